#include "random_pattern.hpp"

#include <numeric>

namespace attn::fuzz {

namespace {

class tree_builder {
public:
    tree_builder(draw& random, const sizes& s) : random_(random), s_(s), tree_(std::make_shared<pattern_tree>()) {
        first_query_ = sizes::lowest(s.first_query), queries_ = sizes::extent(s.first_query, s.queries);
        first_key_ = sizes::lowest(s.first_key), keys_ = sizes::extent(s.first_key, s.keys);
    }

    std::size_t any(int depth) {
        if (depth == 0 || random_.one_in(4)) return any_leaf();
        switch (random_.number(0, 5)) {
        case 0:
        case 1:
        case 2:
            return join(joint::both, any(depth - 1), any(depth - 1));
        case 3:
        case 4:
            return join(joint::either, any(depth - 1), any(depth - 1));
        default:
            return join(joint::inverse, any(depth - 1), 0);
        }
    }
    std::size_t of_keys(int depth) {
        if (depth == 0 || random_.one_in(3)) return key_leaf();
        switch (random_.number(0, 3)) {
        case 0:
        case 1:
            return join(joint::both, of_keys(depth - 1), of_keys(depth - 1));
        case 2:
            return join(joint::either, of_keys(depth - 1), of_keys(depth - 1));
        default:
            return join(joint::inverse, of_keys(depth - 1), 0);
        }
    }
    std::size_t stepped(int depth) {
        const auto own = stepped_leaf();
        if (depth == 0 || random_.one_in(4)) return own;
        if (random_.one_in(4)) return join(joint::either, own, stepped(0));
        return random_.one_in(2) ? join(joint::both, own, any(depth - 1)) : join(joint::both, any(depth - 1), own);
    }
    std::shared_ptr<const pattern_tree> done() { return tree_; }

private:
    std::size_t join(joint how, std::size_t left, std::size_t right) {
        const auto &a = tree_->nodes[left].name, &b = tree_->nodes[right].name;
        auto name = how == joint::inverse ? "!" + a : "(" + a + (how == joint::both ? " & " : " | ") + b + ")";
        tree_->nodes.push_back({.how = how, .left = left, .right = right, .name = std::move(name)});
        return tree_->nodes.size() - 1;
    }
    std::size_t leaf(pattern_node::leaf_type p, const std::string& name, std::initializer_list<index_t> arguments = {}) {
        std::string text;
        for (const auto a : arguments) text.append(text.empty() ? "" : ", ").append(std::to_string(a));
        tree_->nodes.push_back({.leaf = std::move(p), .name = name + (text.empty() ? "{}" : "{" + text + "}")});
        return tree_->nodes.size() - 1;
    }
    /// A length that matters here: of a window, a block, a stride.
    index_t length(index_t least) { return random_.one_in(2) ? random_.number(least, 9) : random_.number(least, std::max<index_t>(least, near())); }
    index_t near() const { return std::min<index_t>(std::max(queries_, keys_), 600); }
    /// The number of positions from 0 to somewhere among the keys: 0 if they lie below.
    index_t up_to_a_key() { return std::max<index_t>(0, first_key_ + random_.number(0, keys_)); }

    std::size_t stepped_leaf() {
        const auto by = random_.one_in(3) ? random_.number(1, std::max<index_t>(2, near())) : random_.number(1, 9);
        if (random_.one_in(2)) return leaf(strided{by}, "strided", {by});
        const auto window = random_.number(0, 12);
        return leaf(dilated_window{window, by}, "dilated_window", {window, by});
    }
    std::size_t any_leaf() {
        const auto a = length(1), b = length(0), c = length(0);
        switch (random_.number(0, 17)) {
        case 0:
            return leaf(dense{}, "dense");
        case 1:
        case 2:
        case 3:
            return leaf(causal{}, "causal");
        case 4:
        case 5:
            return leaf(local{b, c}, "local", {b, c});
        case 6:
        case 7:
            return stepped_leaf();
        case 8: {
            const auto width = random_.number(1, a), sub = random_.number(0, a / width - 1);
            return leaf(fixed{a, width, sub}, "fixed", {a, width, sub});
        }
        case 9:
            return leaf(block_diagonal{a}, "block_diagonal", {a});
        case 10: {
            const auto count = random_.one_in(2) ? random_.number(0, 5) : up_to_a_key();
            return leaf(global{count}, "global", {count});
        }
        case 11: {
            const auto count = up_to_a_key();
            return leaf(prefix{count}, "prefix", {count});
        }
        case 12:
            return segments_leaf();
        case 13: {
            const auto first = random_.number(0, s_.heads), end = random_.number(first, s_.heads);
            return leaf(on_heads{first, end}, "on_heads", {first, end});
        }
        case 14:
            return tiles_leaf(false);
        case 15:
            return block_sparse_leaf();
        case 16: {
            const auto kind = static_cast<int>(random_.number(0, 4));
            const auto m = random_.number(0, std::max(a, b)) + (kind == 3);
            return leaf(predicate{drawn_predicate{kind, a, m}}, "predicate", {kind, a, m});
        }
        default:
            return key_leaf();
        }
    }
    std::size_t key_leaf() {
        switch (random_.number(0, 3)) {
        case 0:
            return leaf(dense{}, "dense");
        case 1: {
            auto each = std::make_shared<std::vector<index_t>>();
            for (index_t b = 0; b < s_.batch; ++b) each->push_back(up_to_a_key());
            tree_->parameters.push_back(each);
            return leaf(lengths{*each}, "lengths", {each->empty() ? 0 : each->front()});
        }
        case 2:
            return tiles_leaf(true);
        default: {
            const auto a = random_.number(1, 12), b = random_.number(0, 12);
            return leaf(predicate{drawn_key_predicate{a, b}}, "key_predicate", {a, b});
        }
        }
    }
    std::size_t segments_leaf() {
        const auto longest = random_.number(1, std::max<index_t>(2, near()));
        const auto entries = random_.one_in(2) && s_.batch > 0 ? s_.batch : 1;
        const auto ids = [&](index_t count) {
            std::vector<std::int32_t> v(static_cast<std::size_t>(entries * count));
            std::int32_t id = 0;
            const bool any_order = random_.one_in(4);
            for (auto& x : v) {
                if (random_.one_in(longest)) id = any_order ? static_cast<std::int32_t>(random_.number(-2, 2)) : id + 1;
                x = id;
            }
            return v;
        };
        return leaf(segments(ids(queries_), ids(keys_), entries, first_query_, first_key_), "segments", {entries, longest});
    }
    std::size_t tiles_leaf(bool any_query) {
        const auto rare = random_.number(1, 30);
        const bool mostly = random_.one_in(2);
        tensor<bool> mask({!any_query && random_.one_in(3) ? s_.batch : 1, !any_query && random_.one_in(3) ? s_.heads : 1,
                           any_query ? 1 : queries_, keys_});
        const auto run = random_.number(1, 40);
        bool seen = mostly;
        for (index_t e = 0; e < mask.shape().size(); ++e) {
            if (e % run == 0) seen = random_.one_in(rare) ? !mostly : mostly;
            mask.data()[e] = seen;
        }
        return leaf(tiles(std::as_const(mask).view(), first_query_, first_key_), "tiles", {rare, run, mostly});
    }
    std::size_t block_sparse_leaf() {
        const auto ends = std::max(first_query_ + queries_, first_key_ + keys_);
        if (std::min(first_query_, first_key_) < 0 || ends > 5000) return leaf(causal{}, "causal");
        const auto query_block = length(1), key_block = length(1);
        auto blocks = std::make_shared<tensor<bool>>(shape{random_.one_in(2) ? s_.batch : 1, random_.one_in(2) ? s_.heads : 1,
                                                           ends / query_block + 1, ends / key_block + 1});
        for (index_t e = 0; e < blocks->shape().size(); ++e) blocks->data()[e] = random_.one_in(2);
        tree_->parameters.push_back(blocks);
        return leaf(block_sparse{std::as_const(*blocks).view(), query_block, key_block}, "block_sparse", {query_block, key_block});
    }

    draw& random_;
    const sizes& s_;
    std::shared_ptr<pattern_tree> tree_;
    index_t first_query_, queries_, first_key_, keys_;
};

} // namespace

index_t pattern_tree::step(std::size_t number) const {
    const auto& node = nodes[number];
    if (node.how == joint::inverse) return 1;
    if (node.how == joint::leaf)
        return std::visit([](const auto& leaf) { return step_of(leaf); }, node.leaf);
    const auto a = step(node.left), b = step(node.right);
    return node.how == joint::both ? std::lcm(a, b) : std::gcd(a, b);
}

std::shared_ptr<const pattern_tree> draw_pattern(draw& random, const sizes& s, pattern_kind kind) {
    tree_builder build(random, s);
    const auto depth = static_cast<int>(random.number(0, 3));
    kind == pattern_kind::any ? build.any(depth) : build.of_keys(depth);
    return build.done();
}

std::shared_ptr<const pattern_tree> draw_stepped_pattern(draw& random, const sizes& s) {
    tree_builder build(random, s);
    build.stepped(static_cast<int>(random.number(0, 2)));
    return build.done();
}

} // namespace attn::fuzz
