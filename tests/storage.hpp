// Tensors that are stored in 16 bits, in any layout, beside the floats that they stand for.
#pragma once

#include "layouts.hpp"

namespace attn::testing {

inline constexpr std::array all_formats{narrow_format::none, narrow_format::bfloat16, narrow_format::half};

inline std::string name_of(narrow_format f) { return f == narrow_format::none ? "float" : f == narrow_format::half ? "half" : "bfloat16"; }

inline float widened(std::uint16_t bits, narrow_format f) {
    return f == narrow_format::half ? detail::widened<narrow_format::half>(bits) : detail::widened<narrow_format::bfloat16>(bits);
}
inline std::uint16_t narrowed(float x, narrow_format f) {
    return f == narrow_format::half ? detail::narrowed<narrow_format::half>(x) : detail::narrowed<narrow_format::bfloat16>(x);
}

/// A tensor as it is stored, and the floats that are computed with.
class stored_tensor {
public:
    tensor<float> wide;

    /// The numbers of `from`, rounded.
    stored_tensor(tensor<float> from, narrow_format f, layout l, index_t margin = 128) : wide(std::move(from)), format_(f), floats_(shape{}, l), bits_(shape{}, l) {
        if (f == narrow_format::none) {
            floats_ = placed<float>(wide, l, margin);
            return;
        }
        const auto stored = narrowed(wide);
        wide = widened(stored);
        bits_ = placed<std::uint16_t>(stored, l, margin);
    }

    stored_view<float> view() {
        if (format_ == narrow_format::none) return floats_.view();
        const auto view = bits_.view();
        return {view.data(), format_, view.shape(), view.strides()};
    }
    narrow_format format() const { return format_; }
    /// What is stored now, as floats.
    tensor<float> copy() { return format_ == narrow_format::none ? floats_.copy() : widened(bits_.copy()); }
    /// Numbers as they would be stored, as floats.
    tensor<float> rounded(const tensor<float>& from) const {
        return each<float>(from, [&](float x) { return format_ == narrow_format::none ? x : testing::widened(testing::narrowed(x, format_), format_); });
    }
    /// Whether these numbers, rounded, are what is stored now.
    bool holds(const tensor<float>& expected) {
        return format_ == narrow_format::none ? same_bits(floats_.copy(), expected) : same_bits(bits_.copy(), narrowed(expected));
    }
    bool guards_intact() { return floats_.guards_intact() && bits_.guards_intact(); }

private:
    /// f(number) of each.
    template <class To, class From, class F>
    static tensor<To> each(const tensor<From>& from, const F& f) {
        tensor<To> result(from.shape());
        std::transform(from.data(), from.data() + from.shape().size(), result.data(), f);
        return result;
    }
    tensor<std::uint16_t> narrowed(const tensor<float>& from) const {
        return each<std::uint16_t>(from, [&](float x) { return testing::narrowed(x, format_); });
    }
    tensor<float> widened(const tensor<std::uint16_t>& from) const {
        return each<float>(from, [&](std::uint16_t x) { return testing::widened(x, format_); });
    }

    narrow_format format_;
    placed<float> floats_;
    placed<std::uint16_t> bits_;
};

} // namespace attn::testing
