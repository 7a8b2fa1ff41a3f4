// Causal convolution over tokens: what stands before recurrent attention.
#pragma once

#include "../kernel/convolution/causal.hpp"
#include "../norm/rows_in_and_out.hpp"
#include "../simd/elementary.hpp"
#include "feature_map.hpp"
#include "ragged.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A depthwise convolution of 2 to 8 taps over tokens, of the past and the present only, with an activation behind it if you like.
/// For x (batch, heads, n, channels), channel c of head h having taps and a bias of its own:
///     out[i, c] = activation(bias[c] + sum over t < taps of weights[c, t] x[i - taps + 1 + t, c])
///     last_state[r, c] = x[n - taps + 1 + r, c]
/// where x before token 0 is first_state, or zeros. So a sequence in pieces, each with the state of the one before, has the bits of the
/// whole, however it is cut. weights: (1, heads channels, 1, taps), any strides, perhaps stored in 16 bits: PyTorch's conv1d.weight
/// (channels, 1, taps) as it lies, the heads one after the other. bias: (heads channels), or empty. activation: none, silu{}, or any
/// generic callable. Before Mamba-2, Gated DeltaNet and Kimi's attention there are 4 taps and silu; RWKV's token shift has 2.
/// Time: one read and one write of the tokens. Memory: none. NaN reaches the taps - 1 tokens that follow, no other.
/// Gu and Dao 2023, "Mamba"; ONNX's CausalConvWithState.
template <Scalar T, FeatureMap F = identity_features>
struct causal_convolution {
    static constexpr std::string_view name = "causal_convolution";

    stored_view<const T> weights;
    borrowed<const T> bias = {};
    F activation = {};                     ///< of each number
    stored_view<const T> first_state = {}; ///< (batch, heads, taps - 1, channels), or none: zeros
    stored_view<T> last_state = {};        ///< (batch, heads, taps - 1, channels), is written, or none; it may be the first

    /// How many tokens an output is made of.
    index_t taps() const { return weights.shape().channels; }
    /// The shape of the states of tokens of that shape.
    shape state_shape(const shape& x) const { return {x.batch, x.heads, taps() - 1, x.channels}; }

    /// Throws attention_error if parameters and states do not fit x, by default of a sequence in each batch entry.
    void check(const stored_view<const T>& x) const { check(x, x.shape().batch); }
    void check(const stored_view<const T>& of_x, index_t sequences) const {
        const auto &x = of_x.shape(), &w = weights.shape();
        detail::check_view(name, "x", of_x);
        detail::check_view(name, "weights", weights);
        if (w.batch != 1 || w.heads != detail::product(x.heads, x.channels) || w.tokens != 1)
            detail::raise(shape_error(name, "weights", "has shape ", w, ", but (1, heads channels, 1, taps) is needed for x of shape ", x));
        if (taps() < 2 || taps() > kernel::causal_taps<T>::most_taps)
            detail::raise(shape_error(name, "weights", "has shape ", w, ", but 2 to 8 taps are needed"));
        if (!bias.empty() && std::ssize(bias) != w.heads)
            detail::raise(shape_error(name, "bias", "has ", bias.size(), " entries, but x has shape ", x));
        const auto states = state_shape({sequences, x.heads, x.tokens, x.channels});
        detail::check_optional_input(name, "first_state", first_state, states);
        detail::check_optional(name, "last_state", last_state, states);
        if (!last_state.data()) return;
        detail::check_writable(name, "last_state", last_state);
        const output_memory memory(name, "last_state", last_state);
        memory.require_apart("x", of_x);
        memory.require_apart("weights", weights);
        memory.require_apart("bias", bias);
        const auto &first = first_state, last = stored_view<const T>(last_state);
        if (last.data() != first.data() || last.format() != first.format() || last.strides() != first.strides())
            memory.require_apart("first_state", first);
    }
    void check_apart(const output_memory& out) const {
        out.require_apart("weights", weights);
        out.require_apart("bias", bias);
        out.require_apart("first_state", first_state);
        out.require_apart("last_state", last_state);
    }
    /// Computes. Everything has been checked.
    void forward(const stored_view<const T>& x, const stored_view<T>& out, const execution& run) const {
        const kernel::causal_convolution<T, F> convolution({weights, bias}, activation, detail::worth_streaming<T>(x, out));
        kernel::with_joined_heads([&](const auto&... views) { convolution(views..., run); }, x, first_state, out, last_state);
    }
};

namespace detail {

template <class... Arguments>
struct activation_among {
    using type = identity_features;
};
template <class First, class... Rest>
struct activation_among<First, Rest...> : std::conditional_t<FeatureMap<First>, std::type_identity<First>, activation_among<Rest...>> {};

} // namespace detail

/// Deduces a causal_convolution of its weights' scalar type, of 16-bit ones float, and of the activation that is given.
template <StoredTensor W, class... Others>
causal_convolution(const W&, const Others&...)
    -> causal_convolution<detail::computed_t<W>, typename detail::activation_among<Others...>::type>;

namespace detail {

/// Throws attention_error unless the result can be written.
template <Scalar T, class F>
void check_convolved(const causal_convolution<T, F>& op, const stored_view<const T>& x, const stored_view<T>& out) {
    check_view(op.name, "out", out);
    if (out.shape() != x.shape()) refuse_result(op.name, "out", out.shape(), x.shape());
    check_writable(op.name, "out", out);
    const output_memory memory(op.name, "out", out);
    memory.require_apart("x", x);
    op.check_apart(memory);
}

} // namespace detail

/// Convolves tokens: see causal_convolution. x and out (batch, heads, n, channels) may lie in any way; where channels lie side by side in
/// both, and both are stored alike, they are read and written where they are. Where T is float, each, and the states, may be stored in 16
/// bits: widened first, rounded last. Checks everything once, then computes and allocates nothing; `run` as in `attend`. The result is the
/// same, bit by bit, for every executor, number of threads and strides.
/// Throws attention_error, before anything is read or written: shapes that do not fit, an out or a last state that overlaps what is read,
/// but for a last state that is the first.
template <Scalar T, class F>
void convolve(const causal_convolution<T, F>& op, const detail::read_stored<T>& x, const std::type_identity_t<stored_view<T>>& out,
              const detail::call_execution& run = {}) {
    op.check(x);
    detail::check_convolved(op, x, out);
    op.forward(x, out, run);
}

/// Convolves tokens to a new tensor of x's shape: see convolve(op, x, out, run).
template <Scalar T, class F>
[[nodiscard]] tensor<T> convolve(const causal_convolution<T, F>& op, const detail::read_stored<T>& x,
                                 const detail::call_execution& run = {}) {
    op.check(x);
    tensor<T> out(x.shape());
    op.forward(x, out, run);
    return out;
}

/// Convolves the sequences of a ragged batch: x and out (1, heads, all tokens, channels), states (entries, heads, taps - 1, channels). The
/// bits are those of a call for each sequence. Everything else as in convolve(op, x, out, run).
template <Scalar T, class F>
void convolve(const causal_convolution<T, F>& op, const ragged& batch, const detail::read_stored<T>& x,
              const std::type_identity_t<stored_view<T>>& out, const detail::call_execution& run = {}) {
    detail::check_starts(op.name, "starts", batch.starts, "x", x);
    op.check(x, batch.entries());
    detail::check_convolved(op, x, out);
    detail::check_starts_apart(batch, output_memory(op.name, "out", out));
    if (op.last_state.data()) detail::check_starts_apart(batch, output_memory(op.name, "last_state", op.last_state));
    detail::for_each_entry(batch, 0, run, [&](index_t e, const execution& on) {
        auto own = op;
        own.first_state = op.first_state.slice({.batch = {e, 1}});
        own.last_state = op.last_state.slice({.batch = {e, 1}});
        own.forward(x.slice({.tokens = batch.queries(e)}), out.slice({.tokens = batch.queries(e)}), on);
    });
}

} // namespace attn
