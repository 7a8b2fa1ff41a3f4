// Masked recompute: the second and third way to add up values, for rows that the first left without a finite sum.
#pragma once

#include "../../core/scalar.hpp"

#include <concepts>
#include <cstdint>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

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
