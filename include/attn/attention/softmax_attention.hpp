// Softmax attention: scaled dot products, a score function, a pattern, a softmax over the visible keys.
#pragma once

#include "../kernel/softmax/scheduler.hpp"
#include "backward.hpp"

#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// What the kernel makes of a call of softmax attention, or of another operator of its kernels: it has a `pattern`, a `scale`, perhaps
/// `sinks`, a `score_chain()` of functions that a score goes through, and a `scheduler`.
template <Scalar T, class Op, class Chain>
kernel::softmax_call<T> softmax_call_of(const Op& op, const inputs<T>& in, const outputs<T>& out, const kernel::visible_keys& visible,
                                        const kernel::score_adjustment_of<T, Chain>& adjustment) {
    std::span<const double> sinks;
    if constexpr (requires { op.sinks; }) sinks = op.sinks;
    constexpr bool adjusts = !std::same_as<Chain, identity_score>;
    return {in, out, visible, adjusts ? &adjustment : nullptr, score_scale<T>(op.scale, in.queries.shape().channels), sinks};
}

/// Computes such an operator, with a pattern that may be another. pages: where keys and values lie, of which `in` then tells the shapes
/// only.
template <class Stored, Scalar T, class Op, Pattern P>
void forward_by_softmax_kernel(const Op& op, const P& pattern, const inputs<T>& in, const outputs<T>& out, const execution& run,
                               const kernel::sequence_pages<T>* pages = nullptr) {
    const kernel::visible_keys_of<T, P> visible(pattern, shapes_of(in), in.positions);
    const auto& chain = op.score_chain();
    const kernel::score_adjustment_of<T, std::remove_cvref_t<decltype(chain)>> adjustment(chain);
    auto call = softmax_call_of(op, in, out, visible, adjustment);
    call.pages = pages;
    Op::template scheduler<T, Stored>::attend(call, run);
}

} // namespace detail

/// Softmax attention: every query takes the mean of the values, weighted by the softmax of its scores.
/// For q (batch, heads, n, d_k), k (batch, kv_heads, m, d_k), v (batch, kv_heads, m, d_v); query head h reads kv head h / (heads /
/// kv_heads):
///     x[b, h, i, j]  = score(scale * q[b, h, i] . k[b, h, j], i, j)          for the keys j that the pattern shows to query i
///     out[b, h, i]   = sum_j exp(x[b, h, i, j]) v[b, h, j] / (sum_j exp(x[b, h, i, j]) + exp(sinks[h]))
///     log_sum_exp    = the logarithm of that denominator
/// A hidden key never influences a row, whatever it holds; a score of -infinity hides its key too. A row that sees no key gives 0, and
/// log_sum_exp -infinity (or its sink). NaN in a key or value that is seen makes NaN of the rows that see it, and of no others. So does a
/// sink of NaN with the rows of its head; one of +infinity takes all of the weight. Scores may be of any size, down to the lowest number.
///
/// Time: 2 (d_k + d_v) flops for each pair that the pattern's schedule visits. Memory: the workspace, tens of kilobytes a thread,
/// independent of n and m, plus two numbers a row if a union of patterns with different steps runs as several passes.
/// The result does not depend on executor, threads, strides or the rest of the batch, bit by bit.
/// Vaswani et al. 2017, "Attention Is All You Need"; the online softmax is Milakov and Gimelshein 2018.
template <class P = dense, class S = identity_score, Products R = unrounded_products>
struct softmax_attention {
    static_assert(detail::require_pattern<P>() && detail::require_score_function<S>());
    static constexpr std::string_view name = "softmax_attention";
    static constexpr attention_traits traits{.has_narrow_workspace = true, .knows_storage = true};

    std::optional<double> scale = {};  ///< 1 / sqrt(d_k) if not given
    S score = {};                      ///< what happens to a scaled score before the softmax
    P pattern = {};                    ///< which keys a query may see
    borrowed<const double> sinks = {}; ///< one per head, or none: exp(sink) joins the denominator
    R products = {};                   ///< what operands of products are rounded to: see products.hpp

    template <Scalar T>
    void check(const inputs<T>& in) const {
        static_assert(kernel::require_generic_score<T, S>());
        check_inputs(name, in);
        const auto& q = in.queries.shape();
        if (!sinks.empty() && std::ssize(sinks) != q.heads)
            detail::raise(shape_error(name, "sinks",
                                      detail::joined({"has ", std::to_string(sinks.size()), " entries, but q has shape ", to_string(q)})));
        if (scale) detail::check_number<T>(name, "scale", *scale);
        const auto context = detail::pattern_context_of(name, in.positions, shapes_of(in), q.heads);
        attn::check(pattern, context);
        attn::check(score, context);
    }
    void check_apart(const output_memory& out) const {
        out.require_apart("sinks", sinks);
        attn::check_apart(pattern, out);
        attn::check_apart(score, out);
    }
    shape output_shape(const input_shapes& s) const { return {s.queries.batch, s.queries.heads, s.queries.tokens, s.values.channels}; }
    template <Scalar T>
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const {
        return scheduler<T, unnarrowed_storage>::workspace_bytes(s, max_passes<P> > 1, concurrency, false);
    }
    /// Bytes of workspace for a result of 16-bit numbers, whose rows are rounded when their last key has been seen.
    template <Scalar T>
    std::size_t narrow_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        return scheduler<T>::workspace_bytes(s, max_passes<P> > 1, concurrency, true);
    }
    template <class Stored = any_storage, Scalar T>
    void forward(const inputs<T>& in, const outputs<T>& out, const execution& run) const {
        detail::forward_by_softmax_kernel<Stored>(*this, pattern, in, out, run);
    }

    /// The gradients of the inputs, of the sinks, (1, heads, 1, 1), and of the score function: see softmax_backward.hpp.
    template <Scalar T>
    struct gradients : input_gradients<T> {
        tensor_view<T> sinks = {};        ///< summed over the batch
        score_gradients<S, T> score = {}; ///< of the score function's own parameters
    };
    template <Scalar T>
    void check_gradients(const inputs<T>& in, const gradients<T>& wanted, const auto& check) const {
        if (wanted.sinks.data() && sinks.empty() && in.queries.shape().heads > 0)
            detail::raise(argument_error(name, "wanted.sinks", "is asked for, but there are no sinks"));
        check("wanted.sinks", wanted.sinks, shape{1, in.queries.shape().heads, 1, 1});
        detail::check_score_gradients(score, wanted.score, check);
    }
    template <Scalar T>
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        static_assert(detail::HasBackward<softmax_attention, T>,
                      "attn: the gradient of softmax attention has an include of its own: attn/attention/softmax_backward.hpp");
        return detail::backward_of<softmax_attention, T>::workspace_bytes(*this, s, concurrency);
    }
    template <Scalar T>
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const gradients<T>& wanted,
                  const execution& run) const
        requires std::same_as<R, unrounded_products> // rounding has no gradient
    {
        detail::backward_of<softmax_attention, T>::run(*this, in, saved, d_out, wanted, run);
    }

    /// What a scaled score goes through: the score function.
    const S& score_chain() const { return score; }
    /// What computes it.
    template <Scalar T, class Stored = any_storage>
    using scheduler = kernel::softmax_scheduler<T, typename R::template operand<T>, Stored>;
};

/// What a call costs: the (query, key) pairs that the pattern makes visible, and those that its schedule visits, over all batch entries
/// and heads. The kernel spends 2 (d_k + d_v) flops on a visited pair. Throws attention_error if the pattern or the positions do not fit.
template <Pattern P, ScoreFunction S, Products R>
pair_count visited_pairs(const softmax_attention<P, S, R>& op, const input_shapes& s, const positions& where = {}) {
    detail::check_pattern(op.name, op.pattern, s, where, s.queries.heads);
    // It computes registers of queries with groups of keys where a panel is partly visible.
    using score_stage = kernel::score_stage<float>;
    pair_count all;
    for (index_t b = 0; b < s.queries.batch; ++b)
        for (index_t h = 0; h < s.queries.heads; ++h) {
            const auto pairs = visited_pairs(at(op.pattern, b, h), where.first_query[b], s.queries.tokens, where.first_key[b],
                                             s.keys.tokens, kernel::query_block_traits<float>::lane_count, score_stage::grain);
            all.visible += pairs.visible;
            all.visited += pairs.visited;
        }
    return all;
}

} // namespace attn
