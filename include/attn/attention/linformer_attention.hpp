// Linformer: softmax attention over keys and values that were projected along the sequence.
#pragma once

#include "../kernel/linformer/attention.hpp"
#include "backward.hpp"
#include "projection.hpp"

#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The values are projected as the keys are, by the same parameters (E = F).
struct shared_projection {
    template <Scalar>
    using gradients = no_gradients;
};

/// Linformer: softmax attention over keys and values that were projected along the sequence.
/// For q (batch, heads, n, d_k), k (batch, kv_heads, m, d_k), v (batch, kv_heads, m, d_v), and projections E and F from m tokens to fewer:
///     out[b, h] = softmax(scale * q[b, h] (E k[b, g])^T) (F v[b, g])            g = h / (heads / kv_heads)
/// the softmax being over the projected rows; log_sum_exp is of those scores. E and F may be any projections that give equally many rows:
/// learned matrices (Linformer), pooling, strided convolutions, the identity, your own; they hold views, so that heads, keys and values,
/// and the operators of many layers can refer to one matrix.
///
/// The pattern says which tokens exist: a hidden one is left out of the projection and never read. It must show a key to all queries of its
/// batch entry or to none, for a projected row is the same to every query: causal attention has no such form and is refused. A projected
/// row none of whose tokens is visible is left out of the softmax; a query that is left with none gives 0, and log_sum_exp -infinity.
///
/// It has a gradient if its projections have one (see DifferentiableProjection).
///
/// Time: 2 n p (d_k + d_v) flops a head for p projected rows, and for a learned matrix 2 m p (d_k + d_v) for each head of k and v. Memory:
/// the workspace, p (d_k + d_v) numbers for a few heads at a time. The result does not depend on executor, threads, strides or the rest of
/// the batch, bit by bit.
/// Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity".
template <class E, class F = shared_projection, Pattern P = dense>
struct linformer_attention {
    static constexpr std::string_view name = "linformer_attention";
    static constexpr attention_traits traits = {};
    /// Whether one projection serves keys and values.
    static constexpr bool shares_projection = std::same_as<F, shared_projection>;

    E key_projection;
    F value_projection = {};          ///< that of the keys if not given
    std::optional<double> scale = {}; ///< 1 / sqrt(d_k) if not given
    P pattern = {};                   ///< which keys exist: the same for all queries

    template <Scalar T>
    void check(const inputs<T>& in) const {
        static_assert(
            Projection<E, T>,
            "attn: key_projection is not a projection of such tokens (see attn::Projection); a matrix must have their scalar type");
        if constexpr (!shares_projection)
            static_assert(
                Projection<F, T>,
                "attn: value_projection is not a projection of such tokens (see attn::Projection); a matrix must have their scalar type");
        check_inputs(name, in);
        const auto &q = in.queries.shape(), &k = in.keys.shape(), &v = in.values.shape();
        if (scale) detail::check_number<T>(name, "scale", *scale);
        key_projection.check(projection_context{name, "key_projection", k.heads, k.tokens, k.channels});
        for_values().check(projection_context{name, "value_projection", v.heads, v.tokens, v.channels});
        for (index_t h = 0; h < k.heads; ++h) {
            const auto keys = key_projection.size(h, k.tokens), values = for_values().size(h, k.tokens);
            detail::check_shape<T>(name, "key_projection", {k.batch, k.heads, keys, std::max(k.channels, v.channels)});
            if (keys != values)
                detail::raise(shape_error(name, "value_projection", "gives head ", h, " ", values, " rows, but key_projection ", keys));
        }
        attn::check(pattern, detail::pattern_context_of(name, in.positions, shapes_of(in), q.heads));
        if (q.tokens == 0 || k.tokens == 0) return; // there is no pair to be shown or hidden
        // What is the same for all heads, or for all batch entries, is looked at once.
        const bool shifts = detail::HasAt<P> || !in.positions.first_query.shared() || !in.positions.first_key.shared();
        for (index_t b = 0; b < (shifts ? q.batch : std::min<index_t>(q.batch, 1)); ++b)
            for (index_t h = 0; h < (heads_alike(pattern) ? std::min<index_t>(q.heads, 1) : q.heads); ++h) check_pattern(in, b, h);
    }
    void check_apart(const output_memory& out) const {
        key_projection.check_apart(out);
        for_values().check_apart(out);
        attn::check_apart(pattern, out);
    }
    shape output_shape(const input_shapes& s) const { return {s.queries.batch, s.queries.heads, s.queries.tokens, s.values.channels}; }
    template <Scalar T>
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const {
        return detail::bytes_for<work<T>>(*this, s, concurrency);
    }
    template <Scalar T>
    void forward(const inputs<T>& in, const outputs<T>& out, const execution& run) const {
        const auto s = shapes_of(in);
        if (s.queries.batch * s.queries.heads * s.queries.tokens == 0) return;
        detail::scratch memory(run.workspace().bytes().data());
        const work<T> w(memory, *this, s, run.concurrency());
        w.for_each_part(s.keys, [&](const auto& part) {
            w.project_some(*this, in, run, part);
            w.attend_some(*this, in, out, run, part);
        });
    }

    /// The gradients of the inputs, and of the projections' parameters; of one that both share, in key_projection. See
    /// linformer_backward.hpp.
    template <Scalar T>
        requires detail::HasProjectionGradients<E> && detail::HasProjectionGradients<F>
    struct gradients : input_gradients<T> {
        typename E::template gradients<T> key_projection = {};   ///< of its parameters
        typename F::template gradients<T> value_projection = {}; ///< of its parameters
    };
    template <Scalar T>
    void check_gradients(const inputs<T>&, const gradients<T>& wanted, const auto& check) const {
        detail::check_projection_gradients<T>(name, "key_projection", key_projection, wanted.key_projection, check);
        if constexpr (!shares_projection)
            detail::check_projection_gradients<T>(name, "value_projection", value_projection, wanted.value_projection, check);
    }
    template <Scalar T>
        requires detail::HasProjectionGradients<E> && detail::HasProjectionGradients<F>
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        static_assert(detail::HasBackward<linformer_attention, T>,
                      "attn: the gradient of Linformer has an include of its own: attn/attention/linformer_backward.hpp");
        return detail::backward_of<linformer_attention, T>::workspace_bytes(*this, s, concurrency);
    }
    template <Scalar T>
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const gradients<T>& wanted,
                  const execution& run) const {
        detail::backward_of<linformer_attention, T>::run(*this, in, saved, d_out, wanted, run);
    }

    /// The projection of the values: that of the keys unless another is given.
    const auto& for_values() const {
        if constexpr (shares_projection) return key_projection;
        else return value_projection;
    }

private:
    /// Throws argument_error unless the pattern shows each key to all queries of a head or to none, and to all heads of a group.
    template <Scalar T>
    void check_pattern(const inputs<T>& in, index_t batch, index_t head) const {
        const auto &q = in.queries.shape(), &k = in.keys.shape();
        const query_tile queries{in.positions.first_query[batch], q.tokens, 1};
        const auto refuse = [&](index_t key, const char* problem) {
            detail::raise(argument_error(name, "pattern", "shows key ", key, " of batch entry ", batch, " to some ", problem));
        };
        const auto for_each_key_run = [&](const auto& own, auto&& f) {
            for_each_run(own, queries, in.positions.first_key[batch], k.tokens, 1, f);
        };
        index_t keys = 0;
        const auto own = at(pattern, batch, head);
        for_each_key_run(own, [&](const key_run& r) {
            if (!r.full)
                refuse(r.first, "queries and hides it from others: projecting mixes the positions of the keys, so that all queries see a "
                                "key or none does; "
                                "causal attention cannot be projected");
            keys += r.count;
        });
        const auto first_of_group = head / (q.heads / k.heads) * (q.heads / k.heads);
        if (head == first_of_group) return;
        index_t keys_of_group = 0;
        constexpr auto problem = "heads of a group and hides it from others, but they share the projected keys";
        for_each_key_run(at(pattern, batch, first_of_group), [&](const key_run& r) {
            for (index_t j = 0; j < r.count; ++j)
                if (!visibility(own.visible(queries.positions(), key_run{r.first + j, 1, 1, true}.positions())).is_all())
                    refuse(r.first + j, problem);
            keys_of_group += r.count;
        });
        if (keys != keys_of_group) refuse(in.positions.first_key[batch], problem);
    }

    template <Scalar T>
    using work = kernel::linformer_work<T, linformer_attention>;
};

} // namespace attn
