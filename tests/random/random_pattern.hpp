// Patterns composed at run time: a tree of the library's patterns that is itself a pattern, so that thousands of different ones take one
// instantiation of a kernel.
#pragma once

#include "sizes.hpp"

#include <attn/pattern/block_diagonal.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/dilated_window.hpp>
#include <attn/pattern/fixed.hpp>
#include <attn/pattern/global.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/on_heads.hpp>
#include <attn/pattern/predicate.hpp>
#include <attn/pattern/prefix.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/pattern/block_sparse.hpp>
#include <attn/pattern/lengths.hpp>
#include <attn/pattern/segments.hpp>
#include <attn/pattern/tiles.hpp>

#include <memory>
#include <utility>
#include <variant>

namespace attn::fuzz {

using namespace pattern;

/// Some predicates of a user's own.
struct drawn_predicate {
    int kind;
    index_t a, b;

    constexpr auto operator()(const auto& i, const auto& j) const {
        // Branches of one type: what a comparison of i and j gives.
        if (kind == 0) return floor_mod(i - j, a) < b;
        if (kind == 1) return abs(i - j) < b || floor_mod(j, a) == 0;
        if (kind == 2) return (i - j) / a != b && i - j != a;
        if (kind == 3) return floor_div(i, a) - floor_div(j, b) >= 0 || j == b;
        return (i - 2 * j) % a != b || j - i >= b;
    }
};

/// Nothing but what a key's position says: the same for all queries.
struct drawn_key_predicate {
    index_t a, b;

    constexpr auto operator()(const auto&, const auto& j) const { return floor_mod(j, a) != b; }
};

enum class joint { leaf, both, either, inverse };

/// A leaf, or how one or two earlier nodes combine.
struct pattern_node {
    using leaf_type = std::variant<dense, causal, local, strided, dilated_window, fixed, block_diagonal, global, prefix, lengths, segments,
                                   on_heads, tiles, block_sparse, predicate<drawn_predicate>, predicate<drawn_key_predicate>>;
    joint how = joint::leaf;
    std::size_t left = 0, right = 0;
    leaf_type leaf = dense{};
    std::string name = "dense";
};

/// The nodes, the last of which is the pattern, and what their views refer to.
struct pattern_tree {
    std::vector<pattern_node> nodes;
    std::vector<std::shared_ptr<const void>> parameters;

    /// What all visible pairs have in common modulo: 1 if nothing.
    index_t step(std::size_t node) const;
    index_t step() const { return step(nodes.size() - 1); }
    std::string name() const { return nodes.back().name; }
};

/// What a tree's patterns may ask: everything, or only what shows a key to all queries and heads of a batch entry or to none.
enum class pattern_kind { any, of_keys };

std::shared_ptr<const pattern_tree> draw_pattern(draw&, const sizes&, pattern_kind = pattern_kind::any);
/// One in which i = j modulo some step: strided{s} & another, dilated_window{w, s} & another, ...
std::shared_ptr<const pattern_tree> draw_stepped_pattern(draw&, const sizes&);

/// The tree for one batch entry and head.
struct bound_pattern {
    const pattern_tree* tree;
    index_t batch, head;

    constexpr auto visible(const auto& i, const auto& j) const { return node_sees(tree->nodes.size() - 1, i, j); }

private:
    /// In whatever i and j are, a constant is of the same type as a comparison.
    template <class I, class V>
    static constexpr auto truth(const V& value) {
        if constexpr (QueryLanes<I> && std::same_as<V, bool>)
            return I::mask_from_bits(value ? ~std::uint64_t{0} : 0);
        else if constexpr (std::same_as<I, position_range>)
            return visibility(value);
        else
            return value;
    }
    template <class I, class J>
    using seen = decltype(truth<I>(causal{}.visible(std::declval<const I&>(), std::declval<const J&>())));

    template <class I, class J>
    constexpr seen<I, J> node_sees(std::size_t number, const I& i, const J& j) const {
        const auto& node = tree->nodes[number];
        switch (node.how) {
        case joint::both:
            return node_sees(node.left, i, j) && node_sees(node.right, i, j);
        case joint::either:
            return node_sees(node.left, i, j) || node_sees(node.right, i, j);
        case joint::inverse:
            return !node_sees(node.left, i, j);
        default:
            return std::visit([&](const auto& leaf) -> seen<I, J> { return truth<I>(attn::at(leaf, batch, head).visible(i, j)); },
                              node.leaf);
        }
    }
};

struct bound_stepped_pattern : bound_pattern {
    index_t by;
    constexpr index_t step() const { return by; }
};

/// A tree as a pattern. For a part of a problem: its batch entries and heads begin at these of the tree's.
struct random_pattern {
    const pattern_tree* tree;
    index_t first_batch = 0, first_head = 0;

    constexpr bound_pattern at(index_t batch, index_t head) const { return {tree, first_batch + batch, first_head + head}; }
};

/// The same with the promise of a step.
struct random_stepped_pattern {
    const pattern_tree* tree;
    index_t first_batch = 0, first_head = 0;

    bound_stepped_pattern at(index_t batch, index_t head) const {
        return {{tree, first_batch + batch, first_head + head}, tree->step()};
    }
};

} // namespace attn::fuzz
