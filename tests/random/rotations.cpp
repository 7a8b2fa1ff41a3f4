// Problems of rotary positions.
#include "bounds.hpp"
#include "draw_layout.hpp"
#include "on_threads.hpp"
#include "others.hpp"

#include <attn/layer/rotary.hpp>

#include <array>

namespace attn::fuzz {

namespace {

rotary_frequencies draw_frequencies(draw& random, index_t channels, std::string& name) {
    const auto factor = random.real(0.5, 20), base = random.real(2, 20000);
    switch (random.number(channels < 4 ? 1 : 0, 3)) {
    case 0:
        name = "ntk";
        return rotary_frequencies::ntk(channels, factor, base);
    case 1:
        name = "interpolated";
        return rotary_frequencies::interpolated(channels, factor, base);
    case 2:
        name = "yarn";
        return rotary_frequencies::yarn(channels, factor, random.number(1, 5000), base);
    default:
        name = "geometric";
        return rotary_frequencies::geometric(channels, base);
    }
}

/// How far a rotation may be from ours in double, which rounds as well: of the table's numbers, two products and a sum.
template <Scalar T>
double rounding(double a, double b, double magnitude) {
    return 8 * unit_of<T> * magnitude * (std::abs(a) + std::abs(b)) + static_cast<double>(std::numeric_limits<T>::min());
}

template <Scalar T>
outcome attempt_rotation(draw& random) {
    const auto channels = 2 * random.number(0, 20), axes = random.number(1, 3), count = random.number(1, 3000);
    const shape s{random.number(0, 3), random.number(1, 4), random.number(0, std::min<index_t>(count, 80)), axes * channels + random.number(0, 9)};
    const auto pairs = random.one_in(2) ? rotary_pairs::interleaved : rotary_pairs::half_split;
    outcome result;
    const auto f = draw_frequencies(random, channels, result.name);
    const auto x = filled<T>(s, [&] { return random.real(-3, 3); });
    // Where tokens lie: counted from one position, from one of each batch entry, or listed.
    const bool listed = axes > 1 || random.one_in(2), shared = random.one_in(2);
    tensor<index_t> places({shared ? 1 : s.batch, 1, s.tokens, axes});
    std::generate_n(places.data(), places.shape().size(), [&] { return random.number(0, count - 1); });
    std::vector<index_t> first(static_cast<std::size_t>(s.batch));
    std::ranges::generate(first, [&] { return random.number(0, count - s.tokens); });
    const auto where = listed ? rotary_positions(places) : shared && s.batch > 0 ? rotary_positions(first[0]) : rotary_positions(per_batch(first));
    result.name += joined(", x ", s, ", ", channels, " channels of ", axes, " axes, ", pairs == rotary_pairs::interleaved ? "interleaved, " : "half split, ",
                          listed ? "listed" : "counted");

    const rotary<T> turns(count, f, pairs);
    const auto expected = rotate(turns, x, where);
    const auto half = channels / 2, all = axes * half;
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t h = 0; h < s.heads; ++h)
            for (index_t i = 0; i < s.tokens; ++i)
                for (index_t c = 0; c < s.channels; ++c) {
                    const auto ours = static_cast<double>(expected(b, h, i, c)), own = static_cast<double>(x(b, h, i, c));
                    auto exact = own, bound = 0.0;
                    if (c < 2 * all) {
                        const auto pair = pairs == rotary_pairs::interleaved ? c / 2 : c % all;
                        const bool right = pairs == rotary_pairs::interleaved ? c % 2 == 1 : c >= all;
                        const auto apart = pairs == rotary_pairs::interleaved ? 1 : all;
                        const auto other = static_cast<double>(x(b, h, i, right ? c - apart : c + apart));
                        const auto at = listed ? places(shared ? 0 : b, 0, i, pair / half) : first[shared ? 0 : static_cast<std::size_t>(b)] + i;
                        const auto angle = static_cast<double>(at) * f.values[static_cast<std::size_t>(pair % half)];
                        exact = f.magnitude * (own * std::cos(angle) + (right ? other : -other) * std::sin(angle));
                        bound = rounding<T>(own, other, f.magnitude);
                    }
                    if (std::abs(ours - exact) <= bound) continue;
                    result.problem = joined("channel ", c, " of token ", i, " is ", ours, ", not ", exact);
                    return result;
                }

    testing::placed<T> other_x(x, draw_layout(random)), out(x, draw_layout(random));
    static thread_pool pool(3);
    rotate(turns, other_x.view(), where, out.view(), pool);
    rotate(turns, other_x.view(), where, other_x.view(), pool);
    if (!out.guards_intact() || !other_x.guards_intact()) result.problem = "wrote beside its output";
    else if (!testing::same_bits(out.copy(), expected)) result.problem = "other bits elsewhere";
    else if (!testing::same_bits(other_x.copy(), expected)) result.problem = "other bits in place";
    return result;
}

} // namespace

outcome check_rotation(draw& random) {
    return in_drawn_numbers(random, [&]<Scalar T>(std::type_identity<T>) { return attempt_rotation<T>(random); });
}

} // namespace attn::fuzz
