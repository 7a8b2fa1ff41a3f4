// The scheduler of the gradient of softmax attention: hands its tasks to threads, with their memory.
#pragma once

#include "../../parallel/executor.hpp"
#include "../../simd/wide_sum.hpp"
#include "worker.hpp"

#include <cmath>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The gradient of softmax attention of any pattern and score function. With P = e^(x - log_sum_exp), recomputed tile by tile, and
/// multiplied by a share of each row where log_sum_exp is so large that it has lost digits of the sum, D_i = dO_i . O_i, dL the gradient of
/// log_sum_exp:
///     dV_j = sum_i P_ij dO_i,   dS_ij = score'(s_ij) P_ij (dO_i . v_j - D_i + dL_i),
///     dq_i = scale sum_j dS_ij k_j,   dk_j = scale sum_i dS_ij q_i
/// A task is a kv head, whose five products on visible pairs give all of it; or, where these are too few for the threads, a part of its
/// rows, of queries or of keys, which take seven in all: with the same bits. One more where there are shares. Memory: two numbers a row,
/// and that of the threads, which does not grow with the call.
template <Scalar T, class Rows = gradient_rows<T>>
class softmax_gradient_scheduler {
public:
    /// has_parameters: the score function has parameters with gradients.
    static std::size_t workspace_bytes(const input_shapes& s, index_t concurrency, bool has_parameters) {
        return detail::bytes_for<layout>(s, concurrency, has_parameters);
    }

    /// sinks, and their gradient (1, heads, 1, 1), which may have no memory.
    void operator()(softmax_gradient_call<T> call, std::span<const double> sinks, const tensor_view<T>& of_sinks, bool has_parameters,
                    const execution& run) const {
        const auto s = shapes_of(call.in);
        detail::scratch memory(run.workspace().bytes().data());
        const layout own(memory, s, run.concurrency(), has_parameters);
        const auto heads = s.queries.heads;
        if constexpr (is_softmax) {
            run.for_each(s.queries.batch * heads, [&](index_t head, index_t) { find_delta(call, head / heads, head % heads, own.delta); });
            call.delta = own.delta;
            if (!call.share) {
                std::fill_n(own.share, s.queries.batch * heads * s.queries.tokens, T{0});
                add_weights(call, own.share, has_parameters, run);
                to_shares(call.saved.log_sum_exp, sinks, own.share);
                call.share = own.share;
            }
        }

        const grid tasks(call, run.concurrency());
        run.for_each(tasks.count(), [&](index_t task, index_t slice) {
            auto slice_memory = own.slices[slice];
            worker_type(slice_memory, s, &call)(tasks[task]);
        });
        if (has_parameters) call.slopes->find_parameters(summation(call, own, run));
        find_sink_gradients(call.saved.log_sum_exp, sinks, call.share, call.delta, of_sinks);
    }

    /// Adds to sums (batch, heads, n) the weights e^(x - log_sum_exp) of the rows whose log_sum_exp loses_sum.
    static void add_weights(const softmax_gradient_call<T>& call, T* sums, bool has_parameters, const execution& run) {
        detail::scratch memory(run.workspace().bytes().data());
        const layout own(memory, shapes_of(call.in), run.concurrency(), has_parameters);
        constexpr index_t grain = 256;
        const auto& s = call.in.queries.shape();
        const auto heads_of_group = s.heads / std::max<index_t>(1, call.in.keys.shape().heads), parts = (s.tokens + grain - 1) / grain;
        run.for_each(s.batch * s.heads * parts, [&](index_t number, index_t slice) {
            const auto plane = number / parts, first = number % parts * grain, batch = plane / s.heads, head = plane % s.heads;
            const gradient_task task{
                batch, head / heads_of_group, {first, std::min(grain, s.tokens - first)}, {0, call.in.keys.shape().tokens}};
            if (!any_loses_sum(call.saved.log_sum_exp.slice({.batch = {batch, 1}, .heads = {head, 1}, .tokens = task.queries}))) return;
            auto slice_memory = own.slices[slice];
            worker_type(slice_memory, shapes_of(call.in), &call).add_weights(task, head, sums + plane * s.tokens);
        });
    }
    /// Whether there is any row whose log_sum_exp loses_sum.
    static bool any_loses_sum(const tensor_view<const T>& log_sum_exp) {
        bool any = false;
        detail::for_each_row(log_sum_exp.shape(),
                             [&](index_t b, index_t h, index_t row) { any = any || loses_sum(log_sum_exp(b, h, row, 0)); });
        return any;
    }
    /// Sums of the weights of all keys become the shares of the rows.
    static void to_shares(const tensor_view<const T>& log_sum_exp, std::span<const double> sinks, T* sums) {
        detail::for_each_row(log_sum_exp.shape(), [&](index_t b, index_t h, index_t row) {
            const T all = log_sum_exp(b, h, row, 0);
            *sums = share_of(all, *sums + weight_of_sink(sinks, h, all));
            ++sums;
        });
    }

private:
    using worker_type = softmax_gradient_worker<T, Rows>;
    static constexpr bool is_softmax = std::same_as<Rows, gradient_rows<T>>;
    using lanes = simd::lanes<T>;

    struct layout {
        T *delta, *share; ///< (batch, heads, n)
        T* sums;          ///< (batch, heads, n + m), of pairs, if there are parameters
        detail::slices slices;

        layout(detail::scratch& memory, const input_shapes& s, index_t concurrency, bool has_parameters)
            : delta(memory.take<T>(s.queries.batch, s.queries.heads, is_softmax ? s.queries.tokens : 0)),
              share(memory.take<T>(s.queries.batch, s.queries.heads, is_softmax ? s.queries.tokens : 0)),
              sums(memory.take<T>(s.queries.batch, s.queries.heads, has_parameters ? s.queries.tokens + s.keys.tokens : 0)),
              slices(memory, concurrency, detail::bytes_for<worker_type>(s)) {}
    };

    /// The tasks of a call. What they are changes no bit.
    class grid {
    public:
        grid(const softmax_gradient_call<T>& call, index_t concurrency)
            : queries_(call.in.queries.shape().tokens), keys_(call.in.keys.shape().tokens), kv_heads_(call.in.keys.shape().heads),
              heads_(call.in.queries.shape().batch * kv_heads_), wants_queries_(call.wanted.queries.data()),
              wants_keys_(call.wanted.keys.data() || call.wanted.values.data()) {
            joint_ = wants_queries_ && wants_keys_ && are_whole_tasks_faster(heads_, concurrency);
            if (heads_ == 0 || concurrency == 1 || joint_) return;
            const auto parts = (4 * concurrency + heads_ - 1) / heads_; // the last ones to be done are small
            query_parts_ = std::clamp<index_t>(parts, 1, std::max<index_t>(1, queries_ / grain));
            key_parts_ = std::clamp<index_t>(parts, 1, std::max<index_t>(1, keys_ / grain));
        }
        index_t count() const { return heads_ * parts(); }
        gradient_task operator[](index_t number) const {
            const auto head = number / parts(), part = number % parts();
            gradient_task task{head / kv_heads_, head % kv_heads_, {0, queries_}, {0, keys_}, wants_queries_, wants_keys_};
            if (joint_) return task;
            task.of_queries = wants_queries_ && part < query_parts_;
            task.of_keys = !task.of_queries;
            const auto cut = [](index_t all, index_t p, index_t parts) {
                const auto border = [&](index_t n) { return n == parts ? all : all * n / parts / grain * grain; };
                return row_range{border(p), border(p + 1) - border(p)};
            };
            if (task.of_queries) task.queries = cut(queries_, part, query_parts_);
            else task.keys = cut(keys_, wants_queries_ ? part - query_parts_ : part, key_parts_);
            return task;
        }

    private:
        static constexpr index_t grain = 128;

        index_t parts() const { return joint_ ? 1 : (wants_queries_ ? query_parts_ : 0) + (wants_keys_ ? key_parts_ : 0); }

        index_t queries_, keys_, kv_heads_, heads_;
        bool wants_queries_, wants_keys_, joint_ = false;
        index_t query_parts_ = 1, key_parts_ = 1;
    };

    /// Each plane by itself, or in parts of its rows, or of its keys where it has one row for all.
    class summation final : public pair_summation<T> {
    public:
        summation(const softmax_gradient_call<T>& call, const layout& own, const execution& run)
            : pair_summation<T>(shapes_of(call.in), call.in.positions, own.sums), call_(call), own_(own), run_(run) {}

        void operator()(const pair_sum<T>& sum) const override {
            constexpr index_t grain = 128;
            const auto& s = sum.to.shape();
            const auto queries = call_.in.queries.shape().tokens, keys = call_.in.keys.shape().tokens;
            const bool by_query = s.tokens != 1;
            const auto parts =
                !this->has_parts(sum) || (!by_query && s.channels == 1) ? 1 : std::max<index_t>(1, (by_query ? queries : keys) / grain);
            run_.for_each(s.batch * s.heads * parts, [&](index_t number, index_t slice) {
                const auto plane = number / parts, part = number % parts;
                pair_task<T> task{&sum, {s, plane / s.heads, plane % s.heads}, {0, queries}, {0, keys}};
                auto& own = by_query ? task.queries : task.keys;
                own.first = std::min(own.count, part * grain);
                own.count = (part + 1 == parts ? own.count : std::min(own.count, own.first + grain)) - own.first;
                auto slice_memory = own_.slices[slice];
                worker_type(slice_memory, this->shapes, &call_)(task);
            });
        }

    private:
        const softmax_gradient_call<T>& call_;
        const layout& own_;
        const execution& run_;
    };
    static void find_delta(const softmax_gradient_call<T>& call, index_t batch, index_t head, T* delta) {
        const auto& s = call.in.queries.shape();
        const auto out = call.saved.values.rows(batch, head), d_out = call.d_out.values.rows(batch, head);
        const auto channels = call.saved.values.shape().channels;
        const auto read = [](const row_block<const T>& from, index_t row, index_t c, index_t present) {
            return load_channels<T>(from.address(row), from.channel_stride, c, present);
        };
        for (index_t row = 0; row < s.tokens; ++row) {
            simd::wide_sum<T> products;
            simd::for_each_part<T>(channels, [&](index_t c, auto part, index_t) {
                products.add(part, read(out, row, c, channels - c), read(d_out, row, c, channels - c));
            });
            const T of_log_sum_exp = call.d_out.log_sum_exp.data() ? call.d_out.log_sum_exp(batch, head, row, 0) : T{0};
            delta[(batch * s.heads + head) * s.tokens + row] = of_log_sum_exp - products.total();
        }
    }
};

} // namespace attn::kernel
