// Rotary positions: pairs of channels turned by an angle that grows with the position, so that scores depend on distances.
#pragma once

#include "layer.hpp"

#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Which channels of a head make pair p of c / 2: 2p and 2p + 1 (GPT-J, RoFormer), or p and p + c / 2 (GPT-NeoX, Llama).
enum class rotary_pairs { interleaved, half_split };

/// Rotary positions: pairs of channels are turned by angles that grow with the position.
/// For the first c channels of each head of queries and keys x (batch, heads, n, d), at position t, pair p being (a, b):
///     a' = a cos(t f_p) - b sin(t f_p),    b' = a sin(t f_p) + b cos(t f_p),       f_p = base^(-2 p / c)
/// The table of sines and cosines is made once, in double, for positions 0 .. max_positions - 1, and may serve many layers. Throws
/// attention_error if c is odd, a count is negative, or the table would be too large. Su et al. 2021, "RoFormer: Enhanced Transformer with
/// Rotary Position Embedding".
template <Scalar T>
class rotary {
public:
    static constexpr std::string_view name = "rotary";

    /// A table of the angles of positions 0 to max_positions - 1.
    rotary(index_t max_positions, index_t channels, rotary_pairs pairs = rotary_pairs::half_split, double base = 10000)
        : max_positions_(max_positions), channels_(channels), pairs_(pairs) {
        if (channels < 0 || channels % 2 != 0)
            throw argument_error(name, "channels", "are " + std::to_string(channels) + ", but they are turned in pairs");
        const shape table{.tokens = max_positions, .channels = channels / 2};
        detail::check_shape<turn>(name, "table", table);
        turns_.reserve(static_cast<std::size_t>(table.size()));
        for (index_t t = 0; t < max_positions_; ++t)
            for (index_t p = 0; p < channels / 2; ++p) {
                const auto angle = static_cast<double>(t) * std::pow(base, -2.0 * static_cast<double>(p) / static_cast<double>(channels));
                turns_.push_back({static_cast<T>(std::cos(angle)), static_cast<T>(std::sin(angle))});
            }
    }

    /// Throws attention_error if x has fewer channels, or positions that the table has not.
    void check(std::string_view operation, std::string_view argument, const shape& x, const per_batch& first) const {
        if (x.channels < channels_)
            throw shape_error(operation, argument,
                              "has shape " + to_string(x) + ", but rotary turns " + std::to_string(channels_) + " channels");
        if (!first.fits(x.batch))
            throw shape_error(operation, argument,
                              "has shape " + to_string(x) + ", but there are " + std::to_string(first.count()) + " positions");
        for (index_t b = 0; b < (first.shared() ? std::min<index_t>(x.batch, 1) : x.batch); ++b)
            if (x.tokens > 0 && (first[b] < 0 || first[b] > max_positions_ - x.tokens))
                throw argument_error(operation, argument,
                                  "lies at positions " + std::to_string(first[b]) + " to " + std::to_string(detail::saturating_sum(first[b], x.tokens - 1)) +
                                      ", but rotary has 0 to " + std::to_string(max_positions_ - 1));
    }
    void check_apart(const output_memory& out) const {
        const auto bytes = std::as_bytes(std::span(turns_));
        out.require_apart("the table of rotary", bytes);
    }
    /// Computes: out may be x. Everything has been checked.
    void forward(const tensor_view<const T>& x, const per_batch& first, const tensor_view<T>& out, const execution& run) const {
        const auto batch = x.shape().batch, heads = x.shape().heads, tokens = x.shape().tokens;
        constexpr index_t tokens_of_a_task = 32;
        const auto chunks = (tokens + tokens_of_a_task - 1) / tokens_of_a_task;
        run.for_each(batch * chunks, [&](index_t task, index_t) {
            const auto b = task / chunks, begin = task % chunks * tokens_of_a_task;
            for (index_t i = begin; i < std::min(tokens, begin + tokens_of_a_task); ++i)
                for (index_t h = 0; h < heads; ++h)
                    turn_row(x.row(b, h, i), x.strides().channels, x.shape().channels, first[b] + i, out.row(b, h, i), out.strides().channels);
        });
    }

private:
    struct turn {
        T cosine, sine;
    };
    void turn_row(const T* from, index_t from_stride, index_t channels, index_t position, T* to, index_t to_stride) const {
        const auto half = channels_ / 2, apart = pairs_ == rotary_pairs::half_split ? half : index_t{1}, step = apart == half ? index_t{1} : index_t{2};
        const turn* const turns = turns_.data() + position * half;
        for (index_t p = 0; p < half; ++p) {
            const auto left = p * step, right = left + apart;
            const T a = from[left * from_stride], c = from[right * from_stride];
            to[left * to_stride] = a * turns[p].cosine - c * turns[p].sine;
            to[right * to_stride] = a * turns[p].sine + c * turns[p].cosine;
        }
        if (from == to) return;
        for (index_t c = channels_; c < channels; ++c) to[c * to_stride] = from[c * from_stride];
    }

    index_t max_positions_, channels_;
    rotary_pairs pairs_;
    std::vector<turn> turns_; ///< (positions, pairs)
};

/// out = x (batch, heads, n, d) turned; row r of batch entry b is at position first[b] + r. out may be x itself. Allocates nothing. Throws
/// attention_error, before anything is read or written: shapes that do not fit, positions that the table has not, an out that overlaps x but is
/// not x, or the table.
template <Scalar T>
void rotate(const rotary<T>& rotation, const std::type_identity_t<tensor_view<const T>>& x, const per_batch& first,
            const std::type_identity_t<tensor_view<T>>& out, const execution& run) {
    constexpr auto name = rotary<T>::name;
    detail::check_view(name, "x", x);
    detail::check_view(name, "out", out);
    detail::check_same_or_apart(name, x, out, true);
    rotation.check(name, "x", x.shape(), first);
    const output_memory memory(name, "out", out);
    rotation.check_apart(memory);
    memory.require_apart("first", first);
    rotation.forward(x, first, out, run);
}

/// The same.
template <Scalar T, ExecutorArgument E = sequential>
void rotate(const rotary<T>& rotation, const std::type_identity_t<tensor_view<const T>>& x, const per_batch& first,
            const std::type_identity_t<tensor_view<T>>& out, E&& executor = {}) {
    workspace none;
    rotate(rotation, x, first, out, execution(executor, none));
}

/// The same, to a new tensor.
template <Scalar T, ExecutorArgument E = sequential>
[[nodiscard]] tensor<T> rotate(const rotary<T>& rotation, const std::type_identity_t<tensor_view<const T>>& x, const per_batch& first = 0,
                               E&& executor = {}) {
    detail::check_view(rotary<T>::name, "x", x);
    tensor<T> out(x.shape());
    rotate(rotation, x, first, out, executor);
    return out;
}

} // namespace attn
