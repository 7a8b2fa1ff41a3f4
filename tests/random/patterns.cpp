#include "others.hpp"
#include "pattern_checks.hpp"
#include "random_pattern.hpp"

namespace attn::fuzz {

namespace {

/// What a pattern says of the whole, and of some boxes in it.
std::string offences(draw& random, const auto& p, const sizes& s) {
    static constexpr index_t tiles[] = {1, 4, 16, 17, 64}, grains[] = {1, 3, 8};
    const auto first_query = s.first_query[0], first_key = s.first_key[0];
    const pattern_checks::problem all{first_query, s.queries, first_key, s.keys, random.one_of(tiles), random.one_of(grains)};
    if (const auto count = pattern_checks::schedule_offences(p, all); count > 0) return std::to_string(count) + " offences of the schedule";
    if (s.queries * s.keys == 0) return {};
    pattern_checks::verdict found;
    for (int k = 0; k < 20; ++k) {
        const auto step = random.number(1, 4), row = random.number(0, s.queries - 1), column = random.number(0, s.keys - 1);
        const auto by = random.one_in(2) ? step : 1;
        const query_tile rows{first_query + row, std::min<index_t>((s.queries - row + by - 1) / by, random.number(1, 40)), by};
        const key_run run{first_key + column, std::min<index_t>((s.keys - column + step - 1) / step, random.number(1, 20)), step, false};
        pattern_checks::check_box(p, rows, run, found);
    }
    return found.wrong > 0 ? std::to_string(found.wrong) + " boxes of 20 differ" : std::string();
}

} // namespace

outcome check_pattern(draw& random) {
    auto s = draw_sizes(random);
    s.batch = s.heads = s.kv_heads = 1;
    s.queries = std::min<index_t>(s.queries, 90);
    s.keys = std::min<index_t>(s.keys, 200);
    draw_positions(random, s);
    s.first_query.resize(1);
    s.first_key.resize(1);
    const auto tree = draw_pattern(random, s), stepped = draw_stepped_pattern(random, s), other = draw_stepped_pattern(random, s);
    outcome result{describe(s) + "; tree " + tree->name() + "; stepped " + stepped->name() + "; other " + other->name(), {}};
    const random_pattern a{tree.get()};
    const random_stepped_pattern b{stepped.get()}, c{other.get()};
    const auto check = [&] {
        const auto kind = random.number(0, 3);
        if (kind == 0) result.problem = offences(random, attn::at(a, 0, 0), s);
        if (kind == 1) result.problem = offences(random, attn::at(b, 0, 0), s);
        if (kind == 2) result.problem = offences(random, attn::at(a | b, 0, 0), s);
        if (kind == 3) result.problem = offences(random, attn::at(b | c, 0, 0), s);
    };
    attn::detail::try_catch<std::exception>(check, [&](const std::exception& e) { result.problem = threw(e); });
    return result;
}

} // namespace attn::fuzz
