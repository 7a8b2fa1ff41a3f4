// Sinusoidal positions: a fixed row for each position, which is added to its token.
#pragma once

#include "../core/position.hpp"
#include "../norm/norm.hpp"
#include "../simd/elementary.hpp"

#include <cmath>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Fills a table (1, 1, n, d), of any strides, whose row r is the encoding of position t = first + r:
///     table[r, 2i] = sin(t / base^(2i / d)),      table[r, 2i + 1] = cos(t / base^(2i / d))
/// in double, rounded. Throws shape_error if the table cannot be written, has several heads or batch entries, or lies beyond
/// farthest_position.
/// Vaswani et al. 2017, "Attention Is All You Need".
template <Scalar T>
void fill_sinusoidal_positions(const tensor_view<T>& table, index_t first = 0, double base = 10000) {
    const auto& s = table.shape();
    detail::check_view("fill_sinusoidal_positions", "table", table);
    if (s.batch != 1 || s.heads != 1)
        detail::raise(
            shape_error("fill_sinusoidal_positions", "table", "has shape ", s, ", not that of a matrix (1, 1, positions, channels)"));
    detail::check_writable("fill_sinusoidal_positions", "table", table);
    detail::check_positions("fill_sinusoidal_positions", "first", first, s.tokens);
    for (index_t r = 0; r < s.tokens; ++r)
        for (index_t c = 0; c < s.channels; ++c) {
            const auto angle =
                static_cast<double>(first + r) / simd::pow(base, static_cast<double>(c / 2 * 2) / static_cast<double>(s.channels));
            table(0, 0, r, c) = static_cast<T>(c % 2 == 0 ? simd::sin(angle) : simd::cos(angle));
        }
}

} // namespace attn
