// A norm with fixed statistics and the linear beside it, as one linear.
#pragma once

#include "../simd/unfused.hpp"
#include "channel_map.hpp"
#include "norm.hpp"

#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A linear's weight and bias: y = W x + b, weight W (1, 1, outputs, inputs), of any strides, where T is float perhaps stored in 16 bits,
/// and bias b (outputs), or empty. A convolution in front of a norm is one too: its rows are its outputs.
template <class T>
struct linear_view {
    stored_view<T> weight;
    borrowed<T> bias = {};

    operator linear_view<const T>() const
        requires(!std::is_const_v<T>)
    {
        return {weight, bias};
    }
};

namespace detail {

std::vector<channel_map> maps_to_fold(std::string_view operation, const FoldableNorm auto& norm, index_t channels) {
    const auto& statistics = [&]() -> const auto& {
        if constexpr (requires { norm.rep; }) return norm.rep.batch;
        else if constexpr (requires { norm.batch; }) return norm.batch;
        else return norm;
    }();
    if (statistics.mean.empty()) detail::raise(argument_error(operation, "norm", "has no running statistics to fold"));
    norm.check({.tokens = 1, .channels = channels});
    std::vector<channel_map> maps;
    for (index_t c = 0; c < channels; ++c) maps.push_back(norm.map_of(c));
    return maps;
}

template <class T>
void check_linear(std::string_view operation, std::string_view argument, const linear_view<T>& linear) {
    const auto& s = linear.weight.shape();
    check_view(operation, argument, linear.weight);
    if (s.batch != 1 || s.heads != 1)
        detail::raise(shape_error(operation, argument, "has a weight of shape ", s, ", not a matrix (1, 1, outputs, inputs)"));
    if (!linear.bias.empty() && std::ssize(linear.bias) != s.tokens)
        detail::raise(shape_error(operation, argument, "has a bias of ", linear.bias.size(), " entries, but a weight of shape ", s));
}

template <Scalar T>
void check_folded(std::string_view operation, const linear_view<const T>& linear, const linear_view<T>& folded,
                  const tensor_view<const T>& probe) {
    if (probe.data()) check_view(operation, "probe", probe);
    check_linear(operation, "linear", linear);
    check_linear(operation, "folded", folded);
    const auto& s = linear.weight.shape();
    if (folded.weight.shape() != s)
        detail::raise(shape_error(operation, "folded", "has a weight of shape ", folded.weight.shape(), ", but linear has ", s));
    if (std::ssize(folded.bias) != s.tokens)
        detail::raise(shape_error(operation, "folded", "has no bias, but the norm's goes there: ", s.tokens, " entries"));
    if (overlaps_itself(folded.weight))
        detail::raise(shape_error(operation, "folded", "has a weight with strides by which its elements overlap"));
    const output_memory weight(operation, "folded.weight", folded.weight),
        bias(operation, "folded.bias", head_major(folded.bias.data(), {.tokens = 1, .channels = s.tokens}));
    const bool same_weight = folded.weight.data() == linear.weight.data() && folded.weight.strides() == linear.weight.strides() &&
                             folded.weight.format() == linear.weight.format();
    if (!same_weight) weight.require_apart("linear.weight", linear.weight);
    if (folded.bias.data() != linear.bias.data()) bias.require_apart("linear.bias", linear.bias);
    weight.require_apart("linear.bias", linear.bias);
    weight.require_apart("folded.bias", folded.bias);
    bias.require_apart("linear.weight", linear.weight);
    weight.require_apart("probe", probe);
    bias.require_apart("probe", probe);
}

template <class T>
double bias_of(const linear_view<T>& linear, index_t o) {
    return linear.bias.empty() ? 0 : static_cast<double>(linear.bias[static_cast<std::size_t>(o)]);
}

/// Output o of a linear on inputs in(0), in(1), ...
template <class T, class F>
double output_of(const linear_view<T>& linear, index_t o, const F& in) {
    auto sum = bias_of(linear, o);
    for (index_t i = 0; i < linear.weight.shape().channels; ++i) sum += static_cast<double>(linear.weight(0, 0, o, i)) * in(i);
    return sum;
}

/// Calls f(row) with each row of the probe, if there is one, widened.
template <class T, class F>
void for_each_probe(std::string_view operation, const tensor_view<T>& probe, index_t inputs, const F& f) {
    const auto& s = probe.shape();
    if (!probe.data()) return;
    if (s.channels != inputs) detail::raise(shape_error(operation, "probe", "has shape ", s, ", but the linear has ", inputs, " inputs"));
    std::vector<double> row(static_cast<std::size_t>(inputs));
    for_each_row(s, [&](index_t b, index_t h, index_t i) {
        for (index_t c = 0; c < inputs; ++c) row[static_cast<std::size_t>(c)] = static_cast<double>(probe(b, h, i, c));
        f([&](index_t c) { return row[static_cast<std::size_t>(c)]; });
    });
}

inline double applied(const channel_map& map, double x) { return simd::unfused((x - map.mean) * map.scale) + map.offset; }

/// The two ways to fold: a norm of the inputs, or of the outputs. Returns the largest deviation on the probe from what is not folded, which
/// is found before, for `folded` may be `linear`.
template <FoldableNorm N, Scalar T>
double fold(const N& norm, const linear_view<const T>& linear, const linear_view<T>& folded, const tensor_view<const T>& probe,
            bool of_inputs) {
    constexpr std::string_view operation = "fold";
    check_folded<T>(operation, linear, folded, probe);
    const auto [one, heads, outputs, inputs] = linear.weight.shape();
    const auto maps = maps_to_fold(operation, norm, of_inputs ? inputs : outputs);
    const auto map = [&](index_t c) -> const channel_map& { return maps[static_cast<std::size_t>(c)]; };
    const auto unfolded = [&](index_t o, const auto& in) {
        if (!of_inputs) return applied(map(o), output_of(linear, o, in));
        return output_of(linear, o, [&](index_t i) { return applied(map(i), in(i)); });
    };
    std::vector<double> expected;
    for_each_probe(operation, probe, inputs, [&](const auto& in) {
        for (index_t o = 0; o < outputs; ++o) expected.push_back(unfolded(o, in));
    });
    for (index_t o = 0; o < outputs; ++o) {
        const auto bias =
            of_inputs ? output_of(linear, o, [&](index_t i) { return map(i).at_zero(); }) : applied(map(o), bias_of(linear, o));
        for (index_t i = 0; i < inputs; ++i)
            folded.weight(0, 0, o, i) = static_cast<T>(static_cast<double>(linear.weight(0, 0, o, i)) * map(of_inputs ? i : o).scale);
        folded.bias[static_cast<std::size_t>(o)] = static_cast<T>(bias);
    }
    double largest = 0;
    auto at = expected.begin();
    for_each_probe(operation, probe, inputs, [&](const auto& in) {
        for (index_t o = 0; o < outputs; ++o) {
            const auto deviation = std::abs(output_of(folded, o, in) - *at++);
            if (!(deviation <= largest)) largest = deviation;
        }
    });
    return largest;
}

} // namespace detail

/// The linear that equals `norm` and then `linear`, over the inputs of which the norm is:
///     W' = W diag(a),   b' = b + W c,   where norm(x) = a x + c,   a = weight / sqrt(variance + eps) + eta
/// written to `folded`, which may be `linear` itself, its bias being there.
/// Returns the largest difference that folding makes on a probe (batch, heads, tokens, inputs), both sides in double from the numbers as
/// stored; 0 without a probe. Throws attention_error, before anything is written, if shapes differ or the norm has no running statistics.
template <FoldableNorm N>
double fold(const N& norm, const linear_view<const typename N::scalar>& linear, const linear_view<typename N::scalar>& folded,
            const tensor_view<const typename N::scalar>& probe = {}) {
    return detail::fold<N, typename N::scalar>(norm, linear, folded, probe, true);
}

/// The linear that equals `linear` and then `norm`, over the outputs of which the norm is:
///     W' = diag(a) W,   b' = a b + c
/// The rest is as above.
template <FoldableNorm N>
double fold(const linear_view<const typename N::scalar>& linear, const N& norm, const linear_view<typename N::scalar>& folded,
            const tensor_view<const typename N::scalar>& probe = {}) {
    return detail::fold<N, typename N::scalar>(norm, linear, folded, probe, false);
}

} // namespace attn
