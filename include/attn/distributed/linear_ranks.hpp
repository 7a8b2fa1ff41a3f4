// The linear attentions over ranks: sums over the keys go from one to the next, and what a convolution reads beyond its own tokens is
// exchanged.
#pragma once

#include "../attention/focused_linear_attention.hpp"
#include "../attention/linear_attention.hpp"
#include "../attention/simplified_linear_attention.hpp"
#include "key_stream.hpp"
#include "linear_plan.hpp"
#include "rank_call.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

template <Attention Op, Scalar T>
    requires TakesLinearRows<Op, T>
class rank_call<Op, T> {
    using plan_type = linear_plan<T, std::remove_cvref_t<decltype(Op::pattern)>>;
    using states = kernel::linear_states<T>;
    static constexpr bool causal = plan_type::order::causal;
    static constexpr bool has_convolution = requires(const Op& op) { op.convolution; };
    static constexpr bool shares_maxima = [] {
        if constexpr (requires { Op::template shares_key_maxima<T>(); }) return Op::template shares_key_maxima<T>();
        else return false;
    }();

public:
    rank_call(const Op& op, const partition& parts, index_t rank, const inputs<T>& in)
        : op_(op), parts_(parts), rank_(rank), plan_(op.pattern, parts, features(op, parts)), key_plan_(parts.key_cuts(), plan_.key_rows()),
          memory_(key_plan_, rank, in), convolved_(convolved(in)), halo_plan_(halo_plan()), halo_(halo_plan_, rank, convolved_) {
        taken_of(sums_memory_, [&](scratch& memory) { lay_out(memory); });
    }

    /// Checks the operator against all rows, of which a rank has some: positional encodings are those of all keys, and the convolution's
    /// input is a rank's as its queries are.
    static void check(const Op& op, const partition& parts, index_t rank, const inputs<T>& in) {
        auto whole = op;
        if constexpr (has_convolution) {
            static constexpr std::remove_cvref_t<decltype(*op.convolution_input.data())> none{};
            auto s = op.convolution_input.shape();
            if (is_given(op.convolution_input)) {
                check_view(Op::name, "convolution_input", op.convolution_input);
                if (s.tokens != parts.queries(rank).count)
                    detail::raise(shape_error(Op::name, "convolution_input", "has shape ", s, ", but rank ", rank,
                                              " of the partition holds ", parts.queries(rank).count, " tokens"));
                s.tokens = parts.shapes().queries.tokens;
                whole.convolution_input = head_major(&none, s);
            }
        }
        whole.check(whole_inputs(parts, in));
    }
    index_t fingerprint() const { return key_plan_.fingerprint() ^ halo_plan_.fingerprint() ^ features(op_, parts_); }
    template <Storage U>
    static std::size_t workspace_bytes(const Op& op, const partition& parts, index_t rank, index_t concurrency) {
        const plan_type plan(op.pattern, parts, features(op, parts));
        auto keys = parts.shapes().keys;
        keys.tokens = plan.key_rows()[static_cast<std::size_t>(rank)].count;
        const linear_rows<T> rows{{nullptr, keys, {}}, 0, parts.shapes().queries.tokens};
        return op.workspace_bytes(plan.shapes(rank), concurrency, &rows);
    }

    template <Communicator C>
    void run(C& ranks, const inputs<T>& in, const outputs<T>& out, const execution& run) {
        if (parts_.shapes().queries.size() == 0) return;
        const auto n = parts_.shapes().queries.tokens, m = parts_.shapes().keys.tokens;
        auto own = in;
        own.positions.first_key = parts_.positions().first_key;
        own.keys = in.keys.slice(as_rows_from(0, m)), own.values = in.values.slice(as_rows_from(0, m));
        linear_rows<T> rows{in.keys.slice(no_tokens), 0, n, parts_.queries(rank_).first};
        key_stream<T, C>(ranks, key_plan_, in, parts_.keys(rank_), memory_)
            .run([&](index_t, const row_range& seen, const auto& keys, const auto& values) {
                own.keys = keys.slice(as_rows_from(seen.first, m)), own.values = values.slice(as_rows_from(seen.first, m));
                rows.keys = keys, rows.first_key = seen.first;
            });
        key_stream<T, C>(ranks, halo_plan_, convolved_, convolved_held(), halo_)
            .run([&](index_t, const row_range& read, const auto&, const auto& tokens) {
                rows.convolution_input = tokens.slice(as_rows_from(read.first, n));
            });
        std::exception_ptr unknown;
        if constexpr (shares_maxima) {
            unknown = find_maxima(ranks, in, run);
            rows.key_maxima = maxima_;
        }
        bool passed_on = false;
        const auto pass_on = [&](const auto& add_keys) {
            passed_on = true;
            if (numbers() > 0 && causal) hand_on(ranks, add_keys, run);
            else if (numbers() > 0) share(ranks, add_keys, run);
        };
        const auto failure = failure_of([&] {
            if (unknown) std::rethrow_exception(unknown);
            op_.with_kernel(own, rows, run, [&](const auto& kernel, std::byte* memory) {
                pass_on([&](index_t number, index_t first, index_t end, index_t slice, const auto& to) {
                    if (first < end) kernel.add_keys(own, number / kv_heads(), number % kv_heads(), first, end, slice, memory, to);
                });
                kernel(own, out, run, memory, &sums_);
            });
        });
        // Who has failed still passes on what others wait for.
        if (!passed_on) pass_on([](auto&&...) {});
        if (failure) std::rethrow_exception(failure);
    }

private:
    /// How many a key has.
    static index_t features(const Op& op, const partition& parts) {
        const auto channels = parts.shapes().keys.channels;
        if constexpr (requires { op.feature_map.features(channels); }) return op.feature_map.features(channels);
        else return channels;
    }
    index_t kv_heads() const { return parts_.shapes().keys.heads; }
    /// How many sums there are: one for each batch entry and kv head.
    index_t numbers() const { return parts_.shapes().queries.batch * kv_heads(); }
    index_t summed(index_t rank, index_t number) const { return plan_.summed(rank, number / kv_heads()); }

    bool reads_values() const {
        if constexpr (has_convolution) return !is_given(op_.convolution_input);
        else return true;
    }
    /// What the convolution reads, as the values of keys without channels.
    inputs<T> convolved(const inputs<T>& in) const {
        auto own = in;
        own.keys = {};
        if constexpr (has_convolution)
            if (!reads_values()) own.values = op_.convolution_input;
        return own;
    }
    row_range convolved_held() const { return reads_values() ? parts_.keys(rank_) : parts_.queries(rank_); }
    key_plan halo_plan() const {
        std::vector<row_range> read(static_cast<std::size_t>(parts_.ranks()));
        if constexpr (has_convolution)
            if (op_.convolution.present() && parts_.shapes().queries.tokens > 0)
                read = plan_.convolved_rows(op_.convolution.grid(parts_.shapes().queries.tokens));
        return {reads_values() ? parts_.key_cuts() : parts_.query_cuts(), read};
    }
    void lay_out(scratch& memory) {
        const auto some = [&](index_t count) {
            return states::take(memory, count, features(op_, parts_), parts_.shapes().values.channels);
        };
        sums_ = some(numbers());
        spans_ = causal ? sums_ : some(numbers() * plan_.span_count(rank_));
        next_ = causal ? some(numbers()) : sums_;
    }

    /// Finds what a map of vectors takes of all keys: the largest number of each head, of those that each rank holds. Returns what that has
    /// thrown: who has failed still tells the others.
    template <Communicator C>
    std::exception_ptr find_maxima(C& ranks, const inputs<T>& in, const execution& run) {
        maxima_.assign(static_cast<std::size_t>(numbers()), -std::numeric_limits<T>::infinity());
        const auto held = parts_.keys(rank_);
        const auto failure = failure_of([&] {
            const auto of = [&](index_t b) { return kernel::taking_part{0, common_rows(held, {0, plan_.seen(b)}).count}; };
            op_.find_key_maxima(in, of, run, std::span<T>(maxima_));
        });
        const auto all = all_gather(ranks, std::as_bytes(std::span<const T>(maxima_)));
        std::vector<T> of_rank(maxima_.size());
        for (index_t rank = 0; rank < parts_.ranks(); ++rank) {
            std::memcpy(of_rank.data(), all.data() + static_cast<std::size_t>(rank) * of_rank.size() * sizeof(T),
                        of_rank.size() * sizeof(T));
            for (std::size_t n = 0; n < of_rank.size(); ++n)
                if (rank == 0 || of_rank[n] > maxima_[n]) maxima_[n] = of_rank[n];
        }
        return failure;
    }
    /// Queries see different keys: each rank takes the sum of the keys before, and gives it with its own to the next, some heads at a time.
    void hand_on(Communicator auto& ranks, const auto& add_keys, const execution& run) {
        if (parts_.queries(rank_).count == 0) return;
        const auto next = plan_.with_queries_after(rank_), before = plan_.with_queries_before(rank_);
        const bool is_first = rank_ == plan_.first_with_queries(), is_last = next == parts_.ranks();
        const auto piece = [&](index_t number) {
            return relayed_bytes{is_first ? -1 : before, is_last ? -1 : next, bytes_of(sums_, number, 1), bytes_of(next_, number, 1)};
        };
        const auto add = [&](index_t number, index_t slice) {
            const auto own = summed(rank_, number);
            if (is_first) {
                sums_.of(number).reset();
                add_keys(number, 0, own, slice, sums_.of(number));
            }
            if (is_last) return;
            std::ranges::copy(sums_.numbers(number), next_.numbers(number).begin());
            add_keys(number, own, summed(next, number), slice, next_.of(number));
        };
        const auto failure = relay(ranks, numbers(), run.concurrency(), piece, [&](index_t first, index_t end) {
            run.for_each(end - first, [&](index_t task, index_t slice) { add(first + task, slice); });
        });
        if (failure) std::rethrow_exception(failure);
    }
    /// All queries see the same keys: spans are summed where they are, added up from rank to rank, and the sum is everyone's.
    void share(Communicator auto& ranks, const auto& add_keys, const execution& run) {
        const auto count = plan_.span_count(rank_);
        const auto add = [&](index_t task, index_t slice) {
            const auto number = task / count;
            const auto rows = common_rows(plan_.span_rows(rank_, task % count), {0, summed(rank_, number)});
            if (rows.count == 0) return;
            spans_.of(task).reset();
            add_keys(number, rows.first, rows.end(), slice, spans_.of(task));
        };
        // Who has failed still passes on what others wait for.
        const auto failure = failure_of([&] { run.for_each(numbers() * count, add); });
        index_t before = -1;
        for (index_t rank = 0; rank < parts_.ranks(); ++rank) {
            if (plan_.spans_of(rank).count == 0) continue;
            if (rank == rank_ || before == rank_) {
                if (before < 0) {
                    for (index_t number = 0; number < numbers(); ++number) sums_.of(number).reset();
                } else {
                    auto message = rank == rank_ ? ranks.receive(before, 1, bytes_of(sums_, 0, numbers()))
                                                 : ranks.send(rank, 1, bytes_of(sums_, 0, numbers()));
                    ranks.wait(message);
                }
            }
            before = rank;
            if (rank != rank_) continue;
            for (index_t task = 0; task < numbers() * count; ++task)
                if (common_rows(plan_.span_rows(rank_, task % count), {0, summed(rank_, task / count)}).count > 0)
                    sums_.of(task / count).merge(spans_.of(task));
        }
        if (before >= 0) broadcast(ranks, before, bytes_of(sums_, 0, numbers()));
        if (failure) std::rethrow_exception(failure);
    }
    static std::span<std::byte> bytes_of(const states& of, index_t first, index_t count) {
        return std::as_writable_bytes(std::span(of.numbers(first).data(), static_cast<std::size_t>(count) * of.numbers(first).size()));
    }

    const Op& op_;
    const partition& parts_;
    index_t rank_;
    plan_type plan_;
    key_plan key_plan_;
    stream_memory<T> memory_;
    inputs<T> convolved_;
    key_plan halo_plan_;
    stream_memory<T> halo_;
    workspace sums_memory_;
    states sums_;           ///< of each batch entry and head: what the rank's rows take
    states spans_;          ///< of the rank's spans
    states next_;           ///< what the next rank is given
    std::vector<T> maxima_; ///< of each batch entry and head
};

} // namespace attn::detail
