// One of the tensors of `parameters`: its numbers in the type in which they were added, and in those that they were converted to.
#pragma once

#include "../core/stored_view.hpp"
#include "../core/tensor.hpp"

#include <string>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

struct named_tensor {
    std::vector<index_t> size;
    bool is_double = false;                     ///< what it was added as: double,
    narrow_format format = narrow_format::none; ///< or 16-bit numbers, or float. The others are converted from it
    tensor<std::uint16_t> bits = {};
    tensor<float> single_numbers = {};
    tensor<double> double_numbers = {};
    std::string other_type = {}, other_bytes = {}; ///< or what is not computed with

    /// The type in which it was added.
    std::string type() const {
        if (!other_type.empty()) return other_type;
        return is_double ? "double" : format == narrow_format::none ? "float" : format == narrow_format::half ? "half" : "bfloat16";
    }
    template <Scalar T>
    bool was_added_as() const {
        return other_type.empty() && is_double == std::same_as<T, double> && format == narrow_format::none;
    }
    /// Whether its numbers are there as T: added so, or converted.
    template <Scalar T>
    bool holds() const {
        return was_added_as<T>() || numbers<T>().data();
    }
    /// The numbers as T, if it holds them so.
    template <Scalar T>
    tensor<T>& numbers() {
        if constexpr (std::same_as<T, double>) return double_numbers;
        else return single_numbers;
    }
    template <Scalar T>
    const tensor<T>& numbers() const {
        if constexpr (std::same_as<T, double>) return double_numbers;
        else return single_numbers;
    }
    /// The numbers as they were added, unless as double.
    stored_view<const float> stored() const {
        if (format == narrow_format::none) return single_numbers;
        return {bits.data(), format, bits.shape(), bits.view().strides()};
    }
    /// Makes numbers of T of those that were added, which are of another type.
    template <Scalar T>
    void convert() {
        const auto fill = [&](const shape& s, const auto& number) {
            numbers<T>() = tensor<T>(s);
            for (index_t i = 0; i < s.size(); ++i) numbers<T>().data()[i] = static_cast<T>(number(i));
        };
        if (is_double) fill(double_numbers.shape(), [&](index_t i) { return double_numbers.data()[i]; });
        else fill(stored().shape(), [from = stored().rows(0, 0)](index_t i) { return from(0, i); });
    }
};

} // namespace attn::inline ATTN_INSTRUCTION_SET::detail
