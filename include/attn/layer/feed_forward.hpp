// The feed-forward layer: two linears with an activation between them, or three with a gate.
#pragma once

#include "activation.hpp"
#include "linear.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A feed-forward network: two linears with an activation between, gated or not, applied to every token.
/// For each token row x (channels):
///     out = down(f(up(x))) (+ residual),      and with a gate   out = down(f(gate(x)) * up(x)) (+ residual)
/// up and gate: weights (1, 1, hidden, channels); down: weight (1, 1, outputs, hidden). f: gelu, gelu_tanh, relu, silu or any generic
/// callable. Time: 2 hidden (channels + outputs) flops a token, and with a gate 2 hidden channels more. Memory: the hidden channels of 768
/// tokens, twice with a gate. With a gate and silu it is SwiGLU: Shazeer 2020, "GLU Variants Improve Transformer".
template <Scalar T, Activation F = gelu, class Arch = simd::native>
struct feed_forward {
    using scalar = T;
    static constexpr std::string_view name = "feed_forward";
    static constexpr bool in_place = true;

    linear<T, Arch> up, down;
    linear<T, Arch> gate = {}; ///< none without memory
    F activation = {};

    /// Whether there is a gate.
    bool gated() const { return gate.weight.data() != nullptr; }
    void check(const layer_inputs<T>& in) const {
        detail::check_linear(name, "up", up.view());
        detail::check_tokens(name, "tokens", in.tokens, up.inputs());
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
        detail::scratch memory;
        work(memory, *this, std::min(max_rows, tokens.batch * tokens.tokens), concurrency);
        return memory.used_bytes();
    }
    void forward(const layer_inputs<T>& in, const tensor_view<T>& out, const execution& run) const {
        const detail::row_matrices matrices(in.tokens.shape(), in.tokens, in.residual, out);
        for (index_t b = 0; b < matrices.count; ++b)
            for (index_t first = 0; first < matrices.rows; first += max_rows) {
                const auto count = std::min(max_rows, matrices.rows - first);
                const auto part = [&](const auto& t) { return detail::some_rows(t, b, first, count); };
                forward_some(part(in.tokens), in.residual.data() ? part(in.residual) : tensor_view<const T>{}, part(out), run);
            }
    }

private:
    /// Two blocks of the matrix product: enough that packing the weights costs little, few enough that the hidden channels stay in a cache.
    static constexpr index_t max_rows = 768;

    struct work {
        T *hidden, *gates;

        work(detail::scratch& memory, const feed_forward& layer, index_t rows, index_t concurrency) {
            const shape in{1, 1, rows, layer.up.inputs()}, within{1, 1, rows, layer.up.outputs()};
            memory.take<std::byte>(std::max(layer.up.workspace_bytes(in, concurrency), layer.down.workspace_bytes(within, concurrency)));
            hidden = memory.take<T>(within.size());
            gates = layer.gated() ? memory.take<T>(within.size()) : nullptr;
        }
    };

    void forward_some(const tensor_view<const T>& x, const tensor_view<const T>& residual, const tensor_view<T>& out,
                      const execution& run) const {
        detail::scratch memory(run.workspace().bytes().data());
        const shape within{1, 1, x.shape().tokens, up.outputs()};
        const work own(memory, *this, within.tokens, run.concurrency());
        const auto hidden = head_major(own.hidden, within), gates = head_major(own.gates, within);
        up.forward(x, {}, hidden, run);
        if (gated()) gate.forward(x, {}, gates, run);
        detail::for_each_row(hidden, run, [&](T* row, index_t, index_t token) {
            const T* const factors = gated() ? gates.row(0, 0, token) : nullptr;
            activate(row, factors);
        });
        down.forward(hidden, residual, out, run);
    }
    /// One row: f(hidden), or f(gate) * hidden.
    void activate(T* row, const T* gates) const {
        using lanes = simd::lanes<T, Arch>;
        const auto activated = [&](index_t c, const auto& load) -> lanes {
            return gates ? static_cast<lanes>(activation(load(gates + c))) * load(row + c) : static_cast<lanes>(activation(load(row + c)));
        };
        index_t c = 0;
        for (; c + lanes::size <= up.outputs(); c += lanes::size) activated(c, [](const T* p) { return lanes::load(p); }).store(row + c);
        if (const auto left = up.outputs() - c; left > 0)
            activated(c, [left](const T* p) { return lanes::load_first(p, left); }).store_first(row + c, left);
    }
};

} // namespace attn
