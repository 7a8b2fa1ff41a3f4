// The state of linear attention: where its map is applied changes no bit. attn_random holds its sums to their definition.
#include "answers.hpp"
#include "catch.hpp"

#include <attn/kernel/linear/state.hpp>

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

} // namespace

TEMPLATE_TEST_CASE("linear_state: a map applied in reading gives the bits of features written before", "[kernel][linear][portable]", ATTN_TEST_NUMBERS) {
    using state = kernel::linear_state<TestType>;
    const auto positive = []<class S>(S x) {
        if constexpr (std::is_arithmetic_v<S>)
            return std::max(x, S{0});
        else
            return max_or_second(S{TestType{0}}, x);
    };
    constexpr index_t columns = kernel::tile_traits<TestType>::max_columns, whole = columns * state::lanes::size;
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
            sum.finish(features, {row_block<TestType>{out.data(), d_v, 1}, d_v, factors.data(), nullptr, nullptr}, spare.data(), nothing_ahead);
            denominators.resize(rows);
            return std::pair(denominators, out);
        };
        const auto& read = on_reading ? x : written; // what is not mapped in reading has to be written
        const auto ours = run(kernel::feature_rows<TestType, decltype(positive)>{read.data.data(), rows, d_k, positive});
        CHECK(ours == run(written.features(0, rows)));
    }
}

TEMPLATE_TEST_CASE("sum_each: lane r is the sum of row r", "[simd][linear][portable]", ATTN_TEST_NUMBERS) {
    using lanes = simd::lanes<TestType>;
    TestType numbers[lanes::size][lanes::size], sums[lanes::size];
    lanes rows[lanes::size];
    for (int r = 0; r < lanes::size; ++r) {
        for (int l = 0; l < lanes::size; ++l) numbers[r][l] = static_cast<TestType>(r * r + 3 * l);
        rows[r] = lanes::load(numbers[r]);
    }
    simd::sum_each<TestType>(rows).store(sums);
    for (int r = 0; r < lanes::size; ++r)
        CHECK(sums[r] == static_cast<TestType>(lanes::size * r * r + 3 * lanes::size * (lanes::size - 1) / 2));
}

} // namespace attn::testing
