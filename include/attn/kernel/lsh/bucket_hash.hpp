// The hash of LSH attention: which bucket a token falls into.
#pragma once

#include "../gemm/matrix_product.hpp"

#include <algorithm>
#include <array>
#include <limits>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The hash of LSH attention.
template <Scalar T>
struct bucket_hash {
    static constexpr index_t rows_of_task = 128;

    row_block<const T> rotations; ///< (channels, half)
    index_t channels, half;       ///< half the buckets

    /// That of a head in a round.
    bucket_hash(const tensor_view<const T>& all, index_t round, index_t head)
        : rotations(all.rows(round, all.shape().heads == 1 ? 0 : head)), channels(all.shape().tokens), half(all.shape().channels) {}
    static std::size_t task_bytes(index_t channels, index_t half) {
        detail::scratch memory;
        (void)rotated(memory, half);
        (void)widened_rows(memory, channels);
        return memory.used_bytes() + product_of(rows_of_task, channels, half).task_bytes();
    }
    /// The buckets of so many rows, at most rows_of_task, `stride` apart. memory: task_bytes.
    void operator()(const stored_rows<const T>& x, index_t rows, index_t* buckets, index_t stride, detail::scratch memory) const {
        auto* const turned = rotated(memory, half);
        auto* const wide = widened_rows(memory, channels);
        if (x.is_narrow()) copy_rows<T>(x, rows, channels, wide, channels);
        const auto tokens = x.is_narrow() ? row_block<const T>{wide, channels, 1} : x.numbers();
        product_of(rows, channels, half).run_all(memory, tokens, rotations, {nullptr, 0, 0}, {turned, half, 1});
        for (index_t r = 0; r < rows; ++r) buckets[r * stride] = bucket_of(turned + r * half);
    }

private:
    using lanes = simd::lanes<T>;

    static T* rotated(detail::scratch& memory, index_t half) { return memory.take<T>(rows_of_task, half); }
    static T* widened_rows(detail::scratch& memory, index_t channels) { return memory.take<T>(rows_of_task, channels); }
    static matrix_product<T> product_of(index_t rows, index_t channels, index_t half) { return {rows, channels, half}; }
    /// The first of the largest of y and -y; 0 if all is NaN.
    index_t bucket_of(const T* y) const {
        constexpr auto infinity = std::numeric_limits<T>::infinity();
        const auto extreme = [&](T start, const auto& beyond) {
            lanes found = start;
            std::array<T, static_cast<std::size_t>(lanes::size)> each;
            index_t c = 0;
            for (; c + lanes::size <= half; c += lanes::size) {
                const auto next = lanes::load(y + c);
                found = select(beyond(next, found), next, found);
            }
            found.store(each.data());
            for (const T number : each) start = beyond(number, start) ? number : start;
            for (; c < half; ++c) start = beyond(y[c], start) ? y[c] : start;
            return start;
        };
        const T highest = extreme(-infinity, [](auto a, auto b) { return a > b; }),
                lowest = extreme(infinity, [](auto a, auto b) { return a < b; });
        const bool opposite = -lowest > highest;
        const auto* const at = std::find(y, y + half, opposite ? lowest : highest);
        return at == y + half ? 0 : (at - y) + (opposite ? half : 0);
    }
};

} // namespace attn::kernel
