// All gradients of a depthwise convolution: of its input, its kernels and their bias.
#pragma once

#include "../../parallel/executor.hpp"
#include "tap_sums.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The grid of the convolution backwards in space: input (y', x') gets what outputs (y' + top - ky, x' + left - kx) are given.
inline convolution_grid flipped(convolution_grid grid) {
    grid.top = grid.kernel_height - 1 - grid.top;
    grid.left = grid.kernel_width - 1 - grid.left;
    return grid;
}

/// The parameters of the convolution backwards in space: the kernels from their last tap to their first, without a bias.
template <class U>
convolution_parameters<U> flipped(const convolution_parameters<U>& forward) {
    const auto& w = forward.weights;
    const auto [kernels, channels, height, width] = w.shape();
    const auto& s = w.strides();
    const U* const last = w.data() + (height - 1) * s.tokens + (width - 1) * s.channels;
    return {flipped(forward.grid), {last, w.shape(), {s.batch, s.heads, -s.tokens, -s.channels}}, {}};
}

/// The gradients of a convolution's input (batch, input heads, n, channels), its weights (1 or heads, channels, kernel_height,
/// kernel_width) and its bias (channels, or channels of each head). What has no memory is not wanted.
template <Scalar T, class U>
struct convolution_gradients {
    tensor_view<T> input;
    tensor_view<U> weights;
    std::span<U> bias;
    bool add_to_input = false; ///< to what is there, instead of writing it
};

/// The gradient of a depthwise convolution. With outputs (batch, heads, n, channels), head h reading input head h / (heads / input heads):
///     d input[g, (y, x)] = sum over heads of g, ky, kx of weights[h, ky, kx] d_out[h, (y + top - ky, x + left - kx)]
///     d weights[h, ky, kx] = sum over batch, (y, x) of d_out[h, (y, x)] input[g, (y - top + ky, x - left + kx)]
///     d bias[h] = sum over batch, (y, x) of d_out[h, (y, x)]
/// and sums over the heads where they share weights or a bias. Tokens are summed in parts that depend on the shapes only, and parts one
/// after the other, heads in their order: so threads and strides change no bit.
template <Scalar T, class U>
class depthwise_backward {
public:
    /// input, d_out: the shapes of tensors.
    depthwise_backward(const convolution_grid& grid, const shape& input, const shape& d_out)
        : grid_(grid), input_(input), d_out_(d_out), chunks_(token_chunks::of(grid, convolution::target_tokens, convolution::max_tokens)) {}

    std::size_t workspace_bytes(index_t concurrency) const {
        detail::scratch shared;
        sums(shared);
        return shared.used_bytes() + detail::bytes_for_threads(concurrency, worker_bytes());
    }

    /// Computes all that is wanted. present(b): the tokens of batch entry b's input that are there, others count as outside the grid (their
    /// gradient is 0). memory: workspace_bytes of run's concurrency.
    template <std::invocable<index_t> Present>
    void operator()(const convolution_parameters<U>& parameters, const tensor_view<const T>& input, const tensor_view<const T>& d_out,
                    const convolution_gradients<T, U>& wanted, const Present& present, std::byte* memory, const execution& run) const {
        if (d_out_.channels == 0) return;
        detail::scratch shared(memory);
        T* const partial = sums(shared);
        const detail::slices slices(memory + shared.used_bytes(), worker_bytes());
        const auto worker_of = [&](index_t slice) {
            auto slice_memory = slices[slice];
            return worker(slice_memory, grid_, d_out_.channels);
        };
        if (wanted.input.data() && input_.size() > 0) {
            const auto of_a_task = chunks_.of_a_task(convolution::task_tokens), tasks = (chunks_.count() + of_a_task - 1) / of_a_task;
            run.for_each(input_.batch * input_.heads * tasks, [&](index_t task, index_t slice) {
                const auto b = task / (input_.heads * tasks), head = task / tasks % input_.heads, from = task % tasks * of_a_task;
                auto own = worker_of(slice);
                input_gradient(own, flipped(parameters), d_out, b, head, from, std::min(from + of_a_task, chunks_.count()), present(b),
                               wanted.add_to_input, wanted.input.rows(b, head));
            });
        }
        if (!wanted.weights.data() && wanted.bias.empty()) return;
        run.for_each(d_out_.heads * parts(), [&](index_t task, index_t slice) {
            const auto head = task / parts(), part = task % parts(), units = d_out_.batch * chunks_.count();
            auto own = worker_of(slice);
            T* const to = partial + task * sums_of_a_part();
            std::fill_n(to, sums_of_a_part(), T{0});
            for (auto unit = units * part / parts(); unit < units * (part + 1) / parts(); ++unit) {
                const auto b = unit / chunks_.count(), chunk = unit % chunks_.count(), first = chunks_.first(chunk);
                own.sums(input.rows(b, head / group()), present(b), d_out.rows(b, head), first, chunks_.end(chunk) - first,
                         wanted.weights.data() != nullptr, to);
            }
        });
        write_sums(partial, wanted);
    }

private:
    using convolution = convolution_worker<T>;

    struct worker {
        worker(detail::scratch& memory, const convolution_grid& grid, index_t channels)
            : backwards(memory, flipped(grid), channels), sums(memory, grid, channels, convolution::max_tokens) {}

        convolution backwards;
        tap_sums<T> sums;
    };
    std::size_t worker_bytes() const { return detail::bytes_for<worker>(grid_, d_out_.channels); }

    index_t group() const { return d_out_.heads / std::max<index_t>(1, input_.heads); }
    /// Enough parts for many threads; few, where a kernel has many taps.
    index_t parts() const {
        constexpr index_t most = 64;
        return std::clamp<index_t>(d_out_.batch * d_out_.tokens / std::max(convolution::task_tokens, grid_.taps()), 1, most);
    }
    index_t padded() const { return whole_registers<T>(d_out_.channels); }
    index_t sums_of_a_part() const { return (1 + grid_.taps()) * padded(); }
    /// [head][part][1 + taps][padded], the bias first
    T* sums(detail::scratch& memory) const {
        return memory.take<T>(d_out_.heads * parts(), std::min(grid_.taps(), max_bytes) + 1, padded());
    }

    /// The gradient of the input at some chunks' tokens, from all output heads that read them.
    void input_gradient(worker& own, const convolution_parameters<U>& parameters, const tensor_view<const T>& d_out, index_t b,
                        index_t input_head, index_t from, index_t end, index_t present, bool added, const row_block<T>& to) const {
        for (auto head = input_head * group(); head < (input_head + 1) * group(); ++head, added = true) {
            own.backwards.tile.load_weights(parameters, head);
            for (auto chunk = from; chunk < end; ++chunk)
                own.backwards.write(d_out.rows(b, head), d_out_.tokens, chunks_, chunk, present, added, to, d_out_.channels);
        }
    }

    void write_sums(const T* partial, const convolution_gradients<T, U>& wanted) const {
        const auto channels = d_out_.channels;
        const auto sum_of = [&](index_t first_head, index_t heads, index_t row, index_t c) {
            T sum = 0;
            for (auto part = first_head * parts(); part < (first_head + heads) * parts(); ++part)
                sum += partial[part * sums_of_a_part() + row * padded() + c];
            return static_cast<U>(sum);
        };
        if (const auto& w = wanted.weights; w.data()) {
            const auto kernels = w.shape().batch, heads = kernels == 1 ? d_out_.heads : 1;
            for (index_t kernel = 0; kernel < kernels; ++kernel)
                for (index_t ky = 0; ky < grid_.kernel_height; ++ky)
                    for (index_t kx = 0; kx < grid_.kernel_width; ++kx)
                        for (index_t c = 0; c < channels; ++c)
                            w(kernel, c, ky, kx) = sum_of(kernel, heads, 1 + ky * grid_.kernel_width + kx, c);
        }
        const bool own_bias = std::ssize(wanted.bias) > channels;
        for (index_t i = 0; i < std::ssize(wanted.bias); ++i)
            wanted.bias[static_cast<std::size_t>(i)] = sum_of(own_bias ? i / channels : 0, own_bias ? 1 : d_out_.heads, 0, i % channels);
    }

    convolution_grid grid_;
    shape input_, d_out_;
    token_chunks chunks_;
};

} // namespace attn::kernel
