// Unions of patterns that differ in step run as disjoint passes, each with the query tiles of its own step; and a pattern of heads that are
// computed together.
#pragma once

#include "schedule.hpp"

#include <numeric>
#include <tuple>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// One batch entry of a pattern for all its heads together: a key is seen if any head sees it, and ranges are all visible if they are to
/// all.
template <Pattern P>
struct over_heads {
    const P& pattern;
    index_t batch, heads;

    constexpr visibility visible(const position_range& i, const position_range& j) const {
        bool all = heads > 0, none = true;
        for (index_t c = 0; c < patterns(); ++c) {
            const visibility seen = at(pattern, batch, c).visible(i, j);
            all = all && seen.is_all();
            none = none && seen.is_none();
        }
        return {all, none};
    }
    constexpr bool visible(index_t i, index_t j) const {
        for (index_t c = 0; c < patterns(); ++c)
            if (bool(at(pattern, batch, c).visible(i, j))) return true;
        return false;
    }
    /// The step that all heads promise.
    constexpr index_t step() const {
        index_t common = 0;
        for (index_t c = 0; c < patterns(); ++c) common = std::gcd(common, step_of(at(pattern, batch, c)));
        return std::max<index_t>(common, 1);
    }

private:
    /// How many different patterns the heads have at most.
    constexpr index_t patterns() const { return attn::heads_alike(pattern) ? std::min<index_t>(heads, 1) : heads; }
};

/// A union taken apart: the terms that promise no step, joined as they were written (`hidden` if there is none), and those that do.
template <class Stepless, class... Stepped>
struct union_terms {
    Stepless stepless;
    std::tuple<Stepped...> stepped;
};
template <class Stepless, class... Stepped>
union_terms(Stepless, std::tuple<Stepped...>) -> union_terms<Stepless, Stepped...>;

struct hidden {
    constexpr bool visible(auto, auto) const { return false; }
};

template <class A, class B>
constexpr auto either_term(const A& a, const B& b) {
    if constexpr (std::same_as<A, hidden>) return b;
    else if constexpr (std::same_as<B, hidden>) return a;
    else return pattern::either<A, B>{a, b};
}

template <class A, class B>
constexpr auto both_term(const A& a, const B& b) {
    if constexpr (std::same_as<A, hidden> || std::same_as<B, hidden>) return hidden{};
    else return pattern::both<A, B>{a, b};
}

template <class A, class... B>
constexpr auto both_each(const A& a, const std::tuple<B...>& terms) {
    if constexpr (std::same_as<A, hidden>) return std::tuple<>{};
    else return std::apply([&](const B&... b) { return std::tuple<pattern::both<A, B>...>(pattern::both<A, B>{a, b}...); }, terms);
}

template <class P>
constexpr auto terms_of(const P& p) {
    if constexpr (HasStep<P>) return union_terms<hidden, P>{{}, {p}};
    else return union_terms<P>{p, {}};
}
template <class A, class B, bool is_union>
constexpr auto terms_of(const pattern::combined<A, B, is_union>& p) {
    const auto a = terms_of(p.a);
    const auto b = terms_of(p.b);
    if constexpr (is_union) {
        return union_terms{either_term(a.stepless, b.stepless), std::tuple_cat(a.stepped, b.stepped)};
    } else {
        const auto cross = std::apply([&](const auto&... term) { return std::tuple_cat(both_each(term, b.stepped)...); }, a.stepped);
        return union_terms{both_term(a.stepless, b.stepless),
                           std::tuple_cat(both_each(a.stepless, b.stepped), both_each(b.stepless, a.stepped), cross)};
    }
}

constexpr bool sees_anything(const auto& p, const position_range& queries, const position_range& keys) {
    return !visibility(p.visible(queries, keys)).is_none();
}

template <class Earlier, class F>
constexpr void passes_after(const Earlier&, const position_range&, const position_range&, F&) {}

template <class Earlier, class F, class P, class... Later>
constexpr void passes_after(const Earlier& earlier, const position_range& queries, const position_range& keys, F& body, const P& p,
                            const Later&... later) {
    if (sees_anything(p, queries, keys)) {
        if constexpr (std::same_as<Earlier, hidden>) body(p, step_of(p));
        else body(pattern::both<P, pattern::inverse<Earlier>>{p, {earlier}}, step_of(p));
    }
    passes_after(either_term(earlier, p), queries, keys, body, later...);
}

} // namespace detail

/// The most passes that a pattern can need: 1 unless it is a union of terms with steps.
template <Pattern P>
inline constexpr index_t max_passes = [] {
    using terms = decltype(detail::terms_of(attn::at(std::declval<const P&>(), 0, 0)));
    constexpr auto stepped = std::tuple_size_v<decltype(terms::stepped)>;
    return static_cast<index_t>(std::max<std::size_t>(1, stepped + !std::same_as<decltype(terms::stepless), detail::hidden>));
}();

/// Calls body(pass, step) for patterns that are disjoint and together are p, on `queries` queries from first_query and `keys` keys
/// from first_key. The tiles of a pass have its step (tile_at, for_each_run). Intersections are distributed over unions; terms
/// without a step are one pass, the first, each term with one is another, less those before it: the strided keys of
/// causal{} & (local{w} | strided{s}) leave out what the window has seen. A union whose terms all have the same step is one pass. How a
/// pattern falls into passes depends on the pattern alone, so that a row's keys are added up in the same order in any call; those that
/// see nothing here are skipped, but there is always one.
template <Pattern P, class F>
constexpr void for_each_pass(const P& p, index_t first_query, index_t queries, index_t first_key, index_t keys, F&& body) {
    if constexpr (max_passes<P> == 1) {
        body(p, step_of(p));
    } else {
        if (queries <= 0 || keys <= 0) return void(body(p, index_t{1}));
        auto terms = detail::terms_of(p);
        constexpr bool has_stepless = !std::same_as<decltype(terms.stepless), detail::hidden>;
        const bool same = std::apply([](const auto& a, const auto&... b) { return ((step_of(b) == step_of(a)) && ...); }, terms.stepped);
        if (same && (!has_stepless || step_of(std::get<0>(terms.stepped)) == 1)) return void(body(p, step_of(std::get<0>(terms.stepped))));
        const position_range i(first_query, first_query + queries - 1, 1), j(first_key, first_key + keys - 1, 1);
        bool any = false;
        const auto visit = [&](const auto& pass, index_t step) {
            any = true;
            body(pass, step);
        };
        if (detail::sees_anything(terms.stepless, i, j)) visit(terms.stepless, index_t{1});
        std::apply([&](const auto&... term) { detail::passes_after(terms.stepless, i, j, visit, term...); }, terms.stepped);
        if (!any) body(p, index_t{1});
    }
}

/// The pairs of a pattern (after `at`): how many are visible, and how many its schedule visits with tiles of `tile` queries (and a
/// unit, see tile_at) and runs of `grain` keys. Full runs are counted by multiplication, partial ones pair by pair. Throws attention_error
/// if the pattern is wrong.
constexpr pair_count visited_pairs(const Pattern auto& p, index_t first_query, index_t queries, index_t first_key, index_t keys,
                                   index_t tile, index_t grain, index_t unit = 0) {
    attn::check(p, pattern_context{.operation = "visited_pairs",
                                   .first_query = first_query,
                                   .end_query = first_query + queries,
                                   .first_key = first_key,
                                   .end_key = first_key + keys});
    pair_count pairs;
    for_each_pass(p, first_query, queries, first_key, keys, [&](const auto& pass, index_t step) {
        for (index_t t = 0; t < tile_count(queries, tile, step); ++t) {
            const auto rows = tile_at(t, first_query, queries, tile, step, unit);
            for_each_run(pass, rows, first_key, keys, grain, [&](const key_run& run) {
                pairs.visited += rows.count * run.count;
                if (run.full) {
                    pairs.visible += rows.count * run.count;
                    return;
                }
                for (index_t i = 0; i < rows.count; ++i)
                    for (index_t j = 0; j < run.count; ++j)
                        pairs.visible += bool(pass.visible(rows.first + i * step, run.first + j * step));
            });
        }
    });
    return pairs;
}

} // namespace attn
