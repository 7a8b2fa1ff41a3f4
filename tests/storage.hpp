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
    stored_tensor(tensor<float> from, narrow_format f, layout l) : wide(std::move(from)), format_(f), floats_(shape{}, l), bits_(shape{}, l) {
        if (f == narrow_format::none) {
            floats_ = placed<float>(wide, l);
            return;
        }
        const auto stored = rounded(wide);
        for (index_t e = 0; e < wide.shape().size(); ++e) wide.data()[e] = widened(stored.data()[e], f);
        bits_ = placed<std::uint16_t>(stored, l);
    }

    stored_view<float> view() {
        if (format_ == narrow_format::none) return floats_.view();
        const auto view = bits_.view();
        return {view.data(), format_, view.shape(), view.strides()};
    }
    /// Whether these numbers, rounded, are what is stored now.
    bool holds(const tensor<float>& expected) {
        return format_ == narrow_format::none ? same_bits(floats_.copy(), expected) : same_bits(bits_.copy(), rounded(expected));
    }
    bool guards_intact() { return floats_.guards_intact() && bits_.guards_intact(); }

private:
    tensor<std::uint16_t> rounded(const tensor<float>& from) const {
        tensor<std::uint16_t> result(from.shape());
        for (index_t e = 0; e < from.shape().size(); ++e) result.data()[e] = narrowed(from.data()[e], format_);
        return result;
    }

    narrow_format format_;
    placed<float> floats_;
    placed<std::uint16_t> bits_;
};

} // namespace attn::testing
