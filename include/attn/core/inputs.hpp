// What an attention operator reads and writes in one call.
#pragma once

#include "borrowed.hpp"
#include "position.hpp"
#include "stored_view.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// One number for all batch entries, or one for each.
class per_batch {
public:
    /// 0 for all, as long as nobody gives a number.
    constexpr per_batch() = default;
    /// One number for all.
    constexpr per_batch(index_t same) : same_(same), given_(true) {}
    /// One number for each: a view of a vector, an array, a span or anything like them.
    template <class R>
        requires(std::convertible_to<R, std::span<const index_t>> && !detail::Temporary<R>)
    constexpr per_batch(R&& each) : shared_(false), given_(true), each_(std::forward<R>(each)) {}
    /// A temporary would be gone before it is read: name the numbers first.
    template <detail::Temporary R>
    per_batch(R&& numbers) = delete;

    constexpr index_t operator[](index_t batch) const noexcept { return shared_ ? same_ : each_[static_cast<std::size_t>(batch)]; }
    /// The number of a batch entry; where numbers are given one by one, they are repeated, image after image.
    constexpr index_t repeated(index_t batch) const noexcept { return shared_ || each_.empty() ? same_ : (*this)[batch % count()]; }
    /// The number of one batch entry, for a call of that entry alone.
    constexpr per_batch of_entry(index_t batch) const noexcept { return given_ ? per_batch(repeated(batch)) : per_batch(); }
    /// Whether somebody gave a number.
    constexpr bool given() const noexcept { return given_; }
    /// Count of numbers given one by one; 0 if all entries share one.
    constexpr index_t count() const noexcept { return static_cast<index_t>(each_.size()); }
    /// Whether there is a number for each of so many batch entries.
    constexpr bool fits(index_t batch) const noexcept { return shared_ || count() == batch; }
    /// Whether one number is for all entries.
    constexpr bool shared() const noexcept { return shared_; }
    /// The numbers given one by one; none if all entries share one.
    constexpr std::span<const index_t> each() const noexcept { return each_; }

private:
    index_t same_ = 0;
    bool shared_ = true;
    bool given_ = false;
    std::span<const index_t> each_;
};

/// Where the rows of a call lie: query row r is at position first_query + r, key row r at first_key + r. Patterns and score
/// functions see these absolute positions, so that they stay right in a chunk of a sequence and beside a cache of keys.
/// Rows lie between -farthest_position and farthest_position, 2^60 on either side; others are refused.
/// Where nothing is given they begin at 0, and a call is taken to have all keys that there are; then n and m must be the same if the
/// pattern or the score function compares positions.
struct positions {
    per_batch first_query = {};
    per_batch first_key = {};

    /// Whether any position is given.
    constexpr bool given() const noexcept { return first_query.given() || first_key.given(); }
    /// The positions of one batch entry, for a call of that entry alone.
    constexpr positions of_entry(index_t batch) const noexcept { return {first_query.of_entry(batch), first_key.of_entry(batch)}; }
};

/// Query row 0 beside key row 0, which nobody assumes when n != m and it matters.
constexpr positions top_left() { return {.first_query = 0, .first_key = 0}; }

/// The last query beside the last key, as when the keys are a cache that ends with the queries' own.
constexpr positions bottom_right(index_t queries, index_t keys) { return {.first_query = keys - queries}; }

/// What attention reads: queries (batch, heads, n, d_k), keys (batch, kv_heads, m, d_k), values (batch, kv_heads, m, d_v) and their
/// positions. Where T is float, each may be stored in 16 bits.
/// kv_heads divides heads; query head h reads key and value head h / (heads / kv_heads).
template <class T>
struct inputs {
    stored_view<const T> queries;
    stored_view<const T> keys;
    stored_view<const T> values;
    attn::positions positions = {};

    /// What a call of a part of the queries, and of one of keys and values, reads; the positions stay those of the whole.
    constexpr inputs slice(const tensor_part& of_queries, const tensor_part& of_keys) const noexcept {
        return {queries.slice(of_queries), keys.slice(of_keys), values.slice(of_keys), positions};
    }
};

/// The shapes of a call: all that output shapes, workspace sizes and costs depend on.
struct input_shapes {
    shape queries, keys, values;
};

/// The shapes of a call's inputs.
template <class T>
input_shapes shapes_of(const inputs<T>& in) {
    return {in.queries.shape(), in.keys.shape(), in.values.shape()};
}

/// What attention writes: values (batch, heads, n, d_v), which where T is float may be stored in 16 bits, rounded to the nearest; and, if
/// its data is not null, log_sum_exp (batch, heads, n, 1): the natural logarithm of each row's softmax denominator, its sink included.
template <class T>
struct outputs {
    stored_view<T> values;
    tensor_view<T> log_sum_exp = {};

    /// What a call of a part of the queries writes.
    constexpr outputs slice(const tensor_part& part) const noexcept { return {values.slice(part), log_sum_exp.slice(part)}; }
};

namespace detail {

/// What a call writes: outputs, or a tensor, or a view, of its values alone. One that nobody can write to is refused in one sentence.
template <class T>
class call_outputs : public outputs<T> {
public:
    constexpr call_outputs(const outputs<T>& out) : outputs<T>(out) {}
    template <class V>
        requires(std::convertible_to<V, stored_view<T>> || requires(const V& v) { v.data(), v.shape(); })
    constexpr call_outputs(V&& to_values, const tensor_view<T>& to_log_sum_exp = {})
        : outputs<T>{view_of(std::forward<V>(to_values)), to_log_sum_exp} {}

private:
    template <class V>
    static constexpr stored_view<T> view_of(V&& values) {
        constexpr bool writable = std::convertible_to<V, stored_view<T>>;
        static_assert(writable,
                      "attn: a result goes to a tensor, or a view, that is not const, of the type of the call's numbers or of 16 bits");
        if constexpr (writable) return std::forward<V>(values);
        else return {};
    }
};
/// What a call writes, of T that is known from other arguments.
template <class T>
using written = std::type_identity_t<call_outputs<T>>;

} // namespace detail

} // namespace attn
