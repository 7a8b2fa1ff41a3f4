// The scores of few queries beside keys in columns.
#pragma once

#include "../../simd/transpose.hpp"
#include "key_columns.hpp"

#include <array>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Queries that are few beside keys in columns: with more, lanes are queries.
template <Scalar T>
inline constexpr index_t few_rows_of_columns = std::min<index_t>(8, simd::lanes<T>::size);

/// scores[key][row] of the keys of a run for few queries, queries[row][channels]: lanes are keys, and a score is one chain of multiply-adds
/// over the channels in order. Rows: so many queries there are, or some of zeros more.
template <int Rows, class V, Scalar T>
[[gnu::noinline]] void multiply_columns(const T* queries, const key_columns<T>& keys, index_t count, T* scores, index_t stride,
                                        auto& ahead) {
    using lanes = simd::lanes<T>;
    constexpr index_t size = lanes::size, in_block = column_block / size, piece = 32;
    constexpr int registers = Rows <= 2 ? 4 : Rows <= 4 ? 2 : 1; // of keys: 4 to 8 chains, so that none waits for itself
    const auto channels = keys.format.channels, end = (keys.first + count + size - 1) / size;
    for (auto reg = keys.first / size; reg < end; reg += registers) {
        const auto key_register = [&](int r) { return std::min(reg + r, end - 1); };
        auto columns = [&]<int... r>(std::integer_sequence<int, r...>) {
            return std::array{column_reader<T, V>(keys.blocks + key_register(r) / in_block * keys.block_bytes, keys.format,
                                                  key_register(r) % in_block * size, keys.next)...};
        }(std::make_integer_sequence<int, registers>{});
        lanes sum[std::size_t{registers}][std::size_t{Rows}];
        simd::unroll<registers, Rows>([&](auto r, auto q) { sum[r][q] = lanes(T{0}); });
        for (index_t c = 0, run_end = 0; c < channels;) {
            if (c == run_end) simd::unroll<registers>([&](auto r) { run_end = columns[r].begin(c); });
            const auto piece_end = std::min(run_end, c + piece);
            for (; c < piece_end; ++c) {
                lanes key[std::size_t{registers}];
                simd::unroll<registers>([&](auto r) { key[r] = columns[r](c); });
                simd::unroll<Rows>([&](auto q) {
                    const lanes query(queries[q * channels + c]);
                    simd::unroll<registers>([&](auto r) { sum[r][q] = fma(key[r], query, sum[r][q]); });
                });
            }
            ahead.beside(piece * Rows * registers);
        }
        simd::unroll<registers>([&](auto r) {
            const auto first = (reg + r) * size - keys.first; // key of the run in lane 0
            if (reg + r < end)
                simd::store_columns<Rows>(sum[r], std::max<index_t>(0, -first), std::min(size, count - first), scores + first * stride,
                                          stride);
        });
    }
}
/// The same for queries[row][channels] of so many rows that they are few, memory for a power of two of them.
template <Scalar T>
void score_columns(const T* queries, index_t rows, const key_columns<T>& keys, index_t count, T* scores, index_t stride, auto& ahead) {
    constexpr auto most = static_cast<int>(few_rows_of_columns<T>);
    with_columns<T>(keys.format, [&]<class V>(std::type_identity<V>) {
        if (rows == 1) multiply_columns<1, V, T>(queries, keys, count, scores, stride, ahead);
        else if (rows == 2) multiply_columns<2, V, T>(queries, keys, count, scores, stride, ahead);
        else if (rows <= 4) multiply_columns<std::min(4, most), V, T>(queries, keys, count, scores, stride, ahead);
        else multiply_columns<most, V, T>(queries, keys, count, scores, stride, ahead);
    });
}

} // namespace attn::kernel
