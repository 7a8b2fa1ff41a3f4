// Locality-sensitive hashing of tokens: those that point the same way fall into the same bucket.
#pragma once

#include "../core/tensor.hpp"
#include "../kernel/gemm/matrix_product.hpp"
#include "attention.hpp"

#include <algorithm>
#include <array>
#include <limits>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// The hash of a head in one round.
template <Scalar T>
struct bucket_hash {
    static constexpr index_t rows_of_task = 128;

    row_block<const T> rotations; ///< (channels, half)
    index_t channels, half;       ///< half the buckets

    static std::size_t task_bytes(index_t channels, index_t half) {
        scratch memory;
        (void)rotated(memory, half);
        (void)widened_rows(memory, channels);
        return memory.used_bytes() + product_of(rows_of_task, channels, half).task_bytes();
    }
    /// The buckets of so many rows, at most rows_of_task, `stride` apart. memory: task_bytes.
    void operator()(const stored_rows<const T>& x, index_t rows, index_t* buckets, index_t stride, scratch memory) const {
        auto* const turned = rotated(memory, half);
        auto* const wide = widened_rows(memory, channels);
        if (x.is_narrow()) kernel::copy_rows<T>(x, rows, channels, wide, channels);
        const auto tokens = x.is_narrow() ? row_block<const T>{wide, channels, 1} : x.numbers();
        const auto multiply = product_of(rows, channels, half);
        for (index_t task = 0; task < multiply.task_count(); ++task) {
            auto own = memory;
            multiply.run_task(task, own, tokens, rotations, {nullptr, 0, 0}, {turned, half, 1});
        }
        for (index_t r = 0; r < rows; ++r) buckets[r * stride] = bucket_of(turned + r * half);
    }

private:
    using lanes = simd::lanes<T>;

    static T* rotated(scratch& memory, index_t half) { return memory.take<T>(rows_of_task, half); }
    static T* widened_rows(scratch& memory, index_t channels) { return memory.take<T>(rows_of_task, channels); }
    static kernel::matrix_product<T> product_of(index_t rows, index_t channels, index_t half) { return {rows, channels, half}; }
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

/// Throws shape_error unless the rotations (rounds, heads or 1, channels, at least 1) suit tokens of that shape.
template <Scalar T>
void check_rotations(std::string_view operation, const tensor_view<const T>& rotations, const shape& tokens) {
    check_view(operation, "rotations", rotations);
    const auto& r = rotations.shape();
    if (r.batch < 1 || (r.heads != 1 && r.heads != tokens.heads) || r.tokens != tokens.channels || r.channels < 1)
        throw shape_error(operation, "rotations",
                          "have shape " + to_string(r) + ", but tokens of shape " + to_string(tokens) +
                              " need (rounds, heads or 1, channels of a token, buckets / 2)");
}

/// The hash of a round and head.
template <Scalar T>
bucket_hash<T> hash_of(const tensor_view<const T>& rotations, index_t round, index_t head) {
    const auto& r = rotations.shape();
    return {rotations.rows(round, r.heads == 1 ? 0 : head), r.tokens, r.channels};
}

} // namespace detail

/// Locality-sensitive hashing: the bucket of every token in every round, (batch, heads, n, rounds).
///     bucket(x) = argmax [x R, -x R]        the first of equal ones; a product that is NaN is never chosen, and if all are, 0
/// for tokens (batch, heads, n, d) and rotations R (rounds, heads or 1, d, buckets / 2), normal numbers of any scale:
/// fill_random_projection makes them. Two vectors meet in a bucket the more likely the smaller their angle. The products are rounded as the
/// scalar type rounds, so that a vector halfway between two buckets may fall into either. Tokens may be stored in 16 bits, and are hashed
/// as floats. n d buckets flops a round and head. Throws shape_error if the rotations do not suit the tokens.
/// Andoni et al. 2015, "Practical and Optimal LSH for Angular Distance".
template <StoredTensor X, TensorLike R>
[[nodiscard]] tensor<index_t> lsh_buckets(const X& x, const R& rotations) {
    using T = detail::computed_t<X>;
    static_assert(std::same_as<T, detail::scalar_t<R>>, "attn: rotations must have the tokens' scalar type, of 16-bit ones float");
    const stored_view<const T> tokens = x;
    const tensor_view<const T> turns = rotations;
    const auto& s = tokens.shape();
    detail::check_view("lsh_buckets", "tokens", tokens);
    detail::check_rotations("lsh_buckets", turns, s);
    using hash = detail::bucket_hash<T>;
    tensor<index_t> buckets({s.batch, s.heads, s.tokens, turns.shape().batch});
    workspace memory(hash::task_bytes(s.channels, turns.shape().channels));
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t h = 0; h < s.heads; ++h)
            for (index_t round = 0; round < turns.shape().batch; ++round)
                for (index_t i = 0; i < s.tokens; i += hash::rows_of_task)
                    detail::hash_of(turns, round, h)(tokens.rows(b, h, i), std::min(s.tokens - i, hash::rows_of_task),
                                                     &buckets(b, h, i, round), buckets.shape().channels,
                                                     detail::scratch(memory.bytes().data()));
    return buckets;
}

} // namespace attn
