// The score stage: S^T = K Q^T for one query block and one key block.
#pragma once

#include "../../core/workspace.hpp"
#include "../gemm/tile_product.hpp"
#include "../prefetch.hpp"
#include "query_block.hpp"

#include <bit>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Queries of one block, laid out for one of two ways to make a tile of scores[keys][rows], bit by bit the same: a score is one chain of
/// multiply-adds over the channels in order.
///   many rows   lanes are rows: only Q is transposed, K is broadcast as it lies, one number at a time
///   few rows    lanes are keys: squares of K are transposed in registers, the finished scores transposed back. So a decoding step's heads
///               are scored, where lanes of rows would be mostly empty
template <Scalar T, class Arch>
class score_stage {
public:
    using lanes = simd::lanes<T, Arch>;
    using traits = query_block_traits<T, Arch>;
    /// Keys that are looked at together where not every row sees all.
    static constexpr index_t grain = 8;

    score_stage(detail::scratch& memory, index_t channels)
        : channels_(channels), queries_(memory.take<T>(traits::max_rows, channels)) {}

    /// A block's queries, times `scale`.
    void begin(const query_block& block, const stored_view<const T>& queries, T scale) {
        rows_ = block.rows();
        stride_ = whole_registers<T, Arch>(rows_);
        const auto rows_from = [&](index_t row) {
            return rows_of(queries, block.batch, block.head_of(row), block.token_of(row)).from(0, block.tokens.step);
        };
        if (block.heads == 1 && rows_ > max_few) return transpose_rows<T, Arch>(rows_from(0), rows_, channels_, scale, queries_, stride_);
        const auto row_stride = rows_ > max_few ? index_t{1} : channels_, channel_stride = rows_ > max_few ? stride_ : index_t{1};
        for (index_t row = 0; row < rows_; ++row) {
            const auto from = rows_from(row);
            for (index_t c = 0; c < channels_; ++c)
                queries_[row * row_stride + c * channel_stride] = scale * from(0, c);
        }
        if (rows_ > max_few)
            for (index_t c = 0; c < channels_; ++c) std::fill(queries_ + c * stride_ + rows_, queries_ + (c + 1) * stride_, T{0});
    }
    /// Numbers between the scores of two keys: the rows of the block in whole registers.
    index_t stride() const { return stride_; }

    /// scores[j * stride()] for the keys of a block. visible: one bit per row and key, or null if all see all; what nobody of a register sees
    /// may be left out, and holds any number.
    template <class Prefetch>
    void multiply(const row_block<const T>& keys, index_t count, const std::uint64_t* visible, T* scores, Prefetch& ahead) const {
        if (rows_ <= max_few) {
            for (index_t first = 0; first < count; first += lanes::size)
                multiply_few(keys.data + first * keys.row_stride, keys.row_stride, std::min<index_t>(lanes::size, count - first),
                             scores + first * stride_, ahead);
            return;
        }
        const auto registers = stride_ / lanes::size;
        constexpr index_t wide = tile_traits<T, Arch>::max_columns;
        for (index_t pieces = (registers + wide - 1) / wide, piece = 0; piece < pieces; ++piece) { // as even as they come
            const auto left = registers * piece / pieces, right = registers * (piece + 1) / pieces;
            if (!visible) {
                multiply_many(keys, 0, count, left, right, scores, ahead);
                continue;
            }
            const auto seen_from = [&](index_t first) { return seen_registers(visible + first, std::min(grain, count - first), left, right); };
            for (index_t first = 0, next; first < count; first = next) { // grains alike are one run: a tall tile does with fewer loads
                const auto seen = seen_from(first);
                for (next = first + grain; next < count && seen_from(next) == seen;) next += grain;
                next = std::min(next, count);
                if (seen != 0) multiply_many(keys, first, next - first, left + std::countr_zero(seen), left + bit_end(seen), scores, ahead);
            }
        }
    }

private:
    /// So many chains of multiply-adds take less time than a register of lanes that are mostly empty.
    static constexpr index_t max_few = std::max<index_t>(1, lanes::size / 4);

    /// One bit for each of the registers left .. right - 1 that sees one of the keys.
    static std::uint64_t seen_registers(const std::uint64_t* visible, index_t keys, index_t left, index_t right) {
        std::uint64_t rows = 0, registers = 0;
        for (index_t j = 0; j < keys; ++j) rows |= visible[j];
        for (auto reg = left; reg < right; ++reg)
            registers |= std::uint64_t{(rows & bit_range(reg * lanes::size, lanes::size)) != 0} << (reg - left);
        return registers;
    }
    template <class Prefetch>
    void multiply_many(const row_block<const T>& keys, index_t first, index_t count, index_t left, index_t right, T* scores, Prefetch& ahead) const {
        const auto lane = left * lanes::size;
        kernel::multiply<T, Arch>(count, right - left,
                                  {.a = keys.data + first * keys.row_stride,
                                   .a_row = keys.row_stride,
                                   .a_depth = 1,
                                   .b = queries_ + lane,
                                   .b_depth = stride_,
                                   .depth = channels_,
                                   .c = scores + first * stride_ + lane,
                                   .c_row = stride_},
                                  ahead);
    }
    /// A register of keys. Where there are fewer the last is read again, and its scores are for nobody.
    template <class Prefetch>
    void multiply_few(const T* keys, index_t key_stride, index_t count, T* scores, Prefetch& ahead) const {
        constexpr int size = lanes::size;
        lanes sum[std::size_t{size}];
#pragma GCC unroll 16
        for (int q = 0; q < size; ++q) sum[q] = lanes(T{0});
        const T *rows[std::size_t{size}], *query = queries_;
#pragma GCC unroll 16
        for (int j = 0; j < size; ++j) rows[j] = keys + std::min<index_t>(j, count - 1) * key_stride;
        index_t c = 0;
        for (; c + size <= channels_; c += size, query += size) {
            lanes square[std::size_t{size}];
#pragma GCC unroll 16
            for (int j = 0; j < size; ++j) square[j] = lanes::load(rows[j] + c);
            ahead.beside(16 * size);
            simd::transpose<T, Arch>(square);
            ahead.beside(16 * size); // a row of keys and one of values for each of these
#pragma GCC unroll 4
            for (index_t q = 0; q < max_few; ++q) {
                if (q >= rows_) break;
#pragma GCC unroll 16
                for (int i = 0; i < size; ++i) sum[q] = fma(square[i], lanes(query[q * channels_ + i]), sum[q]);
            }
        }
        if (const auto rest = channels_ - c; rest > 0) {
            lanes square[std::size_t{size}];
#pragma GCC unroll 16
            for (int j = 0; j < size; ++j) square[j] = lanes::load_first(rows[j] + c, rest);
            simd::transpose<T, Arch>(square);
            T columns[std::size_t{size * size}];
            for (int i = 0; i < size; ++i) square[i].store(columns + i * size);
            for (index_t q = 0; q < rows_; ++q)
                for (index_t i = 0; i < rest; ++i) sum[q] = fma(lanes::load(columns + i * size), lanes(query[q * channels_ + i]), sum[q]);
        }
        simd::transpose<T, Arch>(sum);
        for (index_t j = 0; j < count; ++j) sum[j].store(scores + j * stride_);
    }

    index_t channels_, rows_ = 0, stride_ = 0;
    T* queries_; ///< [channels][stride()], or [rows][channels] if they are few
};

} // namespace attn::kernel
