// Linear attention in its other order of evaluation: weights of query-key pairs first, then weighted values.
#pragma once

#include "../../simd/wide_sum.hpp"
#include "../tile_loader.hpp"
#include "state.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Keys that a chunk of queries meets one by one: query r sees the first seen[r], which never falls. A tile of rows may reach past the last
/// query, where seen stays as it was.
template <Scalar T>
struct scored_keys {
    feature_rows<T> keys;
    const T* values;
    index_t value_stride;
    const index_t* seen;
};

/// Weights P[i][j] = phi(q_i) . phi(k_j) of a chunk of queries and a block of keys, and what they add:
///     numerators[i] += sum over seen j of P[i][j] v_j,      denominators[i] += sum over seen j of P[i][j]
/// A value is never multiplied for a query that does not see it, so that its NaN stays away.
template <Scalar T>
class linear_scores {
public:
    using lanes = simd::lanes<T>;
    using traits = tile_traits<T>;

    linear_scores(detail::scratch& memory, index_t max_queries, index_t max_keys, index_t key_channels, index_t padded)
        : key_channels_(key_channels), padded_(padded), stride_(whole_registers<T>(max_keys)),
          key_columns_(memory.take<T>(key_channels, stride_)), weights_(memory.take<T>(whole_registers<T>(max_queries) * stride_)) {}

    /// numerators: rows of whole registers of channels; `first` if they hold nothing yet. denominators: whole registers of rows.
    void add(const feature_rows<T>& queries, const scored_keys<T>& block, bool first, T* numerators, T* denominators) const {
        transpose_rows<T>(row_block<const T>{block.keys.data, block.keys.stride, 1}, block.keys.count, key_channels_, T{1}, key_columns_,
                          stride_);
        multiply(queries, block);
        add_sums(queries.count, block.seen, denominators);
        for_each_tile<T>(queries.count, padded_ / lanes::size, traits::max_columns, [&](auto rows, auto columns, index_t row, index_t reg) {
            add_values<rows(), columns()>(block, row, reg * lanes::size, first, numerators);
        });
    }

private:
    /// Multiplies only the registers of keys of which some query of a group sees one.
    void multiply(const feature_rows<T>& queries, const scored_keys<T>& block) const {
        const bool seen_by_all = block.seen[0] > block.keys.count - lanes::size;
        const auto registers = whole_registers<T>(block.keys.count) / lanes::size;
        const auto wide = seen_by_all ? traits::max_columns : 1;
        for_each_tile<T>(queries.count, registers, wide, [&](auto rows, auto columns, index_t row, index_t reg) {
            if (block.seen[row + rows() - 1] > reg * lanes::size) multiply_rows<rows(), columns()>(queries, row, reg * lanes::size);
        });
    }
    template <int Rows, int Columns>
    [[gnu::noinline]] void multiply_rows(const feature_rows<T>& queries, index_t row, index_t key) const {
        matrix_tile<Rows, Columns, T> tile;
        tile.zero();
        tile.multiply_add(queries.data + row * queries.stride, queries.stride, unit_stride{}, key_columns_ + key, stride_, key_channels_);
        tile.store(weights_ + row * stride_ + key, stride_);
    }
    void add_sums(index_t queries, const index_t* seen, T* denominators) const {
        for (index_t first = 0; first < queries; first += lanes::size) {
            const auto rows = std::min<index_t>(lanes::size, queries - first);
            lanes sum[lanes::size];
            for (index_t r = 0; r < lanes::size; ++r) {
                simd::wide_sum<T> weights;
                simd::for_each_part<T>(r < rows ? seen[first + r] : 0, [&](index_t j, auto part, index_t count) {
                    const auto weight = lanes::load(weights_ + (first + r) * stride_ + j);
                    weights.add(part, count == lanes::size ? weight : select(simd::lane_bits::first(count), weight, lanes(T{0})));
                });
                sum[r] = weights.folded();
            }
            (lanes::load(denominators + first) + simd::sum_each<T>(sum)).store(denominators + first);
        }
    }
    /// A group of queries shares the keys that all of them see; the rest is a triangle.
    template <int Rows, int Columns>
    [[gnu::noinline]] void add_values(const scored_keys<T>& block, index_t row, index_t channel, bool first, T* numerators) const {
        matrix_tile<Rows, Columns, T> tile;
        T* const at = numerators + row * padded_ + channel;
        if (first) tile.zero();
        else tile.load(at, padded_);
        const auto common = block.seen[row], max_seen = block.seen[row + Rows - 1];
        const T *const weights = weights_ + row * stride_, *const values = block.values + channel;
        tile.multiply_add(weights, stride_, unit_stride{}, values, block.value_stride, common);
        for (auto j = common; j < max_seen; ++j) {
            lanes value[std::size_t{Columns}];
#pragma GCC unroll 4
            for (int c = 0; c < Columns; ++c) value[c] = lanes::load(values + j * block.value_stride + c * lanes::size);
#pragma GCC unroll 16
            for (int i = 0; i < Rows; ++i) {
                if (j >= block.seen[row + i]) continue;
                const lanes weight = weights[i * stride_ + j];
#pragma GCC unroll 4
                for (int c = 0; c < Columns; ++c) tile.sum[i][c] = fma(weight, value[c], tile.sum[i][c]);
            }
        }
        tile.store(at, padded_);
    }

    index_t key_channels_, padded_, stride_;
    T *key_columns_, *weights_;
};

} // namespace attn::kernel
