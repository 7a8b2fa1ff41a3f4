// Depthwise convolution over tokens: a local term that is added to attention.
#pragma once

#include "../kernel/convolution/depthwise.hpp"
#include "../norm/norm.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A depthwise convolution over tokens, which is added to what attention gives.
/// For x (batch, x_heads, n, c) whose n tokens are a grid, row-major, and out (batch, heads, n, c); head h reads head h / (heads / x_heads)
/// of x:
///     out[b, h, (y, x), c] += bias[h, c] + sum over (ky, kx) of weights[h, c, ky, kx] x[b, h, (y + ky - kernel_height / 2, x + kx -
///     kernel_width / 2), c]
/// with zeros outside the grid. Kernels have odd sizes, and may be larger than the grid.
/// A sequence is a grid of one row: kernels (1 or heads, c, 1, width). Causal, token t reads tokens t - width + 1 ... t, and any width will
/// do. Time: 2 n c kernel_height kernel_width flops a head. Memory: a few tiles a thread.
template <Scalar T = float>
struct depthwise_convolution {
    static constexpr std::string_view name = "depthwise_convolution";

    /// (1 or heads, c, kernel_height, kernel_width), any strides: one kernel for all heads, or one for each. Or, for all heads, as PyTorch
    /// has them: (c, 1, kernel_height, kernel_width).
    tensor_view<const T> weights = {};
    borrowed<const T> bias = {}; ///< none, c numbers, or c for each head
    index_t height = 0;          ///< of the grid; one row if not given
    index_t width = 0;           ///< of the grid
    bool causal = false;         ///< of a sequence: the past and the present only

    /// Whether there are weights.
    bool present() const { return attn::detail::is_given(weights); }

    /// Throws attention_error, in the name of `operation`, if the parameters do not fit x and out.
    void check(std::string_view operation, const shape& x, const shape& out) const {
        const auto w = kernels(x.channels).shape();
        const auto refuse = [&](const auto&... problem) {
            detail::raise(shape_error(operation, "weights", "has shape ", weights.shape(), problem...));
        };
        attn::detail::check_view(operation, "weights", weights);
        if (weights.strides() == strides{} && w.size() > 1) detail::raise(shape_error(operation, "weights", "has no strides"));
        if (w.heads != x.channels || (w.batch != 1 && w.batch != out.heads)) refuse(", but x has ", x, " for ", out.heads, " heads");
        if (w.tokens < 1 || w.channels < 1 || (!causal && (w.tokens % 2 == 0 || w.channels % 2 == 0)))
            refuse(", but a kernel has an odd height and width");
        if (std::ssize(bias) != 0 && std::ssize(bias) != x.channels && std::ssize(bias) != out.heads * x.channels)
            detail::raise(shape_error(operation, "bias", "has ", bias.size(), " entries, but x has shape ", x));
        if (causal && (height > 1 || w.tokens != 1)) refuse(", but a causal convolution is one of sequences: of one row");
        if (std::max({w.tokens, w.channels, height, width}) > max_size) refuse(" for a grid of ", height, " x ", width, ": more than 2^40");
        const bool fits = height == 0 ? width == 0 : width == 0 ? x.tokens == 0 : x.tokens % width == 0 && x.tokens / width == height;
        if (height < 0 || width < 0 || !fits)
            detail::raise(shape_error(operation, "height", "and width are ", height, " and ", width, ", but x has shape ", x));
    }
    void check_apart(const output_memory& out) const {
        out.require_apart("the convolution's weights", weights);
        out.require_apart("the convolution's bias", bias);
    }
    /// The weights of so many channels as (1 or heads, c, kernel_height, kernel_width).
    tensor_view<const T> kernels(index_t channels) const { return kernels_of(weights, channels); }
    /// A tensor in the shape of the weights of so many channels as (1 or heads, c, kernel_height, kernel_width).
    template <class V>
    static tensor_view<V> kernels_of(const tensor_view<V>& weights, index_t channels) {
        const auto& w = weights.shape();
        const auto& s = weights.strides();
        if (w.heads != 1 || channels == 1) return weights;
        return {weights.data(), {1, w.batch, w.tokens, w.channels}, {0, s.batch, s.tokens, s.channels}};
    }
    /// The grid that n tokens are.
    kernel::convolution_grid grid(index_t n) const {
        const auto& w = weights.shape();
        kernel::convolution_grid g{.height = 1, .width = n, .kernel_height = w.tokens, .kernel_width = w.channels};
        if (height > 0) g.height = height, g.width = width;
        g.top = g.kernel_height / 2;
        g.left = causal ? g.kernel_width - 1 : g.kernel_width / 2;
        return g;
    }
    std::size_t workspace_bytes(const shape& x, index_t concurrency) const {
        return detail::bytes_for_threads(concurrency, detail::bytes_for<worker>(grid(x.tokens), x.channels));
    }
    /// Computes. Everything has been checked.
    void forward(const tensor_view<const T>& x, const tensor_view<T>& out, const execution& run) const {
        const auto [batch, heads, tokens, channels] = out.shape();
        if (out.shape().size() == 0) return;
        const auto g = grid(tokens);
        const auto chunks = kernel::token_chunks::of(g, worker::target_tokens, worker::max_tokens);
        const auto group = heads / x.shape().heads, chunks_of_a_task = chunks.of_a_task(worker::task_tokens),
                   tasks = (chunks.count() + chunks_of_a_task - 1) / chunks_of_a_task;
        const detail::slices slices(run.workspace().bytes().data(), workspace_bytes(x.shape(), 1));
        run.for_each(batch * heads * tasks, [&](index_t task, index_t slice) {
            const auto b = task / (heads * tasks), h = task / tasks % heads, from = task % tasks * chunks_of_a_task;
            auto memory = slices[slice];
            worker w(memory, g, channels);
            w.tile.load_weights(kernel::convolution_parameters<T>{g, kernels(channels), bias}, h);
            for (auto chunk = from; chunk < std::min(from + chunks_of_a_task, chunks.count()); ++chunk)
                w.write(x.rows(b, h / group), tokens, chunks, chunk, tokens, true, out.rows(b, h), channels);
        });
    }

private:
    /// The largest extent of a kernel or a grid: far from where sums of their places would overflow.
    static constexpr index_t max_size = index_t{1} << 40;

    using worker = kernel::convolution_worker<T>;
};

/// Deduces a depthwise_convolution of its weights' scalar type.
template <TensorLike W, class... Others>
depthwise_convolution(const W&, const Others&...) -> depthwise_convolution<detail::scalar_t<W>>;

/// The gradients of a loss with respect to what a depthwise convolution read: its input (batch, x_heads, n, c), its weights, and its bias,
/// in their shapes. What has no memory is not wanted, and not computed. That of what the convolution was added to is the gradient given.
/// They are computed by depthwise_backward.hpp.
template <Scalar T>
struct depthwise_gradients {
    tensor_view<T> input = {};
    tensor_view<T> weights = {};
    std::span<T> bias = {};
};

namespace detail {

/// Throws attention_error unless `out`, an argument of that name, has a convolution of x's shape: that of x, with as many heads or a
/// multiple.
template <class X, class Out>
void check_convolved(std::string_view operation, const tensor_view<X>& x, std::string_view argument, const tensor_view<Out>& out) {
    const auto &from = x.shape(), &to = out.shape();
    check_view(operation, "x", x);
    check_view(operation, argument, out);
    if (to.batch != from.batch || to.tokens != from.tokens || to.channels != from.channels ||
        (from.heads == 0 ? to.heads != 0 : to.heads % from.heads != 0))
        refuse(operation, argument, to, "x", from, "they do not fit");
}

} // namespace detail

/// Bytes of workspace that a convolution of x, of that shape, needs with such an executor or execution.
template <Scalar T>
std::size_t workspace_bytes(const depthwise_convolution<T>& op, const shape& x, const detail::call_execution& run = {}) {
    return op.workspace_bytes(x, run.concurrency());
}

/// Adds the convolution of x into out. Checks everything once, then computes; `run` as in `attend`. The result is the same, bit by bit, for
/// every executor, number of threads and strides. Throws attention_error, before anything is read or written: shapes or parameters that do
/// not fit, an out that overlaps x, a given workspace too small.
template <Scalar T>
void add_convolution(const depthwise_convolution<T>& op, const detail::read_view<T>& x, const std::type_identity_t<tensor_view<T>>& out,
                     const detail::call_execution& run = {}) {
    constexpr auto name = depthwise_convolution<T>::name;
    const auto &from = x.shape(), &to = out.shape();
    detail::check_convolved(name, x, "out", out);
    detail::check_writable(name, "out", out);
    const output_memory memory(name, "out", out);
    memory.require_apart("x", x);
    op.check_apart(memory);
    op.check(name, from, to);
    run.reserve(name, "x", from, workspace_bytes(op, from, run));
    op.forward(x, out, run);
}

/// The convolution of x by itself, in a new tensor of x's shape.
template <Scalar T>
[[nodiscard]] tensor<T> convolve(const depthwise_convolution<T>& op, const detail::read_view<T>& x,
                                 const detail::call_execution& run = {}) {
    detail::check_view(op.name, "x", x);
    tensor<T> out(x.shape());
    add_convolution(op, x, out, run);
    return out;
}

} // namespace attn
