// A layer in windows of a grid of tokens, and one that makes a token of each window.
#pragma once

#include "window_edges.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A layer on each window of a grid by itself, shifted or not: the windows of tokens (batch, 1, height width, c) are the batch entries
/// (batch windows(), 1, window_tokens(), c) of the inner layer. In shifted windows its attention needs the pattern grid.shift_segments(),
/// or another pattern or bias of -infinity that keeps opposite edges apart; without it is refused.
/// Memory: the windows, before and after. Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows".
template <Layer L>
struct windowed {
    using scalar = typename L::scalar;
    static constexpr std::string_view name = "windowed";
    static constexpr bool in_place = true, moves_statistics = L::moves_statistics;

    window_grid grid;
    L layer;

    void check(const layer_inputs<scalar>& in) const {
        detail::check_grid(name, grid, in.tokens);
        detail::check_no_context(name, in, "is not cut into windows");
        layer.check({.tokens = planned_windows(in), .positions = in.positions});
        if (in.tokens.shape().batch > 0) detail::check_edges(name, grid, layer, in.positions);
    }
    void check_apart(const output_memory& out) const { layer.check_apart(out); }
    shape output_shape(const shape& tokens) const {
        return {tokens.batch, 1, tokens.tokens, layer.output_shape(grid.windows_of(tokens)).channels};
    }
    std::size_t workspace_bytes(const shape& tokens, const shape&, index_t concurrency) const {
        return detail::bytes_for<work>(*this, tokens, concurrency);
    }
    void forward(const layer_inputs<scalar>& in, const tensor_view<scalar>& out, const execution& run) const {
        forward(in, out, nullptr, run);
    }

    /// The gradients of the parameters of the layer inside.
    using gradients = detail::parameter_gradients<L>;
    void for_each_gradient(const layer_inputs<scalar>& in, const gradients& wanted, const auto& visit) const {
        layer.for_each_gradient({.tokens = planned_windows(in), .positions = in.positions}, wanted, visit);
    }
    std::size_t kept_bytes(const shape& tokens, const shape&) const { return layer.kept_bytes(grid.windows_of(tokens), {}); }
    /// Keeps nothing without memory for it.
    void forward(const layer_inputs<scalar>& in, const tensor_view<scalar>& out, std::byte* kept, const execution& run) const {
        detail::scratch memory(run.workspace().bytes().data());
        const work w(memory, *this, in.tokens.shape(), run.concurrency());
        detail::copy_windows(grid, in.tokens, w.before, true, run);
        detail::forward_inside(layer, {.tokens = w.before, .positions = in.positions}, w.after, kept, run);
        const auto channels = out.shape().channels;
        detail::for_each_window_token(grid, out.shape().batch, run, [&](index_t b, index_t to, index_t entry, index_t from) {
            const scalar* const row = w.after.row(entry, 0, from);
            if (in.residual.data()) detail::add_rows(in.residual.row(b, 0, to), row, out.row(b, 0, to), channels);
            else std::copy_n(row, channels, out.row(b, 0, to));
        });
    }
    std::size_t backward_workspace_bytes(const shape& tokens, const shape&, index_t concurrency) const {
        return detail::bytes_for<gradient_work>(*this, tokens, concurrency);
    }
    void backward(const layer_inputs<scalar>& in, const std::byte* kept, const tensor_view<const scalar>& d_out,
                  const layer_gradients<windowed>& wanted, const execution& run) const
        requires DifferentiableLayer<L>
    {
        detail::scratch memory(run.workspace().bytes().data());
        const gradient_work g(memory, *this, in.tokens.shape(), run.concurrency());
        detail::copy_windows(grid, in.tokens, g.before, true, run);
        detail::copy_windows(grid, d_out, g.after, true, run);
        const auto of_before = wanted.tokens.data() ? g.of_before : tensor_view<scalar>{};
        layer.backward({.tokens = g.before, .positions = in.positions}, kept, g.after,
                       {.tokens = of_before, .parameters = wanted.parameters}, run);
        if (wanted.tokens.data()) detail::copy_windows<scalar>(grid, g.of_before, wanted.tokens, false, run);
    }

private:
    tensor_view<const scalar> planned_windows(const layer_inputs<scalar>& in) const {
        return detail::planned(head_major(static_cast<const scalar*>(nullptr), grid.windows_of(in.tokens.shape())));
    }
    /// The memory of a forward, or of its gradient, behind that of the layer inside.
    struct work {
        tensor_view<scalar> before, after;

        work(detail::scratch& memory, const windowed& outer, const shape& tokens, index_t concurrency)
            : work(memory, detail::inner_bytes<false>(outer.layer, outer.grid.windows_of(tokens), {}, concurrency), outer, tokens) {}

    protected:
        work(detail::scratch& memory, std::size_t inner, const windowed& outer, const shape& tokens) {
            const auto in = outer.grid.windows_of(tokens), result = outer.layer.output_shape(in);
            memory.take<std::byte>(inner);
            before = head_major(memory.take<scalar>(in.size()), in);
            after = head_major(memory.take<scalar>(result.size()), result);
        }
    };
    struct gradient_work : work {
        tensor_view<scalar> of_before;

        gradient_work(detail::scratch& memory, const windowed& outer, const shape& tokens, index_t concurrency)
            : work(memory, detail::inner_bytes<true>(outer.layer, outer.grid.windows_of(tokens), {}, concurrency), outer, tokens),
              of_before(head_major(memory.take<scalar>(this->before.shape().size()), this->before.shape())) {}
    };
};

/// One token for each window of a grid: for tokens (batch, 1, height width, c)
///     out[w] = norm(projection(the tokens of window w, one after the other))           (batch, 1, windows(), outputs)
/// which is a convolution whose kernel is its stride, then a norm: projection.weight[o, (y, x, channel)] = kernel[o, channel, y, x]. It
/// shortens keys and values (`reduce` of a multi_head), and cuts images into patches. Adds no residual. Wang et al. 2021, "Pyramid Vision
/// Transformer".
template <Scalar T, Norm N = identity_norm<T>>
struct spatial_reduction {
    using scalar = T;
    static constexpr std::string_view name = "spatial_reduction";
    static constexpr bool in_place = false, moves_statistics = N::moves_statistics;

    window_grid grid; ///< not shifted
    linear<T> projection;
    N norm = {};

    void check(const layer_inputs<T>& in) const {
        detail::check_grid(name, grid, in.tokens);
        projection.check(name, "projection", projection.outputs(), grid.window_tokens() * in.tokens.shape().channels);
        norm.check(output_shape(in.tokens.shape()));
        detail::check_no_context(name, in);
        if (detail::is_given(in.residual)) detail::raise(argument_error(name, "residual", "is given, but not used here"));
    }
    void check_apart(const output_memory& out) const {
        projection.check_apart(out);
        norm.check_apart(out);
    }
    shape output_shape(const shape& tokens) const { return {tokens.batch, 1, grid.windows(), projection.outputs()}; }
    std::size_t workspace_bytes(const shape& tokens, const shape&, index_t concurrency) const {
        detail::scratch memory;
        take_windows(memory, tokens, concurrency);
        if (moves_statistics) take_projected(memory, tokens);
        return memory.used_bytes();
    }
    void forward(const layer_inputs<T>& in, const tensor_view<T>& out, const execution& run) const { forward(in, out, nullptr, run); }

    /// The gradients of the parameters of the projection and the norm.
    struct gradients {
        typename linear<T>::gradients projection = {}; ///< of projection
        detail::parameter_gradients<N> norm = {};      ///< of norm
    };
    void for_each_gradient(const layer_inputs<T>& in, const gradients& wanted, const auto& visit) const {
        projection.for_each_gradient(in, wanted.projection, detail::visit_member("projection", visit));
        detail::for_each_norm_gradient<N>(wanted.norm, projection.outputs(), detail::visit_member("norm", visit));
    }
    /// Bytes that the gradient needs kept: what the norm reads.
    std::size_t kept_bytes(const shape& tokens, const shape&) const {
        return detail::bytes_taken([&](detail::scratch& memory) { return take_projected(memory, tokens); });
    }
    /// Keeps nothing without memory for it.
    void forward(const layer_inputs<T>& in, const tensor_view<T>& out, std::byte* kept, const execution& run) const {
        detail::scratch memory(run.workspace().bytes().data()), held(kept);
        const auto& s = in.tokens.shape();
        const auto windows = take_windows(memory, s, run.concurrency());
        const auto projected = has_norm && kept ? take_projected(held, s) : moves_statistics ? take_projected(memory, s) : out;
        detail::copy_windows(grid, in.tokens, windows, true, run);
        projection.forward({head_major(windows.data(), joined(s))}, projected, run);
        if constexpr (has_norm) norm.forward(projected, out, run);
    }
    std::size_t backward_workspace_bytes(const shape& tokens, const shape&, index_t concurrency) const {
        return detail::bytes_for<gradient_work>(*this, tokens, concurrency);
    }
    void backward(const layer_inputs<T>& in, const std::byte* kept, const tensor_view<const T>& d_out,
                  const layer_gradients<spatial_reduction>& wanted, const execution& run) const
        requires detail::TrainableNorm<N>
    {
        detail::scratch memory(run.workspace().bytes().data()), held(const_cast<std::byte*>(kept));
        const auto& s = in.tokens.shape();
        const gradient_work g(memory, *this, s, run.concurrency());
        auto of_projected = d_out;
        if constexpr (has_norm) {
            detail::backward_inside(norm, wanted.parameters.norm, take_projected(held, s), d_out, g.of_projected, run);
            of_projected = g.of_projected;
        }
        detail::copy_windows(grid, in.tokens, g.windows, true, run);
        const auto of_windows = wanted.tokens.data() ? head_major(g.of_windows.data(), joined(s)) : tensor_view<T>{};
        projection.backward(head_major(g.windows.data(), joined(s)), of_projected, of_windows, false, wanted.parameters.projection, run);
        if (wanted.tokens.data()) detail::copy_windows<T>(grid, g.of_windows, wanted.tokens, false, run);
    }

private:
    static constexpr bool has_norm = !std::same_as<N, identity_norm<T>>;

    tensor_view<T> take_projected(detail::scratch& memory, const shape& s) const {
        const auto result = output_shape(s);
        return head_major(has_norm ? memory.take<T>(result.size()) : nullptr, result);
    }
    struct gradient_work {
        tensor_view<T> windows, of_windows, of_projected;

        gradient_work(detail::scratch& memory, const spatial_reduction& layer, const shape& s, index_t concurrency) {
            memory.take<std::byte>(layer.inner_bytes<true>(s, concurrency));
            windows = head_major(memory.take<T>(s.size()), layer.grid.windows_of(s));
            of_windows = head_major(memory.take<T>(s.size()), layer.grid.windows_of(s));
            of_projected = layer.take_projected(memory, s);
        }
    };
    template <bool backward>
    std::size_t inner_bytes(const shape& s, index_t concurrency) const {
        return std::max(detail::inner_bytes<backward>(projection, joined(s), {}, concurrency),
                        detail::inner_bytes<backward>(norm, output_shape(s), {}, concurrency));
    }
    shape joined(const shape& s) const { return {s.batch, 1, grid.windows(), grid.window_tokens() * s.channels}; }
    tensor_view<T> take_windows(detail::scratch& memory, const shape& s, index_t concurrency) const {
        memory.take<std::byte>(inner_bytes<false>(s, concurrency));
        return head_major(memory.take<T>(s.size()), grid.windows_of(s));
    }
};

} // namespace attn
