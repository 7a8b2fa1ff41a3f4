// Neighbourhood attention: windows over a grid of one, two or three dimensions.
#pragma once

#include "bit_table.hpp"

#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// What a neighbourhood is, along each of D axes, the last of which is that of neighbouring tokens.
template <std::size_t D>
struct neighborhood_rule {
    std::array<index_t, D> grid;              ///< tokens along each axis
    std::array<index_t, D> window;            ///< keys that a query sees along each axis
    std::array<index_t, D> dilation = ones(); ///< from one of them to the next
    std::array<bool, D> causal = {};          ///< only keys up to the query's own place
    std::array<index_t, D> tile = ones();     ///< how tokens lie: tile after tile, each row-major; ones: the whole grid row-major

private:
    static constexpr std::array<index_t, D> ones() {
        std::array<index_t, D> all;
        all.fill(1);
        return all;
    }
};

/// Neighbourhood attention: a query sees the window of keys around it along every axis of a grid, moved inward at the edges so that it
/// always has as many. Along an axis of L tokens, a query at place x with dilation r sees places of its own residue class modulo r, of
/// which it is number t = floor(x / r) of L_g: those numbered
///     s .. s + window - 1,      s = clamp(t - floor(window / 2), 0, L_g - window);      causal: t - window + 1 .. t, as far as they exist
/// Positions are 0 .. product of the grid - 1, others are refused, and tokens lie row-major, or in tiles (a grid of 56 x 56 in tiles of 4 x
/// 4, as window_partition lays them out), which costs fewer visited pairs: a register of queries then lies close together along both axes.
/// O(n product of the windows) pairs. What it needs of each token is found once, in O(n) memory that copies of the pattern share.
/// Throws argument_error if a number is below 1, a dilated window is longer than its axis, or a tile does not divide the grid.
/// Hassani et al. 2023, "Neighborhood Attention Transformer"; Hassani and Shi 2022, "Dilated Neighborhood Attention Transformer"; NATTEN.
template <std::size_t D>
    requires(1 <= D && D <= 3)
class neighborhood {
public:
    /// `rule` says what the grid and the windows are.
    explicit neighborhood(const neighborhood_rule<D>& rule) : rule_(rule) {
        check_rule();
        auto made = std::make_shared<std::array<places, D>>();
        for (index_t t = 0; t < tokens(); ++t) {
            const auto at = places_of(t);
            for (std::size_t a = 0; a < D; ++a) (*made)[a].add(rule_, a, at[a]);
        }
        for (auto& axis : *made) // what lanes read behind the last token
            for (auto* numbers : {&axis.first, &axis.last}) numbers->resize(numbers->size() + 64);
        places_ = made;
    }

    /// The visibility of two tokens, of two ranges of them, and of lanes of queries with one key: see Pattern.
    bool visible(index_t i, index_t j) const {
        for (const auto& axis : *places_)
            if (axis.place[index(j)] < axis.first[index(i)] || axis.place[index(j)] > axis.last[index(i)]) return false;
        return true;
    }
    visibility visible(const position_range& i, const position_range& j) const {
        const auto q = places_of(i), k = places_of(j);
        visibility seen = visibility::all;
        for (std::size_t a = 0; a < D; ++a) {
            const auto step = rule_.dilation[a], window = rule_.window[a] * step;
            const auto before = (rule_.causal[a] ? rule_.window[a] - 1 : rule_.window[a] / 2) * step;
            if (rule_.causal[a]) seen = seen && k[a] <= q[a] && q[a] - k[a] <= before;
            else
                seen =
                    seen && (q[a] - k[a] <= before || k[a] >= rule_.grid[a] - window) && (k[a] < window || k[a] - q[a] < window - before);
            if (step > 1) seen = seen && floor_mod(q[a] - k[a], step) == 0;
        }
        return seen;
    }
    auto visible(const QueryLanes auto& i, index_t j) const {
        if (i.step != 1) return detail::mask_of_each(i, [&](index_t query) { return visible(query, j); });
        auto bits = ~std::uint64_t{0};
        for (const auto& axis : *places_) bits &= axis.queries_that_see(axis.place[index(j)], i.first);
        return detail::mask_of(i, bits);
    }
    /// The pattern on one box of queries: along each axis many keys have the same place, whose queries are found once.
    class of_box {
    public:
        /// A key costs a load for each axis, which a question about ranges of keys does not save.
        static constexpr bool is_asked_by_key = true;

        /// Refers to a pattern that outlives it.
        explicit of_box(const neighborhood& pattern) : pattern_(&pattern) {}
        /// What the pattern says.
        auto visible(const auto& i, const auto& j) const { return pattern_->visible(i, j); }
        /// The mask of lanes of queries that see one key; for queries side by side, those of a place are found once.
        auto visible(const QueryLanes auto& i, index_t j) const {
            if (i.step != 1) return pattern_->visible(i, j);
            if (i.first != first_) {
                first_ = i.first;
                for (auto& axis : place_) axis.fill(-1);
            }
            auto bits = ~std::uint64_t{0};
            for (std::size_t a = 0; a < D; ++a) {
                const auto& axis = (*pattern_->places_)[a];
                const auto place = axis.place[index(j)];
                const auto slot = index(place) % slot_count;
                if (place_[a][slot] != place) {
                    place_[a][slot] = place;
                    queries_[a][slot] = axis.queries_that_see(place, i.first);
                }
                bits &= queries_[a][slot];
            }
            return detail::mask_of(i, bits);
        }

    private:
        static constexpr std::size_t slot_count = 64;
        const neighborhood* pattern_;
        mutable index_t first_ = -1;                                             // of the queries
        mutable std::array<std::array<std::int32_t, slot_count>, D> place_ = {}; // -1: none
        mutable std::array<std::array<std::uint64_t, slot_count>, D> queries_ = {};
    };
    friend of_box narrowed(const neighborhood& p, const position_range&, const position_range&) { return of_box(p); }

    /// Along every axis queries and keys differ by multiples of the dilation.
    index_t step() const {
        index_t common = 0;
        for (std::size_t a = 0; a < D; ++a) common = std::gcd(common, rule_.dilation[a] * stride(a));
        return is_tiled() ? 1 : common;
    }
    void check(const pattern_context& context) const {
        context.require_inside(0, tokens(), 0, tokens(),
                               [&] { return "neighborhood{" + text_of(rule_.grid) + ", " + text_of(rule_.window) + "}"; });
    }

private:
    /// Where each token lies along one axis, and the first and the last key that it sees there. Residue classes lie one after the other, so
    /// that what a query sees is one interval.
    struct places {
        std::vector<std::int32_t> place, first, last;

        void add(const neighborhood_rule<D>& rule, std::size_t a, index_t x) {
            const auto step = rule.dilation[a], length = rule.grid[a], window = rule.window[a];
            const auto residue = x % step, number = x / step, count = (length - residue + step - 1) / step;
            const auto start =
                rule.causal[a] ? std::max<index_t>(0, number - window + 1) : std::clamp<index_t>(number - window / 2, 0, count - window);
            const auto end = rule.causal[a] ? number : start + window - 1, offset = residue * length;
            place.push_back(static_cast<std::int32_t>(offset + number));
            first.push_back(static_cast<std::int32_t>(offset + start));
            last.push_back(static_cast<std::int32_t>(offset + end));
        }
        /// One bit for each of 64 queries from `query` on. Nothing branches, so that the compiler makes registers of it; a product gathers
        /// eight bytes of 0 or 1, the first the lowest, bit 8 l to bit 56 + l.
        std::uint64_t queries_that_see(std::int32_t key, index_t query) const {
            constexpr std::size_t size = 64;
            std::array<std::uint8_t, size> seen;
            const auto *const from = first.data() + query, *const to = last.data() + query;
            for (std::size_t l = 0; l < size; ++l) seen[l] = static_cast<std::uint8_t>((from[l] <= key) & (key <= to[l]));
            std::uint64_t bits = 0;
            for (std::size_t l = 0; l < size; l += 8) {
                std::uint64_t eight;
                std::memcpy(&eight, seen.data() + l, 8);
                if constexpr (std::endian::native == std::endian::big) eight = __builtin_bswap64(eight);
                bits |= (eight * 0x0102040810204080u >> 56) << l;
            }
            return bits;
        }
    };

    static constexpr std::size_t index(index_t i) { return static_cast<std::size_t>(i); }
    static std::string text_of(const std::array<index_t, D>& numbers) {
        std::string text;
        for (const auto number : numbers) text.append(text.empty() ? "" : " x ").append(std::to_string(number));
        return text;
    }
    index_t tokens() const {
        return std::apply([](auto... extents) { return detail::product(extents...); }, rule_.grid);
    }
    /// Tokens from one to the next along an axis.
    index_t stride(std::size_t a) const {
        index_t s = 1;
        for (++a; a < D; ++a) s *= rule_.grid[a];
        return s;
    }
    bool is_tiled() const {
        return std::ranges::any_of(rule_.tile, [](index_t extent) { return extent != 1; });
    }
    /// The coordinates of a token, or the ranges of those of some.
    template <class Index>
    std::array<Index, D> places_of(const Index& token) const {
        auto at = [&]<std::size_t... a>(std::index_sequence<a...>) {
            return std::array<Index, D>{(static_cast<void>(a), token)...};
        }(std::make_index_sequence<D>());
        if (!is_tiled()) {
            auto rest = token;
            for (std::size_t a = D; a-- > 1; rest = floor_div(rest, rule_.grid[a])) at[a] = floor_mod(rest, rule_.grid[a]);
            at[0] = rest;
            return at;
        }
        const auto of_tile = std::apply([](auto... extents) { return detail::product(extents...); }, rule_.tile);
        auto tile = floor_div(token, of_tile), inside = floor_mod(token, of_tile);
        for (std::size_t a = D; a-- > 0;) {
            const auto across = rule_.grid[a] / rule_.tile[a];
            at[a] = floor_mod(tile, across) * rule_.tile[a] + floor_mod(inside, rule_.tile[a]);
            tile = floor_div(tile, across);
            inside = floor_div(inside, rule_.tile[a]);
        }
        return at;
    }
    void check_rule() const {
        const auto refuse = [&](const auto&... problem) {
            detail::raise(argument_error("neighborhood", "rule", "of the grid ", text_of(rule_.grid), " and the window ",
                                         text_of(rule_.window), " ", problem...));
        };
        for (std::size_t a = 0; a < D; ++a) {
            if (std::min({rule_.grid[a], rule_.window[a], rule_.dilation[a], rule_.tile[a]}) < 1) refuse("has a number below 1");
            if (rule_.grid[a] > largest || rule_.window[a] > rule_.grid[a] / rule_.dilation[a])
                refuse("has a window that is longer than its axis, or an axis beyond 2^24");
            if (rule_.grid[a] % rule_.tile[a] != 0) refuse("has a tile ", text_of(rule_.tile), " that does not divide the grid");
            if (rule_.dilation[a] * rule_.grid[a] > std::numeric_limits<std::int32_t>::max()) refuse("has too large a dilation");
        }
        if (tokens() > largest) refuse("has more than 2^24 tokens");
    }
    static constexpr index_t largest = index_t{1} << 24;

    neighborhood_rule<D> rule_;
    std::shared_ptr<const std::array<places, D>> places_;
};

/// Deduces a neighborhood of as many dimensions as its rule has.
template <std::size_t D>
neighborhood(const neighborhood_rule<D>&) -> neighborhood<D>;

} // namespace attn::pattern
