// The state of linear attention and its scores against plain loops, on whole numbers, whose sums are exact in any order.
#include "answers.hpp"
#include "catch.hpp"

#include <attn/kernel/linear/scores.hpp>

namespace attn::testing {

namespace {

template <Scalar T>
struct rows_of_numbers {
    index_t count, channels, padded;
    std::vector<T> data;

    /// Rows of whole numbers, filled up with zeros; room for a tile of rows more.
    rows_of_numbers(index_t n, index_t c, index_t p, unsigned seed)
        : count(n), channels(c), padded(p), data(static_cast<std::size_t>((n + 16) * p)) {
        std::mt19937 random(seed);
        for (index_t r = 0; r < n; ++r)
            for (index_t k = 0; k < c; ++k) data[static_cast<std::size_t>(r * p + k)] = static_cast<T>(static_cast<int>(random() % 7) - 3);
    }
    T operator()(index_t r, index_t c) const { return data[static_cast<std::size_t>(r * padded + c)]; }
    kernel::feature_rows<T> features(index_t first, index_t n) const { return {data.data() + first * padded, n, padded}; }
};

kernel::no_prefetch nothing_ahead;

template <Scalar T>
struct state_checker {
    using state = kernel::linear_state<T, simd::native>;
    static index_t whole(index_t c) { return (c + state::lanes::size - 1) / state::lanes::size * state::lanes::size; }

    index_t d_k, d_v;
    tensor<T> memory{{1, 1, 1, 4 * (d_k + 16) * (d_v + 16) + 1024}};
    detail::scratch space{reinterpret_cast<std::byte*>(memory.data())};

    /// Keys in two pushes and a merge; then `queries` rows, with and without a start and a local term.
    void check(index_t first_keys, index_t more_keys, index_t merged_keys, index_t queries) {
        INFO("d_k " << d_k << ", d_v " << d_v << ", keys " << first_keys << " + " << more_keys << " + " << merged_keys << ", " << queries
                    << " queries");
        const auto m = first_keys + more_keys + merged_keys;
        const rows_of_numbers<T> k(m, d_k, state::whole(d_k), 1), v(m, d_v, whole(d_v), 2), q(queries, d_k, state::whole(d_k), 3);
        const rows_of_numbers<T> start(queries, d_v, whole(d_v), 4), local(queries, d_v, whole(d_v), 5);
        const auto one = state::take(space, d_k, d_v), two = state::take(space, d_k, d_v);
        one.reset();
        two.reset();
        one.push(k.features(0, first_keys), v.data.data(), v.padded, nothing_ahead);
        one.push(k.features(first_keys, more_keys), v.data.data() + first_keys * v.padded, v.padded, nothing_ahead);
        two.push(k.features(first_keys + more_keys, merged_keys), v.data.data() + (first_keys + more_keys) * v.padded, v.padded, nothing_ahead);
        one.merge(two);

        std::vector<T> denominators(static_cast<std::size_t>(queries + 16), T{1}), factors(denominators.size());
        one.add_denominators(q.features(0, queries), denominators.data());
        for (std::size_t r = 0; r < factors.size(); ++r) factors[r] = static_cast<T>(r % 3 + 1);
        const auto stride = v.padded + 3;
        std::vector<T> out(static_cast<std::size_t>(queries * stride), T{77}), spare(static_cast<std::size_t>(16 * v.padded));
        for (const bool with : {false, true}) {
            one.finish(q.features(0, queries),
                       {kernel::row_block<T>{out.data(), stride, 1}, d_v, factors.data(), with ? start.data.data() : nullptr, with ? local.data.data() : nullptr},
                       spare.data(), nothing_ahead);
            index_t wrong = 0;
            for (index_t i = 0; i < queries; ++i) {
                T sum = 1;
                for (index_t j = 0; j < m; ++j)
                    for (index_t c = 0; c < d_k; ++c) sum += q(i, c) * k(j, c);
                wrong += denominators[static_cast<std::size_t>(i)] != sum;
                for (index_t c = 0; c < stride; ++c) {
                    const T ours = out[static_cast<std::size_t>(i * stride + c)];
                    if (c >= d_v) {
                        wrong += ours != T{77};
                        continue;
                    }
                    T x = with ? start(i, c) : T{0};
                    for (index_t j = 0; j < m; ++j)
                        for (index_t a = 0; a < d_k; ++a) x += q(i, a) * k(j, a) * v(j, c);
                    wrong += ours != x * factors[static_cast<std::size_t>(i)] + (with ? local(i, c) : T{0});
                }
            }
            CHECK(wrong == 0);
        }
    }
};

} // namespace

TEMPLATE_TEST_CASE("linear_state: push, merge and finish against plain loops", "[kernel][linear][portable]", ATTN_TEST_NUMBERS) {
    for (const index_t d_k : {1, 3, 4, 5, 9, 15, 16, 17, 31, 33, 64})
        for (const index_t d_v : {1, 16, 20, 33, 48, 64, 80}) state_checker<TestType>{d_k, d_v}.check(7, 0, 5, 1 + (d_k + d_v) % 23);
    for (index_t queries = 1; queries <= 40; ++queries) state_checker<TestType>{6, 40}.check(queries % 5, 3, queries % 3, queries);
}

TEMPLATE_TEST_CASE("linear_state: a map applied in reading gives the bits of features written before", "[kernel][linear][portable]", ATTN_TEST_NUMBERS) {
    using state = kernel::linear_state<TestType, simd::native>;
    const auto positive = []<class S>(S x) {
        if constexpr (std::is_arithmetic_v<S>)
            return std::max(x, S{0});
        else
            return max_or_second(S{TestType{0}}, x);
    };
    constexpr index_t columns = kernel::tile_traits<TestType, simd::native>::max_columns, whole = columns * state::lanes::size;
    for (const index_t d_v : {whole, 2 * whole, whole + state::lanes::size}) {
        INFO("d_v " << d_v);
        constexpr index_t rows = 37, d_k = state::whole(20);
        const rows_of_numbers<TestType> x(rows, d_k, d_k, 1), v(rows, d_v, d_v, 2);
        auto written = x;
        for (auto& e : written.data) e = positive(e);
        const bool on_reading = state::maps_on_reading(d_v);
        CHECK(on_reading == (columns == 4 && d_v % whole == 0));

        tensor<TestType> memory({1, 1, 1, 4 * (d_k + 16) * (d_v + 16) + 1024});
        detail::scratch space(reinterpret_cast<std::byte*>(memory.data()));
        const auto run = [&](const auto& features) {
            const auto sum = state::take(space, d_k, d_v);
            sum.reset();
            sum.push(features, v.data.data(), d_v, nothing_ahead);
            std::vector<TestType> denominators(static_cast<std::size_t>(rows + 16)), out(static_cast<std::size_t>(rows * d_v)),
                factors(denominators.size(), TestType{1}), spare(static_cast<std::size_t>(16 * d_v));
            sum.add_denominators(features, denominators.data());
            sum.finish(features, {kernel::row_block<TestType>{out.data(), d_v, 1}, d_v, factors.data(), nullptr, nullptr}, spare.data(), nothing_ahead);
            denominators.resize(rows);
            return std::pair(denominators, out);
        };
        const auto& read = on_reading ? x : written; // what is not mapped in reading has to be written
        const auto ours = run(kernel::feature_rows<TestType, decltype(positive)>{read.data.data(), rows, d_k, positive});
        CHECK(ours == run(written.features(0, rows)));
    }
}

TEMPLATE_TEST_CASE("sum_each: lane r is the sum of row r", "[simd][linear][portable]", ATTN_TEST_NUMBERS) {
    using lanes = simd::lanes<TestType, simd::native>;
    TestType numbers[lanes::size][lanes::size], sums[lanes::size];
    lanes rows[lanes::size];
    for (int r = 0; r < lanes::size; ++r) {
        for (int l = 0; l < lanes::size; ++l) numbers[r][l] = static_cast<TestType>(r * r + 3 * l);
        rows[r] = lanes::load(numbers[r]);
    }
    simd::sum_each<TestType, simd::native>(rows).store(sums);
    for (int r = 0; r < lanes::size; ++r)
        CHECK(sums[r] == static_cast<TestType>(lanes::size * r * r + 3 * lanes::size * (lanes::size - 1) / 2));
}

TEMPLATE_TEST_CASE("linear_scores: sums over the seen keys, and not one more", "[kernel][linear][portable]", ATTN_TEST_NUMBERS) {
    using scores = kernel::linear_scores<TestType, simd::native>;
    using state = kernel::linear_state<TestType, simd::native>;
    constexpr auto not_a_number = std::numeric_limits<TestType>::quiet_NaN();
    std::mt19937 random(3);
    for (int round = 0; round < 60; ++round) {
        const index_t queries = 1 + static_cast<index_t>(random() % 40), m = 1 + static_cast<index_t>(random() % 64),
                    d_k = 1 + static_cast<index_t>(random() % 20), d_v = 1 + static_cast<index_t>(random() % 70),
                    v_padded = state_checker<TestType>::whole(d_v);
        INFO(queries << " queries, " << m << " keys, d_k " << d_k << ", d_v " << d_v);
        const rows_of_numbers<TestType> q(queries, d_k, state::whole(d_k), 1), k(m, d_k, state::whole(d_k), 2);
        rows_of_numbers<TestType> v(m, d_v, v_padded, 3);
        std::vector<index_t> seen(static_cast<std::size_t>(queries));
        for (auto& s : seen) s = static_cast<index_t>(random() % static_cast<unsigned>(m + 1));
        std::ranges::sort(seen);
        for (index_t j = seen.back(); j < m; ++j) v.data[static_cast<std::size_t>(j * v_padded)] = not_a_number;
        seen.resize(seen.size() + 3, seen.back());

        tensor<TestType> memory({1, 1, 1, 20'000});
        detail::scratch space(reinterpret_cast<std::byte*>(memory.data()));
        const scores ours(space, 48, 64, d_k, v_padded);
        std::vector<TestType> numerators(static_cast<std::size_t>((queries + 16) * v_padded)),
            denominators(static_cast<std::size_t>(queries + 16));
        for (const bool first : {true, false})
            ours.add(q.features(0, queries), {k.features(0, m), v.data.data(), v_padded, seen.data()}, first, numerators.data(),
                     denominators.data());
        index_t wrong = 0;
        for (index_t i = 0; i < queries; ++i)
            for (index_t c = 0; c < d_v; ++c) {
                TestType sum = 0, weights = 0;
                for (index_t j = 0; j < seen[static_cast<std::size_t>(i)]; ++j) {
                    TestType weight = 0;
                    for (index_t a = 0; a < d_k; ++a) weight += q(i, a) * k(j, a);
                    weights += weight;
                    sum += weight * v(j, c);
                }
                wrong += numerators[static_cast<std::size_t>(i * v_padded + c)] != 2 * sum ||
                         denominators[static_cast<std::size_t>(i)] != 2 * weights;
            }
        CHECK(wrong == 0);
    }
}

} // namespace attn::testing
