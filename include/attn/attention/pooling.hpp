// Projections along the sequence that read a bin of neighbouring tokens: pooling and strided convolutions.
#pragma once

#include "projection.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Mean pooling: the mean of the visible tokens of each of `projected` bins. Bin r of m tokens is floor(r m / projected) to
/// ceil((r + 1) m / projected) - 1.
template <class Arch = simd::native>
struct mean_pooling {
    index_t projected = 1;

    index_t size(index_t, index_t) const { return projected; }
    kernel::token_range range(index_t, index_t row, index_t tokens) const {
        return {row * tokens / projected, ((row + 1) * tokens + projected - 1) / projected};
    }
    template <Scalar T>
    std::size_t workspace_bytes(index_t, index_t) const {
        return 0;
    }
    void check(const projection_context& context) const {
        if (projected < 1) context.refuse("pools to " + std::to_string(projected) + " rows: at least one is needed");
    }
    template <Scalar T>
    void project(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const kernel::row_block<T>& to,
                 detail::scratch&) const {
        using lanes = simd::lanes<T, Arch>;
        for (index_t r = 0; r < count; ++r) {
            const auto bin = range(head, first + r, x.count);
            index_t seen = 0;
            x.for_each_run(bin.first, bin.end, [&](index_t, index_t tokens) { seen += tokens; });
            kernel::reduce_tokens<Arch, T>(
                x, bin, to.data + r * to.row_stride, [](index_t, index_t) { return lanes(T{0}); },
                [](lanes sum, index_t, lanes token, index_t, index_t) { return sum + token; }, [&](lanes sum) { return sum / lanes(seen); });
        }
    }
};

/// Max pooling: the largest number of each channel over the visible tokens of each bin, NaN if one of them is; the bins are those of
/// mean_pooling.
template <class Arch = simd::native>
struct max_pooling {
    index_t projected = 1;

    index_t size(index_t, index_t) const { return projected; }
    kernel::token_range range(index_t head, index_t row, index_t tokens) const { return mean_pooling<Arch>{projected}.range(head, row, tokens); }
    template <Scalar T>
    std::size_t workspace_bytes(index_t, index_t) const {
        return 0;
    }
    void check(const projection_context& context) const { mean_pooling<Arch>{projected}.check(context); }
    template <Scalar T>
    void project(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const kernel::row_block<T>& to,
                 detail::scratch&) const {
        using lanes = simd::lanes<T, Arch>;
        for (index_t r = 0; r < count; ++r) {
            kernel::reduce_tokens<Arch, T>(
                x, range(head, first + r, x.count), to.data + r * to.row_stride,
                [](index_t, index_t) { return lanes(-std::numeric_limits<T>::infinity()); },
                [](lanes largest, index_t, lanes token, index_t, index_t) {
                    // A NaN is neither above nor equal: it comes in, and stays.
                    return select(token > largest || token != token, token, largest);
                },
                [](lanes largest) { return largest; });
        }
    }
};

/// A convolution along the sequence whose stride is its kernel, one kernel for each channel:
///     projected[r, c] = bias[c] + sum_t weights[t, c] x[kernel r + t, c]
/// over the visible tokens. Tokens that do not fill a kernel at the end are dropped.
template <Scalar T, class Arch = simd::native>
struct channel_convolution {
    tensor_view<const T> weights;   ///< (1, heads or 1, kernel, channels)
    tensor_view<const T> bias = {}; ///< (1, heads or 1, 1, channels), or none

    index_t size(index_t, index_t tokens) const { return tokens / kernel_of(weights.shape().tokens); }
    kernel::token_range range(index_t, index_t row, index_t) const { return {row * weights.shape().tokens, (row + 1) * weights.shape().tokens}; }
    template <Scalar>
    std::size_t workspace_bytes(index_t, index_t) const {
        return 0;
    }
    void check(const projection_context& context) const { check_convolution(context, weights, weights.shape().tokens, bias); }
    void check_apart(const output_memory& out) const { check_apart(out, weights, bias); }
    void project(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const kernel::row_block<T>& to,
                 detail::scratch&) const {
        using lanes = simd::lanes<T, Arch>;
        const auto load = [head](const tensor_view<const T>& t, index_t row, index_t c, index_t present) {
            return kernel::load_channels<Arch, T>(t.row(0, t.shape().heads == 1 ? 0 : head, row), t.strides().channels, c, present);
        };
        for (index_t r = 0; r < count; ++r) {
            const auto window = range(head, first + r, x.count);
            kernel::reduce_tokens<Arch, T>(
                x, window, to.data + r * to.row_stride,
                [&](index_t c, index_t present) { return bias.data() ? load(bias, 0, c, present) : lanes(T{0}); },
                [&](lanes sum, index_t token, lanes value, index_t c, index_t present) {
                    return fma(load(weights, token - window.first, c, present), value, sum);
                },
                [](lanes sum) { return sum; });
        }
    }

    /// Of both convolutions. Throws shape_error without a kernel: sizes are asked for before anything is checked.
    static index_t kernel_of(index_t tokens) {
        if (tokens < 1) [[unlikely]]
            throw shape_error("convolution", "weights", "have a kernel of " + std::to_string(tokens) + " tokens");
        return tokens;
    }
    static void check_apart(const output_memory& out, const tensor_view<const T>& weights, const tensor_view<const T>& bias) {
        out.require_apart("the weights of a projection", weights);
        out.require_apart("the bias of a projection", bias);
    }
    /// Of both convolutions: kernel at least 1, the weights' rows as wide as the tokens, the bias too.
    static void check_convolution(const projection_context& context, const tensor_view<const T>& weights, index_t kernel,
                                  const tensor_view<const T>& bias) {
        detail::check_view(context.operation, context.argument, weights);
        detail::check_view(context.operation, context.argument, bias);
        context.require_heads("weights", weights.shape());
        if (kernel < 1 || weights.shape().channels != context.channels)
            context.refuse("weights have shape " + to_string(weights.shape()) + ", but tokens have " + std::to_string(context.channels) +
                           " channels");
        if (!bias.data()) return;
        context.require_heads("bias", bias.shape());
        if (bias.shape().tokens != 1 || bias.shape().channels != context.channels)
            context.refuse("bias has shape " + to_string(bias.shape()) + ", but tokens have " + std::to_string(context.channels) +
                           " channels");
    }
};

/// Of its weights' scalar type.
template <TensorLike W, class... Others>
channel_convolution(const W&, const Others&...) -> channel_convolution<detail::scalar_t<W>>;

/// A convolution along the sequence that mixes channels, as the spatial reduction of a pyramid vision transformer does:
///     projected[r, o] = bias[o] + sum_t sum_c weights[t, o, c] x[kernel r + t, c]
/// over the visible tokens.
template <Scalar T, class Arch = simd::native>
struct mixing_convolution {
    tensor_view<const T> weights;   ///< (kernel, heads or 1, channels out, channels in), as many out as in
    tensor_view<const T> bias = {}; ///< (1, heads or 1, 1, channels), or none

    index_t size(index_t, index_t tokens) const { return tokens / channel_convolution<T, Arch>::kernel_of(weights.shape().batch); }
    kernel::token_range range(index_t, index_t row, index_t) const { return {row * weights.shape().batch, (row + 1) * weights.shape().batch}; }
    template <Scalar>
    std::size_t workspace_bytes(index_t tokens, index_t channels) const {
        detail::scratch memory;
        memory.take<T>(max_rows, weights.shape().batch, channels);
        return memory.used_bytes() + kernel::matrix_product<T, Arch>(std::min(max_rows, tokens), channels, channels).task_bytes();
    }
    void check(const projection_context& context) const {
        channel_convolution<T, Arch>::check_convolution(context, weights, weights.shape().batch, bias);
        if (weights.shape().tokens != context.channels)
            context.refuse("weights have shape " + to_string(weights.shape()) + ": as many channels must come out as go in");
    }
    void check_apart(const output_memory& out) const { channel_convolution<T, Arch>::check_apart(out, weights, bias); }
    void project(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const kernel::row_block<T>& to,
                 detail::scratch& memory) const {
        for (index_t done = 0; done < count; done += max_rows) {
            auto own = memory;
            project_some(x, head, first + done, std::min(max_rows, count - done), {to.data + done * to.row_stride, to.row_stride, 1}, own);
        }
    }

private:
    static constexpr index_t max_rows = 48;

    void project_some(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const kernel::row_block<T>& to,
                      detail::scratch& memory) const {
        const auto kernel = weights.shape().batch;
        auto windows = x.rows;
        windows.data += first * kernel * windows.row_stride;
        T* const copy = memory.take<T>(max_rows * kernel * x.channels);
        if (x.seen) { // with zeros for hidden tokens: here rows are left out, not terms
            for (index_t j = 0; j < count * kernel; ++j)
                for (index_t c = 0; c < x.channels; ++c)
                    copy[j * x.channels + c] = x.seen[first * kernel + j] ? x(first * kernel + j, c) : T{0};
            windows = {copy, x.channels, 1};
        }
        const auto own_head = [head](const tensor_view<const T>& t) { return t.shape().heads == 1 ? 0 : head; };
        kernel::row_block<const T> start{bias.data() ? bias.row(0, own_head(bias), 0) : nullptr, 0, bias.strides().channels};
        const kernel::matrix_product<T, Arch> product(count, x.channels, x.channels);
        for (index_t t = 0; t < kernel; ++t) {
            const kernel::row_block<const T> w{weights.row(t, own_head(weights), 0), weights.strides().tokens, weights.strides().channels};
            for (index_t task = 0; task < product.task_count(); ++task) {
                auto own = memory;
                product.run_task(task, own, {windows.data + t * windows.row_stride, kernel * windows.row_stride, windows.channel_stride},
                                 kernel::transposed(w), start, to);
            }
            start = {to.data, to.row_stride, 1};
        }
    }
};

/// Of its weights' scalar type.
template <TensorLike W, class... Others>
mixing_convolution(const W&, const Others&...) -> mixing_convolution<detail::scalar_t<W>>;

} // namespace attn
