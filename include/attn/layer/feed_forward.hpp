// The feed-forward layer: two linears with an activation between them, or three with a gate. `relu` and `silu` are activations too.
#pragma once

#include "../attention/feature_map.hpp"
#include "../score/dual.hpp"
#include "../simd/elementary.hpp"
#include "linear.hpp"

#include <cmath>
#include <numbers>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A value with one generic call x -> f(x), on numbers and on lanes: what a FeatureMap is.
template <class F>
concept Activation = FeatureMap<F>;

/// GELU: x Phi(x) = x (1 + erf(x / sqrt 2)) / 2, exactly. Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".
struct gelu {
    template <class S>
    S operator()(S x) const {
        using std::erf;
        return S(0.5) * x * (S(1) + erf(x * S(std::numbers::sqrt2 / 2)));
    }
};

/// GELU by the tanh that approximates it: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2. GPT-2's.
struct gelu_tanh {
    template <class S>
    S operator()(S x) const {
        using std::tanh;
        constexpr auto root = 0.79788456080286535588; // sqrt(2 / pi)
        return S(0.5) * x * (S(1) + tanh(S(root) * (x + S(0.044715) * x * x * x)));
    }
};

/// A feed-forward network: two linears with an activation between, gated or not, applied to every token.
/// For each token row x (channels):
///     out = down(f(up(x))) (+ residual),      and with a gate   out = down(f(gate(x)) * up(x)) (+ residual)
/// up and gate: weights (1, 1, hidden, channels); down: weight (1, 1, outputs, hidden). f: gelu, gelu_tanh, relu, silu or any generic
/// callable. Time: 2 hidden (channels + outputs) flops a token, and with a gate 2 hidden channels more. Memory: the hidden channels of 768
/// tokens, twice with a gate. With a gate and silu it is SwiGLU: Shazeer 2020, "GLU Variants Improve Transformer".
template <Scalar T, Activation F = gelu>
struct feed_forward {
    using scalar = T;
    static constexpr std::string_view name = "feed_forward";
    static constexpr bool in_place = true, moves_statistics = false;

    linear<T> up, down;
    linear<T> gate = {}; ///< none without memory
    F activation = {};

    /// Whether there is a gate.
    bool gated() const { return detail::is_given(gate.weight); }
    void check(const layer_inputs<T>& in) const {
        detail::check_linear(name, "up", up.view());
        detail::check_tokens(name, "tokens", in.tokens, up.inputs());
        detail::check_no_context(name, in);
        down.check(name, "down", down.outputs(), up.outputs());
        if (gated()) gate.check(name, "gate", up.outputs(), up.inputs());
    }
    void check_apart(const output_memory& out) const {
        up.check_apart(out);
        down.check_apart(out);
        gate.check_apart(out);
    }
    shape output_shape(const shape& tokens) const { return {tokens.batch, 1, tokens.tokens, down.outputs()}; }
    std::size_t workspace_bytes(const shape& tokens, const shape&, index_t concurrency) const {
        const auto rows = std::min(max_rows, tokens.batch * tokens.tokens);
        return detail::bytes_taken([&](detail::scratch& memory) { return take_work(memory, rows, concurrency); });
    }
    void forward(const layer_inputs<T>& in, const tensor_view<T>& out, const execution& run) const { compute(in, {}, out, run); }

    /// The gradients of the linears' parameters.
    struct gradients {
        typename linear<T>::gradients up = {};   ///< of up
        typename linear<T>::gradients down = {}; ///< of down
        typename linear<T>::gradients gate = {}; ///< of gate, if there is one
    };
    void for_each_gradient(const layer_inputs<T>& in, const gradients& wanted, const auto& visit) const {
        up.for_each_gradient(in, wanted.up, detail::visit_member("up", visit));
        down.for_each_gradient(in, wanted.down, detail::visit_member("down", visit));
        gate.for_each_gradient(in, wanted.gate, detail::visit_member("gate", visit));
    }
    /// Bytes that the gradient needs kept: the hidden channels, before the activation.
    std::size_t kept_bytes(const shape& tokens, const shape&) const {
        return detail::bytes_taken([&](detail::scratch& memory) { return take_hidden(memory, tokens); });
    }
    void forward(const layer_inputs<T>& in, const tensor_view<T>& out, std::byte* kept, const execution& run) const {
        detail::scratch memory(kept);
        compute(in, take_hidden(memory, in.tokens.shape()), out, run);
    }
    std::size_t backward_workspace_bytes(const shape& tokens, const shape&, index_t concurrency) const {
        return detail::bytes_for<gradient_work>(*this, tokens, concurrency);
    }
    void backward(const layer_inputs<T>& in, const std::byte* kept, const tensor_view<const T>& d_out,
                  const layer_gradients<feed_forward>& wanted, const execution& run) const {
        detail::scratch memory(run.workspace().bytes().data()), held(const_cast<std::byte*>(kept));
        const gradient_work g(memory, *this, in.tokens.shape(), run.concurrency());
        const auto h = take_hidden(held, in.tokens.shape());
        const auto& p = wanted.parameters;
        activate(h.up, h.gate, g.of.up, run);
        down.backward(g.of.up, d_out, g.of_activated, false, p.down, run);
        detail::for_each_row(g.of.up, run, [&](T* of_up, index_t b, index_t i) {
            const auto row = [&](const auto& t) { return t.data() ? t.row(b, 0, i) : nullptr; };
            differentiate(row(h.up), row(h.gate), row(g.of_activated), of_up, row(g.of.gate));
        });
        up.backward(in.tokens, g.of.up, wanted.tokens, false, p.up, run);
        if (gated()) gate.backward(in.tokens, g.of.gate, wanted.tokens, true, p.gate, run);
    }

private:
    struct hidden_channels {
        tensor_view<T> up, gate;
    };
    hidden_channels take_hidden(detail::scratch& memory, const shape& tokens) const {
        const shape s{tokens.batch, 1, tokens.tokens, up.outputs()};
        hidden_channels h{head_major(memory.take<T>(s.size()), s), {}};
        if (gated()) h.gate = head_major(memory.take<T>(s.size()), s);
        return h;
    }
    /// The memory of a gradient, behind that of the linears.
    struct gradient_work {
        hidden_channels of; ///< before the activation; what it makes of them at first
        tensor_view<T> of_activated;

        gradient_work(detail::scratch& memory, const feed_forward& layer, const shape& tokens, index_t concurrency) {
            const shape within{tokens.batch, 1, tokens.tokens, layer.up.outputs()};
            memory.take<std::byte>(std::max(layer.up.backward_workspace_bytes(tokens, {}, concurrency),
                                            layer.down.backward_workspace_bytes(within, {}, concurrency)));
            of = layer.take_hidden(memory, tokens);
            of_activated = head_major(memory.take<T>(within.size()), within);
        }
    };

    /// Two blocks of the matrix product: enough that packing the weights costs little, few enough that the hidden channels stay in a cache.
    static constexpr index_t max_rows = 768;

    /// The hidden channels of so many rows, behind the memory of the linears.
    hidden_channels take_work(detail::scratch& memory, index_t rows, index_t concurrency) const {
        const shape in{1, 1, rows, up.inputs()}, within{1, 1, rows, up.outputs()};
        memory.take<std::byte>(std::max(up.workspace_bytes(in, {}, concurrency), down.workspace_bytes(within, {}, concurrency)));
        return take_hidden(memory, in);
    }
    /// kept: where the hidden channels stay as they are before the activation; in the workspace, some rows at a time, without memory.
    void compute(const layer_inputs<T>& in, const hidden_channels& kept, const tensor_view<T>& out, const execution& run) const {
        const detail::row_matrices matrices(in.tokens.shape(), in.tokens, in.residual, out);
        detail::scratch memory(run.workspace().bytes().data());
        const auto own = take_work(memory, std::min(max_rows, in.tokens.shape().batch * in.tokens.shape().tokens), run.concurrency());
        for (index_t b = 0; b < matrices.count; ++b)
            for (index_t first = 0; first < matrices.rows; first += max_rows) {
                const auto count = std::min(max_rows, matrices.rows - first);
                const auto part = [&](const auto& t) { return t.slice({.batch = {b, 1}, .tokens = {first, count}}); };
                const shape within{1, 1, count, up.outputs()};
                const auto activated = head_major(own.up.data(), within);
                const auto h = kept.up.data() ? hidden_channels{part(kept.up), part(kept.gate)}
                                              : hidden_channels{activated, head_major(own.gate.data(), within)};
                up.forward({.tokens = part(in.tokens)}, h.up, run);
                if (gated()) gate.forward({.tokens = part(in.tokens)}, h.gate, run);
                activate(h.up, h.gate, activated, run);
                down.forward({.tokens = activated, .residual = part(in.residual)}, part(out), run);
            }
    }
    /// Writes the activated rows f(hidden), or f(gate) * hidden; they may be written where they are.
    void activate(const tensor_view<const T>& hidden, const tensor_view<const T>& gates, const tensor_view<T>& to,
                  const execution& run) const {
        detail::for_each_row(to, run, [&](T* row, index_t b, index_t i) {
            const T *const from = hidden.row(b, 0, i), *const factors = gates.data() ? gates.row(b, 0, i) : nullptr;
            simd::for_each_register<T>(up.outputs(), [&](index_t c, const auto& load, const auto& store) {
                const auto activated = static_cast<simd::lanes<T>>(activation(load((factors ? factors : from) + c)));
                store(factors ? activated * load(from + c) : activated, row + c);
            });
        });
    }
    /// The gradients of one row's hidden channels and gates, from that of what they were made to.
    void differentiate(const T* hidden, const T* gates, const T* d_out, T* of_hidden, T* of_gates) const {
        simd::for_each_register<T>(up.outputs(), [&](index_t c, const auto& load, const auto& store) {
            const auto g = load(d_out + c);
            const auto f = detail::differentiated(activation, load((gates ? gates : hidden) + c));
            store(g * (gates ? f.value : f.derivative), of_hidden + c);
            if (gates) store(g * load(hidden + c) * f.derivative, of_gates + c);
        });
    }
};

} // namespace attn
