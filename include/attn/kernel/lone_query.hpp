// Scores of one query by itself: lanes are channels, then keys.
#pragma once

#include "online_softmax.hpp"
#include "tile_loader.hpp"

#include <algorithm>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// True if the last of so many queries would be alone in its register, as a window of 49 leaves it. Then its scores are a row: computed
/// in lanes of queries like the others', 15 of 16 would be for nothing, a quarter of the time of a window.
template <Scalar T, class Arch>
constexpr bool leaves_lone_query(index queries) {
    return simd::lanes<T, Arch>::size >= 8 && queries % simd::lanes<T, Arch>::size == 1;
}

/// scores[j] = query . keys[j] for at most a register of keys, each the sum of its lanes in one order.
template <Scalar T, class Arch>
void multiply_lone_query(const T* query, const T* keys, index key_stride, index channels, index count, T* scores) {
    using lanes = simd::lanes<T, Arch>;
    const auto whole = channels / lanes::size * lanes::size;
    const auto last_query = lanes::load_first(query + whole, channels - whole);
    const auto products = [&]<int Keys>(std::integral_constant<int, Keys>, const T* key, lanes* sums) {
        simd::unroll<Keys>([&](auto r) { sums[r] = lanes(T{0}); });
        for (index c = 0; c < whole; c += lanes::size) {
            const auto q = lanes::load(query + c);
            simd::unroll<Keys>([&](auto r) { sums[r] = fma(q, lanes::load(key + r * key_stride + c), sums[r]); });
        }
        if (whole < channels)
            simd::unroll<Keys>(
                [&](auto r) { sums[r] = fma(last_query, lanes::load_first(key + r * key_stride + whole, channels - whole), sums[r]); });
    };
    if (count == lanes::size) {
        lanes sums[lanes::size];
        products(std::integral_constant<int, lanes::size>{}, keys, sums);
        simd::sum_each<T, Arch>(sums).store(scores);
        return;
    }
    for (index j = 0; j < count; ++j) {
        lanes one;
        products(std::integral_constant<int, 1>{}, keys + j * key_stride, &one);
        scores[j] = sum(one);
    }
}

/// Takes the lone query's scores[keys] into the softmax, and leaves weights in their place: online_softmax::push_scores for a row. Up to a
/// whole register `scores` is overwritten.
template <Scalar T, class Arch>
void push_lone_query(online_softmax<T, Arch>& softmax, T* scores, index keys) {
    using lanes = simd::lanes<T, Arch>;
    const auto at = softmax.registers * lanes::size, end = whole_registers<T, Arch>(keys);
    std::fill(scores + keys, scores + end, hidden_score<T>);
    const auto earlier = lanes::load(softmax.maximum + at);
    auto top = earlier, total = lanes(T{0});
    for (index j = 0; j < end; j += lanes::size) top = max_or_second(lanes::load(scores + j), top);
    T tops[lanes::size];
    top.store(tops);
    const lanes m = *std::max_element(tops, tops + lanes::size), shrink = softmax.weight_of(earlier, m);
    for (index j = 0; j < end; j += lanes::size) {
        const auto weight = softmax.weight_of(lanes::load(scores + j), m);
        weight.store(scores + j);
        total = total + weight;
    }
    m.store(softmax.maximum + at);
    shrink.store(softmax.factor + at);
    fma(lanes::load(softmax.sum + at), shrink, lanes(sum(total))).store(softmax.sum + at);
}

} // namespace attn::kernel
