#include "random_score.hpp"

#include <cmath>

namespace attn::fuzz {

std::string score_steps::name() const {
    static constexpr std::array names{"cap ", "alibi", "times ", "plus ", "distance ", "logarithm ", "power ", "beyond "};
    std::string text;
    for (const auto& step : each) {
        text.append(text.empty() ? "" : ", ").append(names[static_cast<std::size_t>(step.kind)]);
        if (step.kind == score_kind::beyond) text.append(std::to_string(step.reach)).append(": ");
        if (step.kind != score_kind::alibi) text.append(std::to_string(step.number));
    }
    return "composed_score{" + text + "}";
}

rounded score_steps::operator()(rounded s, index_t head, index_t query, index_t key, double unit) const {
    const auto distance = std::abs(static_cast<double>(query - key));
    for (const auto& step : each) {
        switch (step.kind) {
        case score_kind::cap: {
            // The slope of tanh is at most 1. Its argument is rounded twice, which moves tanh by at most max |x| (1 - tanh(x)^2) < 1/2 of
            // that; tanh of a register is good to a few units, and so is the standard's.
            const auto capped = step.number * std::tanh(s.value / step.number);
            s = {capped, std::min(s.error, 2 * step.number) + 16 * unit * std::min(step.number, std::abs(s.value))};
            break;
        }
        case score_kind::alibi:
        case score_kind::distance: {
            const auto slope = step.kind == score_kind::alibi ? step.slopes[static_cast<std::size_t>(head)] : step.number;
            const auto value = s.value - slope * distance;
            s = {value, s.error + unit * (4 * std::abs(slope) * distance + 2 * std::abs(value))};
            break;
        }
        case score_kind::logarithm:
        case score_kind::power: {
            // A register's logarithm and exponential are good to a few units; the power's exponent is as many times less so as it is large.
            const bool logarithmic = step.kind == score_kind::logarithm;
            const auto exponent = step.rate * std::log(std::max(distance, 1.0));
            const auto size = step.number * (logarithmic ? std::log1p(step.rate * distance) : distance > 0 ? std::exp(exponent) : 0.0);
            const auto error = logarithmic ? 8 * size + 4 * step.number : (8 + 4 * exponent) * size;
            s = {s.value - size, s.error + unit * (error + 2 * std::abs(s.value - size))};
            break;
        }
        case score_kind::times:
            s = {step.number * s.value, std::abs(step.number) * (s.error + 3 * unit * std::abs(s.value))};
            break;
        case score_kind::plus: {
            const bool is_exact = std::abs(s.value) + std::abs(step.number) <= 0.5 / unit && std::nearbyint(s.value) == s.value && std::nearbyint(step.number) == step.number;
            s = {s.value + step.number, s.error + (s.error == 0 && is_exact ? 0 : unit * (2 * std::abs(step.number) + 2 * std::abs(s.value)))};
            break;
        }
        case score_kind::beyond:
            // One number, rounded alike for all keys, which cancels.
            if (distance > static_cast<double>(step.reach)) s = {step.number, 0};
            break;
        }
    }
    return s;
}

score_steps draw_score(draw& random, const sizes& s, double lowest) {
    score_steps steps;
    for (auto count = random.number(1, 3); count > 0; --count) {
        const auto kind = static_cast<score_kind>(random.number(0, 7));
        score_step step{.kind = kind, .number = random.real(-1.5, 1.5)};
        if (kind == score_kind::cap) step.number = random.real(0.5, 40);
        if (kind == score_kind::alibi) {
            step.slopes = s.heads > 0 && random.one_in(2) ? alibi_slopes(s.heads) : std::vector<double>(static_cast<std::size_t>(s.heads));
            if (random.one_in(2)) std::ranges::generate(step.slopes, [&] { return random.real(-0.1, 1); });
        }
        if (kind == score_kind::plus && random.one_in(4)) step.number = random.real(-1000, 1000);
        if (kind == score_kind::plus && random.one_in(4)) { // as masks of padded rows do
            const double whole[] = {-100, 1000, -10'000, 1e6};
            step.number = random.one_of(whole);
        }
        if (kind == score_kind::logarithm || kind == score_kind::power) step.number = random.real(0, 0.5), step.rate = random.real(0.1, 1);
        if (kind == score_kind::distance) step.number = random.real(0, 0.2);
        if (kind == score_kind::beyond) {
            const double hidden[] = {-std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(), lowest / 2, -1e4};
            step.number = random.one_of(hidden);
            step.reach = random.number(0, std::max<index_t>(2, std::max(s.queries, s.keys)));
        }
        steps.each.push_back(step);
        // What follows would make infinity of -infinity, or of the lowest number.
        if (kind == score_kind::beyond) break;
    }
    return steps;
}

template <Scalar T>
drawn_bias<T> draw_bias(draw& random, const sizes& s) {
    constexpr auto infinity = std::numeric_limits<double>::infinity();
    drawn_bias<T> bias{{}, sizes::lowest(s.first_query), sizes::lowest(s.first_key)};
    const shape size{random.one_in(2) ? s.batch : 1, random.one_in(2) ? s.heads : 1,
                     random.one_in(4) ? 1 : sizes::extent(s.first_query, s.queries),
                     random.one_in(10) ? 1 : sizes::extent(s.first_key, s.keys)};
    const auto limit = random.one_in(8) ? 300.0 : 2.0;
    const double hidden = random.one_in(4) ? static_cast<double>(std::numeric_limits<T>::lowest()) : -infinity;
    const index_t rare[] = {1, 2, 8, 1000, 1 << 30};
    const auto hides = random.one_of(rare), hides_row = random.one_in(4) ? index_t{3} : index_t{1} << 30;
    bias.numbers = filled<T>(size, [&] { return random.one_in(hides) && random.one_in(2) ? hidden : random.real(-limit, limit); });
    for (index_t row = 0; row < size.batch * size.heads * size.tokens; ++row)
        if (random.one_in(hides_row)) std::fill_n(bias.numbers.data() + row * size.channels, size.channels, static_cast<T>(hidden));
    return bias;
}

template <Scalar T>
drawn_relative<T> draw_relative(draw& random, const sizes& s) {
    const auto limit = random.one_in(8) ? 100.0 : 2.0, closed = -std::numeric_limits<double>::infinity();
    const bool shared = random.one_in(2), hides = random.one_in(8);
    const auto table = filled<T>({1, shared ? 1 : std::max<index_t>(s.heads, 1), 1, 2 * random.number(2, 16)},
                                 [&] { return hides && random.one_in(4) ? closed : random.real(-limit, limit); });
    const auto first = std::min(sizes::lowest(s.first_query), sizes::lowest(s.first_key));
    const auto end = std::max(sizes::lowest(s.first_query) + sizes::extent(s.first_query, s.queries),
                              sizes::lowest(s.first_key) + sizes::extent(s.first_key, s.keys));
    const auto rare = random.one_in(3) ? index_t{20} : index_t{1} << 30;
    const double closing[] = {closed, closed, -2000, -1e10, static_cast<double>(std::numeric_limits<T>::lowest()) / 0x1p20}; // of which a sum is a number still
    const auto gates = filled<T>({random.one_in(2) ? s.batch : 1, random.one_in(2) ? s.heads : 1, end - first, 1},
                                 [&] { return random.one_in(rare) ? random.one_of(closing) : random.real(-0.3, 0); });
    return composed_score{relative_buckets(table, {.max_distance = random.number(20, 200), .bidirectional = random.one_in(2)}),
                          forgetting(gates, first)};
}

template drawn_relative<float> draw_relative(draw&, const sizes&);
template drawn_relative<double> draw_relative(draw&, const sizes&);
template drawn_bias<float> draw_bias(draw&, const sizes&);
template drawn_bias<double> draw_bias(draw&, const sizes&);

} // namespace attn::fuzz
