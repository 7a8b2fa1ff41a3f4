// Projections along the sequence that are strided convolutions: of each channel, or mixing them.
#pragma once

#include "projection_concept.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A convolution along the sequence whose stride is its kernel, one kernel for each channel:
///     projected[r, c] = bias[c] + sum_t weights[t, c] x[kernel r + t, c]
/// over the visible tokens. Tokens that do not fill a kernel at the end are dropped.
template <Scalar T>
struct channel_convolution {
    tensor_view<const T> weights;   ///< (1, heads or 1, kernel, channels)
    tensor_view<const T> bias = {}; ///< (1, heads or 1, 1, channels), or none

    index_t size(index_t, index_t tokens) const { return tokens / kernel_of(weights.shape().tokens); }
    kernel::token_range range(index_t, index_t row, index_t) const {
        return {row * weights.shape().tokens, (row + 1) * weights.shape().tokens};
    }
    template <Scalar>
    std::size_t workspace_bytes(index_t, index_t) const {
        return 0;
    }
    void check(const projection_context& context) const { check_convolution(context, weights, weights.shape().tokens, bias); }
    void check_apart(const output_memory& out) const { check_apart(out, weights, bias); }
    void project(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const row_block<T>& to,
                 detail::scratch&) const {
        using lanes = simd::lanes<T>;
        const auto load = [head](const tensor_view<const T>& t, index_t row, index_t c, index_t present) {
            return kernel::load_channels<T>(t.row(0, t.shape().heads == 1 ? 0 : head, row), t.strides().channels, c, present);
        };
        for (index_t r = 0; r < count; ++r) {
            const auto window = range(head, first + r, x.count);
            kernel::reduce_tokens<T>(
                x, window, to.data + r * to.row_stride,
                [&](index_t c, index_t present) { return bias.data() ? load(bias, 0, c, present) : lanes(T{0}); },
                [&](lanes sum, index_t token, lanes value, index_t c, index_t present) {
                    return fma(load(weights, token - window.first, c, present), value, sum);
                },
                [](lanes sum) { return sum; });
        }
    }

    /// The gradients of the weights and the bias, in their shapes.
    template <Scalar U>
    struct gradients {
        tensor_view<U> weights = {}; ///< of the weights
        tensor_view<U> bias = {};    ///< of the bias
    };
    void for_each_gradient(const gradients<T>& wanted, const auto& f) const {
        f("wanted.weights", wanted.weights, weights);
        f("wanted.bias", wanted.bias, bias);
    }
    template <Scalar>
    std::size_t backward_workspace_bytes(index_t, index_t) const {
        return 0;
    }
    void add_token_gradients(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const row_block<const T>& d_out,
                             const row_block<T>& to, detail::scratch&) const {
        const auto kernel = weights.shape().tokens;
        const auto of_head = detail::rows_of_head(weights, head);
        for (auto j = first * kernel; j < (first + count) * kernel; ++j) {
            if (!x.visible(j)) continue;
            const T *const weight = of_head.data + j % kernel * of_head.row_stride, *const from = d_out.data +
                                                                                                  (j / kernel - first) * d_out.row_stride;
            kernel::update_channels(to.data + j * to.row_stride, to.channel_stride, x.channels, [&](auto sum, index_t c, index_t present) {
                return fma(kernel::load_channels<T>(weight, of_head.channel_stride, c, present),
                           kernel::load_channels<T>(from, 1, c, present), sum);
            });
        }
    }
    /// Parts are taps of the kernel, the bias goes with the first.
    index_t gradient_parts(index_t) const { return weights.shape().tokens; }
    void add_parameter_gradients(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count,
                                 const row_block<const T>& d_out, index_t part, const gradients<T>& wanted, detail::scratch&) const {
        const auto of_weights = detail::rows_of_head(wanted.weights, head, part);
        for (index_t r = 0; r < count; ++r) {
            const auto token = (first + r) * weights.shape().tokens + part;
            if (!of_weights.data || !x.visible(token)) continue;
            kernel::update_channels(of_weights.data, 1, x.channels, [&](auto sum, index_t c, index_t present) {
                return fma(kernel::load_channels<T>(d_out.data + r * d_out.row_stride, 1, c, present),
                           kernel::load_channels<T>(x, token, c, present), sum);
            });
        }
        if (part == 0) add_bias_gradients(x.channels, count, d_out, detail::rows_of_head(wanted.bias, head));
    }

    /// Adds the gradient of the bias of either convolution: the sum of the rows.
    static void add_bias_gradients(index_t channels, index_t count, const row_block<const T>& d_out, const row_block<T>& of_bias) {
        for (index_t r = 0; of_bias.data && r < count; ++r) kernel::add_channels(of_bias.data, 1, channels, d_out.address(r));
    }
    /// The kernel of either convolution, in tokens. Throws shape_error without one: sizes are asked for before anything is checked.
    static index_t kernel_of(index_t tokens) {
        if (tokens < 1) [[unlikely]]
            detail::raise(shape_error("convolution", "weights", "have a kernel of ", tokens, " tokens"));
        return tokens;
    }
    static void check_apart(const output_memory& out, const tensor_view<const T>& weights, const tensor_view<const T>& bias) {
        out.require_apart("the weights of a projection", weights);
        out.require_apart("the bias of a projection", bias);
    }
    /// Refuses parameters of either convolution that do not fit: kernel at least 1, the weights' rows as wide as the tokens, the bias too.
    static void check_convolution(const projection_context& context, const tensor_view<const T>& weights, index_t kernel,
                                  const tensor_view<const T>& bias) {
        detail::check_view(context.operation, context.argument, weights);
        detail::check_view(context.operation, context.argument, bias);
        context.require_heads("weights", weights.shape());
        if (kernel < 1 || weights.shape().channels != context.channels)
            context.refuse("weights have shape ", weights.shape(), ", but tokens have ", context.channels, " channels");
        if (!bias.data()) return;
        context.require_heads("bias", bias.shape());
        if (bias.shape().tokens != 1 || bias.shape().channels != context.channels)
            context.refuse("bias has shape ", bias.shape(), ", but tokens have ", context.channels, " channels");
    }
};

/// Deduces a channel_convolution of its weights' scalar type.
template <TensorLike W, class... Others>
channel_convolution(const W&, const Others&...) -> channel_convolution<detail::scalar_t<W>>;

/// A convolution along the sequence that mixes channels, as the spatial reduction of a pyramid vision transformer does:
///     projected[r, o] = bias[o] + sum_t sum_c weights[t, o, c] x[kernel r + t, c]
/// over the visible tokens.
template <Scalar T>
struct mixing_convolution {
    tensor_view<const T> weights;   ///< (kernel, heads or 1, channels out, channels in), as many out as in
    tensor_view<const T> bias = {}; ///< (1, heads or 1, 1, channels), or none

    index_t size(index_t, index_t tokens) const { return tokens / channel_convolution<T>::kernel_of(weights.shape().batch); }
    kernel::token_range range(index_t, index_t row, index_t) const {
        return {row * weights.shape().batch, (row + 1) * weights.shape().batch};
    }
    template <Scalar>
    std::size_t workspace_bytes(index_t tokens, index_t channels) const {
        detail::scratch memory;
        memory.take<T>(max_rows, weights.shape().batch, channels);
        return memory.used_bytes() + kernel::matrix_product<T>(std::min(max_rows, tokens), channels, channels).task_bytes();
    }
    void check(const projection_context& context) const {
        channel_convolution<T>::check_convolution(context, weights, weights.shape().batch, bias);
        if (weights.shape().tokens != context.channels)
            context.refuse("weights have shape ", weights.shape(), ": as many channels must come out as go in");
    }
    void check_apart(const output_memory& out) const { channel_convolution<T>::check_apart(out, weights, bias); }
    void project(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const row_block<T>& to,
                 detail::scratch& memory) const {
        for (index_t done = 0; done < count; done += max_rows) {
            auto own = memory;
            project_some(x, head, first + done, std::min(max_rows, count - done), {to.data + done * to.row_stride, to.row_stride, 1}, own);
        }
    }

    /// The gradients of the weights and the bias, in their shapes.
    template <Scalar U>
    using gradients = typename channel_convolution<U>::template gradients<U>;
    void for_each_gradient(const gradients<T>& wanted, const auto& f) const {
        f("wanted.weights", wanted.weights, weights);
        f("wanted.bias", wanted.bias, bias);
    }
    template <Scalar>
    std::size_t backward_workspace_bytes(index_t tokens, index_t channels) const {
        using product = kernel::matrix_product<T>;
        detail::scratch memory;
        memory.take<T>(max_rows, channels);
        return memory.used_bytes() +
               std::max(product(max_rows, channels, channels).task_bytes(), product(channels, size(0, tokens), channels).task_bytes());
    }
    void add_token_gradients(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const row_block<const T>& d_out,
                             const row_block<T>& to, detail::scratch& memory) const {
        T* const sums = memory.take<T>(max_rows, x.channels);
        const auto kernel = weights.shape().batch;
        for (index_t done = 0; done < count; done += max_rows)
            for (index_t t = 0; t < kernel; ++t) {
                const auto rows = std::min(max_rows, count - done);
                kernel::matrix_product<T>(rows, x.channels, x.channels)
                    .run_all(memory, {d_out.data + done * d_out.row_stride, d_out.row_stride, 1}, detail::rows_of_head(weights, head, 0, t),
                             {nullptr, 0, 1}, {sums, x.channels, 1});
                for (index_t r = 0; r < rows; ++r) {
                    const auto token = (first + done + r) * kernel + t;
                    if (x.visible(token)) kernel::add_channels(to.address(token), to.channel_stride, x.channels, sums + r * x.channels);
                }
            }
    }
    /// Parts are taps of the kernel, the bias goes with the first.
    index_t gradient_parts(index_t) const { return weights.shape().batch; }
    void add_parameter_gradients(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count,
                                 const row_block<const T>& d_out, index_t part, const gradients<T>& wanted, detail::scratch& memory) const {
        const auto kernel = weights.shape().batch, token = first * kernel + part;
        const auto of_weights = detail::rows_of_head(wanted.weights, head, 0, part);
        if (of_weights.data)
            kernel::matrix_product<T>(x.channels, count, x.channels)
                .run_all(memory, d_out.transposed(), x.rows.from(token).every(kernel), {of_weights.data, of_weights.row_stride, 1},
                         {of_weights.data, of_weights.row_stride, 1}, [&](index_t from, index_t terms, auto&& visit) {
                             if (!x.seen) return visit(from, terms);
                             for (auto r = from; r < from + terms; ++r)
                                 if (x.visible(token + r * kernel)) visit(r, index_t{1});
                         });
        if (part == 0) channel_convolution<T>::add_bias_gradients(x.channels, count, d_out, detail::rows_of_head(wanted.bias, head));
    }

private:
    static constexpr index_t max_rows = 48;

    void project_some(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const row_block<T>& to,
                      detail::scratch& memory) const {
        const auto kernel = weights.shape().batch;
        T* const copy = memory.take<T>(max_rows * kernel * x.channels);
        const bool copies = x.seen || x.rows.is_narrow();
        for (index_t j = 0; copies && j < count * kernel; ++j) // with zeros for hidden tokens: here rows are left out, not terms
            if (const auto token = first * kernel + j; x.visible(token))
                kernel::copy_rows<T>(x.rows.from(token), 1, x.channels, copy + j * x.channels, x.channels);
            else std::fill_n(copy + j * x.channels, x.channels, T{0});
        const auto windows = copies ? row_block<const T>{copy, x.channels, 1} : x.rows.from(first * kernel).numbers();
        auto start = detail::rows_of_head(bias, head);
        start.row_stride = 0;
        for (index_t t = 0; t < kernel; ++t) {
            kernel::matrix_product<T>(count, x.channels, x.channels)
                .run_all(memory, {windows.data + t * windows.row_stride, kernel * windows.row_stride, windows.channel_stride},
                         detail::rows_of_head(weights, head, 0, t).transposed(), start, to);
            start = {to.data, to.row_stride, 1};
        }
    }
};

/// Deduces a mixing_convolution of its weights' scalar type.
template <TensorLike W, class... Others>
mixing_convolution(const W&, const Others&...) -> mixing_convolution<detail::scalar_t<W>>;

} // namespace attn
