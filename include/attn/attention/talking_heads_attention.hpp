// Talking-heads attention: softmax attention whose heads are mixed before the softmax, after it, or both.
#pragma once

#include "../kernel/talking/scheduler.hpp"
#include "../pattern/passes.hpp"
#include "backward.hpp"

#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Talking-heads attention: softmax attention whose heads are mixed before the softmax and after it.
/// For q (batch, h_k, n, d_k), k (batch, kv_heads, m, d_k), v (batch, kv_heads, m, d_v), where kv_heads, which may differ between k and v,
/// divide h_k and h_v; head a of h_k reads key head a / (h_k / kv_heads), and values likewise. With h mixed heads in between:
///     L[b, a, i, j]  = scale * q[b, a, i] . k[b, a, j]
///     J[b, c, i, j]  = score(sum_a logits_mix[c, a] L[b, a, i, j] + logits_bias[c], i, j)
///     P[b, c, i, j]  = exp(J[b, c, i, j]) / (sum_j exp(J[b, c, i, j]) + exp(sinks[c]))
///     W[b, e, i, j]  = sum_c weights_mix[e, c] P[b, c, i, j] + weights_bias[e]
///     out[b, e, i]   = sum_j W[b, e, i, j] v[b, e, j]              (batch, h_v, n, d_v)
///     log_sum_exp    = the logarithm of the denominator of P       (batch, h, n, 1)
/// for the keys j that the pattern shows to query i.
/// Without a mixing the heads on either side of it are the same. Pattern, score function and sinks are those of the h mixed heads. A key is
/// hidden if it is in every mixed head, by the pattern or by a score of -infinity: it never influences a row, and gets no weights_bias. A
/// row that sees no key gives 0. NaN in a key or query reaches all heads, by way of the mixings.
///
/// Time: 2 (h_k d_k + h_v d_v) flops for each pair of query and key, and 2 h (h_k + h_v) for the mixings. Memory: what tens of queries need
/// for some 32 keys in all heads, a few hundred kilobytes a thread at 12 heads; and, with a second mixing, as many times h m weights. A
/// smaller workspace, down to least_workspace_bytes, does without these: scores are then computed twice, to the same bits. keeps_weights
/// tells which. Shazeer et al. 2020, "Talking-Heads Attention"; the first mixing alone: Su 2020; both, with biases: Touvron et al. 2021,
/// CaiT.
template <class P = dense, class S = identity_score>
struct talking_heads_attention {
    static_assert(detail::require_pattern<P>() && detail::require_score_function<S>());
    static constexpr std::string_view name = "talking_heads_attention";
    static constexpr attention_traits traits{.has_log_sum_exp_shape = true, .has_least_workspace = true};

    tensor_view<const double> logits_mix = {};  ///< (1, 1, h, h_k), or none
    borrowed<const double> logits_bias = {};    ///< one per mixed head, or none; needs logits_mix
    tensor_view<const double> weights_mix = {}; ///< (1, 1, h_v, h), or none
    borrowed<const double> weights_bias = {};   ///< one per head of the result, or none; needs weights_mix
    std::optional<double> scale = {};           ///< 1 / sqrt(d_k) if not given
    S score = {};                               ///< what happens to a mixed score before the softmax
    P pattern = {};                             ///< which keys a query may see
    borrowed<const double> sinks = {};          ///< one per mixed head, or none: exp(sink) joins the denominator

    template <Scalar T>
    void check(const inputs<T>& in) const {
        static_assert(kernel::require_generic_score<T, S>());
        detail::check_tensors(name, in);
        const auto shapes = shapes_of(in);
        check_mixing("logits_mix", logits_mix, "q", shapes.queries, shapes.queries.heads);
        check_mixing("weights_mix", weights_mix, logits_mix.data() ? "logits_mix" : "q",
                     logits_mix.data() ? logits_mix.shape() : shapes.queries, mixed_heads(shapes));
        check_numbers("logits_bias", logits_bias, mixed_heads(shapes), logits_mix.data() != nullptr, "logits_mix");
        check_numbers("weights_bias", weights_bias, value_heads(shapes), weights_mix.data() != nullptr, "weights_mix");
        check_numbers("sinks", sinks, mixed_heads(shapes), true, "");
        if (!detail::divides(shapes.keys.heads, shapes.queries.heads))
            detail::refuse(name, "k", shapes.keys, "q", shapes.queries, "the heads of k must divide the heads of q");
        if (!detail::divides(shapes.values.heads, value_heads(shapes)))
            detail::refuse(name, "v", shapes.values, "out", output_shape(shapes), "the heads of v must divide the heads of the result");
        if (scale) detail::check_number<T>(name, "scale", *scale);
        for (const auto bias : logits_bias) check_narrowed<T>("logits_bias", bias);
        for (const auto bias : weights_bias) check_narrowed<T>("weights_bias", bias);
        for (const auto& [argument, mix] : {std::pair("logits_mix", logits_mix), std::pair("weights_mix", weights_mix)})
            for (index_t to = 0; to < mix.shape().tokens; ++to)
                for (index_t from = 0; from < mix.shape().channels; ++from) check_narrowed<T>(argument, mix(0, 0, to, from));
        const auto context = detail::pattern_context_of(name, in.positions, shapes, mixed_heads(shapes));
        attn::check(pattern, context);
        attn::check(score, context);
    }
    void check_apart(const output_memory& out) const {
        out.require_apart("logits_mix", logits_mix);
        out.require_apart("logits_bias", logits_bias);
        out.require_apart("weights_mix", weights_mix);
        out.require_apart("weights_bias", weights_bias);
        out.require_apart("sinks", sinks);
        attn::check_apart(pattern, out);
        attn::check_apart(score, out);
    }
    shape output_shape(const input_shapes& s) const { return {s.queries.batch, value_heads(s), s.queries.tokens, s.values.channels}; }
    /// The shape of its log_sum_exp: a row for each mixed head.
    shape log_sum_exp_shape(const input_shapes& s) const { return {s.queries.batch, mixed_heads(s), s.queries.tokens, 1}; }
    template <Scalar T>
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const {
        return scheduler<T>{parameters_for(s)}.workspace_bytes(s, concurrency, true);
    }
    /// Enough for the same result in two passes: independent of n and m.
    template <Scalar T>
    std::size_t least_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        return scheduler<T>{parameters_for(s)}.workspace_bytes(s, concurrency, false);
    }
    /// Whether forward, on such shapes and with this workspace, computes scores but once.
    template <Scalar T>
    bool keeps_weights(const input_shapes& s, const execution& run) const {
        return !weights_mix.data() || scheduler<T>{parameters_for(s)}.keeps_weights(s, run);
    }
    template <Scalar T>
    void forward(const inputs<T>& in, const outputs<T>& out, const execution& run) const {
        const auto shapes = shapes_of(in);
        const kernel::visible_keys_of<T, P> visible(pattern, shapes, in.positions);
        const kernel::score_adjustment_of<T, S> adjustment(score);
        scheduler<T>{parameters_for(shapes)}(in, out, visible, scored ? &adjustment : nullptr, run);
    }

    /// The gradients of the inputs, of both mixings, their biases, and the sinks, each of these summed over the batch, and of the score
    /// function: see talking_heads_backward.hpp.
    template <Scalar T>
    struct gradients : mixed_head_gradients<T> {
        score_gradients<S, T> score = {}; ///< of the score function's own parameters
    };
    template <Scalar T>
    void check_gradients(const inputs<T>& in, const gradients<T>& wanted, const auto& check) const {
        const auto shapes = shapes_of(in);
        const auto heads = mixed_heads(shapes), out_heads = value_heads(shapes);
        const auto check_one = [&](std::string_view argument, const tensor_view<T>& view, bool is_there, std::string_view missing,
                                   const shape& expected) {
            if (view.data() && !is_there) detail::raise(argument_error(name, argument, "is asked for, but there ", missing));
            check(argument, view, expected);
        };
        check_one("wanted.logits_mix", wanted.logits_mix, logits_mix.data(), "is no logits_mix", {1, 1, heads, shapes.queries.heads});
        check_one("wanted.logits_bias", wanted.logits_bias, !logits_bias.empty(), "is no logits_bias", {1, heads, 1, 1});
        check_one("wanted.weights_mix", wanted.weights_mix, weights_mix.data(), "is no weights_mix", {1, 1, out_heads, heads});
        check_one("wanted.weights_bias", wanted.weights_bias, !weights_bias.empty(), "is no weights_bias", {1, out_heads, 1, 1});
        check_one("wanted.sinks", wanted.sinks, !sinks.empty() || heads == 0, "are no sinks", {1, heads, 1, 1});
        detail::check_score_gradients(score, wanted.score, check);
    }
    template <Scalar T>
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        static_assert(detail::HasBackward<talking_heads_attention, T>,
                      "attn: the gradient of talking-heads attention has an include of its own: attn/attention/talking_heads_backward.hpp");
        return detail::backward_of<talking_heads_attention, T>::workspace_bytes(*this, s, concurrency);
    }
    template <Scalar T>
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const gradients<T>& wanted,
                  const execution& run) const {
        detail::backward_of<talking_heads_attention, T>::run(*this, in, saved, d_out, wanted, run);
    }

    /// What the kernel is told of it.
    kernel::talking_heads_parameters parameters_for(const input_shapes& s) const {
        const auto factor = detail::score_scale<double>(scale, s.queries.channels);
        return {factor, sinks, logits_mix, logits_bias, weights_mix, weights_bias, heads_alike(pattern), scored};
    }

private:
    index_t mixed_heads(const input_shapes& s) const { return logits_mix.data() ? logits_mix.shape().tokens : s.queries.heads; }
    index_t value_heads(const input_shapes& s) const { return weights_mix.data() ? weights_mix.shape().tokens : mixed_heads(s); }

    static constexpr bool scored = !std::same_as<S, identity_score>;

    template <Scalar T>
    using scheduler = kernel::talking_heads_scheduler<T>;
    static void check_mixing(std::string_view argument, const tensor_view<const double>& mix, std::string_view other,
                             const shape& other_shape, index_t columns) {
        const auto& m = mix.shape();
        if (!mix.data() && m.size() == 0) return;
        detail::check_view(name, argument, mix);
        if (m.batch != 1 || m.heads != 1 || m.channels != columns)
            detail::refuse(name, argument, m, other, other_shape,
                           "the mixing must have the shape (1, 1, heads, " + std::to_string(columns) + ")");
    }
    /// Infinity and NaN are what they are; what becomes one of them as a T is refused.
    template <Scalar T>
    static void check_narrowed(std::string_view argument, double number) {
        if (std::isfinite(number)) detail::check_number<T>(name, argument, number);
    }
    static void check_numbers(std::string_view argument, std::span<const double> numbers, index_t heads, bool has_mixing,
                              std::string_view mixing) {
        if (numbers.empty()) return;
        if (!has_mixing) detail::raise(argument_error(name, argument, "is given without ", mixing));
        if (std::ssize(numbers) != heads)
            detail::raise(shape_error(name, argument, "has ", numbers.size(), " entries, but there are ", heads, " heads"));
    }
};

/// What a call costs: the (query, key) pairs that any mixed head sees, and those that its schedule visits, over all batch entries. The
/// kernel spends 2 (h_k d_k + h_v d_v) flops on a visited pair, in all heads together, and 2 h (h_k + h_v) on the mixings. Throws
/// attention_error if the pattern or the positions do not fit.
template <Pattern P, ScoreFunction S>
pair_count visited_pairs(const talking_heads_attention<P, S>& op, const input_shapes& s, const positions& where = {}) {
    const auto heads = op.log_sum_exp_shape(s).heads;
    detail::check_pattern(op.name, op.pattern, s, where, heads);
    pair_count all;
    for (index_t b = 0; b < s.queries.batch; ++b) { // registers of queries with groups of keys, where a panel sees a block in part
        const auto pairs = visited_pairs(detail::over_heads<P>{op.pattern, b, heads}, where.first_query[b], s.queries.tokens,
                                         where.first_key[b], s.keys.tokens, simd::lanes<float>::size, 8);
        all.visible += pairs.visible;
        all.visited += pairs.visited;
    }
    return all;
}

} // namespace attn
