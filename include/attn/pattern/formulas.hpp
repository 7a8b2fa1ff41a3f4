// Patterns that are formulas of the positions of a query and a key, or of the head.
#pragma once

#include "narrowed.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace pattern {

/// The past and the present: j <= i in absolute positions. With n queries and m keys, first_query = 0 aligns the first ones, and
/// first_query = m - n the last ones.
struct causal {
    constexpr auto visible(const auto& i, const auto& j) const { return j <= i; }
};

/// Causal, but for the first `length` keys, which every query sees: j < length or j <= i. A negative length is refused.
/// Raffel et al. 2020, T5: the prefix language model.
struct prefix {
    index_t length;

    constexpr auto visible(const auto& i, const auto& j) const { return j < length || j <= i; }

    void check(const pattern_context& context) const { context.require_at_least(0, length, detail::named("prefix", length), "length"); }
};

/// A sliding window: i - before <= j <= i + after. `local{w}` reaches w keys to both sides, 2 w + 1 in all.
/// O(n (before + after + 1)) pairs. A side below zero is refused.
/// Beltagy et al. 2020, Longformer; Su 2019 (https://kexue.fm/archives/6853).
struct local {
    index_t before;
    index_t after = before;

    constexpr auto visible(const auto& i, const auto& j) const { return i - j <= before && j - i <= after; }

    void check(const pattern_context& context) const {
        const auto name = detail::named("local", before, after);
        context.require_at_least(0, before, name, "window");
        context.require_at_least(0, after, name, "window");
    }
};

/// Every stride-th key, counted from the query both ways ("atrous"): (i - j) mod stride == 0. O(n^2 / stride) pairs, in runs of keys
/// that queries of one residue class share. A stride below one is refused.
/// Child et al. 2019, Generating Long Sequences with Sparse Transformers; Su 2019 (https://kexue.fm/archives/6853).
struct strided {
    index_t stride;

    constexpr auto visible(const auto& i, const auto& j) const { return (i - j) % stride == 0; }
    constexpr index_t step() const { return stride; }

    void check(const pattern_context& context) const { context.require_at_least(1, stride, detail::named("strided", stride), "stride"); }
};

/// A sliding window with gaps: abs(i - j) <= window dilation and (i - j) mod dilation == 0, `window` keys to both sides, `dilation`
/// apart. O(n (2 window + 1)) pairs. Refused: window < 0, dilation < 1, a reach that does not fit an index.
/// Beltagy et al. 2020, Longformer.
struct dilated_window {
    index_t window;
    index_t dilation;

    constexpr auto visible(const auto& i, const auto& j) const {
        const auto reach = window * dilation;
        return i - j <= reach && j - i <= reach && (i - j) % dilation == 0;
    }
    constexpr index_t step() const { return dilation; }

    void check(const pattern_context& context) const {
        const auto name = detail::named("dilated_window", window, dilation);
        context.require_at_least(0, window, name, "window");
        context.require_at_least(1, dilation, name, "dilation");
        if (window > std::numeric_limits<index_t>::max() / dilation) context.refuse(name(), "reaches further than positions do");
    }
};

/// Blocks of `block` positions that see only themselves: floor(i / block) == floor(j / block). O(n block) pairs. A block below one is
/// refused.
/// Qiu et al. 2019, Blockwise Self-Attention for Long Document Understanding.
struct block_diagonal {
    index_t block;

    constexpr auto visible(const auto& i, const auto& j) const { return floor_div(i, block) == floor_div(j, block); }

    void check(const pattern_context& context) const {
        context.require_at_least(1, block, detail::named("block_diagonal", block), "block");
    }
};

/// Blocks that see themselves and the summary columns of every block: floor(i / block) == floor(j / block), or
///     block - (sub + 1) width <= j mod block < block - sub width,
/// the last `width` columns of each block, or for sub = 1, 2, ... (a head's sub-block) the `width` before those. O(n (block + n width /
/// block)) pairs. The paper's form is causal{} & fixed{block, width}. Refused: block, width < 1, sub < 0, columns beyond the block.
/// Child et al. 2019, Generating Long Sequences with Sparse Transformers, and OpenAI's code for it.
struct fixed {
    index_t block;
    index_t width;
    index_t sub = 0;

    /// The summary columns, which all queries see.
    struct summary {
        index_t begin; ///< columns of a block from here
        index_t end;   ///< up to here
        index_t block; ///< how many a block has

        /// Whether a key is one of the columns.
        constexpr auto visible(const auto&, const auto& j) const {
            const auto column = floor_mod(j, block);
            return column >= begin && column < end;
        }
    };

    constexpr auto visible(const auto& i, const auto& j) const { return parts().visible(i, j); }
    /// A box in another block than its queries need not divide these.
    friend constexpr auto narrowed(const fixed& p, const position_range& queries, const position_range& keys) {
        return attn::narrowed(p.parts(), queries, keys);
    }

    void check(const pattern_context& context) const {
        const auto name = detail::named("fixed", block, width, sub);
        context.require_at_least(1, block, name, "block");
        context.require_at_least(1, width, name, "width");
        context.require_at_least(0, sub, name, "sub-block");
        if (sub >= block / width) context.refuse(name(), "has its summary columns outside the block");
    }

private:
    constexpr either<block_diagonal, summary> parts() const { return {{block}, {block - (sub + 1) * width, block - sub * width, block}}; }
};

/// Tokens that see all and that all see, the first `count` positions: i < count or j < count. O(n count) pairs. A negative count is
/// refused. Beltagy et al. 2020, Longformer: local{w} | global{g}.
struct global {
    index_t count;

    constexpr auto visible(const auto& i, const auto& j) const { return i < count || j < count; }

    void check(const pattern_context& context) const { context.require_at_least(0, count, detail::named("global", count), "count"); }
};

/// A pattern of the user's own: a generic function of the absolute positions of a query and a key,
///     predicate{[w](auto i, auto j) { return j <= i && (i - j < w || j % 4 == 0); }}
/// in + - * / %, comparisons, && || !, and attn::floor_div, floor_mod, abs. It captures by value, and is called from all threads.
template <class F>
struct predicate {
    F function;

    constexpr auto visible(const auto& i, const auto& j) const {
        using seen = decltype(function(i, j));
        static_assert(!std::same_as<seen, position_range>, "attn: a predicate returns a comparison, not a number");
        if constexpr (!std::same_as<seen, position_range>) return function(i, j);
        else return visibility::some; // one error is enough
    }
};

/// Deduces the predicate of a lambda.
template <class F>
predicate(F) -> predicate<F>;

/// Everything on the heads first <= head < end, nothing on others, so that heads differ in one call:
///     (on_heads{0, 2} & local{5}) | (on_heads{2, 4} & strided{6})
/// Refused: first < 0, end < first.
struct on_heads {
    static constexpr bool compares_positions = false;
    index_t first;
    index_t end;

    constexpr auto at(index_t, index_t head) const { return of_head{first <= head && head < end}; }

    void check(const pattern_context& context) const {
        if (first < 0 || end < first) context.refuse(detail::named("on_heads", first, end)(), "is no range of heads");
    }

private:
    struct of_head {
        bool everything;

        constexpr bool visible(auto, auto) const { return everything; }
    };
};

} // namespace pattern

using pattern::causal;

} // namespace attn
