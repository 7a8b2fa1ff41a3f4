// T5's bias: a learned number for each head and bucket of distances.
#pragma once

#include "../core/tensor.hpp"
#include "../simd/elementary.hpp"
#include "score_function.hpp"

#include <algorithm>
#include <memory>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// How T5 puts distances into buckets: each small distance has its own, larger ones share logarithmically wider ones, and all from
/// max_distance on share the last.
struct bucket_rule {
    index_t buckets = 32;
    index_t max_distance = 128;
    /// Half of the buckets are for keys before the query, half for keys behind it; else keys behind it count as 0.
    bool bidirectional = true;

    /// How many of the buckets are for one direction.
    constexpr index_t of_a_direction() const noexcept { return bidirectional ? buckets / 2 : buckets; }
    /// The bucket of a key `distance` = j - i behind its query:
    ///     |distance|                                                                   if it is below e = half the direction's buckets b
    ///     min(b - 1, e + floor(log(|distance| / e) / log(max_distance / e) (b - e)))   otherwise
    /// and, in both directions, b more for keys behind the query. Rounds as the original does, in float.
    /// Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", and its code.
    index_t operator()(index_t distance) const {
        const auto of_one = of_a_direction(), exact = of_one / 2;
        const auto offset = bidirectional && distance > 0 ? of_one : 0;
        const auto away = bidirectional ? abs(distance) : std::max<index_t>(0, -distance);
        if (away < exact) return offset + away;
        const auto ratio = [&](index_t x) { return simd::log(static_cast<double>(x) / static_cast<double>(exact)); };
        const auto share = static_cast<float>(ratio(away)) / static_cast<float>(ratio(max_distance)) * static_cast<float>(of_one - exact);
        return offset + std::min(of_one - 1, exact + static_cast<index_t>(share));
    }
};

namespace detail {

/// The bias of one head by how far the query is behind the key, i - j; what is farther than `reach` counts as that far.
template <Scalar T>
struct distance_bias {
    const T* of_zero; // of i = j: for i - j = -reach .. reach
    index_t reach;

    template <ScoreNumber S>
    constexpr S operator()(S score, index_t query, index_t key) const {
        return plus_bias(score, static_cast<S>(of_zero[std::clamp(query - key, -reach, reach)]));
    }
    void bias_row(index_t first, index_t step, index_t count, index_t key, T* to) const {
        const auto distance = first - key;
        if (step != 1) {
            for (index_t q = 0; q < count; ++q) to[q] = of_zero[std::clamp(distance + q * step, -reach, reach)];
            return;
        }
        const auto begin = std::clamp<index_t>(-reach - distance, 0, count), end = std::clamp(reach - distance, begin, count);
        std::fill_n(to, begin, of_zero[-reach]);
        std::copy_n(of_zero + distance + begin, end - begin, to + begin);
        std::fill_n(to + end, count - end, of_zero[reach]);
    }
};

} // namespace detail

/// Relative position buckets: score + table[h, bucket(j - i)], as T5 has it.
/// table: (1, heads or 1, 1, buckets), any strides; of the checkpoint's embedding (buckets, heads) that is the view
///     tensor_view(data, shape{1, heads, 1, buckets}, strides{0, 1, 0, heads})
/// It is copied once, by distance, into memory that copies of the score function share: 2 max_distance + 1 numbers a head. -infinity hides.
/// Throws shape_error if the table has another shape or holds no memory, argument_error for fewer buckets than a rule needs (4 in both
/// directions, 2 in one), or a max_distance that is not above half of a direction's. Raffel et al. 2020, see bucket_rule.
template <Scalar T>
class relative_buckets {
public:
    /// `rule.buckets` is the table's.
    explicit relative_buckets(const detail::read_view<T>& table, bucket_rule rule = {})
        : rule_(rule), heads_(table.shape().heads), reach_(rule.max_distance) {
        const auto& s = table.shape();
        detail::check_view(name, "table", table);
        rule_.buckets = rule.buckets = s.channels;
        if (s.batch != 1 || s.tokens != 1)
            detail::raise(shape_error(name, "table", "has shape ", s, ", but (1, heads, 1, buckets) is needed"));
        if (s.channels < (rule.bidirectional ? 4 : 2) || (rule.bidirectional && s.channels % 2 != 0))
            detail::raise(shape_error(name, "table", "has shape ", s, ": ", s.channels, " buckets are too few, or odd for two directions"));
        if (rule.max_distance <= rule.of_a_direction() / 2 || rule.max_distance > farthest)
            detail::raise(argument_error(name, "max_distance", "is ", rule.max_distance, ", but must be above ", rule.of_a_direction() / 2,
                                         " and at most 2^24"));
        std::vector<T> numbers;
        numbers.reserve(static_cast<std::size_t>(heads_ * width()));
        for (index_t h = 0; h < heads_; ++h)
            for (index_t behind = -reach_; behind <= reach_; ++behind) numbers.push_back(table(0, h, 0, rule(-behind)));
        by_distance_ = std::make_shared<const std::vector<T>>(std::move(numbers));
    }

    detail::distance_bias<T> at(index_t, index_t head) const {
        return {by_distance_->empty() ? nullptr : by_distance_->data() + std::min(head, heads_ - 1) * width() + reach_, reach_};
    }
    void check(const score_context& context) const {
        context.require_broadcast({1, heads_, 1, 1}, [&] { return std::string(name) + " of " + std::to_string(heads_) + " heads"; });
    }

    /// The rule by which distances come to the table's buckets.
    const bucket_rule& rule() const noexcept { return rule_; }

    /// The gradient of the table, in its shape: summed over the batch, and the heads that share it.
    template <class U>
    struct gradients {
        tensor_view<U> table = {}; ///< not wanted without memory
    };
    template <Scalar U>
    void check_gradients(const gradients<U>& wanted, const auto& check) const {
        check("wanted.score.table", wanted.table, shape{1, heads_, 1, rule_.buckets});
    }
    /// Distances of one bucket lie side by side: they are added in double before they come to the table.
    template <Scalar U>
    void find_gradients(const gradients<U>& wanted, const auto& sums) const {
        const auto& table = wanted.table;
        if (!table.data()) return;
        sums.clear(table);
        double sum = 0;
        index_t last_head = 0, last_bucket = -1;
        const auto write = [&] {
            if (last_bucket >= 0) table(0, last_head, 0, last_bucket) += static_cast<U>(sum);
        };
        sums.for_each_distance([&](index_t, index_t h, index_t distance, U of_distance) {
            const auto head = std::min(h, heads_ - 1), bucket = rule_(std::clamp(distance, -reach_, reach_));
            if (head != last_head || bucket != last_bucket) {
                write();
                sum = 0;
                last_head = head;
                last_bucket = bucket;
            }
            sum += static_cast<double>(of_distance);
        });
        write();
    }

private:
    static constexpr std::string_view name = "relative_buckets";
    static constexpr index_t farthest = index_t{1} << 24;

    index_t width() const { return 2 * reach_ + 1; }

    bucket_rule rule_;
    index_t heads_, reach_;
    std::shared_ptr<const std::vector<T>> by_distance_;
};

/// Deduces relative_buckets of their table's scalar type.
template <TensorLike V>
relative_buckets(const V&) -> relative_buckets<detail::scalar_t<V>>;
/// Deduces relative_buckets of their table's scalar type, with a rule.
template <TensorLike V>
relative_buckets(const V&, bucket_rule) -> relative_buckets<detail::scalar_t<V>>;

} // namespace attn
