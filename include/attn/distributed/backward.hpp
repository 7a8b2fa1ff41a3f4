// The gradient of attention over a sequence whose tokens lie on several ranks: here that of softmax attention.
#pragma once

#include "../attention/softmax_backward.hpp"
#include "gradient_return.hpp"
#include "recurrent_gradient_ranks.hpp"
#include "sequence_parallel.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

template <Pattern P, ScoreFunction S, Scalar T>
class rank_gradient<softmax_attention<P, S, unrounded_products>, T> {
    using operation = softmax_attention<P, S, unrounded_products>;

public:
    using wanted_type = typename operation::template gradients<T>;

    rank_gradient(const operation& op, const partition& parts, index_t rank, const inputs<T>& in, const wanted_type& wanted)
        : op_(op), first_key_(parts.positions().first_key[0]), plan_(plan_of(op, parts)), memory_(plan_, rank, in),
          seeing_(seeing(op, parts, rank)), of_keys_(plan_, rank, parts.ranks(), in.keys.shape()),
          of_values_(plan_, rank, parts.ranks(), in.values.shape()), of_queries_(wanted.queries.data() ? in.queries.shape() : shape{}) {
        index_t numbers = 0;
        for_each_parameter(wanted, [&](const tensor_view<T>& view) { numbers += view.shape().size(); });
        parameters_.resize(static_cast<std::size_t>(numbers));
        before_.resize(parameters_.size());
    }

    index_t fingerprint() const { return plan_.fingerprint(); }
    /// A number of which gradients of parameters are wanted: the same on all ranks.
    static index_t asked(const operation& op, const wanted_type& wanted) {
        index_t parameters = 0;
        for_each_parameter(op, wanted,
                           [&](const tensor_view<T>& view) { parameters = parameters * 31 % 1'000'003 + view.shape().size() + 1; });
        return 1 + parameters;
    }
    static std::size_t workspace_bytes(const operation& op, const partition& parts, index_t rank, index_t concurrency) {
        auto s = parts.shapes(rank);
        s.keys.tokens = 0;
        const auto plan = plan_of(op, parts);
        for (index_t number = 0; number < plan.pieces(); ++number) s.keys.tokens = std::max(s.keys.tokens, plan.seen(number, rank).count);
        s.values.tokens = s.keys.tokens;
        return op.template backward_workspace_bytes<T>(s, concurrency);
    }

    template <Communicator C>
    void run(C& ranks, const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const wanted_type& wanted,
             const execution& run) {
        gradient_return<T, C> keys_home(ranks, plan_, wanted.keys, in.keys.shape(), of_keys_, 32'760);
        gradient_return<T, C> values_home(ranks, plan_, wanted.values, in.values.shape(), of_values_, 32'761);
        fill_zero(wanted.queries);
        key_stream<T, C> stream(ranks, plan_, in, plan_.held(ranks.rank()), memory_);
        const auto progress = [&](index_t) { stream.progress(); };
        const pausing_execution pausing(run, progress);
        auto failure = find_shares(ranks, in, saved, run);
        if (!failure) failure = failure_of([&] { find_sinks(in, saved, d_out, wanted, run); });
        const auto add = [&](index_t number, const row_range& rows, const stored_view<const T>& keys, const stored_view<const T>& values) {
            auto part = wanted;
            part.sinks = {};
            // The rank's queries outside of this range have nothing to do with the piece.
            const auto see = seeing_[static_cast<std::size_t>(number)];
            const tensor_part of_rank{.tokens = see};
            const auto of_queries = wanted.queries.data() ? of_queries_.slice({.tokens = {0, see.count}}) : tensor_view<T>{};
            part.queries = of_queries;
            part.keys = keys_home.part(number), part.values = values_home.part(number);
            const auto compute = [&] {
                gradient_.backward(seen_inputs(in, see, rows, keys, values), saved.slice(of_rank), d_out.slice(of_rank), part,
                                   shares_of(see), pausing);
                if (wanted.queries.data()) add_tensor<T>(wanted.queries.slice(of_rank), of_queries);
                add_parameters(wanted);
            };
            if (!failure) failure = failure_of(compute); // who has failed still passes on what others wait for
            keys_home.send(number), values_home.send(number);
        };
        // What comes of a piece is waited for behind the next, so that who is done with one goes on; not later, for others may wait to send
        // more.
        index_t waiting = 0;
        const auto collect = [&](index_t next) {
            for (; waiting < plan_.pieces() && waiting + 1 < next; ++waiting) { keys_home.collect(waiting), values_home.collect(waiting); }
        };
        stream.run(add, collect);
        keys_home.finish(), values_home.finish();
        sum_over_ranks(ranks, std::span(parameters_), std::span(before_));
        write_parameters(wanted);
        if (failure) std::rethrow_exception(failure);
    }

private:
    static key_plan plan_of(const operation& op, const partition& parts) {
        const auto where = parts.positions();
        const kernel::visible_keys_of<T, P> visible(op.pattern, parts.shapes(), where);
        return {{visible, parts.shapes().queries, where.first_query[0], where.first_key[0]}, parts.query_cuts(), parts.key_cuts(), true};
    }
    /// For each piece of the keys, a rank's queries from the first that sees any of it to the last.
    std::vector<row_range> seeing(const operation& op, const partition& parts, index_t rank) const {
        const auto where = parts.positions();
        const kernel::visible_keys_of<T, P> visible(op.pattern, parts.shapes(), where);
        const call_visibility call{visible, parts.shapes().queries, where.first_query[0], first_key_};
        const auto own = parts.queries(rank);
        std::vector<row_range> all;
        for (index_t number = 0; number < plan_.pieces(); ++number) {
            const auto keys = plan_.seen(number, rank);
            const auto none_of = [&](index_t first, index_t end) {
                return call.is_none({own.first + first, end - first}, keys, 0, visible.passes());
            };
            all.push_back(keys.count > 0 ? possible_rows({0, own.count}, none_of) : row_range{});
        }
        return all;
    }
    /// f(view) of each gradient of the sinks and of the score function's parameters that is wanted.
    static void for_each_parameter(const operation& op, const wanted_type& wanted, const auto& f) {
        const auto call = [&](std::string_view, const tensor_view<T>& view, const shape&) {
            if (view.data()) f(view);
        };
        call("", wanted.sinks, {});
        check_score_gradients(op.score, wanted.score, call);
    }
    void for_each_parameter(const wanted_type& wanted, const auto& f) const { for_each_parameter(op_, wanted, f); }
    /// f(number of the view, its number of the sum) for all of them.
    void for_each_number(const wanted_type& wanted, const auto& f) {
        auto sum = parameters_.begin();
        for_each_parameter(wanted, [&](const tensor_view<T>& view) {
            attn::detail::for_each_number(view.shape(), [&](index_t b, index_t h, index_t i, index_t c) { f(view(b, h, i, c), *sum++); });
        });
    }
    inputs<T> seen_inputs(const inputs<T>& in, const row_range& see, const row_range& rows, const stored_view<const T>& keys,
                          const stored_view<const T>& values) const {
        return {in.queries.slice({.tokens = see}), keys, values, {in.positions.first_query[0] + see.first, first_key_ + rows.first}};
    }
    /// Finds the shares of the rank's rows: what multiplies the weights of each. Where any rank has a row whose log_sum_exp does not tell
    /// their sum, keys travel once more.
    template <Communicator C>
    std::exception_ptr find_shares(C& ranks, const inputs<T>& in, const saved_outputs<T>& saved, const execution& run) {
        const auto& s = shape_ = saved.log_sum_exp.shape();
        shares_.assign(static_cast<std::size_t>(s.size()), T{0});
        using softmax = kernel::softmax_gradient_scheduler<T>;
        T lost[1] = {softmax::any_loses_sum(saved.log_sum_exp) ? T{1} : T{0}}, before[1] = {};
        sum_over_ranks(ranks, std::span<T>(lost), std::span<T>(before));
        std::exception_ptr failure;
        if (lost[0] != 0)
            key_stream<T, C>(ranks, plan_, in, plan_.held(ranks.rank()), memory_)
                .run([&](index_t number, const row_range& rows, const stored_view<const T>& keys, const stored_view<const T>& values) {
                    const auto see = seeing_[static_cast<std::size_t>(number)];
                    if (failure || see.count == 0) return;
                    failure = failure_of([&] {
                        shares_of_some_.assign(static_cast<std::size_t>(s.batch * s.heads * see.count), T{0});
                        gradient_.add_weights(seen_inputs(in, see, rows, keys, values), saved.slice({.tokens = see}),
                                              shares_of_some_.data(), run);
                        for_each_share(see, [](T& all, T some) { all += some; });
                    });
                });
        softmax::to_shares(saved.log_sum_exp, op_.sinks, shares_.data());
        return failure;
    }
    /// The shares, which multiply weights, of some of the rows.
    const T* shares_of(const row_range& rows) {
        shares_of_some_.resize(static_cast<std::size_t>(shape_.batch * shape_.heads * rows.count));
        for_each_share(rows, [](T all, T& some) { some = all; });
        return shares_of_some_.data();
    }
    /// f(the share of a row, that among some of them).
    void for_each_share(const row_range& rows, const auto& f) {
        if (rows.count == 0) return;
        const auto all = static_cast<index_t>(shares_.size()), tokens = shape_.tokens;
        auto* some = shares_of_some_.data();
        for (index_t first = 0; first < all; first += tokens)
            for (auto i = rows.first; i < rows.end(); ++i) f(shares_[static_cast<std::size_t>(first + i)], *some++);
    }
    /// The sinks' need no keys; all other sums are 0 then.
    void find_sinks(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const wanted_type& wanted,
                    const execution& run) {
        for_each_number(wanted, [](T& number, T&) { number = 0; });
        wanted_type only;
        only.sinks = wanted.sinks;
        if (!only.sinks.data()) return;
        gradient_.backward(in.slice({}, no_tokens), saved, d_out, only, shares_.data(), run);
        for_each_number(wanted, [](T& number, T& sum) { sum = number; });
    }
    void add_parameters(const wanted_type& wanted) {
        auto of_sinks = wanted.sinks.shape().size();
        for_each_number(wanted, [&](T& number, T& sum) {
            if (of_sinks-- > 0) return; // complete
            sum += number;
        });
    }
    void write_parameters(const wanted_type& wanted) {
        for_each_number(wanted, [](T& number, T& sum) { number = sum; });
    }

    const operation& op_;
    resumable_gradient<operation, T> gradient_{op_};
    index_t first_key_;
    key_plan plan_;
    stream_memory<T> memory_;
    std::vector<row_range> seeing_;
    return_memory<T> of_keys_, of_values_;
    tensor<T> of_queries_;                   ///< of one piece
    std::vector<T> parameters_, before_;     ///< sums of those of sinks and the score function
    shape shape_;                            ///< of the rank's log_sum_exp
    std::vector<T> shares_, shares_of_some_; ///< of its rows: what multiplies their weights
};

} // namespace detail

/// Bytes of workspace that a rank's gradient needs with such an executor or execution.
template <Scalar T, Attention A>
std::size_t backward_workspace_bytes(const sequence_parallel<A>& op, index_t rank, const detail::call_execution& run = {}) {
    return detail::rank_gradient<A, T>::workspace_bytes(op.op, op.partition, rank, run.concurrency());
}

/// The gradient of a loss with respect to what a rank has of what the call read: as `backward` on one machine, of the rank's own rows of
/// what the call wrote and of the gradients that are given. All ranks call it. Throws as the call does.
/// - softmax_attention, of q, k and v, the sinks and the score function's parameters: keys and values travel as in the call itself; what
///   each rank's queries give to their gradients goes back to who holds them, in T, and is added up there in the order of ranks; what a
///   rank does not want is not sent to it. Gradients of sinks and parameters, all of which every rank wants or none, are summed over the
///   ranks, and then the same on all of them. The result has the same bits from run to run, for every communicator, executor and number of
///   threads; with other ranks or cuts it is rounded otherwise. A rank computes with some thousand keys at a time, and waits for who holds
///   them where more than eight such pieces have not been taken back: under a causal pattern on many ranks, where the holder gets to its
///   keys later. Memory beyond that of the call on one machine: that of the call over ranks, the gradients of eight pieces, what two ranks
///   send of one, and the gradient of the queries a second time.
/// - recurrent_attention, of q, k and v, of what the rule takes of each token and of the first state: states go from rank to rank as in the
///   call itself, and then their gradients from the last to the first, a head after the other. The gradient of the last state is read on
///   the last rank with tokens, that of the first written on the first. The result has the bits of one machine, wherever the sequence is
///   cut: a chunk of 16 tokens that lies on several ranks is computed on the one that holds its first. Numbers that the batch or heads
///   share are a token's, and so are their sums. Memory beyond that of the call on one machine: three states for each batch entry and kv
///   head, and what the tokens of a few chunks have. Time beyond it: that of one more call without queries.
template <Attention A, Scalar T, Communicator C>
void backward(const sequence_parallel<A>& op, C& ranks, const inputs<T>& in, const std::type_identity_t<saved_outputs<T>>& saved,
              const std::type_identity_t<output_gradients<T>>& d_out, const std::type_identity_t<gradients_of<A, T>>& wanted,
              const detail::call_execution& run = {}) {
    using call_type = detail::rank_gradient<A, T>;
    const auto check = [&](const inputs<T>& own) {
        detail::check_backward(op.op, own, saved, d_out, wanted);
        run.reserve(op.name, "the gradient for q", own.queries.shape(),
                    call_type::workspace_bytes(op.op, op.partition, ranks.rank(), run.concurrency()));
    };
    detail::on_all_ranks<call_type>(
        op, ranks, in, call_type::asked(op.op, wanted), check,
        [&](auto& call, const inputs<T>& own) { call.run(ranks, own, saved, d_out, wanted, run); }, wanted);
}

} // namespace attn
