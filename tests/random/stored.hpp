// Tensors that are stored in 16 bits or as floats, in any layout.
#pragma once

#include "differences.hpp"
#include "draw_layout.hpp"
#include "storage.hpp"

namespace attn::fuzz {

inline narrow_format draw_format(draw& random) { return testing::all_formats[static_cast<std::size_t>(random.number(0, std::ssize(testing::all_formats) - 1))]; }

/// Numbers in any format; now and then smaller ones, so that 16 bits, or even 32, hold some as subnormal ones.
inline testing::stored_tensor draw_stored(draw& random, tensor<float> numbers, testing::layout where) {
    if (random.one_in(4)) {
        const auto factor = std::ldexp(1.0F, -static_cast<int>(random.number(10, 140)));
        for (index_t e = 0; e < numbers.shape().size(); e += random.number(1, 9)) numbers.data()[e] *= factor;
    }
    return {std::move(numbers), draw_format(random), where};
}

/// Room for a result in any format.
inline testing::stored_tensor draw_room(draw& random, const shape& s, testing::layout where) {
    return {testing::no_answer<float>(s, false).values, draw_format(random), where};
}

/// What `ours` stores in place of these numbers, rounded: "[b, h, i, c] is x, not y"; or that it wrote beside itself.
inline std::string other_numbers(testing::stored_tensor& ours, const tensor<float>& expected) {
    if (!ours.guards_intact()) return "wrote beside its output";
    return other_bits(ours.copy(), ours.rounded(expected));
}

} // namespace attn::fuzz
