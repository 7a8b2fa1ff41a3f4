// How Linformer's gradient runs: softmax attention's on the projected keys and values, then what projected them, backwards.
#pragma once

#include "../../core/gradients.hpp"
#include "../backward/scheduler.hpp"
#include "../projection/gradient.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The memory of the gradient of a call, and its steps for some heads of keys and values:
///     k' = E k and v' = F v again,   dq, dk', dv' by softmax attention,   dk = E^T dk',   dE = dk' k^T,   dv = F^T dv',   dF = dv' v^T
/// A parameter's gradient is a sum over batch entries, then the heads that share it, then keys before values, in this order whatever the
/// threads.
template <Scalar T, class Op>
struct linformer_gradient_work {
    using softmax = softmax_gradient_scheduler<T>;
    using work = linformer_work<T, Op>;
    using part = typename work::part;

    std::size_t task_bytes;
    work projected;
    tensor_view<T> keys, values; ///< the gradients of what was projected

    linformer_gradient_work(detail::scratch& memory, const Op& op, const input_shapes& s, index_t concurrency)
        : task_bytes(bytes_of_task(op, s)), projected(memory, op, s, concurrency, shared_bytes(op, s, concurrency, task_bytes)),
          keys(projected.take_rows(memory, s.keys)), values(projected.take_rows(memory, s.values)) {}

    static void clear_parameters(const Op& op, const auto& wanted) {
        clear_parameter_gradients<T>(op.key_projection, wanted.key_projection);
        clear_parameter_gradients<T>(op.for_values(), for_values(wanted));
    }
    static void clear(const input_gradients<T>& wanted) {
        for (const auto* view : {&wanted.queries, &wanted.keys, &wanted.values}) detail::fill_zero(*view);
    }

    /// Finds all gradients of a part.
    void find_some(const Op& op, const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const auto& wanted,
                   const execution& run, const part& p) const {
        projected.project_some(op, in, run, p);
        const bool of_keys = any_parameter_wanted<T>(op.key_projection, wanted.key_projection),
                   of_values = any_parameter_wanted<T>(op.for_values(), for_values(wanted));
        const auto of_queries = work::of_queries(p, in);
        const auto if_wanted = [&](const tensor_view<T>& t, bool is) { return is ? projected.of_part(t, p) : tensor_view<T>{}; };
        const inputs<T> projected_in = projected.projected(in, p);
        const input_gradients<T> found{wanted.queries.slice(of_queries), if_wanted(keys, of_keys || wanted.keys.data()),
                                       if_wanted(values, of_values || wanted.values.data())};
        projected.with_visible(op, in, p, projected_in, [&](const auto& visible, T factor) {
            softmax()({projected_in, saved.slice(of_queries), d_out.slice(of_queries), found, visible, nullptr, factor}, {}, {}, false,
                      run);
        });

        const side of_k{op.key_projection, wanted.key_projection, in.keys, keys, wanted.keys};
        const side of_v{op.for_values(), for_values(wanted), in.values, values, wanted.values};
        run.for_each(p.entries * p.kv_heads * 2, [&](index_t task, index_t slice) {
            if (task % 2 == 0) find_tokens(of_k, p, task / 2, slice);
            else find_tokens(of_v, p, task / 2, slice);
        });
        const auto key_parts = of_keys ? parts_of(of_k) : 0, value_parts = of_values && !shares ? parts_of(of_v) : 0;
        run.for_each(key_parts + value_parts, [&](index_t task, index_t slice) {
            for (index_t head = 0; head < p.entries * p.kv_heads; ++head) {
                if (task < key_parts) add_parameters(of_k, p, head, task, slice);
                if (shares || task >= key_parts) add_parameters(of_v, p, head, shares ? task : task - key_parts, slice);
            }
        });
    }

private:
    static constexpr bool shares = Op::shares_projection;

    /// One side of a projection's gradient: the keys, or the values.
    template <class P, class G>
    struct side {
        const P& projection;
        const G& wanted;
        const tensor_view<const T>& from;
        tensor_view<const T> d_out; ///< of what was projected
        const tensor_view<T>& to;   ///< of the tokens
    };

    static const auto& for_values(const auto& wanted) {
        if constexpr (shares) return wanted.key_projection;
        else return wanted.value_projection;
    }
    static std::size_t bytes_of_task(const Op& op, const input_shapes& s) {
        const auto bytes = std::max(op.key_projection.template backward_workspace_bytes<T>(s.keys.tokens, s.keys.channels),
                                    op.for_values().template backward_workspace_bytes<T>(s.keys.tokens, s.values.channels));
        return (bytes + alignment - 1) / alignment * alignment;
    }
    static std::size_t shared_bytes(const Op& op, const input_shapes& s, index_t concurrency, std::size_t of_task) {
        auto projected = s;
        projected.keys.tokens = projected.values.tokens = most_rows(op.key_projection, s.keys);
        return std::max(softmax::workspace_bytes(projected, concurrency, false), detail::bytes_for_threads(concurrency, of_task));
    }
    template <class P, class G>
    index_t parts_of(const side<P, G>& s) const {
        return parameter_gradient_parts(s.projection, s.wanted, projected.rows.tokens);
    }

    /// f(tokens, kv_head, row, count, d_out, memory) for the runs of projected rows of a head of the part.
    template <class P, class G>
    void for_each_run(const side<P, G>& s, const part& p, index_t head, index_t slice, const auto& f) const {
        projected.for_each_run(p, s.from, s.d_out, head, {0, projected.rows.max_rows}, detail::slices(projected.shared, task_bytes)[slice],
                               f);
    }
    template <class P, class G>
    void find_tokens(const side<P, G>& s, const part& p, index_t head, index_t slice) const {
        if (!s.to.data()) return;
        const auto own = s.to.slice({.batch = {p.b + head / p.kv_heads, 1}, .heads = {p.g + head % p.kv_heads, 1}});
        find_token_gradients<T>(s.projection, own, [&](const auto& f) { for_each_run(s, p, head, slice, f); });
    }
    template <class P, class G>
    void add_parameters(const side<P, G>& s, const part& p, index_t head, index_t number, index_t slice) const {
        add_parameter_gradients<T>(s.projection, number, s.wanted, [&](const auto& f) { for_each_run(s, p, head, slice, f); });
    }
};

} // namespace attn::kernel
