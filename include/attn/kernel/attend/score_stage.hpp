// The score stage: S^T = K Q^T for one query block and one key block.
#pragma once

#include "../../core/workspace.hpp"
#include "../gemm/matrix_tile.hpp"
#include "../prefetch.hpp"
#include "../transposed_columns.hpp"
#include "key_reader.hpp"
#include "query_block.hpp"

#include <bit>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// f(rows, first, count) for some keys of a run, so many at a time as lie alike: here all of them.
template <class E>
void for_each_tile(const row_block<const E>& keys, index_t first, index_t count, const auto& f) {
    f(keys.from(first), first, count);
}

/// Queries of one block, laid out for one of two ways to make a tile of scores[keys][rows], bit by bit the same: a score is one chain of
/// multiply-adds over the channels in order.
///   many rows   lanes are rows: only Q is transposed, K is broadcast as it lies, one number at a time
///   few rows    lanes are keys: squares of K are transposed in registers, the finished scores transposed back. So a decoding step's heads
///               are scored, where lanes of rows would be mostly empty
/// E: what the channels of queries and keys are multiplied as. Few: the most rows that are few, which depends on how keys lie: a copy of a
/// key would be made for a few multiply-adds, and so many chains of them take less time than a register of lanes that are mostly empty.
template <Scalar T, class E = T, index_t Few = head_rows<any_storage, T>::few_rows>
class score_stage {
public:
    using lanes = simd::lanes<T>;
    using operand = simd::operand_lanes<E>;
    using traits = query_block_traits<T, E>;
    /// Keys that are looked at together where not every row sees all.
    static constexpr index_t grain = 8;

    score_stage(detail::scratch& memory, index_t channels)
        : channels_(channels), depth_((channels + simd::terms_of<E> - 1) / simd::terms_of<E>),
          numbers_(memory.take<T>(traits::max_rows, channels)) {
        if constexpr (std::same_as<E, T>) queries_ = numbers_;
        else queries_ = memory.take<E>(traits::max_rows, depth_);
    }

    /// A block's queries, times `scale`. together: rows that are few need be no whole registers.
    void begin(const query_block& block, const auto& queries, T scale, bool together = false) {
        rows_ = block.rows();
        stride_ = whole_registers<T>(rows_);
        if (std::same_as<E, T> && together && is_few()) stride_ = static_cast<index_t>(std::bit_ceil(static_cast<std::size_t>(rows_)));
        read(block, queries, scale);
        if constexpr (!std::same_as<E, T>) {
            const auto numbers = [&](index_t row_stride) { return row_block<const T>{numbers_, row_stride, 1}; };
            using rows = operand_rows<T, E>;
            if (!is_few()) rows::of_rows::copy(numbers(stride_), channels_, 0, stride_, queries_, stride_);
            else rows::of_channels::copy(numbers(channels_), rows_, 0, channels_, queries_, depth_);
        }
    }
    /// Numbers between the scores of two keys: the rows of the block in whole registers, or, together, a power of two of them.
    index_t stride() const { return stride_; }

    /// scores[j * stride()] for a run of a reader's keys, which are read as they are stored where rows are few, or columns of numbers.
    /// visible: as `multiply` has it.
    void multiply_run(auto& reader, const key_run& keys, const std::uint64_t* visible, T* scores, auto&& ahead) const {
        if constexpr (std::remove_reference_t<decltype(reader)>::is_paged)
            if (const auto columns = reader.columns(keys)) {
                if (is_few()) score_columns(numbers_, rows_, *columns, keys.count, scores, stride_, ahead);
                else multiply(reader.read(keys, *columns), keys.count, visible, scores, ahead);
                return;
            }
        const auto stored = reader.stored(keys);
        if (is_few() && reader.can_widen(stored)) multiply_stored(stored, keys.count, scores, ahead);
        else multiply(reader.read(keys), keys.count, visible, scores, ahead);
    }
    /// scores[j * stride()] for the keys of a block. visible: one bit per row and key, or null if all see all; what nobody of a register
    /// sees may be left out, and holds any number.
    void multiply(const auto& keys, index_t count, const std::uint64_t* visible, T* scores, auto&& ahead) const {
        if (is_few()) {
            if constexpr (std::convertible_to<decltype(keys), row_block<const E>>) multiply_few(keys, count, scores, ahead);
            return;
        }
        const auto registers = stride_ / lanes::size;
        for_each_piece(registers, tile_traits<T>::max_columns, [&](index_t left, index_t columns) {
            if (!visible) return multiply_many(keys, 0, count, left, left + columns, scores, ahead);
            const auto seen_from = [&](index_t first) {
                return seen_registers(visible + first, std::min(grain, count - first), left, left + columns);
            };
            for (index_t first = 0, next; first < count; first = next) { // grains alike are one run: a tall tile does with fewer loads
                const auto seen = seen_from(first);
                for (next = first + grain; next < count && seen_from(next) == seen;) next += grain;
                next = std::min(next, count);
                if (seen != 0) multiply_many(keys, first, next - first, left + std::countr_zero(seen), left + bit_end(seen), scores, ahead);
            }
        });
    }

    /// Whether the rows are few.
    bool is_few() const { return rows_ <= Few; }

private:
    /// Reads the queries of a block, times a scale, to numbers_.
    void read(const query_block& block, const auto& queries, T scale) {
        const auto rows_from = [&](index_t row) {
            return queries.rows(block.batch, block.head_of(row), block.token_of(row)).every(block.tokens.step);
        };
        if (block.heads == 1 && !is_few()) return transpose_rows<T>(rows_from(0), rows_, channels_, scale, numbers_, stride_);
        const auto row_stride = is_few() ? channels_ : index_t{1}, channel_stride = is_few() ? index_t{1} : stride_;
        for (index_t row = 0; row < rows_; ++row) {
            const auto from = rows_from(row);
            for (index_t c = 0; c < channels_; ++c) numbers_[row * row_stride + c * channel_stride] = scale * from(0, c);
        }
        if (is_few()) // zeros up to a power of two
            std::fill(numbers_ + rows_ * channels_,
                      numbers_ + static_cast<index_t>(std::bit_ceil(static_cast<std::size_t>(rows_))) * channels_, T{0});
        else
            for (index_t c = 0; c < channels_; ++c) std::fill(numbers_ + c * stride_ + rows_, numbers_ + (c + 1) * stride_, T{0});
    }

    /// One bit for each of the registers left .. right - 1 that sees one of the keys.
    static std::uint64_t seen_registers(const std::uint64_t* visible, index_t keys, index_t left, index_t right) {
        std::uint64_t rows = 0, registers = 0;
        for (index_t j = 0; j < keys; ++j) rows |= visible[j];
        for (auto reg = left; reg < right; ++reg)
            registers |= std::uint64_t{(rows & bit_range(reg * lanes::size, lanes::size)) != 0} << (reg - left);
        return registers;
    }
    void multiply_many(const auto& keys, index_t first, index_t count, index_t left, index_t right, T* scores, auto& ahead) const {
        for_each_tile(keys, first, count, [&](const row_block<const E>& some, index_t from, index_t size) {
            kernel::multiply<T, E>(size, right - left,
                                   {.a = some,
                                    .b = {queries_ + left * lanes::size, stride_, 1},
                                    .depth = depth_,
                                    .c = {scores + from * stride_ + left * lanes::size, stride_, 1}},
                                   ahead);
        });
    }
    /// The scores of keys that are stored in 16 bits, for few rows: the keys are read as they lie.
    void multiply_stored(const auto& keys, index_t count, T* scores, auto& ahead) const {
        as_they_lie(keys, [&]<class V>(const row_block<const V>& own) {
            if constexpr (Narrow<V> && std::same_as<E, T>) multiply_few(own, count, scores, ahead);
        });
    }
    /// Keys of E or of 16-bit numbers, a register of them at a time.
    template <class V>
    void multiply_few(const row_block<const V>& keys, index_t count, T* scores, auto& ahead) const {
        for (index_t first = 0; first < count; first += lanes::size)
            multiply_register(keys.data + first * keys.row_stride, keys.row_stride, std::min<index_t>(lanes::size, count - first),
                              scores + first * stride_, ahead);
    }
    /// The scores of a register of keys. Where there are fewer the last is read again, and its scores are for nobody.
    template <class V>
    void multiply_register(const V* keys, index_t key_stride, index_t count, T* scores, auto& ahead) const {
        lanes sum[std::size_t{Few}];
#pragma GCC unroll 8
        for (index_t q = 0; q < Few; ++q) sum[q] = lanes(T{0});
        const auto add = [&](index_t c, const operand& column) __attribute__((always_inline)) { // one chain for each query
#pragma GCC unroll 8
            for (index_t q = 0; q < Few; ++q) {
                if (q >= rows_) break;
                sum[q] = fma(column, operand(queries_[q * depth_ + c]), sum[q]);
            }
        };
        for_each_column<T, E>(keys, key_stride, count, depth_, ahead, add);
        if (stride_ == 1) simd::store_columns<1>(sum, 0, count, scores, stride_);
        else if (Few > 2 && stride_ == 2) simd::store_columns<2>(sum, 0, count, scores, stride_);
        else if (Few > 4 && stride_ == 4) simd::store_columns<4>(sum, 0, count, scores, stride_);
        else simd::store_columns<static_cast<int>(Few)>(sum, 0, count, scores, stride_);
    }

    index_t channels_, depth_, rows_ = 0, stride_ = 0;
    T* numbers_; ///< [channels][stride()], or [rows][channels] if they are few
    E* queries_; ///< the same as operands, depth_ for the channels
};

} // namespace attn::kernel
