// Tensors laid out in memory in every way a caller may, surrounded by guards.
#pragma once

#include "answers.hpp"

namespace attn::testing {

enum class layout {
    head_major,       // [batch][heads][tokens][channels]
    token_major,      // [batch][tokens][heads][channels]
    padded_rows,      // gaps between rows and between heads
    strided_channels, // every third number
    column_major,     // tokens lie side by side: Eigen's default
    misaligned,       // head_major, one number further
    pages_apart,      // rows a multiple of 4096 bytes apart
    reversed,         // head_major backwards: every stride negative
};

struct named_layout {
    layout value;
    const char* name;
};
inline constexpr std::array all_layouts{
    named_layout{layout::head_major, "head_major"},     named_layout{layout::token_major, "token_major"},
    named_layout{layout::padded_rows, "padded_rows"},   named_layout{layout::strided_channels, "strided_channels"},
    named_layout{layout::column_major, "column_major"}, named_layout{layout::misaligned, "misaligned"},
    named_layout{layout::pages_apart, "pages_apart"},   named_layout{layout::reversed, "reversed"},
};

template <class T>
strides strides_of(layout l, const shape& s) {
    const auto rows = [&](index_t row, index_t channel) { return strides{s.heads * s.tokens * row, s.tokens * row, row, channel}; };
    constexpr index_t page = 4096 / sizeof(T);
    switch (l) {
    case layout::token_major:
        return {s.tokens * s.heads * s.channels, s.channels, s.heads * s.channels, 1};
    case layout::padded_rows:
        return {s.heads * (s.tokens + 1) * (s.channels + 3) + 7, (s.tokens + 1) * (s.channels + 3), s.channels + 3, 1};
    case layout::strided_channels:
        return rows(3 * s.channels + 1, 3);
    case layout::column_major:
        return {s.heads * s.tokens * s.channels, s.tokens * s.channels, 1, s.tokens};
    case layout::pages_apart:
        return rows((s.channels + page - 1) / page * page, 1);
    case layout::reversed:
        return {-s.heads * s.tokens * s.channels, -s.tokens * s.channels, -s.channels, -1};
    default:
        return rows(s.channels, 1);
    }
}

/// A tensor in some layout. All memory that is not its elements holds guards, `margin` numbers before and after included: a cache line and more,
/// or none, for what tells of reading beyond.
template <class T>
class placed {
public:
    placed(const shape& s, layout l, index_t margin = 128) : shape_(s), strides_(strides_of<T>(l, s)) {
        const auto reach = [](index_t stride, index_t extent) { return std::abs(stride) * std::max<index_t>(0, extent - 1); };
        const auto span = reach(strides_.batch, s.batch) + reach(strides_.heads, s.heads) + reach(strides_.tokens, s.tokens) +
                          reach(strides_.channels, s.channels);
        const index_t shifted = l == layout::misaligned ? 1 : 0;
        memory_ = tensor<T>({1, 1, 1, 2 * margin + shifted + span + 1});
        std::fill_n(memory_.data(), memory_.shape().size(), guard<T>);
        first_ = margin + (l == layout::reversed ? span : shifted);
    }
    placed(const tensor<T>& from, layout l, index_t margin = 128) : placed(from.shape(), l, margin) { place(from); }

    tensor_view<T> view() { return {memory_.data() + first_, shape_, strides_}; }
    tensor<T> copy() {
        tensor<T> result(shape_);
        auto* next = result.data();
        each([&](const T& element) { *next++ = element; });
        return result;
    }
    /// Nothing was written but elements.
    bool guards_intact() {
        const auto elements = copy();
        each([&](T& element) { element = guard<T>; });
        const auto others = static_cast<std::size_t>(memory_.shape().size() - 1); // the first is a guard, and each other is as the one before it
        const bool intact = same_bits(memory_.data()[0], guard<T>) && std::memcmp(memory_.data(), memory_.data() + 1, others * sizeof(T)) == 0;
        place(elements);
        return intact;
    }

private:
    void place(const tensor<T>& from) {
        auto* next = from.data();
        each([&](T& element) { element = *next++; });
    }
    /// f(element) of each in the order of batch entries, heads, tokens and channels. By pointers, since what tests spend unoptimised is calls.
    template <class F>
    void each(F&& f) {
        for (index_t b = 0; b < shape_.batch; ++b)
            for (index_t h = 0; h < shape_.heads; ++h)
                for (index_t i = 0; i < shape_.tokens; ++i) {
                    auto* element = memory_.data() + first_ + b * strides_.batch + h * strides_.heads + i * strides_.tokens;
                    for (index_t c = 0; c < shape_.channels; ++c, element += strides_.channels) f(*element);
                }
    }

    shape shape_;
    strides strides_;
    tensor<T> memory_;
    index_t first_ = 0;
};

} // namespace attn::testing
