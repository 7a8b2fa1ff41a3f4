// Mixes the scores or the weights of a block of keys across heads: small dense algebra whose lanes are queries.
#pragma once

#include "../../core/tensor_view.hpp"
#include "../../core/workspace.hpp"
#include "../gemm/matrix_tile.hpp"

#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Numbers of every head for a block of keys and a panel of queries, [heads][keys][registers].
struct head_block {
    index keys, registers;
    index head_stride;                   ///< numbers from one head to the next
    const std::uint64_t* seen = nullptr; ///< [keys] one bit per query, 0 for pairs that need no number; null if all do
};

/// A matrix (heads out, heads in) and a bias per head out, as the micro-kernel reads them: a pair of a query and a key in one head is
///     to[row] = bias[row] + sum over columns of matrix[row, column] factor[column] from[column]
/// and each lane one chain of multiply-adds in the order of the columns, whatever the shape of the block.
template <Scalar T, class Arch>
class head_mixing {
public:
    using lanes = simd::lanes<T, Arch>;
    using traits = tile_traits<T, Arch>;

    index rows = 0, columns = 0;

    static head_mixing take(detail::scratch& memory, index rows, index columns) {
        head_mixing result;
        result.rows = rows;
        result.columns = columns;
        result.matrix_ = memory.take<T>(rows, columns);
        result.bias_ = memory.take<T>(rows);
        return result;
    }
    void load(const tensor_view<const double>& matrix, std::span<const double> bias) {
        for (index row = 0; row < rows; ++row) {
            for (index column = 0; column < columns; ++column) matrix_[column * rows + row] = static_cast<T>(matrix(0, 0, row, column));
            bias_[row] = bias.empty() ? T{0} : static_cast<T>(bias[static_cast<std::size_t>(row)]);
        }
    }
    /// What happens beside a mixing.
    struct options {
        const T* factor = nullptr; ///< [columns][factor_stride] a number per query, or none
        index factor_stride = 0;
        index ahead = 0; ///< numbers beyond which `from` is prefetched, 0 for none
    };
    /// Registers of queries that see none of two keys become 0.
    void operator()(const head_block& block, const T* from, T* to, const options& with) const {
        for_each_piece(rows, most_rows, [&](index row, index count) {
            with_constant<most_rows>(count, [&](auto r) {
                if (with.factor)
                    mix_rows<r(), true>(row, block, from, to, with);
                else
                    mix_rows<r(), false>(row, block, from, to, with);
            });
        });
    }

private:
    /// Two keys at a time: every number is loaded, and multiplied with its factor, but once for twelve heads.
    static constexpr int most_rows = traits::max_rows(2);

    template <int Rows, bool scaled>
    [[gnu::noinline]] void mix_rows(index row, const head_block& block, const T* from, T* to, const options& with) const {
        const auto stride = block.registers * lanes::size;
        index key = 0;
        for (; key + 2 <= block.keys; key += 2)
            for (index lane = 0; lane < stride; lane += lanes::size) mix_keys<Rows, 2, scaled>(row, block, key, lane, from, to, with);
        if (key < block.keys)
            for (index lane = 0; lane < stride; lane += lanes::size) mix_keys<Rows, 1, scaled>(row, block, key, lane, from, to, with);
    }
    template <int Rows, int Keys, bool scaled>
    [[gnu::always_inline]] void mix_keys(index row, const head_block& block, index key, index lane, const T* from, T* to,
                                         const options& with) const {
        matrix_tile<Rows, Keys, T, Arch> tile;
        const auto stride = block.registers * lanes::size, at = key * stride + lane;
        auto depth = columns;
        if (block.seen) {
            const auto own = simd::lane_bits::first(lanes::size).value;
            std::uint64_t seen[std::size_t{Keys}], any = 0;
            simd::unroll<Keys>([&](auto k) { any |= seen[k] = block.seen[key + k] >> lane & own; });
            simd::unroll<Rows>([&](auto r) {
                simd::unroll<Keys>([&](auto k) { tile.sum[r][k] = select(simd::lane_bits{seen[k]}, lanes(bias_[row + r]), lanes(T{0})); });
            });
            depth = any == 0 ? 0 : columns;
        } else {
            simd::unroll<Rows>([&](auto r) { simd::unroll<Keys>([&](auto k) { tile.sum[r][k] = lanes(bias_[row + r]); }); });
        }
        const T* x = from + at;
        const T* m = matrix_ + row;
        for (index column = 0; column < depth; ++column) {
            lanes right[std::size_t{Keys}];
            simd::unroll<Keys>([&](auto k) {
                right[k] = lanes::load(x + k * stride);
                if (with.ahead > 0) simd::prefetch(x + k * stride + with.ahead);
            });
            if constexpr (scaled) {
                const auto f = lanes::load(with.factor + column * with.factor_stride + lane);
                simd::unroll<Keys>([&](auto k) { right[k] = right[k] * f; });
            }
            simd::unroll<Rows>([&](auto r) {
                const lanes left = m[r];
                simd::unroll<Keys>([&](auto k) { tile.sum[r][k] = fma(left, right[k], tile.sum[r][k]); });
            });
            x += block.head_stride;
            m += rows;
        }
        T* const y = to + row * block.head_stride + at;
        simd::unroll<Rows>(
            [&](auto r) { simd::unroll<Keys>([&](auto k) { tile.sum[r][k].store(y + r * block.head_stride + k * stride); }); });
    }

    T* matrix_ = nullptr; ///< [columns][rows]
    T* bias_ = nullptr;   ///< [rows]
};

} // namespace attn::kernel
