// The sizes of a problem, where its tokens lie, and the numbers in them.
#pragma once

#include "draw.hpp"

#include <attn/core/inputs.hpp>

#include <string>

namespace attn::fuzz {

/// The positions that are allowed lie within this of 0.
inline constexpr index_t farthest = index_t{1} << 60;

struct sizes {
    index_t batch = 1, heads = 1, kv_heads = 1, queries = 1, keys = 1, key_dim = 1, value_dim = 1;
    std::vector<index_t> first_query, first_key; ///< one for all batch entries, or one for each

    attn::positions positions() const {
        const auto each = [](const std::vector<index_t>& v) { return v.size() == 1 ? per_batch(v[0]) : per_batch(std::span(v)); };
        return {each(first_query), each(first_key)};
    }
    input_shapes shapes() const {
        return {{batch, heads, queries, key_dim}, {batch, kv_heads, keys, key_dim}, {batch, kv_heads, keys, value_dim}};
    }
    double pairs() const { return static_cast<double>(batch * heads) * static_cast<double>(queries * keys); }
    /// The lowest of some positions, and how many positions there are from it to the end of the highest.
    static index_t lowest(const std::vector<index_t>& first) { return *std::ranges::min_element(first); }
    static index_t extent(const std::vector<index_t>& first, index_t count) { return std::ranges::max(first) - lowest(first) + count; }
};

/// As many as `limit` channels of pairs at most, for a definition takes a nanosecond for each, and a microsecond where nothing is optimised; large
/// problems come now and then.
sizes draw_sizes(draw&);
/// The same with positions that may differ by batch entry, or be far.
void draw_positions(draw&, sizes&);

std::string describe(const sizes&);

/// How the numbers of queries and keys are drawn.
enum class numbers {
    usual,   // scores of a few units
    peaked,  // of hundreds
    equal,   // all scores 0
    integers // scores of up to 10^4, exact in the given precision, if the scale is 1
};

/// Queries, keys and values of one call.
template <Scalar T>
struct given {
    tensor<T> queries, keys, values;
    attn::positions positions = {};
    bool exact_scores = false; ///< q . k takes no rounding

    operator inputs<T>() const { return {queries, keys, values, positions}; }
};

/// `positions` are the sizes', which must outlive the result.
template <Scalar T>
given<T> draw_given(draw&, const sizes&, numbers kind);

template <Scalar T>
tensor<T> copy_of(const tensor<T>& from) {
    tensor<T> to(from.shape());
    std::copy_n(from.data(), from.shape().size(), to.data());
    return to;
}
template <Scalar T>
given<T> copy_of(const given<T>& from) {
    return {copy_of(from.queries), copy_of(from.keys), copy_of(from.values), from.positions, from.exact_scores};
}

} // namespace attn::fuzz
