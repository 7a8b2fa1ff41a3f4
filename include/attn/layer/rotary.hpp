// Rotary positions: pairs of channels turned by an angle that grows with the position, so that scores depend on distances.
#pragma once

#include "../kernel/rotary_table.hpp"
#include "../simd/elementary.hpp"
#include "layer.hpp"
#include "rotary_frequencies.hpp"

#include <cmath>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Where the tokens of rotary lie: one after the other from a first position, or each where a table says, along one axis or several.
class rotary_positions {
public:
    /// Row r of batch entry b is at first[b] + r: a number for all, or a span of one for each.
    template <class P>
        requires std::convertible_to<P, per_batch>
    constexpr rotary_positions(P&& first) : first_(std::forward<P>(first)) {}
    /// (batch or 1, 1, n, axes): row r of batch entry b is at of_tokens(b, 0, r, a) along axis a. A view.
    constexpr rotary_positions(const tensor_view<const index_t>& of_tokens) : of_tokens_(of_tokens), in_table_(true) {}
    /// A table as the view takes it, of a tensor that somebody keeps.
    rotary_positions(const tensor<index_t>& of_tokens) : rotary_positions(of_tokens.view()) {}
    /// A temporary would be gone before it is read: name the tensor first.
    rotary_positions(const tensor<index_t>&& of_tokens) = delete;

    /// How many coordinates a token has.
    constexpr index_t axes() const noexcept { return in_table_ ? of_tokens_.shape().channels : 1; }
    /// Where row `row` of a batch entry lies along an axis.
    constexpr index_t operator()(index_t batch, index_t row, index_t axis) const noexcept {
        return in_table_ ? of_tokens_(of_tokens_.shape().batch == 1 ? 0 : batch, 0, row, axis) : first_[batch] + row;
    }
    /// Throws attention_error unless they are those of x's tokens, and lie in 0 .. count - 1.
    void check(std::string_view operation, std::string_view argument, const shape& x, index_t count) const {
        if (in_table_) return check_table(operation, argument, x, count);
        if (!first_.fits(x.batch))
            detail::raise(shape_error(operation, argument, "has shape ", x, ", but there are ", first_.count(), " positions"));
        for (index_t b = 0; b < (first_.shared() ? std::min<index_t>(x.batch, 1) : x.batch); ++b)
            if (x.tokens > 0 && (first_[b] < 0 || first_[b] > count - x.tokens))
                detail::raise(argument_error(operation, argument, "lies at positions ", first_[b], " to ",
                                             detail::saturating_sum(first_[b], x.tokens - 1), ", but rotary has 0 to ", count - 1));
    }
    void check_apart(const output_memory& out) const {
        if (in_table_) out.require_apart("the positions", of_tokens_);
        else out.require_apart("first", first_);
    }

private:
    void check_table(std::string_view operation, std::string_view argument, const shape& x, index_t count) const {
        const auto& s = of_tokens_.shape();
        detail::check_view(operation, "positions", of_tokens_);
        if ((s.batch != 1 && s.batch != x.batch) || s.heads != 1 || s.tokens != x.tokens || s.channels < 1)
            detail::raise(shape_error(operation, "positions", "have shape ", s, ", but ", argument, " has ", x));
        detail::for_each_number(s, [&](index_t b, index_t h, index_t r, index_t a) {
            if (const auto p = of_tokens_(b, h, r, a); p < 0 || p >= count)
                detail::raise(argument_error(operation, argument, "has a token at position ", p, ", but rotary has 0 to ", count - 1));
        });
    }

    per_batch first_ = 0;
    tensor_view<const index_t> of_tokens_ = {};
    bool in_table_ = false;
};

/// The positions of a grid's tokens, row-major, as rotary takes them: (1, 1, height width, 2), row and column. Throws shape_error for a
/// grid that no tensor can hold.
[[nodiscard]] inline tensor<index_t> grid_positions(index_t height, index_t width) {
    detail::check_shape<index_t>("grid_positions", "the grid", {.tokens = height, .channels = width});
    tensor<index_t> places({.tokens = height * width, .channels = 2});
    for (index_t t = 0; t < height * width; ++t) places(0, 0, t, 0) = t / width, places(0, 0, t, 1) = t % width;
    return places;
}

/// Which channels of a head make pair p of c / 2: 2p and 2p + 1 (GPT-J, RoFormer), or p and p + c / 2 (GPT-NeoX, Llama).
enum class rotary_pairs { interleaved, half_split };

/// Rotary positions: pairs of channels are turned by angles that grow with the position.
/// For the first c channels of each head of queries and keys x (batch, heads, n, d), at position t, pair p being (a, b):
///     a' = a cos(t f_p) - b sin(t f_p),    b' = a sin(t f_p) + b cos(t f_p),       f_p = base^(-2 p / c)
/// or other frequencies, or tables of sines and cosines as they are given. Tokens of several axes, such as the row and the column of a
/// patch, have as many times c channels turned: of the pairs of all of them, the first c / 2 turn by the first coordinate, the next by the
/// second. The table is made once, in double, for positions 0 .. max_positions - 1, and may serve many layers. Throws attention_error if c
/// is odd, a count is negative, or the table would be too large. Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position
/// Embedding".
template <Scalar T>
class rotary {
public:
    static constexpr std::string_view name = "rotary";

    /// A table of the angles of positions 0 to max_positions - 1.
    rotary(index_t max_positions, index_t channels, rotary_pairs pairs = rotary_pairs::half_split, double base = 10000)
        : rotary(max_positions, geometric(max_positions, channels, base), pairs) {}
    /// A table of the angles of other frequencies: interpolated, NTK-aware, YaRN, your own.
    rotary(index_t max_positions, const rotary_frequencies& f, rotary_pairs pairs = rotary_pairs::half_split)
        : max_positions_(max_positions), channels_(2 * std::ssize(f.values)), pairs_(pairs) {
        reserve();
        for (index_t t = 0; t < max_positions_; ++t)
            for (const auto frequency : f.values) {
                const auto angle = static_cast<double>(t) * frequency;
                turns_.push_back({static_cast<T>(f.magnitude * simd::cos(angle)), static_cast<T>(f.magnitude * simd::sin(angle))});
            }
    }
    /// Given cosines and sines (1, 1, positions, c / 2), which are copied: what ONNX' RotaryEmbedding calls its caches.
    rotary(const detail::read_view<T>& cosines, const detail::read_view<T>& sines, rotary_pairs pairs = rotary_pairs::half_split)
        : max_positions_(cosines.shape().tokens), channels_(2 * cosines.shape().channels), pairs_(pairs) {
        detail::check_view(name, "cosines", cosines);
        detail::check_view(name, "sines", sines);
        const auto &c = cosines.shape(), &s = sines.shape();
        if (c.batch != 1 || c.heads != 1)
            detail::raise(shape_error(name, "cosines", "have shape ", c, ", but (1, 1, positions, pairs) is needed"));
        if (s != c) detail::raise(shape_error(name, "sines", "have shape ", s, ", but the cosines have ", c));
        reserve();
        for (index_t t = 0; t < c.tokens; ++t)
            for (index_t p = 0; p < c.channels; ++p) turns_.push_back({cosines(0, 0, t, p), sines(0, 0, t, p)});
    }

    /// Throws attention_error if x has fewer channels, or positions that the table has not.
    void check(std::string_view operation, std::string_view argument, const shape& x, const rotary_positions& where) const {
        if (x.channels < detail::product(where.axes(), channels_))
            detail::raise(shape_error(operation, argument, "has shape ", x, ", but rotary turns ", channels_, " channels",
                                      (where.axes() > 1 ? " for each of " + std::to_string(where.axes()) + " axes" : "")));
        where.check(operation, argument, x, max_positions_);
    }
    void check_apart(const output_memory& out) const {
        const auto bytes = std::as_bytes(std::span(turns_));
        out.require_apart("the table of rotary", bytes);
    }
    /// Computes: out may be x. Everything has been checked.
    void forward(const tensor_view<const T>& x, const rotary_positions& where, const tensor_view<T>& out, const execution& run) const {
        turn(x, where, out, T{1}, run);
    }
    /// The gradient of x from that of out, in the same way: turned back.
    void backward(const tensor_view<const T>& d_out, const rotary_positions& where, const tensor_view<T>& wanted,
                  const execution& run) const {
        turn(d_out, where, wanted, T{-1}, run);
    }

    /// A view of the table, for a cache that turns keys when they are read (rotary_reading): this outlives it.
    operator kernel::rotary_table<T>() const& { return {turns_.data(), max_positions_, channels_ / 2, pairs_ == rotary_pairs::half_split}; }
    /// A temporary would be gone before it is read: name it first.
    operator kernel::rotary_table<T>() const&& = delete;

private:
    static void check_table(index_t max_positions, index_t channels) {
        detail::check_shape<kernel::cosine_and_sine<T>>(name, "table", {.tokens = max_positions, .channels = channels / 2});
    }
    /// A table that no memory holds is refused before there are frequencies for it.
    static rotary_frequencies geometric(index_t max_positions, index_t channels, double base) {
        check_table(max_positions, channels);
        return rotary_frequencies::geometric(channels, base);
    }
    void reserve() {
        check_table(max_positions_, channels_);
        turns_.reserve(static_cast<std::size_t>(max_positions_ * (channels_ / 2)));
    }
    /// direction: 1, or -1 to turn back.
    void turn(const tensor_view<const T>& x, const rotary_positions& where, const tensor_view<T>& out, T direction,
              const execution& run) const {
        const kernel::rotary_table<T> table = *this;
        const auto batch = x.shape().batch, heads = x.shape().heads, tokens = x.shape().tokens;
        constexpr index_t tokens_of_a_task = 32;
        const auto chunks = (tokens + tokens_of_a_task - 1) / tokens_of_a_task;
        run.for_each(batch * chunks, [&](index_t task, index_t) {
            const auto b = task / chunks, begin = task % chunks * tokens_of_a_task;
            for (index_t i = begin; i < std::min(tokens, begin + tokens_of_a_task); ++i)
                for (index_t h = 0; h < heads; ++h) {
                    const kernel::turned_row<T> row{x.row(b, h, i), out.row(b, h, i), x.strides().channels, out.strides().channels};
                    for (index_t a = 0; a < where.axes(); ++a) table.turn(row, where(b, i, a), a, where.axes(), direction);
                    if (row.from == row.to) continue;
                    for (index_t c = where.axes() * channels_; c < x.shape().channels; ++c)
                        row.to[c * row.to_stride] = row.from[c * row.from_stride];
                }
        });
    }

    index_t max_positions_, channels_;
    rotary_pairs pairs_;
    std::vector<kernel::cosine_and_sine<T>> turns_; ///< (positions, pairs)
};

namespace detail {

/// What is checked of x or its gradient, of which the other is made.
template <Scalar T>
void check_rotation(const rotary<T>& rotation, std::string_view argument, const tensor_view<const T>& from, const rotary_positions& where,
                    std::string_view result, const tensor_view<T>& to) {
    constexpr auto name = rotary<T>::name;
    check_view(name, argument, from);
    check_view(name, result, to);
    check_same_or_apart<T>(name, from, to, true);
    rotation.check(name, argument, from.shape(), where);
    const output_memory memory(name, result, to);
    rotation.check_apart(memory);
    where.check_apart(memory);
}

} // namespace detail

/// Turns x (batch, heads, n, d), whose rows lie at positions counted from a first one, or given for each token. out may be x itself.
/// Allocates nothing. Throws attention_error, before anything is read or written: shapes that do not fit, positions that the table has not,
/// an out that overlaps x but is not x, or the table, or the positions.
template <Scalar T>
void rotate(const rotary<T>& rotation, const detail::read_view<T>& x, const rotary_positions& where,
            const std::type_identity_t<tensor_view<T>>& out, const detail::call_execution& run = {}) {
    detail::check_rotation(rotation, "x", x, where, "out", out);
    rotation.forward(x, where, out, run);
}

/// The gradient of a loss with respect to what `rotate` read, from `d_out`, that by what it wrote: pairs turned back. wanted may be given
/// itself. Throws as rotate does.
template <Scalar T>
void rotate_backward(const rotary<T>& rotation, const std::type_identity_t<tensor_view<const T>>& d_out, const rotary_positions& where,
                     const std::type_identity_t<tensor_view<T>>& wanted, const detail::call_execution& run = {}) {
    detail::check_rotation(rotation, "d_out", d_out, where, "wanted", wanted);
    rotation.backward(d_out, where, wanted, run);
}

/// Turns x, to a new tensor: see rotate(rotation, x, where, out, run).
template <Scalar T>
[[nodiscard]] tensor<T> rotate(const rotary<T>& rotation, const detail::read_view<T>& x, const rotary_positions& where = 0,
                               const detail::call_execution& run = {}) {
    detail::check_view(rotary<T>::name, "x", x);
    tensor<T> out(x.shape());
    rotate(rotation, x, where, out, run);
    return out;
}

} // namespace attn
