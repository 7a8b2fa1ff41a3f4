// Mixes the scores or weights of a block of keys across heads: small dense algebra whose lanes are queries.
#pragma once

#include "../../core/tensor_view.hpp"
#include "../../core/workspace.hpp"
#include "../gemm/matrix_tile.hpp"

#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Numbers of every head for a block of keys and a query block, [heads][keys][registers].
struct head_block {
    index_t keys, registers;
    index_t head_stride;                 ///< numbers from one head to the next
    const std::uint64_t* seen = nullptr; ///< [keys] one bit per query, 0 for pairs that need no number; null if all do
};

/// A matrix (heads out, heads in) and a bias per head out, as the micro-kernel reads them: a pair of a query and a key in one head is
///     to[row] = bias[row] + sum over columns of matrix[row, column] factor[column] from[column]
/// and each lane one chain of multiply-adds in the order of the columns, whatever the shape of the block.
template <Scalar T>
class head_mixing {
public:
    using lanes = simd::lanes<T>;

    head_mixing(detail::scratch& memory, index_t rows, index_t columns)
        : rows_(rows), columns_(columns), stride_(rows + max_rows), matrix_(memory.take<T>(columns, stride_)),
          bias_(memory.take<T>(stride_)) {}
    void load(const tensor_view<const double>& matrix, std::span<const double> bias) {
        std::fill_n(matrix_, columns_ * stride_, T{0});
        std::fill_n(bias_, stride_, T{0});
        for (index_t row = 0; row < rows_; ++row) {
            for (index_t column = 0; column < columns_; ++column)
                matrix_[column * stride_ + row] = static_cast<T>(matrix(0, 0, row, column));
            if (!bias.empty()) bias_[row] = static_cast<T>(bias[static_cast<std::size_t>(row)]);
        }
    }
    /// factor: [columns][factor_stride] a number per query, or null for none. Registers of queries that see none of two keys become 0.
    void operator()(const head_block& block, const T* from, T* to, const T* factor = nullptr, index_t factor_stride = 0) const {
        for_each_piece(rows_, max_rows, [&](index_t row, index_t count) {
            const tile t{row, count, from, to, factor, factor_stride};
            count <= 2   ? mix<2>(block, t)
            : count <= 4 ? mix<4>(block, t)
            : count <= 6 ? mix<6>(block, t)
            : count <= 8 ? mix<std::min(8, max_rows)>(block, t)
                         : mix<max_rows>(block, t);
        });
    }

private:
    /// The most rows of a tile of two keys: every number is loaded, and multiplied with its factor, but once for twelve heads.
    static constexpr int max_rows = tile_traits<T>::max_rows(2);

    struct tile {
        index_t row, count; ///< of the matrix
        const T* from;
        T* to;
        const T* factor;
        index_t factor_stride;
    };

    /// Mixes to so many rows of a matrix that is followed by rows of zeros, `count` of which are written.
    template <int Rows>
    [[gnu::noinline]] void mix(const head_block& block, const tile& t) const {
        const auto stride = block.registers * lanes::size;
        const T* const bias = bias_ + t.row;
        for (index_t key = 0; key < block.keys; key += 2) {
            const auto next = key + 1 < block.keys ? stride : 0; // a last key alone is taken twice
            for (index_t lane = 0; lane < stride; lane += lanes::size) {
                lanes sum[std::size_t{Rows}][2];
                auto depth = columns_;
#pragma GCC unroll 16
                for (int r = 0; r < Rows; ++r) sum[r][0] = sum[r][1] = lanes(bias[r]);
                if (block.seen) {
                    const auto own = simd::lane_bits::first(lanes::size).value;
                    const auto a = block.seen[key] >> lane & own, b = block.seen[key + (next > 0)] >> lane & own;
                    if ((a | b) == 0) depth = 0;
#pragma GCC unroll 16
                    for (int r = 0; r < Rows; ++r) {
                        sum[r][0] = select(simd::lane_bits{a}, sum[r][0], lanes(T{0}));
                        sum[r][1] = select(simd::lane_bits{b}, sum[r][1], lanes(T{0}));
                    }
                }
                const T *x = t.from + key * stride + lane, *m = matrix_ + t.row, *f = t.factor ? t.factor + lane : nullptr;
                for (; depth > 0; --depth, x += block.head_stride, m += stride_, f += t.factor_stride) {
                    auto a = lanes::load(x), b = lanes::load(x + next);
                    if (t.factor) {
                        const auto factor = lanes::load(f);
                        a = a * factor;
                        b = b * factor;
                    }
#pragma GCC unroll 16
                    for (int r = 0; r < Rows; ++r) {
                        const lanes left(m[r]);
                        sum[r][0] = fma(left, a, sum[r][0]);
                        sum[r][1] = fma(left, b, sum[r][1]);
                    }
                }
                T* y = t.to + t.row * block.head_stride + key * stride + lane;
#pragma GCC unroll 16
                for (int r = 0; r < Rows; ++r, y += block.head_stride) {
                    if (r >= t.count) continue;
                    sum[r][0].store(y);
                    sum[r][1].store(y + next);
                }
            }
        }
    }

    index_t rows_, columns_, stride_;
    T* matrix_; ///< [columns][stride], the rows of a column and zeros
    T* bias_;   ///< [stride]
};

} // namespace attn::kernel
