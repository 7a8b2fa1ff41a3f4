// Rows to normalise, and what is asked of every norm.
#pragma once

#include "errors.hpp"
#include "layouts.hpp"

#include <attn/norm/norm.hpp>
#include <attn/reference/norms.hpp>

namespace attn::testing {

/// Normal numbers of a mean and a scale.
template <Scalar T>
tensor<T> random_rows(const shape& s, unsigned seed, double mean = 0, double scale = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(mean, scale);
    tensor<T> t(s);
    std::generate_n(t.data(), s.size(), [&] { return static_cast<T>(normal(random)); });
    return t;
}
template <class T>
std::vector<T> random_numbers(index_t count, unsigned seed, double mean = 0, double scale = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(mean, scale);
    std::vector<T> v(static_cast<std::size_t>(count));
    std::ranges::generate(v, [&] { return static_cast<T>(normal(random)); });
    return v;
}
template <Scalar T>
std::vector<double> widened(const std::vector<T>& v) {
    return {v.begin(), v.end()};
}

/// At the edges of registers of 2 to 16 lanes and of four of them, and primes.
inline const std::vector<index_t> edge_sizes{0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129, 197, 768};

/// A reference's result in double: f(x, out).
template <Scalar T, class F>
tensor<double> exact_rows(const tensor<T>& x, const F& f) {
    const auto wide = reference::widen(x.view());
    tensor<double> out(x.shape());
    f(tensor_view<const double>(wide), out.view());
    return out;
}

/// The layouts whose rows have their channels side by side.
inline const std::vector<layout> row_layouts{layout::head_major, layout::token_major, layout::padded_rows, layout::misaligned, layout::pages_apart};

template <Norm N, Executor E>
void normalise_on(const N& norm, const tensor_view<const typename N::scalar>& x, const tensor_view<typename N::scalar>& out, E& executor) {
    workspace memory(norm.workspace_bytes(x.shape(), std::max<index_t>(1, executor.concurrency())));
    normalise(norm, x, out, execution(executor, memory));
}

} // namespace attn::testing
