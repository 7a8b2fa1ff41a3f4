// The gradient of LSH attention: in every round, the gradient of softmax attention of the sorted tokens, segment by segment.
#pragma once

#include "../../core/gradients.hpp"
#include "../../simd/unfused.hpp"
#include "../backward/scheduler.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The memory of a gradient, and its steps for some heads of a batch entry. With out and log_sum_exp of all rounds together, the weights
/// e^(x - log_sum_exp) of a round's pairs are what they count in all, so each round adds the gradient of softmax attention to its pairs.
/// Where log_sum_exp has lost digits of their sum, they are summed over all rounds first, which makes the share that multiplies them.
/// A segment also gives to the keys of the chunk before it: segments with even and odd numbers take turns, so that no two write to a token.
template <Scalar T, class Op>
struct lsh_gradient {
    using softmax = softmax_gradient_scheduler<T>;
    using work = lsh_work<T, Op>;

    work tokens;
    bool* met; ///< of each token: whether it has seen another
    T* share;  ///< of each token: what multiplies its weights

    lsh_gradient(detail::scratch& memory, const Op& op, const input_shapes& s, index_t concurrency)
        : tokens(memory, op, s, concurrency, false, slice_bytes(op, s)), met(memory.take<bool>(tokens.heads, tokens.tokens)),
          share(memory.take<T>(tokens.heads, tokens.tokens)) {}

    void add_some(const Op& op, const inputs<T>& all, const saved_outputs<T>& saved, const output_gradients<T>& d_out,
                  const input_gradients<T>& to, const execution& run, index_t b, index_t h, index_t count) const {
        const tensor_part some{.batch = {b, 1}, .heads = {h, count}};
        const call own{
            op, all.slice(some, some), saved.slice(some), d_out.slice(some), {to.queries.slice(some), {}, to.values.slice(some)}};
        tokens.find_lengths(own.in.queries, run, count);
        tokens.for_each_token(run, count, [&](index_t head, index_t i) { clear(own, head, i); });
        find_shares(own, run, h, count);
        for (index_t round = 0; round < op.rotations.shape().batch; ++round) {
            tokens.find_order(op, own.in.queries, run, h, count, round);
            for (const index_t turn : {0, 1})
                tokens.for_each_piece(run, count, tokens.segment, [&](index_t head, index_t begin, index_t end, detail::scratch memory) {
                    if (begin / tokens.segment % 2 == turn) segment_memory(memory, tokens).add(*this, own, head, begin, end);
                });
        }
        tokens.for_each_token(run, count, [&](index_t head, index_t i) { finish(own, head, i); });
    }

private:
    struct call {
        const Op& op;
        inputs<T> in;
        saved_outputs<T> saved;
        output_gradients<T> d_out;
        input_gradients<T> to;
    };

    void find_shares(const call& c, const execution& run, index_t h, index_t count) const {
        std::fill_n(share, count * tokens.tokens, T{0});
        const bool any = softmax::any_loses_sum(c.saved.log_sum_exp);
        for (index_t round = 0; any && round < c.op.rotations.shape().batch; ++round) {
            tokens.find_order(c.op, c.in.queries, run, h, count, round);
            tokens.for_each_piece(run, count, tokens.segment, [&](index_t head, index_t begin, index_t end, detail::scratch memory) {
                segment_memory(memory, tokens).add_weights(*this, c, head, begin, end);
            });
        }
        softmax::to_shares(c.saved.log_sum_exp, {}, share);
    }

    static std::size_t slice_bytes(const Op& op, const input_shapes& s) {
        detail::scratch counted;
        return detail::bytes_for<segment_memory>(work(counted, op, s, 1, false));
    }

    /// A segment, what was saved of it, and its gradients.
    struct segment_memory : lsh_segment<T, Op> {
        T *of_out, *log_sum_exp, *of_log_sum_exp, *shares, *of_queries, *of_keys, *of_values;

        segment_memory(detail::scratch& memory, const work& w)
            : lsh_segment<T, Op>(memory, w, softmax::workspace_bytes({w.row_shape, w.row_shape, w.result_shape}, 1, false)) {
            const auto rows = w.row_shape.tokens, d_k = w.row_shape.channels, d_v = w.result_shape.channels;
            for (auto* const each : {&of_queries, &of_keys}) *each = memory.take<T>(rows, d_k);
            for (auto* const each : {&of_out, &of_values}) *each = memory.take<T>(rows, d_v);
            for (auto* const each : {&log_sum_exp, &of_log_sum_exp, &shares}) *each = memory.take<T>(rows);
        }

        /// The sorted places from `at` to stop - 1, which are whole chunks.
        void add(const lsh_gradient& all, const call& c, index_t head, index_t at, index_t stop) const {
            const auto& w = all.tokens;
            const auto before = std::min(at, w.chunk), rows = stop - at, d_k = w.row_shape.channels, d_v = w.result_shape.channels;
            const auto* const placed = w.order + head * w.tokens;
            const bool of_rows = c.to.queries.data();
            input_gradients<T> wanted;
            if (of_rows) {
                wanted.queries = view(of_queries, rows, d_k);
                wanted.keys = view(of_keys, before + rows, d_k);
            }
            if (c.to.values.data()) wanted.values = view(of_values, before + rows, d_v);
            for (index_t r = 0; r < rows; ++r) shares[r] = all.share[head * w.tokens + placed[at + r]];
            with_call(w, c, head, at, stop, wanted,
                      [&](const auto& sorted, const execution& run) { softmax()(sorted, {}, {}, false, run); });
            for (index_t r = 0; r < rows; ++r)
                if (end[r] - first[r] > (c.op.pattern.is_causal ? 0 : 1)) all.met[head * w.tokens + placed[at + r]] = true;

            for (index_t r = 0; r < before + rows; ++r) {
                const auto token = placed[at - before + r];
                for (index_t e = 0; c.to.values.data() && e < d_v; ++e) c.to.values(0, head, token, e) += of_values[r * d_v + e];
                if (of_rows) add_key(c, head, token, r, w.length[head * w.tokens + token]);
            }
            for (index_t r = 0; of_rows && r < rows; ++r)
                for (index_t e = 0; e < d_k; ++e) c.to.queries(0, head, placed[at + r], e) += of_queries[r * d_k + e];
        }
        /// Adds the weights of some places of a round to the shares of their tokens.
        void add_weights(const lsh_gradient& all, const call& c, index_t head, index_t at, index_t stop) const {
            const auto& w = all.tokens;
            std::fill_n(shares, stop - at, T{0});
            with_call(w, c, head, at, stop, {},
                      [&](const auto& sorted, const execution& run) { softmax().add_weights(sorted, shares, false, run); });
            for (index_t r = 0; r < stop - at; ++r) all.share[head * w.tokens + w.order[head * w.tokens + at + r]] += shares[r];
        }

    private:
        using lsh_segment<T, Op>::first, lsh_segment<T, Op>::end, lsh_segment<T, Op>::keys, lsh_segment<T, Op>::out;

        static tensor_view<T> view(T* data, index_t count, index_t channels) { return head_major(data, {1, 1, count, channels}); }
        /// f(the gradient of softmax attention of the sorted tokens, how to run it).
        void with_call(const work& w, const call& c, index_t head, index_t at, index_t stop, const input_gradients<T>& wanted,
                       const auto& f) const {
            for (auto place = at; place < stop; ++place) copy_saved(c, head, w.order[head * w.tokens + place], place - at);
            this->with_sorted(w, c.op, c.in, head, at, stop, [&](const auto& sorted, const auto& visible, T scale, const execution& run) {
                const auto rows = stop - at, d_v = w.result_shape.channels;
                const saved_outputs<T> saved{view(out, rows, d_v), view(log_sum_exp, rows, 1)};
                const output_gradients<T> d_out{view(of_out, rows, d_v), view(of_log_sum_exp, rows, 1)};
                f(softmax_gradient_call<T>{sorted, saved, d_out, wanted, visible, nullptr, scale, shares}, run);
            });
        }
        void copy_saved(const call& c, index_t head, index_t token, index_t r) const {
            const auto d_v = c.in.values.shape().channels;
            for (index_t e = 0; e < d_v; ++e) {
                out[r * d_v + e] = c.saved.values(0, head, token, e);
                of_out[r * d_v + e] = c.d_out.values(0, head, token, e);
            }
            log_sum_exp[r] = c.saved.log_sum_exp(0, head, token, 0);
            of_log_sum_exp[r] = c.d_out.log_sum_exp.data() ? c.d_out.log_sum_exp(0, head, token, 0) : T{0};
        }
        /// Adds the gradient through k = q / |q|: dq = (dk - (k . dk) k) / |q|
        void add_key(const call& c, index_t head, index_t token, index_t r, T norm) const {
            if (norm == 0) return;
            const auto d_k = c.in.queries.shape().channels;
            const T *const key = keys + r * d_k, *const of_key = of_keys + r * d_k;
            T along = 0;
            for (index_t e = 0; e < d_k; ++e) along += simd::unfused(key[e] * of_key[e]);
            for (index_t e = 0; e < d_k; ++e) c.to.queries(0, head, token, e) += (of_key[e] - simd::unfused(along * key[e])) / norm;
        }
    };

    void clear(const call& c, index_t head, index_t i) const {
        met[head * tokens.tokens + i] = false;
        for (const auto* view : {&c.to.queries, &c.to.values})
            for (index_t e = 0; view->data() && e < view->shape().channels; ++e) (*view)(0, head, i, e) = 0;
    }
    /// A token that met no other in any round gave its own value, and log_sum_exp = scale |q| + ln(rounds).
    void finish(const call& c, index_t head, index_t i) const {
        if (met[head * tokens.tokens + i]) return;
        for (index_t e = 0; c.to.values.data() && e < c.to.values.shape().channels; ++e)
            c.to.values(0, head, i, e) += c.d_out.values(0, head, i, e);
        const T norm = tokens.length[head * tokens.tokens + i];
        if (!c.to.queries.data()) return;
        T product = 0;
        for (index_t e = 0; e < c.in.values.shape().channels; ++e)
            product += simd::unfused(c.d_out.values(0, head, i, e) * c.in.values(0, head, i, e));
        T delta = product - product; // dO . v - dO . out: NaN where the formula is
        if (c.d_out.log_sum_exp.data()) delta += c.d_out.log_sum_exp(0, head, i, 0);
        const T factor = detail::score_scale<T>(c.op.scale, tokens.row_shape.channels) * delta, divisor = norm == 0 ? T{1} : norm;
        for (index_t e = 0; e < c.to.queries.shape().channels; ++e)
            c.to.queries(0, head, i, e) += simd::unfused(factor * (c.in.queries(0, head, i, e) / divisor));
    }
};

} // namespace attn::kernel
