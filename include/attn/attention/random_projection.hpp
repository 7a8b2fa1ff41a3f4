// Random matrices: projections along the sequence, for a linear_projection, and directions, for performer_features.
#pragma once

#include "../core/output_memory.hpp"
#include "../core/random_numbers.hpp"
#include "../simd/elementary.hpp"
#include "../simd/unfused.hpp"

#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// Independent normal numbers from a seed, the same in every run.
struct normal_numbers {
    random_numbers uniform;

    /// One of N(0, 1 / parts).
    double operator()(double parts) {
        const auto radius = std::sqrt(-2 * simd::log(uniform()) / parts);
        return radius * simd::cos(2 * std::numbers::pi * uniform());
    }
};

} // namespace detail

/// Fills a matrix (1, heads, projected, m) with the random projection by which Linformer's paper proves that few rows suffice:
/// independent N(0, 1 / projected), so that E^T E is the identity on average. The same numbers for a seed in every run; the distribution
/// is computed here, for the standard library's may differ. Throws shape_error if the matrix cannot be written.
template <Scalar T>
void fill_random_projection(const tensor_view<T>& matrix, std::uint64_t seed) {
    const auto& s = matrix.shape();
    detail::check_view("fill_random_projection", "matrix", matrix);
    detail::check_writable("fill_random_projection", "matrix", matrix);
    detail::normal_numbers normal{{seed}};
    detail::for_each_number(
        s, [&](index_t b, index_t h, index_t r, index_t j) { matrix(b, h, r, j) = static_cast<T>(normal(static_cast<double>(s.tokens))); });
}

/// Fills the directions (1, 1, features, d) of performer_features: rows of which d after d are orthogonal to each other, and each as long
/// as one of d independent N(0, 1). The same numbers for a seed in every run. Throws shape_error if the directions cannot be written.
/// Choromanski et al. 2021, "Rethinking Attention with Performers".
template <Scalar T>
void fill_orthogonal_directions(const tensor_view<T>& directions, std::uint64_t seed) {
    const auto& s = directions.shape();
    detail::check_view("fill_orthogonal_directions", "directions", directions);
    detail::check_writable("fill_orthogonal_directions", "directions", directions);
    detail::normal_numbers normal{{seed}};
    const auto d = static_cast<std::size_t>(s.channels);
    const auto product = [d](const double* a, const double* b) {
        double sum = 0;
        for (std::size_t c = 0; c < d; ++c) sum += simd::unfused(a[c] * b[c]);
        return sum;
    };
    std::vector<double> orthogonal(d * d), row(d);
    for (index_t h = 0; h < s.batch * s.heads; ++h)
        for (index_t r = 0; r < s.tokens && d > 0; ++r) {
            const auto before = static_cast<std::size_t>(r) % d;
            double* const own = orthogonal.data() + before * d;
            for (std::size_t c = 0; c < d; ++c) own[c] = normal(1);
            for (int turn = 0; turn < 2; ++turn) // what the first leaves of other directions, the second takes
                for (std::size_t k = 0; k < before; ++k) {
                    const auto share = product(own, orthogonal.data() + k * d);
                    for (std::size_t c = 0; c < d; ++c) own[c] -= simd::unfused(share * orthogonal[k * d + c]);
                }
            const auto length = std::sqrt(product(own, own));
            for (std::size_t c = 0; c < d; ++c) own[c] /= length, row[c] = normal(1);
            const auto wanted = std::sqrt(product(row.data(), row.data()));
            for (std::size_t c = 0; c < d; ++c)
                directions(h / s.heads, h % s.heads, r, static_cast<index_t>(c)) = static_cast<T>(wanted * own[c]);
        }
}

} // namespace attn
