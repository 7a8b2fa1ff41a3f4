// The micro-kernel: every matrix product of the library runs through it.
#pragma once

#include "../../simd/lanes.hpp"
#include "../../simd/unroll.hpp"
#include "tile_traits.hpp"

#include <algorithm>
#include <functional>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A stride that is known to be one, so that the micro-kernel addresses without multiplying.
using unit_stride = std::integral_constant<index, 1>;

struct nothing_beside {
    void operator()() const {}
};

/// Rows x Columns registers of sums.
template <int Rows, int Columns, Scalar T, class Arch>
struct matrix_tile {
    using lanes = simd::lanes<T, Arch>;
    lanes sum[static_cast<std::size_t>(Rows)][static_cast<std::size_t>(Columns)];

    [[gnu::always_inline]] void zero() {
        simd::unroll<Rows, Columns>([&](auto i, auto c) { sum[i][c] = lanes(T{0}); });
    }
    [[gnu::always_inline]] void load(const T* from, index row_stride) {
        simd::unroll<Rows, Columns>([&](auto i, auto c) { sum[i][c] = lanes::load(from + i * row_stride + c * lanes::size); });
    }
    /// Row i begins as factor[i] times what lies at from + i * row_stride.
    [[gnu::always_inline]] void load_scaled(const T* from, index row_stride, const T* factor) {
        simd::unroll<Rows, Columns>(
            [&](auto i, auto c) { sum[i][c] = lanes::load(from + i * row_stride + c * lanes::size) * lanes(factor[i]); });
    }
    [[gnu::always_inline]] void add(const T* from, index row_stride) {
        simd::unroll<Rows, Columns>(
            [&](auto i, auto c) { sum[i][c] = sum[i][c] + lanes::load(from + i * row_stride + c * lanes::size); });
    }
    [[gnu::always_inline]] void store(T* to, index row_stride) const {
        simd::unroll<Rows, Columns>([&](auto i, auto c) { sum[i][c].store(to + i * row_stride + c * lanes::size); });
    }
    [[gnu::always_inline]] void add_to(T* to, index row_stride) const {
        simd::unroll<Rows, Columns>([&](auto i, auto c) {
            T* const at = to + i * row_stride + c * lanes::size;
            (lanes::load(at) + sum[i][c]).store(at);
        });
    }
    /// sum[i][c] += sum over k < depth of phi(a(i, k)) * b(k, c), where a(i, k) = a[i * a_row + k * a_depth] is a number and b(k, c) the
    /// register at b + k * b_depth + c * lanes::size. Each lane is one chain of multiply-adds in the order of k: its result is the
    /// same in a tile of any size. `beside` is called with each term. Rows are addressed as they are: with a pointer for every three of
    /// them clang keeps these in vector registers, and sums in memory.
    template <class Phi = std::identity, class Beside = nothing_beside>
    [[gnu::always_inline]] void multiply_add(const T* a, auto a_row, auto a_depth, const T* b, index b_depth, index depth,
                                             const Phi& phi = {}, Beside&& beside = {}) {
        for (index k = 0; k < depth; ++k) {
            beside();
            lanes right[static_cast<std::size_t>(Columns)];
            simd::unroll<Columns>([&](auto c) { right[c] = lanes::load(b + c * lanes::size); });
            simd::unroll<Rows>([&](auto i) {
                const lanes left = phi(lanes(a[i * a_row]));
                simd::unroll<Columns>([&](auto c) { sum[i][c] = fma(left, right[c], sum[i][c]); });
            });
            a += a_depth;
            b += b_depth;
        }
    }
};

/// Calls f(std::integral_constant<int, n>) for a run-time n in [1, Max].
template <int Max, class F>
[[gnu::always_inline]] inline void with_constant(index n, F&& f) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
        static_cast<void>(((n == I + 1 && (f(std::integral_constant<int, I + 1>{}), true)) || ...));
    }(std::make_integer_sequence<int, Max>{});
}

/// Cuts [0, count) into pieces of at most `max_size`, as even as they come, and calls f(first, size, pieces) for those of each size,
/// which follow each other: a tail of one row would leave the micro-kernel waiting for its own adders.
template <class F>
[[gnu::always_inline]] inline void for_each_size(index count, index max_size, F&& f) {
    if (count <= 0) return;
    const auto pieces = (count + max_size - 1) / max_size, larger = count % pieces;
    index size = count / pieces, same = pieces - larger;
    for (index first = 0; first < count; first += size * same, ++size, same = larger) f(first, size, same);
}
/// The same, f(first, size) for each piece.
template <class F>
[[gnu::always_inline]] inline void for_each_piece(index count, index max_size, F&& f) {
    for_each_size(count, max_size, [&](index first, index size, index pieces) {
        for (; pieces > 0; --pieces, first += size) f(first, size);
    });
}

} // namespace attn::kernel
