// Tensors that are stored in 16 bits or as floats, in any layout.
#pragma once

#include "differences.hpp"
#include "draw_layout.hpp"
#include "storage.hpp"

namespace attn::fuzz {

/// Numbers in any format, some of them with nothing before and after.
inline testing::stored_tensor in_any_format(draw& random, tensor<float> numbers, testing::layout where) {
    const auto format = testing::all_formats[static_cast<std::size_t>(random.number(0, std::ssize(testing::all_formats) - 1))];
    return {std::move(numbers), format, where, random.one_in(2) ? 0 : 128};
}

/// The same; now and then smaller numbers, so that 16 bits, or even 32, hold some as subnormal ones.
inline testing::stored_tensor draw_stored(draw& random, tensor<float> numbers, testing::layout where) {
    if (random.one_in(4)) {
        const auto factor = std::ldexp(1.0F, -static_cast<int>(random.number(10, 140)));
        for (index_t e = 0; e < numbers.shape().size(); e += random.number(1, 9)) numbers.data()[e] *= factor;
    }
    return in_any_format(random, std::move(numbers), where);
}

/// Room for a result in any format.
inline testing::stored_tensor draw_room(draw& random, const shape& s, testing::layout where) {
    return in_any_format(random, testing::no_answer<float>(s, false).values, where);
}

/// What `ours` stores in place of these numbers, rounded: "[b, h, i, c] is x, not y"; or that it wrote beside itself.
inline std::string other_numbers(testing::stored_tensor& ours, const tensor<float>& expected) {
    if (!ours.guards_intact()) return "wrote beside its output";
    return other_bits(ours.copy(), ours.rounded(expected));
}

} // namespace attn::fuzz
