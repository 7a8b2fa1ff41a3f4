#include "softmax.hpp"

#include "others.hpp"

#include <algorithm>

namespace attn::fuzz {

template <Scalar T>
rounded softmax_drawn<T>::score(rounded x, index_t batch, index_t head, index_t query, index_t key) const {
    const auto step = [&] { x = (*steps)(x, head, query, key, unit_of<T>); };
    const auto add = [&](double b) {
        // A sum that rounds to one of the two, in the definition too, does so for every key that has it: that error cancels.
        const auto least = unit_of<double> / 4;
        const bool is_exact = static_cast<double>(static_cast<T>(b)) == b;
        const bool absorbed = (is_exact && std::abs(x.value) + x.error < least * std::abs(b)) || (x.error == 0 && std::abs(b) < least * std::abs(x.value));
        x = {x.value + b, absorbed ? 0 : x.error + unit_of<T> * 3 * (std::abs(b) + std::abs(x.value))};
        if (b == -std::numeric_limits<double>::infinity()) x = {b, 0};
    };
    if (order == score_order::steps || order == score_order::steps_bias) step();
    if (order == score_order::relative) {
        std::apply([&](const auto&... f) { (add(f.at(batch, head)(0.0, query, key)), ...); }, relative->functions);
        return x;
    }
    if (order != score_order::none && order != score_order::steps) add(bias->at(batch, head, query, key));
    if (order == score_order::bias_steps) step();
    return x;
}

template struct softmax_drawn<float>;
template struct softmax_drawn<double>;

namespace {

score_order order_of(softmax_kind kind) {
    switch (kind) {
    case softmax_kind::scored:
    case softmax_kind::scored_passes:
    case softmax_kind::rounding:
        return score_order::steps;
    case softmax_kind::biased:
    case softmax_kind::biased_composed:
    case softmax_kind::biased_passes:
        return score_order::bias;
    case softmax_kind::scored_biased:
        return score_order::steps_bias;
    case softmax_kind::biased_scored:
        return score_order::bias_steps;
    case softmax_kind::relative:
        return score_order::relative;
    default:
        return score_order::none;
    }
}

/// A grid of so many tokens at least.
neighborhood_rule<2> draw_neighborhood(draw& random, index_t tokens) {
    neighborhood_rule<2> rule{.grid = {1, random.number(1, 20)}, .window = {1, 1}};
    rule.grid[0] = tokens / rule.grid[1] + 1;
    for (std::size_t a = 0; a < 2; ++a) {
        rule.tile[a] = random.one_in(2) ? random.number(1, 4) : 1;
        rule.grid[a] = (rule.grid[a] + rule.tile[a] - 1) / rule.tile[a] * rule.tile[a];
        rule.dilation[a] = random.one_in(2) ? random.number(1, std::min<index_t>(4, rule.grid[a])) : 1;
        rule.window[a] = random.number(1, std::min<index_t>(9, rule.grid[a] / rule.dilation[a]));
        rule.causal[a] = random.one_in(4);
    }
    return rule;
}

/// The tables that only the library's own patterns need.
template <Scalar T>
void draw_tables(draw& random, softmax_kind kind, softmax_drawn<T>& d) {
    auto& s = d.size;
    if (kind == softmax_kind::relative) { // a gate for every token from the first position to the last
        s.first_query = {random.number(-40, 40)};
        s.first_key = {random.number(-40, 40)};
    }
    if (kind == softmax_kind::blocks || kind == softmax_kind::neighbors || kind == softmax_kind::listed) { // which begin at position 0
        s.first_query = {random.number(0, 40)};
        s.first_key = {random.number(0, 40)};
    }
    const auto first_query = sizes::lowest(s.first_query), first_key = sizes::lowest(s.first_key);
    const auto queries = sizes::extent(s.first_query, s.queries), keys = sizes::extent(s.first_key, s.keys);
    d.length = random.number(1, random.one_in(2) ? 8 : std::max<index_t>(9, s.keys));
    if (kind == softmax_kind::blocks) {
        auto blocks = std::make_shared<tensor<bool>>(
            shape{1, 1, (first_query + queries) / d.length + 1, (first_key + keys) / d.length + 1});
        for (index_t e = 0; e < blocks->shape().size(); ++e) blocks->data()[e] = random.one_in(2);
        d.blocks = blocks;
    }
    if (kind == softmax_kind::neighbors)
        d.neighbors = std::make_shared<neighborhood<2>>(draw_neighborhood(random, std::max(first_query + queries, first_key + keys)));
    if (kind == softmax_kind::listed) {
        const auto first = random.one_in(2) ? random.number(0, first_query) : 0, key_block = random.one_in(2) ? 1 : random.number(1, 20);
        const auto rows = (first_query - first + queries) / d.length + 1, length = random.number(0, key_block == 1 ? 30 : 6);
        const auto gap = random.number(1, key_block == 1 ? 40 : 4);
        tensor<index_t> table({1, 1, rows, length});
        for (index_t row = 0; row < rows; ++row) // of rising numbers, some of which are left out
            for (index_t e = 0, block = -1; e < length; ++e) table(0, 0, row, e) = random.one_in(5) ? -1 : block += random.number(1, gap);
        d.lists = std::make_shared<selected>(table, d.length, key_block, first);
    }
    if (kind == softmax_kind::packed) {
        const auto ids = [&](index_t count) {
            std::vector<std::int32_t> v(static_cast<std::size_t>(count));
            std::int32_t id = 0;
            for (auto& x : v) x = id += random.one_in(d.length);
            return v;
        };
        d.documents = std::make_shared<segments>(ids(queries), ids(keys), 1, first_query, first_key);
    }
    if (kind == softmax_kind::masked) {
        const auto rare = random.number(1, 20);
        d.mask = std::make_shared<tiles>([&](index_t, index_t) { return !random.one_in(rare); }, queries, keys, first_query, first_key);
    }
}

std::vector<double> draw_sinks(draw& random, index_t heads) {
    std::vector<double> sinks(random.one_in(3) ? static_cast<std::size_t>(heads) : 0);
    constexpr auto infinity = std::numeric_limits<double>::infinity();
    for (auto& sink : sinks) {
        sink = random.real(-4, 4);
        if (random.one_in(10)) sink = random.real(-200, 200);
        if (random.one_in(20)) sink = -infinity;
        if (random.one_in(200)) sink = random.one_in(2) ? infinity : std::numeric_limits<double>::quiet_NaN();
    }
    return sinks;
}

template <Scalar T>
bool has_lowest(const tensor<T>& t) {
    return std::find(t.data(), t.data() + t.shape().size(), std::numeric_limits<T>::lowest()) != t.data() + t.shape().size();
}

} // namespace

template <Scalar T>
trial<T> draw_softmax(draw& random) {
    trial<T> t;
    constexpr auto kinds_of_numbers = std::same_as<T, float> ? softmax_kind::count : softmax_kind::rounding;
    const auto kind = static_cast<softmax_kind>(random.number(0, static_cast<index_t>(kinds_of_numbers) - 1));
    softmax_drawn<T> d{.size = draw_sizes(random)};
    draw_positions(random, d.size);
    draw_tables(random, kind, d);
    d.tree = draw_pattern(random, d.size);
    d.stepped = draw_stepped_pattern(random, d.size);
    d.other_stepped = draw_stepped_pattern(random, d.size);
    d.order = order_of(kind);
    d.steps = std::make_shared<const score_steps>(draw_score(random, d.size, static_cast<double>(std::numeric_limits<T>::lowest())));
    if (d.order == score_order::relative) {
        d.relative = std::make_shared<const drawn_relative<T>>(draw_relative<T>(random, d.size));
    } else if (d.order >= score_order::bias) {
        auto bias = draw_bias<T>(random, d.size);
        if (d.order != score_order::bias) // a step may carry the lowest number on to -infinity, in one precision only
            std::replace(bias.numbers.data(), bias.numbers.data() + bias.numbers.shape().size(), std::numeric_limits<T>::lowest(), T{-1000});
        d.bias = std::make_shared<const drawn_bias<T>>(std::move(bias));
    }
    d.sinks = std::make_shared<const std::vector<double>>(draw_sinks(random, d.size.heads));
    static constexpr numbers kinds[] = {numbers::usual, numbers::usual, numbers::usual, numbers::usual,
                                        numbers::peaked, numbers::equal, numbers::integers};
    const auto values = random.one_of(kinds);
    if (values == numbers::integers) d.size.key_dim = random.number(1, 4);
    if (kind >= softmax_kind::rounding) d.operand_unit = 0x1p-8; // half the distance of 8 bits
    d.exact_scores = values == numbers::integers && d.operand_unit == 0;
    if (values == numbers::integers) d.scale = 1;
    else if (random.one_in(4)) d.scale = random.real(-1, 1);

    static constexpr const char* names[] = {"dense", "causal", "sliding_window", "tree", "stepped", "tree | stepped", "stepped | other",
                                            "sparse_transformer_strided", "causal & segments", "block_sparse", "neighborhood", "causal & selected", "tiles", "steps, tree",
                                            "steps, tree | stepped", "bias, dense", "bias, tree", "bias, tree | stepped",
                                            "composed_score{steps, bias}, tree", "composed_score{bias, steps}, tree",
                                            "composed_score{relative_buckets, forgetting}, tree", "bf16_products, steps, tree", "bf16_products, stepped | other"};
    t.size = d.size;
    t.in = draw_given<T>(random, t.size, values);
    t.in.positions = t.size.positions();
    const bool large_values = random.one_in(64); // whose mean exists, but no sum
    if (large_values)
        for (index_t e = 0; e < t.in.values.shape().size(); ++e) t.in.values.data()[e] *= std::numeric_limits<T>::max() / 4;
    t.name = names[static_cast<std::size_t>(kind)];
    const auto mentions = [&](const char* part) { return t.name.find(part) != std::string::npos; };
    const bool has_length = kind == softmax_kind::window || kind == softmax_kind::sparse || kind == softmax_kind::packed || kind == softmax_kind::blocks;
    static constexpr const char* kinds_of_values[] = {"", "; peaked", "; equal scores", "; exact scores"};
    t.name = joined(t.name, mentions("tree") && !mentions("sparse_transformer") ? "; tree " + d.tree->name() : "", mentions("stepped") ? "; stepped " + d.stepped->name() : "",
                    mentions("other") ? "; other " + d.other_stepped->name() : "", has_length ? joined(" of ", d.length) : "", mentions("steps") ? "; steps " + d.steps->name() : "",
                    d.bias ? joined("; bias ", d.bias->numbers.shape(), has_lowest(d.bias->numbers) ? " with lowest numbers" : "") : "", kinds_of_values[static_cast<int>(values)],
                    large_values ? "; large values" : "");
    if (!d.sinks->empty()) {
        t.name += "; sinks";
        for (const auto sink : *d.sinks) t.name.append(" ").append(std::to_string(sink));
    }
    const auto own = std::make_shared<const softmax_drawn<T>>(d);
    t.op = softmax_of(kind, *own, {0, t.size.batch, 0, t.size.heads});
    t.has_gradient = kind < softmax_kind::rounding && !large_values; // whose products with anything overflow; rounding has none
    t.part = [own, kind](index_t b, index_t g) {
        const auto group = own->size.heads / own->size.kv_heads;
        return softmax_of(kind, *own, {b, 1, g * group, group});
    };
    return t;
}

outcome check_softmax(draw& random) {
    return check_trial(random, [&]<Scalar T>(std::type_identity<T>) { return draw_softmax<T>(random); });
}

} // namespace attn::fuzz
