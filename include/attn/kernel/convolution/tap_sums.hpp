// The gradients of a depthwise convolution's taps and bias, as sums over outputs.
#pragma once

#include "../../simd/unroll.hpp"
#include "../gemm/matrix_tile.hpp"
#include "depthwise.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// sums[1 + tap](c) += sum over outputs of d_out(y, x, c) in(y - top + ky, x - left + kx, c), and sums[0](c) += sum of d_out(y, x, c): the
/// gradients of a kernel's taps and of its bias, in an order that the grid alone decides.
template <Scalar T>
class tap_sums {
public:
    using lanes = simd::lanes<T>;

    /// Memory for runs of up to max_tokens outputs that lie side by side in one row of the grid, or fill whole rows.
    tap_sums(detail::scratch& memory, const convolution_grid& grid, index_t channels, index_t max_tokens)
        : grid_(grid), channels_(channels), padded_(whole_registers<T>(channels)),
          staged_width_(std::min(grid.width, max_tokens + grid.kernel_width - 1)), d_out_(memory.take<T>(max_tokens, padded_)),
          staged_(memory.take<T>(rows_at_once(max_tokens), staged_width_, padded_)) {}

    /// Adds what outputs first ... first + count - 1 give to `sums`, 1 + taps rows of `padded` numbers; with of_taps false to the first row
    /// only. Of the input, tokens from `present` on are not there.
    void operator()(const row_block<const T>& in, index_t present, const row_block<const T>& d_out, index_t first, index_t count,
                    bool of_taps, T* sums) const {
        const auto outputs = output_rows(d_out, first, count);
        for (index_t channel = 0; channel < padded_; channel += lanes::size) {
            lanes sum(T{0});
            for (index_t t = 0; t < count; ++t) sum += lanes::load(outputs.data + t * outputs.token_stride + channel);
            add(sum, sums + channel);
        }
        if (!of_taps) return;
        const auto y = first / grid_.width, x = first % grid_.width, width = std::min(count, grid_.width - x),
                   height = (count + width - 1) / width;
        const piece here{outputs, input_rows(in, present, y, x, width, height), y, x, width, height, present};
        for (index_t channel = 0; channel < padded_; channel += lanes::size)
            for (index_t ky = 0; ky < grid_.kernel_height; ++ky)
                for (index_t kx = 0; kx < grid_.kernel_width;)
                    kx += add_taps(here, ky, kx, channel, sums + (1 + ky * grid_.kernel_width + kx) * padded_ + channel);
    }

private:
    /// Taps whose sums stay in registers, each in two where there are enough, beside an input and two outputs: of 16, which all instruction
    /// sets have, so that their order is the same.
    static constexpr int most_taps = 7, taps_at_a_time = 4;
    template <int Taps>
    static constexpr int chains = 2 * Taps + 3 <= 16 ? 2 : 1;

    /// Tokens as they lie: token (y, x) at data + y * row_stride + x * token_stride, counted from where `data` is.
    struct rows {
        const T* data;
        index_t row_stride, token_stride;
    };

    /// Outputs (y, x) ... (y + height - 1, x + width - 1), `outputs` counted from the first, and the grid's inputs.
    struct piece {
        rows outputs, inputs;
        index_t y, x, width, height, present;
    };

    index_t rows_at_once(index_t max_tokens) const {
        const auto outputs = std::max<index_t>(1, max_tokens / std::max<index_t>(1, grid_.width));
        return std::min(grid_.height, outputs + grid_.kernel_height - 1);
    }
    bool in_place(const row_block<const T>& block) const { return block.channel_stride == 1 && padded_ == channels_; }

    rows output_rows(const row_block<const T>& d_out, index_t first, index_t count) const {
        const auto from = d_out.from(first);
        if (in_place(d_out)) return {from.data, std::min(count, grid_.width) * d_out.row_stride, d_out.row_stride};
        copy_rows<T>(from, count, channels_, d_out_, padded_);
        return {d_out_, std::min(count, grid_.width) * padded_, padded_};
    }
    rows input_rows(const row_block<const T>& in, index_t present, index_t y, index_t x, index_t width, index_t height) const {
        if (in_place(in)) return {in.data, grid_.width * in.row_stride, in.row_stride};
        const auto above = std::max<index_t>(0, y - grid_.top),
                   below = std::min(grid_.height, y + height - 1 - grid_.top + grid_.kernel_height);
        const auto left = std::max<index_t>(0, x - grid_.left),
                   right = std::min(grid_.width, x + width - grid_.left + grid_.kernel_width - 1);
        for (auto row = above; row < below; ++row) {
            const auto token = row * grid_.width + left,
                       there = std::clamp<index_t>(present - token, 0, std::max<index_t>(0, right - left));
            copy_rows<T>(in.from(token), there, channels_, staged_ + (row - above) * staged_width_ * padded_, padded_);
        }
        const auto row_stride = staged_width_ * padded_;
        return {staged_ - above * row_stride - left * padded_, row_stride, padded_};
    }

    static void add(lanes sum, T* to) { (lanes::load(to) + sum).store(to); }

    /// Taps (ky, kx) and some to the right of it, side by side; returns how many.
    index_t add_taps(const piece& here, index_t ky, index_t kx, index_t channel, T* sums) const {
        const auto left = grid_.kernel_width - kx, taps = left <= most_taps ? left : taps_at_a_time;
        with_constant<most_taps>(taps, [&](auto some) { add_some<some()>(here, ky, kx, channel, sums); });
        return taps;
    }
    /// One register of channels. Outputs all of whose taps meet inputs are taken together, those at an end of a row tap by tap.
    template <int Taps>
    [[gnu::noinline]] void add_some(const piece& here, index_t ky, index_t kx, index_t channel, T* sums) const {
        lanes sum[std::size_t{chains<Taps>}][std::size_t{Taps}];
        simd::unroll<chains<Taps>, Taps>([&](auto chain, auto tap) { sum[chain][tap] = lanes(T{0}); });
        for (index_t line = 0; line < here.height; ++line) {
            const auto row = here.y + line - grid_.top + ky;
            if (row < 0 || row >= grid_.height) continue;
            const auto there = std::clamp<index_t>(here.present - row * grid_.width, 0, grid_.width);
            if (there == 0) continue;
            const auto meets = here.x - grid_.left + kx; // the input that the first output's first tap meets
            const auto to = std::clamp<index_t>(there - meets - Taps + 1, 0, here.width), from = std::clamp<index_t>(-meets, 0, to);
            const T* const outputs = here.outputs.data + line * here.outputs.row_stride + channel;
            const T* const inputs = here.inputs.data + row * here.inputs.row_stride + meets * here.inputs.token_stride + channel;
            const auto output = [&](index_t x) { return lanes::load(outputs + x * here.outputs.token_stride); };
            const auto input = [&](index_t x) { return lanes::load(inputs + x * here.inputs.token_stride); };
            const auto at_an_end = [&](index_t x) {
                const auto d_out = output(x);
                simd::unroll<Taps>([&](auto tap) {
                    if (meets + x + tap >= 0 && meets + x + tap < there) sum[0][tap] = fma(d_out, input(x + tap), sum[0][tap]);
                });
            };
            index_t x = 0;
            for (; x < from; ++x) at_an_end(x);
            if constexpr (chains<Taps> == 2) {
                for (; x + 2 <= to; x += 2) {
                    const auto d_out_here = output(x), d_out_next = output(x + 1);
                    simd::unroll<Taps + 1>([&](auto i) {
                        const auto value = input(x + i);
                        if constexpr (i < Taps) sum[0][i] = fma(d_out_here, value, sum[0][i]);
                        if constexpr (i > 0) sum[1][i - 1] = fma(d_out_next, value, sum[1][i - 1]);
                    });
                }
            }
            for (; x < to; ++x) {
                const auto d_out_here = output(x);
                simd::unroll<Taps>([&](auto tap) { sum[0][tap] = fma(d_out_here, input(x + tap), sum[0][tap]); });
            }
            for (; x < here.width; ++x) at_an_end(x);
        }
        simd::unroll<Taps>([&](auto tap) {
            if constexpr (chains<Taps> == 2) sum[0][tap] += sum[1][tap];
            add(sum[0][tap], sums + tap * padded_);
        });
    }

    convolution_grid grid_;
    index_t channels_, padded_, staged_width_;
    T* d_out_;  ///< [max_tokens][padded]
    T* staged_; ///< [rows of the grid][staged_width][padded]
};

} // namespace attn::kernel
