// Depthwise convolution over a grid of tokens: each channel has a kernel of its own, so lanes are channels.
#pragma once

#include "../tile_loader.hpp"
#include "convolution_grid.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// out(y, x, c) = bias(c) + sum over (ky, kx) of weight(c, ky, kx) in(y - top + ky, x - left + kx, c)
/// over the taps inside the grid, in the order of (ky, kx): the same bits wherever a token lies and in whatever layout.
template <Scalar T>
class convolution_tile {
public:
    using lanes = simd::lanes<T>;

    /// A tile for pieces of up to max_tokens outputs that lie side by side in one row of the grid, or fill whole rows.
    convolution_tile(detail::scratch& memory, const convolution_grid& grid, index_t channels, index_t max_tokens)
        : grid_(grid), channels_(channels), padded_(whole_registers<T>(channels)),
          weights_(memory.take<T>(std::min(grid.taps(), max_bytes) + 1, padded_)),
          staged_width_(std::min(grid.width, max_tokens + grid.kernel_width - 1)), staged_rows_(std::min(grid.height, grid.kernel_height)),
          staged_(memory.take<T>(staged_rows_, staged_width_, padded_)) {}

    index_t padded() const { return padded_; }

    template <class U>
    void load_weights(const convolution_parameters<U>& parameters, index_t head) {
        const U* const weights = parameters.weights_of(head);
        const auto bias = parameters.bias_of(head);
        const auto& s = parameters.weights.strides();
        for (index_t c = 0; c < padded_; ++c) {
            T* const column = weights_ + c;
            const bool present = c < channels_;
            column[0] = present && !bias.empty() ? static_cast<T>(bias[static_cast<std::size_t>(c)]) : T{0};
            for (index_t ky = 0, tap = 1; ky < grid_.kernel_height; ++ky)
                for (index_t kx = 0; kx < grid_.kernel_width; ++kx, ++tap)
                    column[tap * padded_] = present ? static_cast<T>(weights[c * s.heads + ky * s.tokens + kx * s.channels]) : T{0};
        }
    }

    /// to[t] = out(token first + t) for t < count, rows of `padded` numbers. Of the input, tokens from `present` on are not there. Rows of
    /// the grid that the kernel cannot read where they lie are copied, and stay for the calls that follow: the input is the same until the
    /// tile ends.
    void operator()(const stored_rows<const T>& in, index_t present, index_t first, index_t count, T* to) {
        const bool in_place = !in.is_narrow() && in.channel_stride == 1 && padded_ == channels_;
        while (count > 0) {
            const auto y = first / grid_.width, x = first % grid_.width, here = std::min(count, grid_.width - x);
            const auto above = std::max<index_t>(0, y - grid_.top), below = std::min(grid_.height, y - grid_.top + grid_.kernel_height);
            input_rows from{in.numbers().data, grid_.width * in.row_stride, in.row_stride, 0, grid_.height, above};
            if (!in_place) {
                const auto left = std::max<index_t>(0, x - grid_.left),
                           right = std::min(grid_.width, x + here - grid_.left + grid_.kernel_width - 1);
                stage(in, {in.data, present, left, right}, above, below);
                from = {staged_, staged_width_ * padded_, padded_, left, staged_rows_, above % staged_rows_};
            }
            add_row({from, y, x, here, above, below, present}, to);
            first += here;
            count -= here;
            to += here * padded_;
        }
    }

private:
    /// Outputs of a tile: beside them five weights and an input stay in registers.
    static constexpr int wide = simd::register_count >= 32 ? 14 : 7, narrow = wide / 2;

    /// Inputs as they lie: token (y, x) at data + y % rows * row_stride + (x - left) * token_stride.
    struct input_rows {
        const T* data;
        index_t row_stride, token_stride, left, rows;
        index_t first; ///< that of the first row of a piece: y % rows
    };

    /// What lies in `staged`: columns left .. right - 1 of some rows of that input.
    struct staged_input {
        const std::byte* data = nullptr;
        index_t present = 0, left = 0, right = 0;

        bool operator==(const staged_input&) const = default;
    };
    /// Copies what is not there yet of the rows above .. below - 1, over rows further up.
    void stage(const stored_rows<const T>& in, const staged_input& wanted, index_t above, index_t below) {
        if (wanted != staged_input_ || above < staged_begin_ || above > staged_end_)
            staged_input_ = wanted, staged_begin_ = staged_end_ = above;
        for (; staged_end_ < below; ++staged_end_) {
            const auto token = staged_end_ * grid_.width + wanted.left,
                       there = std::clamp<index_t>(wanted.present - token, 0, wanted.right - wanted.left);
            copy_rows<T>(in.from(token), there, channels_, staged_ + staged_end_ % staged_rows_ * staged_width_ * padded_, padded_);
        }
        staged_begin_ = std::max(staged_begin_, staged_end_ - staged_rows_);
    }

    /// A piece of one row of the grid: outputs x .. x + count - 1 of row y, from the rows above .. below - 1 of the input.
    struct row_piece {
        input_rows in;
        index_t y, x, count, above, below, present;
    };

    void add_row(const row_piece& piece, T* to) const {
        const bool centred = grid_.left == grid_.kernel_width / 2;
        if (centred && grid_.kernel_width == 3) add_row_of<3>(piece, to);
        else if (centred && grid_.kernel_width == 5) add_row_of<5>(piece, to);
        else if (centred && grid_.kernel_width == 7) add_row_of<7>(piece, to);
        else add_row_of<0>(piece, to);
    }
    /// The last tile of a row overlaps the one before: doing some outputs twice is cheaper than tiles of every size.
    template <int Width>
    void add_row_of(const row_piece& piece, T* to) const {
        const auto cover = [&]<int Outputs>(std::integral_constant<int, Outputs>) {
            for (index_t at = 0; at < piece.count; at += Outputs) {
                const auto from = std::min(at, piece.count - Outputs);
                add_tile<Outputs, Width>(piece, piece.x + from, to + from * padded_);
            }
        };
        if (piece.count >= wide) cover(std::integral_constant<int, wide>{});
        else if (piece.count >= narrow) cover(std::integral_constant<int, narrow>{});
        else cover(std::integral_constant<int, 1>{});
    }
    template <int Outputs, int Width>
    void add_tile(const row_piece& piece, index_t x, T* to) const {
        const auto first = x - grid_.left, last = first + Outputs + grid_.kernel_width - 1;
        const bool whole_rows = piece.present >= piece.below * grid_.width;
        const bool at_left = first<0, at_right = last> grid_.width;
        // A tile in a corner lacks half a kernel's width of inputs, no more and no less; others do not come up often.
        const bool regular = Width > 0 && Outputs > 1 && whole_rows && (!at_left || x == 0) && (!at_right || x + Outputs == grid_.width);
        for (index_t channel = 0; channel < padded_; channel += lanes::size) {
            if constexpr (Width > 0 && Outputs > 1) {
                if (regular) {
                    add_regular<Outputs, Width>(piece, first, at_left, at_right, channel, to + channel);
                    continue;
                }
            }
            add_any<Outputs>(piece, first, channel, to + channel);
        }
    }
    /// One register of channels of outputs side by side: each input is loaded once for all the outputs that it reaches. At an end of the
    /// grid's row half the kernel's width of inputs is missing.
    template <int Outputs, int Width>
    [[gnu::noinline]] void add_regular(const row_piece& piece, index_t first, bool at_left, bool at_right, index_t channel, T* to) const {
        constexpr int half = Width / 2;
        const auto padded = padded_, token_stride = piece.in.token_stride, row_stride = piece.in.row_stride;
        auto row = piece.in.first;
        const T* tokens = piece.in.data + row * row_stride + (first - piece.in.left) * token_stride + channel;
        const T* weights = weights_ + (1 + (piece.above - piece.y + grid_.top) * Width) * padded + channel;
        lanes sum[std::size_t{Outputs}];
        const auto bias = lanes::load(weights_ + channel);
#pragma GCC unroll 16
        for (int o = 0; o < Outputs; ++o) sum[o] = bias;
        const auto next = [&] { tokens += ++row < piece.in.rows ? row_stride : (row = 0, (1 - piece.in.rows) * row_stride); };
        for (auto rows = piece.below - piece.above; rows > 0; --rows, next()) {
            lanes weight[std::size_t{Width}];
#pragma GCC unroll 8
            for (int k = 0; k < Width; ++k, weights += padded) weight[k] = lanes::load(weights);
            const T* at = tokens;
            if (at_left) {
                at += half * token_stride;
            } else {
#pragma GCC unroll 4
                for (int i = 0; i < half; ++i, at += token_stride) add_input<Outputs, Width>(lanes::load(at), i, weight, sum);
            }
#pragma GCC unroll 16
            for (int i = half; i < half + Outputs; ++i, at += token_stride) add_input<Outputs, Width>(lanes::load(at), i, weight, sum);
            if (at_right) continue;
#pragma GCC unroll 4
            for (int i = half + Outputs; i < 2 * half + Outputs; ++i, at += token_stride)
                add_input<Outputs, Width>(lanes::load(at), i, weight, sum);
        }
        if (piece.below < piece.in.rows) { // the row that comes in when the outputs go on to the next one
            if (at_left) tokens += half * token_stride;
#pragma GCC unroll 16
            for (int o = 0; o < Outputs; ++o) simd::prefetch(tokens + o * token_stride);
        }
#pragma GCC unroll 16
        for (int o = 0; o < Outputs; ++o) sum[o].store(to + o * padded);
    }
    /// What the input number i, the first output's first being 0, adds to each output that it reaches.
    template <int Outputs, int Width>
    [[gnu::always_inline]] static void add_input(lanes value, int i, const lanes* weight, lanes* sum) {
#pragma GCC unroll 8
        for (int k = 0; k < Width; ++k)
            if (k <= i && i < k + Outputs) sum[i - k] = fma(value, weight[k], sum[i - k]);
    }
    /// Computes so many outputs side by side tap by tap, wherever inputs end.
    template <int Outputs>
    [[gnu::noinline]] void add_any(const row_piece& piece, index_t first, index_t channel, T* to) const {
        lanes sum[std::size_t{Outputs}];
        const auto bias = lanes::load(weights_ + channel);
#pragma GCC unroll 16
        for (int o = 0; o < Outputs; ++o) sum[o] = bias;
        auto lies = piece.in.first;
        for (auto row = piece.above; row < piece.below; ++row, lies = lies + 1 < piece.in.rows ? lies + 1 : 0) {
            const auto end = std::clamp<index_t>(piece.present - row * grid_.width, 0, grid_.width);
            const T* const weights = weights_ + (1 + (row - piece.y + grid_.top) * grid_.kernel_width) * padded_ + channel;
            const T* const tokens = piece.in.data + lies * piece.in.row_stride - piece.in.left * piece.in.token_stride + channel;
            for (index_t k = std::max<index_t>(0, -first - Outputs + 1); k < grid_.kernel_width && first + k < end; ++k) {
                const auto weight = lanes::load(weights + k * padded_);
#pragma GCC unroll 16
                for (int o = 0; o < Outputs; ++o) {
                    const auto x = first + k + o;
                    if (x >= 0 && x < end) sum[o] = fma(lanes::load(tokens + x * piece.in.token_stride), weight, sum[o]);
                }
            }
        }
#pragma GCC unroll 16
        for (int o = 0; o < Outputs; ++o) sum[o].store(to + o * padded_);
    }

    convolution_grid grid_;
    index_t channels_, padded_;
    T* weights_; ///< [1 + taps][padded], the bias first
    index_t staged_width_, staged_rows_;
    T* staged_; ///< [row % staged_rows][staged_width][padded]
    staged_input staged_input_;
    index_t staged_begin_ = 0, staged_end_ = 0;
};

/// What one thread convolves with: a tile and its results.
template <Scalar T>
struct convolution_worker {
    /// Tokens of a chunk, as token_chunks cuts them, and of a task.
    static constexpr index_t target_tokens = 64, max_tokens = 96, task_tokens = 1024;

    convolution_tile<T> tile;
    T* result;

    convolution_worker(detail::scratch& memory, const convolution_grid& grid, index_t channels)
        : tile(memory, grid, channels, max_tokens), result(memory.take<T>(max_tokens, tile.padded())) {}

    /// Writes a chunk's outputs to the rows of its tokens, or adds them to these: of tokens from `there` on, zeros.
    void write(const stored_rows<const T>& in, index_t present, const token_chunks& chunks, index_t chunk, index_t there, bool added,
               const row_block<T>& to, index_t channels) {
        const auto first = chunks.first(chunk), count = chunks.end(chunk) - first;
        tile(in, present, first, count, result);
        for (index_t t = 0; t < count; ++t) {
            T *const from = result + t * tile.padded(), *const row = to.address(first + t);
            if (first + t >= there) std::fill_n(from, tile.padded(), T{0});
            if (added) write_row<true, T>(from, channels, T{1}, T{1}, row, to.channel_stride);
            else write_row<false, T>(from, channels, T{1}, T{0}, row, to.channel_stride);
        }
    }
};

} // namespace attn::kernel
