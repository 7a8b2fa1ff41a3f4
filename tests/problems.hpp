// Problems to test operators on: sizes at the edges of registers, panels and tiles, and random numbers in them.
#pragma once

#include "cases/case.hpp"

#include <array>
#include <random>
#include <string>
#include <vector>

namespace attn::testing {

/// "batch 2, heads 4 / 2, 17 queries, 48 keys, head_dim 64, value_dim 33, queries from 5, keys from 0"
inline std::string describe(const problem& p) {
    const auto from = [&](const per_batch& position) {
        auto text = std::to_string(position[0]);
        for (index_t b = 1; b < position.count(); ++b) text.append(" ").append(std::to_string(position[b]));
        return text;
    };
    return "batch " + std::to_string(p.batch) + ", heads " + std::to_string(p.heads) + " / " + std::to_string(p.kv_heads) + ", " +
           std::to_string(p.queries) + " queries, " + std::to_string(p.keys) + " keys, head_dim " + std::to_string(p.key_dim) +
           ", value_dim " + std::to_string(p.value_dim) + ", queries from " + from(p.positions.first_query) + ", keys from " +
           from(p.positions.first_key);
}

/// What is listed, shuffled; each once before any comes again.
template <class V>
class shuffled {
public:
    explicit shuffled(std::vector<V> values) : values_(std::move(values)), at_(values_.size()) {}

    const V& next(std::mt19937& random) {
        if (at_ == values_.size()) {
            std::ranges::shuffle(values_, random);
            at_ = 0;
        }
        return values_[at_++];
    }

private:
    std::vector<V> values_;
    std::size_t at_;
};

/// Where queries and keys may lie: kind < position_kinds.
inline constexpr int position_kinds = 9;
inline positions position_kind(int kind, index_t batch, index_t queries, index_t keys) {
    static constexpr std::array<index_t, 4> staggered_queries{3, 0, -20, 41}, staggered_keys{0, 12, -5, 2};
    constexpr index_t far = index_t{1} << 40;
    const auto each = [&](const auto& numbers) { return per_batch(std::span(numbers).first(static_cast<std::size_t>(batch))); };
    switch (kind) {
    case 1:
        return bottom_right(queries, keys);
    case 2:
        return {.first_query = 5};
    case 3:
        return {.first_key = 7};
    case 4:
        return {.first_query = -3, .first_key = -9};
    case 5:
        return {.first_query = far, .first_key = far - 30};
    case 6:
        return {.first_query = each(staggered_queries)};
    case 7:
        return {.first_query = each(staggered_queries), .first_key = each(staggered_keys)};
    case 8:
        return {.first_query = 60, .first_key = -20};
    default:
        return top_left();
    }
}

/// `count` problems in which every listed number occurs, if there are as many. The large ones have few heads.
inline std::vector<problem> sample_problems(std::size_t count, unsigned seed) {
    struct head_counts {
        index_t batch, heads, kv_heads;
    };
    std::mt19937 random(seed);
    // A register has 2 to 16 lanes, a panel of queries 12 to 48, a tile of keys 128.
    shuffled<index_t> queries({0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 47, 48, 49, 64, 97, 145});
    shuffled<index_t> keys({0, 1, 2, 4, 7, 8, 9, 15, 16, 17, 31, 47, 48, 49, 64, 97, 112, 127, 128, 129, 136, 197, 255, 257});
    shuffled<index_t> key_dims({1, 2, 3, 8, 16, 17, 33, 64, 80, 128}), value_dims({1, 3, 4, 15, 16, 33, 48, 64, 80, 128});
    shuffled<head_counts> heads({{0, 2, 1}, {1, 0, 0}, {1, 1, 1}, {1, 1, 1}, {1, 4, 2}, {2, 3, 3}, {2, 6, 2}, {3, 4, 1}, {3, 2, 2}});
    shuffled<int> places([] {
        std::vector<int> kinds(position_kinds);
        for (int k = 0; k < position_kinds; ++k) kinds[static_cast<std::size_t>(k)] = k;
        return kinds;
    }());
    std::vector<problem> problems;
    while (problems.size() < count) {
        const auto [batch, h, kv] = heads.next(random);
        problem p{batch, h, kv, queries.next(random), keys.next(random), key_dims.next(random), value_dims.next(random)};
        if (p.queries * p.keys * p.batch * p.heads > 30'000) p.batch = 1;
        if (p.queries * p.keys * p.batch * p.heads > 60'000) p.heads = p.kv_heads = 1;
        p.positions = position_kind(places.next(random), p.batch, p.queries, p.keys);
        problems.push_back(p);
    }
    return problems;
}

/// The problem, or the nearest simpler one that the operator supports.
inline problem adapted(const attention_case& c, problem p) {
    if (!c.supports(p)) p.positions = {.first_query = p.positions.first_query[0], .first_key = p.positions.first_key[0]};
    if (!c.supports(p)) p.positions = top_left();
    if (!c.supports(p)) p.kv_heads = p.heads;
    if (!c.supports(p)) p.keys = p.queries;
    if (!c.supports(p)) p.value_dim = p.key_dim;
    return p;
}

/// Calls f(case, problem) for every case and every sampled problem that it supports.
template <class F>
void for_each_case(const std::vector<problem>& problems, F&& f) {
    for (const auto& c : all_cases())
        for (const auto& p : problems)
            if (const auto fitting = adapted(c, p); c.supports(fitting)) f(c, fitting);
}

/// The tensors of one call.
template <Scalar T>
struct given {
    tensor<T> queries, keys, values;
    attn::positions positions = top_left();

    operator inputs<T>() const { return {queries, keys, values, positions}; }
};

template <Scalar T>
given<T> random_given(const problem& p, unsigned seed = 1) {
    const auto s = p.shapes();
    return {random_tensor<T>(s.queries, seed), random_tensor<T>(s.keys, seed + 1), random_tensor<T>(s.values, seed + 2), p.positions};
}

} // namespace attn::testing
