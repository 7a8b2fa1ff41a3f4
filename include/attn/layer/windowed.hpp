// A layer in windows of a grid of tokens, and one that makes a token of each window.
#pragma once

#include "../norm/identity_norm.hpp"
#include "linear.hpp"
#include "windows.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// Throws shape_error unless the tokens are the grid's.
template <Scalar T>
void check_grid(std::string_view operation, const window_grid& grid, const tensor_view<const T>& tokens) {
    check_tokens(operation, "tokens", tokens, tokens.shape().channels);
    grid.check_tokens(operation, "tokens", tokens.shape());
}

} // namespace detail

/// A layer on each window of a grid by itself, shifted or not: the windows of tokens (batch, 1, height width, c) are the batch entries
/// (batch windows(), 1, window_tokens(), c) of the inner layer. In shifted windows its attention needs the pattern grid.shift_segments().
/// Memory: the windows, before and after. Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows".
template <Layer L, class Arch = simd::native>
struct windowed {
    using scalar = typename L::scalar;
    static constexpr std::string_view name = "windowed";
    static constexpr bool in_place = true;

    window_grid grid;
    L layer;

    void check(const layer_inputs<scalar>& in) const {
        detail::check_grid(name, grid, in.tokens);
        if (in.context.data() || in.value_context.data()) throw argument_error(name, "context", "is not cut into windows");
        layer.check({.tokens = detail::planned(head_major(static_cast<const scalar*>(nullptr), grid.windows_of(in.tokens.shape()))),
                     .positions = in.positions});
    }
    void check_apart(const output_memory& out) const { attn::check_apart(layer, out); }
    shape output_shape(const shape& tokens) const {
        return {tokens.batch, 1, tokens.tokens, layer.output_shape(grid.windows_of(tokens)).channels};
    }
    std::size_t workspace_bytes(const shape& tokens, const shape&, index_t concurrency) const {
        detail::scratch memory;
        work(memory, *this, tokens, concurrency);
        return memory.used_bytes();
    }
    void forward(const layer_inputs<scalar>& in, const tensor_view<scalar>& out, const execution& run) const {
        detail::scratch memory(run.workspace().bytes().data());
        const work w(memory, *this, in.tokens.shape(), run.concurrency());
        detail::copy_to_windows(grid, in.tokens, w.before, run);
        layer.forward({.tokens = w.before, .positions = in.positions}, w.after, run);
        const auto channels = out.shape().channels;
        detail::for_each_window_token(grid, out.shape().batch, run, [&](index_t b, index_t to, index_t entry, index_t from) {
            const scalar* const row = w.after.row(entry, 0, from);
            if (in.residual.data())
                detail::add_rows<Arch>(in.residual.row(b, 0, to), row, out.row(b, 0, to), channels);
            else
                std::copy_n(row, channels, out.row(b, 0, to));
        });
    }

private:
    struct work {
        tensor_view<scalar> before, after;

        work(detail::scratch& memory, const windowed& outer, const shape& tokens, index_t concurrency) {
            const auto in = outer.grid.windows_of(tokens), result = outer.layer.output_shape(in);
            memory.take<std::byte>(static_cast<index_t>(outer.layer.workspace_bytes(in, {}, concurrency)));
            before = head_major(memory.take<scalar>(in.size()), in);
            after = head_major(memory.take<scalar>(result.size()), result);
        }
    };
};

/// One token for each window of a grid: for tokens (batch, 1, height width, c)
///     out[w] = norm(projection(the tokens of window w, one after the other))           (batch, 1, windows(), outputs)
/// which is a convolution whose kernel is its stride, then a norm: projection.weight[o, (y, x, channel)] = kernel[o, channel, y, x]. It
/// shortens keys and values (`reduce` of a multi_head), and cuts images into patches. Adds no residual. Wang et al. 2021, "Pyramid Vision
/// Transformer".
template <Scalar T, Norm N = identity_norm<T>, class Arch = simd::native>
struct spatial_reduction {
    using scalar = T;
    static constexpr std::string_view name = "spatial_reduction";
    static constexpr bool in_place = false;

    window_grid grid; ///< not shifted
    linear<T, Arch> projection;
    N norm = {};

    void check(const layer_inputs<T>& in) const {
        detail::check_grid(name, grid, in.tokens);
        projection.check(name, "projection", projection.outputs(), grid.window_tokens() * in.tokens.shape().channels);
        norm.check(output_shape(in.tokens.shape()));
        if (in.residual.data() || in.context.data() || in.value_context.data())
            throw argument_error(name, in.residual.data() ? "residual" : "context", "is given, but not used here");
    }
    void check_apart(const output_memory& out) const {
        projection.check_apart(out);
        attn::check_apart(norm, out);
    }
    shape output_shape(const shape& tokens) const { return {tokens.batch, 1, grid.windows(), projection.outputs()}; }
    std::size_t workspace_bytes(const shape& tokens, const shape&, index_t concurrency) const {
        detail::scratch memory;
        take_windows(memory, tokens, concurrency);
        return memory.used_bytes();
    }
    void forward(const layer_inputs<T>& in, const tensor_view<T>& out, const execution& run) const {
        detail::scratch memory(run.workspace().bytes().data());
        const auto& s = in.tokens.shape();
        const auto windows = take_windows(memory, s, run.concurrency());
        detail::copy_to_windows(grid, in.tokens, windows, run);
        projection.forward(head_major(windows.data(), joined(s)), {}, out, run);
        if constexpr (!std::same_as<N, identity_norm<T>>) norm.forward(out, out, run);
    }

private:
    shape joined(const shape& s) const { return {s.batch, 1, grid.windows(), grid.window_tokens() * s.channels}; }
    tensor_view<T> take_windows(detail::scratch& memory, const shape& s, index_t concurrency) const {
        memory.take<std::byte>(static_cast<index_t>(
            std::max(projection.workspace_bytes(joined(s), concurrency), norm.workspace_bytes(output_shape(s), concurrency))));
        return head_major(memory.take<T>(s.size()), grid.windows_of(s));
    }
};

} // namespace attn
