// The value stage: O = diag(factor) O + P V for one query block and one key block, and how it is done again where O is not finite.
#pragma once

#include "../gemm/matrix_tile.hpp"
#include "../prefetch.hpp"
#include "query_block.hpp"
#include "seen_runs.hpp"
#include "softmax_state.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The rows, as bits, that see a key; of none that there is not.
inline std::uint64_t rows_that_see(index_t key, index_t keys, const std::uint64_t* visible) {
    return 0 <= key && key < keys ? visible[key] : 0;
}
/// One bit for each of at most 64 operands, a key of which one of the rows sees.
template <class E>
std::uint64_t operands_seen(index_t first, index_t count, index_t keys, const std::uint64_t* visible, index_t before, std::uint64_t rows) {
    constexpr index_t terms = simd::terms_of<E>;
    if constexpr (terms == 1) return keys_seen(visible + first, count, rows);
    std::uint64_t seen = 0;
    for (index_t i = 0; i < count * terms; ++i)
        seen |= std::uint64_t{(rows_that_see(first * terms + i - before, keys, visible) & rows) != 0} << i / terms;
    return seen;
}

/// The rows from one on, and of them so many channels: those of a tile.
template <class E>
row_block<const E> rows_of_tile(const row_block<const E>& values, index_t row, index_t channel, index_t) {
    return values.from(row, channel);
}

/// Adds weights[keys][rows] times the values to the state's sums. Lanes are channels: weights are broadcast from where the softmax left
/// them, values are read as they lie. A value's sum is one chain of multiply-adds over the keys in order. A row's hidden keys are left out
/// or have a weight of 0. visible: one bit per row and key, or null if all see all. Operands of several keys begin `before` keys before the
/// first.
template <Scalar T, class E, class Values>
void add_weighted_values(softmax_state<T>& state, index_t rows, const E* weights, index_t stride, const Values& values, index_t keys,
                         const std::uint64_t* visible, auto& ahead, index_t before = 0) {
    using traits = tile_traits<T>;
    constexpr index_t lane_count = traits::lane_count, terms = simd::terms_of<E>;
    const auto operands = (before + keys + terms - 1) / terms;
    const auto add = [&](index_t row, index_t count, index_t first, index_t depth, bool begins) {
        for_each_piece(state.value_stride / lane_count, traits::max_columns, [&](index_t left, index_t columns) {
            const auto channel = left * lane_count;
            multiply<T, E, Values>(count, columns,
                                   {.a = {weights + first * stride + row, 1, stride},
                                    .b = rows_of_tile(values, first, channel, columns * lane_count),
                                    .depth = depth,
                                    .c = {state.values + row * state.value_stride + channel, state.value_stride, 1},
                                    .scale = begins && state.has_values ? state.factor + row : nullptr,
                                    .adds = !begins},
                                   ahead);
        });
    };
    if (visible) { // only rows of one tile leave out the keys that none of them sees
        for_each_row_tile<T>(rows, state.value_stride / lane_count, [&](index_t row, index_t count) {
            const auto seen = [&](index_t first, index_t size) {
                return operands_seen<E>(first, size, keys, visible, before, bit_range(row, count));
            };
            bool begins = true;
            const auto add_run = [&](index_t first, index_t end) { add(row, count, first, end - first, std::exchange(begins, false)); };
            for_each_seen_run(operands, seen, add_run);
            if (begins) add_run(0, 0);
        });
    } else {
        add(0, rows, 0, operands, true);
    }
    state.has_values = true;
}

/// Adds weighted values to the same bits as add_weighted_values, but values of hidden keys are not touched: 0 times NaN or infinity is NaN.
/// And weights are multiplied by the unit of their row.
template <Scalar T, class E>
void add_seen_values(softmax_state<T>& state, index_t rows, const E* weights, index_t stride, const row_block<const E>& values,
                     index_t keys, const std::uint64_t* visible, index_t before = 0) {
    using lanes = simd::lanes<T>;
    using operand = simd::operand_lanes<E>;
    constexpr index_t terms = simd::terms_of<E>;
    for (index_t row = 0; row < rows; ++row) {
        for (index_t channel = 0; channel < state.value_stride; channel += lanes::size) {
            T* const at = state.values + row * state.value_stride + channel;
            auto sum = state.has_values ? lanes::load(at) * lanes(state.factor[row]) : lanes(T{0});
            for (index_t j = 0; j * terms < before + keys; ++j) {
                const E weight = weights[j * stride + row];
                const E* const value = values.data + j * values.row_stride + channel;
                if constexpr (terms == 1) {
                    if (visible[j] >> row & 1) sum = fma(lanes(state.unit[row] * weight), lanes::load(value), sum);
                } else {
                    bool seen[std::size_t{terms}], any = false;
                    for (index_t t = 0; t < terms; ++t) any |= seen[t] = rows_that_see(j * terms + t - before, keys, visible) >> row & 1;
                    if (any) sum = fma(operand(times(weight, state.unit[row])), operand::load(value).only(seen), sum);
                }
            }
            sum.store(at);
        }
    }
    state.has_values = true;
}

/// How keys go by. masked: values of hidden keys are not touched. Weights are multiplied by `unit` before values are.
template <Scalar T>
struct pass_through {
    bool masked;
    T unit;

    /// Whether what is not finite now has to stay so.
    bool is_last() const { return unit != 1; }
};

/// Calls rows = pass(rows, how) until no rows, given as bits, are left: pass returns those whose sums hold NaN or infinity that no score
/// put there. 0 * NaN is NaN, so a weight of 0 does not protect from the value of a hidden key: such rows are done again with hidden keys
/// left out. And sums of large values may pass what numbers hold before they are divided: then with smaller weights.
template <Scalar T, class F>
void recompute_masked(std::uint64_t rows, F&& pass) {
    constexpr T small_weights = std::same_as<T, float> ? 0x1p-40 : 0x1p-80;
    for (const auto how : {pass_through<T>{false, 1}, pass_through<T>{true, 1}, pass_through<T>{true, small_weights}}) {
        if (rows == 0) return;
        rows = pass(rows, how);
    }
}

} // namespace attn::kernel
