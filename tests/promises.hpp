// What is common to the tests of promises at the edges of arithmetic: calls whose memory is guarded, and numbers at the ends of a type.
#pragma once

#include "answers.hpp"
#include "catch.hpp"

#include <attn/pattern/tiles.hpp>
#include <attn/score/additive_bias.hpp>

#include <functional>

namespace attn::testing {

template <Scalar T>
inline constexpr T infinite = std::numeric_limits<T>::infinity();
template <Scalar T>
inline constexpr T not_a_number = std::numeric_limits<T>::quiet_NaN();
template <Scalar T>
inline constexpr T lowest = std::numeric_limits<T>::lowest();

/// Every score is the same.
template <Scalar T>
struct constant_score {
    T value;

    template <class S>
    S operator()(S, auto, auto) const {
        return S(value);
    }
};

/// What the kernel gives, in exactly the memory that it asks for.
template <Scalar T, class Op>
answer<T> in_its_memory(const Op& op, const inputs<T>& in, const shape& rows) {
    constexpr std::size_t fence = 1 << 14;
    constexpr std::byte untouched{0x5a};
    auto result = no_answer<T>(op.output_shape(shapes_of(in)), rows);
    sequential here;
    const auto bytes = workspace_bytes<T>(op, shapes_of(in), here);
    workspace memory(bytes + fence);
    fill(memory, untouched);
    attn::attend(op, in, result.out(), execution(here, memory));
    CHECK(std::ranges::all_of(memory.bytes().subspan(bytes), [](std::byte b) { return b == untouched; }));
    return result;
}

/// A mask as a pattern: a function of rows of queries and keys.
inline pattern::tiles mask(index_t queries, index_t keys, const std::function<bool(index_t, index_t)>& visible) {
    return pattern::tiles(visible, queries, keys);
}
inline pattern::tiles everything(index_t queries, index_t keys) {
    return mask(queries, keys, [](index_t, index_t) { return true; });
}

/// Row i of all heads together: whether it is the same in two results, bit by bit.
template <Scalar T>
bool same_row(const tensor<T>& a, const tensor<T>& b, index_t i) {
    const auto& s = a.shape();
    for (index_t h = 0; h < s.heads; ++h)
        for (index_t c = 0; c < s.channels; ++c)
            if (!same_bits(a(0, h, i, c), b(0, h, i, c))) return false;
    return true;
}
template <Scalar T>
bool same_row(const answer<T>& a, const answer<T>& b, index_t i) {
    return same_row(a.values, b.values, i) && same_row(a.log_sum_exp, b.log_sum_exp, i);
}
/// Whether all of a row is NaN.
template <Scalar T>
bool nan_row(const tensor<T>& a, index_t i) {
    const auto& s = a.shape();
    for (index_t h = 0; h < s.heads; ++h)
        for (index_t c = 0; c < s.channels; ++c)
            if (!std::isnan(a(0, h, i, c))) return false;
    return true;
}

/// |a - b| of numbers near the largest, whose difference is no larger than they are.
template <Scalar T>
bool is_close(T a, T b, T tolerance) {
    return std::abs(a - b) <= tolerance; // false for NaN
}

} // namespace attn::testing
