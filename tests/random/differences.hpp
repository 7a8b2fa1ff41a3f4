// Where two tensors differ, in words.
#pragma once

#include "answers.hpp"
#include "bounded.hpp"

#include <string>

namespace attn::fuzz {

template <class V>
std::string text_of(V value) {
    char text[40];
    std::snprintf(text, sizeof text, "%.9g", static_cast<double>(value));
    return text;
}

/// "[b, h, i, c]" of the first element that f(element) objects to; empty for none.
template <class F>
std::string first_offence(const shape& s, F&& offends) {
    for (index_t e = 0; e < s.size(); ++e)
        if (offends(e)) {
            const auto row = e / s.channels, head = row / s.tokens;
            return "[" + std::to_string(head / s.heads) + ", " + std::to_string(head % s.heads) + ", " + std::to_string(row % s.tokens) +
                   ", " + std::to_string(e % s.channels) + "]";
        }
    return {};
}

/// Farther than bound(element) from exact(element): "[b, h, i, c] is x, not y +- z".
template <Scalar T>
std::string too_far(const tensor<T>& ours, const auto& exact, const auto& bound) {
    index_t worst = -1;
    const auto at = first_offence(ours.shape(), [&](index_t e) {
        const auto a = static_cast<double>(ours.data()[e]), b = exact(e);
        if (a == b || (std::isnan(a) && std::isnan(b))) return false;
        worst = e;
        return !std::isfinite(a) || !std::isfinite(b) || !(std::abs(a - b) <= bound(e));
    });
    if (at.empty()) return {};
    return at + " is " + text_of(ours.data()[worst]) + ", not " + text_of(exact(worst)) + " +- " + text_of(bound(worst));
}
/// Of a definition that knows its bounds, twice them: a kernel may round what the formula does not, a weight once more with each block of keys.
template <Scalar T>
std::string too_far(const tensor<T>& ours, const tensor<bounded<T>>& exact) {
    return too_far(ours, [&](index_t e) { return exact.data()[e].value(); }, [&](index_t e) { return 2 * exact.data()[e].error(); });
}

/// Other bits than expected: "[b, h, i, c] is x, not y".
template <Scalar T>
std::string other_bits(const tensor<T>& ours, const tensor<T>& expected) {
    if (ours.shape() != expected.shape()) return "has another shape";
    index_t at_e = 0;
    const auto at = first_offence(ours.shape(), [&](index_t e) {
        at_e = e;
        const T a = ours.data()[e], b = expected.data()[e];
        return !testing::same_bits(a, b) && !(std::isnan(a) && std::isnan(b) && !testing::same_bits(a, testing::guard<T>));
    });
    return at.empty() ? at : at + " is " + text_of(ours.data()[at_e]) + ", not " + text_of(expected.data()[at_e]);
}

} // namespace attn::fuzz
