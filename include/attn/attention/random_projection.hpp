// Random projections along the sequence, for a linear_projection.
#pragma once

#include "../core/output_memory.hpp"
#include "../simd/elementary.hpp"

#include <cmath>
#include <cstdint>
#include <numbers>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Fills a matrix (1, heads, projected, m) with the random projection by which Linformer's paper proves that few rows suffice:
/// independent N(0, 1 / projected), so that E^T E is the identity on average. The same numbers for a seed in every run; the distribution
/// is computed here, for the standard library's may differ. Throws shape_error if the matrix cannot be written.
template <Scalar T>
void fill_random_projection(const tensor_view<T>& matrix, std::uint64_t seed) {
    const auto& s = matrix.shape();
    detail::check_view("fill_random_projection", "matrix", matrix);
    detail::check_writable("fill_random_projection", "matrix", matrix);
    const auto next = [&seed] { // splitmix64, to a number in (0, 1]
        auto x = seed += 0x9e3779b97f4a7c15u;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return static_cast<double>((x ^ x >> 31) >> 11) * 0x1p-53 + 0x1p-54;
    };
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t h = 0; h < s.heads; ++h)
            for (index_t r = 0; r < s.tokens; ++r)
                for (index_t j = 0; j < s.channels; ++j) {
                    const auto radius = std::sqrt(-2 * simd::log(next()) / static_cast<double>(s.tokens));
                    matrix(b, h, r, j) = static_cast<T>(radius * simd::cos(2 * std::numbers::pi * next()));
                }
}

} // namespace attn
