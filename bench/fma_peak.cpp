#include "fma_peak.hpp"

#include "attn/kernel/gemm/matrix_tile.hpp"
#include "measure.hpp"

#include <numeric>

namespace attn::bench {

namespace {

/// Chains of multiply-adds in which the sum is a factor, so that no step can be left out or joined with the next. 24 chains, or 12 of
/// 16 registers, are more than two units of latency four need. Each begins with numbers of its own: equal chains a compiler runs once.
template <Scalar T>
struct burst {
    static constexpr int columns = kernel::tile_traits<T>::max_columns;
    static constexpr int rows = kernel::tile_traits<T>::max_rows(columns);
    static constexpr int steps = 150'000;
    using lanes = simd::lanes<T>;
    static constexpr int row_size = columns * lanes::size;
    static constexpr double flops = 2.0 * rows * row_size * steps;

    [[gnu::noinline]] static T run(T factor, T summand) {
        std::array<T, rows * row_size> sums;
        std::iota(sums.begin(), sums.end(), summand);
        kernel::matrix_tile<rows, columns, T> tile;
        tile.load(sums.data(), row_size);
        const lanes f = factor, s = summand;
        for (int step = 0; step < steps; ++step)
#pragma GCC unroll 16
            for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
                for (int c = 0; c < columns; ++c) tile.sum[i][c] = fma(tile.sum[i][c], f, s);
        tile.store(sums.data(), row_size);
        return std::accumulate(sums.begin(), sums.end(), T(0));
    }
};

} // namespace

template <Scalar T>
double fma_peak(thread_pool& threads) {
    // Read at run time, lest the compiler should know what the sums come to.
    volatile T factor = T(0.5), summand = T(1);
    volatile T result = 0;
    const auto count = threads.concurrency();
    double best = 0;
    for (int attempt = 0; attempt < 3; ++attempt) {
        const auto seconds = seconds_of([&] {
            threads.parallel_for(count, [&](index_t slice) {
                const T total = burst<T>::run(factor, summand);
                if (slice == 0) result = total;
            });
        });
        best = std::max(best, burst<T>::flops * static_cast<double>(count) / seconds);
    }
    return best;
}

template double fma_peak<float>(thread_pool&);
template double fma_peak<double>(thread_pool&);

std::string compiler() {
#ifdef __clang__
    return "clang " __clang_version__;
#else
    return "gcc " __VERSION__;
#endif
}

int register_bits() { return simd::lanes<float>::size * 32; }

std::string instruction_set() { return std::string(xsimd::default_arch::name()) + ", " + std::to_string(register_bits()) + " bits"; }

} // namespace attn::bench
