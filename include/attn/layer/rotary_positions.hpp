// Where the tokens lie that rotary turns.
#pragma once

#include "../core/inputs.hpp"
#include "../core/output_memory.hpp"
#include "../core/tensor.hpp"

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
            throw shape_error(operation, argument, "has shape ", x, ", but there are ", first_.count(), " positions");
        for (index_t b = 0; b < (first_.shared() ? std::min<index_t>(x.batch, 1) : x.batch); ++b)
            if (x.tokens > 0 && (first_[b] < 0 || first_[b] > count - x.tokens))
                throw argument_error(operation, argument, "lies at positions ", first_[b], " to ",
                                     detail::saturating_sum(first_[b], x.tokens - 1), ", but rotary has 0 to ", count - 1);
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
            throw shape_error(operation, "positions", "have shape ", s, ", but ", argument, " has ", x);
        for (index_t b = 0; b < s.batch; ++b)
            for (index_t r = 0; r < s.tokens; ++r)
                for (index_t a = 0; a < s.channels; ++a)
                    if (const auto p = of_tokens_(b, 0, r, a); p < 0 || p >= count)
                        throw argument_error(operation, argument, "has a token at position ", p, ", but rotary has 0 to ", count - 1);
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

} // namespace attn
