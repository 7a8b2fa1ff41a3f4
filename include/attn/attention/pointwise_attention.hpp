// Pointwise attention: each key has a weight of its own, a function of its score, and nothing divides by their sum.
#pragma once

#include "../kernel/attend/weight_sums.hpp"
#include "../score/dual.hpp"
#include "pointwise_weight.hpp"
#include "softmax_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// A weight as the last of a chain of score functions. A hidden key stays hidden.
template <PointwiseWeight F>
struct weight_of_score {
    static constexpr bool compares_positions = false;
    F weight;

    template <class S>
    S operator()(S x, auto, auto) const {
        using attn::select;
        const S hidden = static_cast<S>(-std::numeric_limits<float>::infinity());
        return select(x == hidden, hidden, static_cast<S>(weight(x)));
    }
    template <class S>
    S derivative(S x, auto, auto) const {
        return differentiated(weight, x).derivative;
    }
    template <class S>
        requires requires(const F& f, index_t number, S x) { f.parameter_slope(number, x); }
    S parameter_slope(index_t number, S x, auto, auto) const {
        return weight.parameter_slope(number, x);
    }
    template <class T>
    using gradients = score_gradients<F, T>;
    template <class G>
        requires(!std::same_as<G, no_gradients>)
    void check_gradients(const G& wanted, const auto& check) const {
        weight.check_gradients(wanted, check);
    }
    void find_gradients(const auto& wanted, const auto& sums) const { weight.find_gradients(wanted, sums); }
};

} // namespace detail

/// Pointwise attention: every query takes the sum of the values, each weighted by a function of its own score.
/// For q (batch, heads, n, d_k), k (batch, kv_heads, m, d_k), v (batch, kv_heads, m, d_v); query head h reads kv head h / (heads /
/// kv_heads):
///     x[b, h, i, j] = score(scale * q[b, h, i] . k[b, h, j], i, j)           for the keys j that the pattern shows to query i
///     out[b, h, i]  = sum_j weight(x[b, h, i, j]) v[b, h, j]
/// Ready weights are sigmoid, relu_over and squared_relu; your own generic lambda is one. A hidden key never influences a row, whatever it
/// holds; a score of -infinity hides its key too, whatever the weight makes of it, and so does a weight of -infinity. A row that sees no
/// key gives 0. There is no denominator, so no log_sum_exp and no sinks.
///
/// Time: 2 (d_k + d_v) flops for each pair that the pattern's schedule visits. Memory and bits as softmax_attention's.
/// Ramapuram et al. 2024 (sigmoid), Wortsman et al. 2023 (relu).
template <PointwiseWeight F, class P = dense, class S = identity_score>
struct pointwise_attention {
    static_assert(detail::require_pattern<P>() && detail::require_score_function<S>());
    static constexpr std::string_view name = "pointwise_attention";
    static constexpr attention_traits traits{.has_log_sum_exp = false, .has_narrow_workspace = true, .knows_storage = true};

    F weight;                         ///< what a score becomes
    std::optional<double> scale = {}; ///< 1 / sqrt(d_k) if not given
    P pattern = {};                   ///< which keys a query may see
    S score = {};                     ///< what happens to a scaled score before the weight

    template <Scalar T>
    void check(const inputs<T>& in) const {
        static_assert(kernel::require_generic_score<T, S>());
        check_inputs(name, in);
        if (scale) detail::check_number<T>(name, "scale", *scale);
        if constexpr (requires { weight.check(name); }) weight.check(name);
        const auto context = detail::pattern_context_of(name, in.positions, shapes_of(in), in.queries.shape().heads);
        attn::check(pattern, context);
        attn::check(score, context);
    }
    void check_apart(const output_memory& out) const {
        attn::check_apart(pattern, out);
        attn::check_apart(score, out);
    }
    shape output_shape(const input_shapes& s) const { return {s.queries.batch, s.queries.heads, s.queries.tokens, s.values.channels}; }
    template <Scalar T>
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const {
        return scheduler<T>::workspace_bytes(s, max_passes<P> > 1, concurrency, false);
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

    /// The gradients of the inputs, of the weight's own parameters, and of the score function's: see pointwise_backward.hpp.
    template <Scalar T>
    struct gradients : input_gradients<T> {
        score_gradients<F, T> weight = {}; ///< of the weight's own parameters
        score_gradients<S, T> score = {};  ///< of the score function's own parameters
    };
    template <Scalar T>
    void check_gradients(const inputs<T>&, const gradients<T>& wanted, const auto& check) const {
        detail::check_score_gradients(weight, wanted.weight, check);
        detail::check_score_gradients(score, wanted.score, check);
    }
    template <Scalar T>
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        static_assert(detail::HasBackward<pointwise_attention, T>,
                      "attn: the gradient of pointwise attention has an include of its own: attn/attention/pointwise_backward.hpp");
        return detail::backward_of<pointwise_attention, T>::workspace_bytes(*this, s, concurrency);
    }
    template <Scalar T>
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const gradients<T>& wanted,
                  const execution& run) const {
        detail::backward_of<pointwise_attention, T>::run(*this, in, saved, d_out, wanted, run);
    }

    /// What a scaled score goes through: the score function, and behind it the weight.
    auto score_chain() const {
        const detail::weight_of_score<F> last{weight};
        if constexpr (std::same_as<S, identity_score>) return last;
        else return composed_score<S, detail::weight_of_score<F>>(score, last);
    }
    /// What computes it.
    template <Scalar T, class Stored = any_storage>
    using scheduler = kernel::softmax_scheduler<T, T, Stored, kernel::weight_sums<T>>;
};

/// What a call costs: as that of a softmax attention with the same pattern.
template <PointwiseWeight F, Pattern P, ScoreFunction S>
pair_count visited_pairs(const pointwise_attention<F, P, S>& op, const input_shapes& s, const positions& where = {}) {
    return visited_pairs(softmax_attention<P>{.pattern = op.pattern}, s, where);
}

} // namespace attn
