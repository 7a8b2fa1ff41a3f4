#include "sizes.hpp"

namespace attn::fuzz {

namespace {

index_t draw_channels(draw& random, index_t least) {
    static constexpr index_t usual[] = {1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 65, 80, 128, 129};
    return std::max(least, random.one_in(3) ? random.number(0, 130) : random.one_in(2) ? random.number(0, 20) : random.one_of(usual));
}

} // namespace

sizes draw_sizes(draw& random) {
    static constexpr index_t few[] = {1, 1, 1, 1, 2, 2, 3};
    sizes s;
    s.batch = random.one_in(50) ? 0 : random.one_of(few);
    s.kv_heads = random.one_in(50) ? 0 : random.one_of(few);
    s.heads = s.kv_heads * random.one_of(few);
    s.queries = random.size(random.one_in(8) ? 400 : 200);
    s.keys = random.size(2100);
    s.key_dim = draw_channels(random, 1);
    s.value_dim = draw_channels(random, 0);
    const double limit = random.one_in(60) ? (random.one_in(10) ? 3e7 : 5e6) : random.one_in(6) ? 1.5e6 : 1.5e5;
    const auto too_large = [&] { return s.pairs() * static_cast<double>(s.key_dim + s.value_dim + 4) > limit; };
    while (too_large()) {
        switch (random.number(0, 5)) {
        case 0:
            s.batch = std::min<index_t>(s.batch, 1);
            break;
        case 1:
            s.heads = s.kv_heads = std::min<index_t>(s.kv_heads, 1);
            break;
        case 2:
            s.queries = random.number(0, s.queries);
            break;
        case 3:
            s.keys = random.number(0, s.keys);
            break;
        case 4:
            s.key_dim = random.number(1, s.key_dim);
            break;
        default:
            s.value_dim = random.number(0, s.value_dim);
        }
    }
    s.first_query = s.first_key = {0};
    return s;
}

void draw_positions(draw& random, sizes& s) {
    const auto each = [&](auto&& f) {
        std::vector<index_t> v(random.one_in(2) && s.batch > 0 ? static_cast<std::size_t>(s.batch) : 1);
        std::ranges::generate(v, f);
        return v;
    };
    const auto kind = random.number(0, 7);
    if (kind < 2) return;
    if (kind < 4) {
        s.first_query = {s.keys - s.queries};
        return;
    }
    index_t origin = 0;
    if (kind == 6) origin = random.number(-3000, 3000);
    if (kind == 7) {
        static constexpr index_t far[] = {index_t{1} << 24, index_t{1} << 31, index_t{1} << 40, (index_t{1} << 53) - 1, farthest - 5000};
        origin = random.one_of(far) * (random.one_in(2) ? 1 : -1);
    }
    const auto near = std::max<index_t>(10, std::max(s.queries, s.keys));
    s.first_query = each([&] { return origin + random.number(-near, near); });
    s.first_key = each([&] { return origin + random.number(-near, near); });
}

std::string describe(const sizes& s) {
    const auto list = [](const std::vector<index_t>& v) {
        std::string text;
        for (const auto x : v) text.append(text.empty() ? "" : " ").append(std::to_string(x));
        return text;
    };
    return joined("batch ", s.batch, ", heads ", s.heads, " / ", s.kv_heads, ", ", s.queries, " queries from ", list(s.first_query), ", ", s.keys, " keys from ",
                  list(s.first_key), ", d_k ", s.key_dim, ", d_v ", s.value_dim);
}

template <Scalar T>
given<T> draw_given(draw& random, const sizes& s, numbers kind) {
    const auto [q, k, v] = s.shapes();
    const auto limit = kind == numbers::peaked ? random.real(2, 40) : 2.0;
    const auto uniform = [&] { return random.real(-limit, limit); };
    given<T> in{filled<T>(q, uniform), filled<T>(k, uniform), filled<T>(v, [&] { return random.real(-2, 2); }), s.positions()};
    if (kind == numbers::equal) in.queries = tensor<T>(q);
    if (kind == numbers::integers) {
        in.exact_scores = true;
        // In the first channel a product of up to 10^4, in the others of 9: sums below 2^24.
        const auto offset = random.number(0, 2500);
        in.queries = filled<T>(q, [&] { return random.number(-3, 3); });
        in.keys = filled<T>(k, [&] { return random.number(-3, 3); });
        for (index_t row = 0; row < q.batch * q.heads * q.tokens; ++row) in.queries.data()[row * q.channels] = 4;
        for (index_t row = 0; row < k.batch * k.heads * k.tokens; ++row)
            in.keys.data()[row * k.channels] = static_cast<T>(offset + random.number(-1, 1));
    }
    if (random.one_in(8)) std::fill_n(in.values.data(), v.size(), static_cast<T>(random.real(-4, 4)));
    return in;
}

template given<float> draw_given(draw&, const sizes&, numbers);
template given<double> draw_given(draw&, const sizes&, numbers);

} // namespace attn::fuzz
