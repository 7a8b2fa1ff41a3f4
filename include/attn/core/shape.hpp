// The shape of a four-dimensional tensor, and the errors that speak of arguments.
#pragma once

#include "error.hpp"
#include "scalar.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The most bytes of a tensor or a workspace, 256 TiB: what 48 bits address. It is so far from the largest index that sums of a few sizes,
/// and their multiples by a number of threads, fit as well. Where addresses have 32 bits, 1 GiB: sums of three fit a std::size_t.
inline constexpr index_t max_bytes = index_t{1} << (sizeof(std::size_t) == 8 ? 48 : 30);

namespace detail {

/// max_bytes as text.
inline constexpr std::string_view max_bytes_text = sizeof(std::size_t) == 8 ? "2^48 bytes" : "2^30 bytes";

/// A count, not negative, of what memory is asked for: one that a std::size_t cannot hold becomes one that no memory can be had for.
constexpr std::size_t to_size(index_t count) noexcept {
    return std::in_range<std::size_t>(count) ? static_cast<std::size_t>(count) : std::numeric_limits<std::size_t>::max();
}

/// The product of counts, none of them negative; the largest index where it does not fit one, which is beyond every limit.
constexpr index_t product(std::same_as<index_t> auto... counts) noexcept {
    index_t result = 1;
    const auto times = [&](index_t count) {
        if (__builtin_mul_overflow(result, count, &result)) result = std::numeric_limits<index_t>::max();
    };
    (times(counts), ...);
    return result;
}

} // namespace detail

/// Extents of a tensor (batch, heads, tokens, channels). A matrix of one head is {.tokens = n, .channels = d}.
struct shape {
    index_t batch = 1;
    index_t heads = 1;
    index_t tokens = 0;
    index_t channels = 0;

    /// Count of elements; the largest index if they are more.
    constexpr index_t size() const noexcept { return detail::product(batch, heads, tokens, channels); }
    /// The extents with tokens and channels exchanged.
    constexpr shape transposed() const noexcept { return {batch, heads, channels, tokens}; }
    friend constexpr bool operator==(const shape&, const shape&) = default;
};

namespace detail {

/// The shape of what has no memory. All of it is 0, since gcc 12.2 with AVX-512 makes {1, 1, 1, 1} of the 32 bytes of shape{} where it
/// copies them as a constant.
inline constexpr shape no_shape{0, 0, 0, 0};

/// Calls f(batch, head, token) for each row of a tensor.
constexpr void for_each_row(const shape& s, const auto& f) {
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t h = 0; h < s.heads; ++h)
            for (index_t i = 0; i < s.tokens; ++i) f(b, h, i);
}
/// Calls f(batch, head, token, channel) for each number of a tensor.
constexpr void for_each_number(const shape& s, const auto& f) {
    for_each_row(s, [&](index_t b, index_t h, index_t i) {
        for (index_t c = 0; c < s.channels; ++c) f(b, h, i, c);
    });
}

/// Pieces of text as one. What is said to callers in long sentences is put together here, out of the way of what computes.
[[gnu::cold, gnu::noinline]] inline std::string joined(std::initializer_list<std::string_view> pieces) {
    std::string text;
    for (const auto piece : pieces) text += piece;
    return text;
}

} // namespace detail

/// "(2, 8, 197, 64)": batch, heads, tokens, channels.
[[gnu::cold]] inline std::string to_string(const shape& s) {
    std::string text;
    for (auto extent : {s.batch, s.heads, s.tokens, s.channels}) text.append(text.empty() ? "(" : ", ").append(std::to_string(extent));
    return text.append(")");
}

namespace detail {

/// What may be said in an error, as text.
inline std::string_view piece_of(std::string_view text) { return text; }
template <class Number>
    requires std::is_arithmetic_v<Number>
std::string piece_of(Number number) {
    return std::to_string(number);
}
inline std::string piece_of(const shape& s) { return to_string(s); }

} // namespace detail

/// What attn throws (see error.hpp for -fno-exceptions): "operation: argument problem".
struct attention_error : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
    /// An error whose message has operation, argument and the pieces of a problem: texts, numbers and shapes.
    template <class... Pieces>
        requires(sizeof...(Pieces) > 0)
    [[gnu::cold]] attention_error(std::string_view operation, std::string_view argument, const Pieces&... problem)
        : std::invalid_argument(detail::joined({operation, ": ", argument, " ", detail::piece_of(problem)...})) {}
};

/// An argument's shape, strides or memory do not fit: "softmax_attention: k has shape (1, 2, 9, 63), but q has (1, 2, 9, 64): channels
/// differ".
struct shape_error : attention_error {
    static constexpr error_kind kind = error_kind::shape;
    using attention_error::attention_error;
};

/// An argument is refused for its value, or for being given or missing: "layer_norm: eps is 0, but must be above 0 and finite".
struct argument_error : attention_error {
    static constexpr error_kind kind = error_kind::argument;
    using attention_error::attention_error;
};

namespace detail {

/// Why no tensor can be of that shape: it has a negative extent, or its elements take more than max_bytes. Empty if one can. Extents of 0
/// count as 1, so that what loops over the others ends: 2^32 batch entries of 2^32 heads without tokens are too many too.
inline std::string problem_of(const shape& s, std::size_t bytes_of_element) {
    if (std::min({s.batch, s.heads, s.tokens, s.channels}) < 0) return joined({"has the negative shape ", to_string(s)});
    const auto at_least_one = [](index_t extent) { return std::max<index_t>(1, extent); };
    const auto bytes = product(at_least_one(s.batch), at_least_one(s.heads), at_least_one(s.tokens), at_least_one(s.channels),
                               static_cast<index_t>(bytes_of_element));
    return bytes > max_bytes ? joined({"has shape ", to_string(s), ", which is more than ", max_bytes_text}) : std::string();
}

/// Throws shape_error: what a call writes, or a gradient of it, has another shape than the result.
[[noreturn, gnu::cold]] inline void refuse_result(std::string_view operation, std::string_view argument, const shape& has,
                                                  const shape& expected) {
    detail::raise(shape_error(operation, argument, joined({"has shape ", to_string(has), ", but the result has ", to_string(expected)})));
}

/// Throws shape_error if no tensor of T can be of that shape.
template <class T>
void check_shape(std::string_view operation, std::string_view argument, const shape& s) {
    if (const auto problem = problem_of(s, sizeof(T)); !problem.empty()) detail::raise(shape_error(operation, argument, problem));
}

/// A number as text: "1e+39".
inline std::string text_of(double number) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", number);
    return text;
}
/// Throws argument_error if a number that is given in double is not finite in T, which computes with it.
template <Scalar T>
void check_number(std::string_view operation, std::string_view argument, double number) {
    if (std::isfinite(static_cast<T>(number))) return;
    detail::raise(
        argument_error(operation, argument,
                       std::isfinite(number) ? joined({"is ", text_of(number), ", which is not finite as a float"}) : "is not finite"));
}

} // namespace detail

} // namespace attn
