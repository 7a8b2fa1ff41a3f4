// Every registered operator: what a query does not see never influences it, and what it sees does, NaN and infinity included.
#include "answers.hpp"
#include "catch.hpp"

namespace attn::testing {

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

template <Scalar T>
void fill_row(tensor<T>& t, index_t b, index_t h, index_t i, double value, index_t channels = 1 << 30) {
    for (index_t c = 0; c < std::min(channels, t.shape().channels); ++c) t(b, h, i, c) = static_cast<T>(value);
}

/// What the definition makes of a change of the inputs, ours must: the same elements become NaN (or cease to be finite), and those
/// that the change does not reach keep their bits, if rows stand alone.
template <Scalar T>
void check_change(const tensor<T>& before, const tensor<T>& after, const tensor<double>& exact_before, const tensor<double>& exact_after,
                  bool only_nan, bool rows_stand_alone) {
    index_t wrong = 0, leaked = 0, inexact = 0;
    const auto spoiled = [&](double x) { return only_nan ? std::isnan(x) : !std::isfinite(x); };
    for (index_t e = 0; e < before.shape().size(); ++e) {
        const T ours = after.data()[e];
        const double exact = exact_after.data()[e];
        wrong += spoiled(static_cast<double>(ours)) != spoiled(exact);
        leaked += rows_stand_alone && same_bits(exact, exact_before.data()[e]) && !same_bits(ours, before.data()[e]);
        inexact += std::isfinite(exact) && !(std::abs(static_cast<double>(ours) - exact) <= 1e-3 * (1 + std::abs(exact)));
    }
    CHECK(wrong == 0);
    CHECK(leaked == 0);
    CHECK(inexact == 0);
}

template <Scalar T, class Change>
void check_spoiled(const attention_case& c, const problem& p, bool only_nan, const Change& change) {
    const auto op = c.make<T>(p);
    auto in = random_given<T>(p);
    const auto before = attend(*op, inputs<T>(in), c.has_log_sum_exp);
    const auto exact_before = reference_of(*op, inputs<T>(in), c.has_log_sum_exp);
    change(in);
    const auto after = attend(*op, inputs<T>(in), c.has_log_sum_exp);
    const auto exact_after = reference_of(*op, inputs<T>(in), c.has_log_sum_exp);
    check_change(before.values, after.values, exact_before.values, exact_after.values, only_nan, c.rows_stand_alone);
    check_change(before.log_sum_exp, after.log_sum_exp, exact_before.log_sum_exp, exact_after.log_sum_exp, only_nan, c.rows_stand_alone);
}

/// Spoils one key, value or query after another.
template <Scalar T>
void check_all_spoils(const attention_case& c, const problem& p, std::mt19937& random) {
    for (const index_t j : {index_t{0}, p.keys / 2, p.keys - 1, static_cast<index_t>(random() % static_cast<unsigned>(p.keys))}) {
        const auto b = static_cast<index_t>(random() % static_cast<unsigned>(p.batch)),
                   h = static_cast<index_t>(random() % static_cast<unsigned>(p.kv_heads));
        const auto i = j % p.queries;
        INFO(c.name << ": " << describe(p) << "; key " << j << " or query " << i << " of batch entry " << b << " and kv head " << h
                    << " is spoiled");
        const auto spoil = [&](const char* what, bool only_nan, const auto& change) {
            INFO(what);
            check_spoiled<T>(c, p, only_nan, change);
        };
        spoil("key and value are NaN", true, [&](given<T>& in) {
            fill_row(in.keys, b, h, j, not_a_number);
            fill_row(in.values, b, h, j, not_a_number);
        });
        spoil("channel 0 of the value is NaN", true, [&](given<T>& in) { in.values(b, h, j, 0) = std::numeric_limits<T>::quiet_NaN(); });
        spoil("the value is infinite", false, [&](given<T>& in) { fill_row(in.values, b, h, j, infinity); });
        spoil("the key is infinite", false, [&](given<T>& in) { fill_row(in.keys, b, h, j, infinity); });
        spoil("one channel of the key is infinite", false, [&](given<T>& in) { fill_row(in.keys, b, h, j, infinity, 1); });
        spoil("a query is NaN", true, [&](given<T>& in) { fill_row(in.queries, b, h, i, not_a_number); });
    }
}

/// One dimension, positive queries: a key of -infinity scores -infinity, which hides it, so that its value must not matter.
template <Scalar T>
void check_infinitely_low_score(const attention_case& c, const problem& p) {
    INFO(c.name << ": " << describe(p));
    check_spoiled<T>(c, p, false, [&](given<T>& in) {
        for (index_t e = 0; e < in.queries.shape().size(); ++e) in.queries.data()[e] = std::abs(in.queries.data()[e]);
        fill_row(in.keys, 0, 0, p.keys / 3, -infinity);
        fill_row(in.values, 0, 0, p.keys / 3, not_a_number);
    });
}

} // namespace

TEMPLATE_TEST_CASE("every operator: NaN and infinity reach the rows that see them and no others", "[conformance]", ATTN_TEST_NUMBERS) {
    std::mt19937 random(9);
    const std::vector<problem> problems{
        {1, 2, 1, 50, 150, 8, 20}, {2, 1, 1, 97, 97, 16, 16}, {1, 1, 1, 30, 40, 3, 9, position_kind(4, 1, 30, 40)}};
    for_each_case(problems, [&](const auto& c, const problem& p) { check_all_spoils<TestType>(c, p, random); });
}

TEMPLATE_TEST_CASE("every operator: NaN and infinity in some keys", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    std::mt19937 random(10);
    for_each_case({{1, 2, 1, 19, 35, 4, 5}}, [&](const auto& c, const problem& p) { check_all_spoils<TestType>(c, p, random); });
}

TEMPLATE_TEST_CASE("every operator: a score of -infinity hides its key", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    for_each_case({{1, 2, 1, 50, 140, 1, 5}, {1, 1, 1, 5, 9, 1, 16}},
                  [&](const auto& c, const problem& p) { check_infinitely_low_score<TestType>(c, p); });
}

TEMPLATE_TEST_CASE("every operator: a row that sees no key is exactly 0", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    index_t blank = 0;
    const auto count_blank = [&](const auto& ours, const auto& exact, double expected) {
        for (index_t e = 0; e < exact.shape().size(); ++e) {
            if (exact.data()[e] != expected) continue;
            ++blank;
            if (static_cast<double>(ours.data()[e]) != expected)
                FAIL_CHECK("element " << e << " is " << ours.data()[e] << ", not " << expected);
        }
    };
    for_each_case(sample_problems(40, 6), [&](const auto& c, const problem& p) {
        INFO(c.name << ": " << describe(p));
        const auto op = c.template make<TestType>(p);
        const auto in = random_given<TestType>(p);
        const auto ours = attend(*op, inputs<TestType>(in), c.has_log_sum_exp);
        const auto exact = reference_of(*op, inputs<TestType>(in), c.has_log_sum_exp);
        count_blank(ours.values, exact.values, 0);
        count_blank(ours.log_sum_exp, exact.log_sum_exp, -infinity);
    });
    CHECK(blank > 1000);
}

TEMPLATE_TEST_CASE("every operator: equal values come out equal", "[conformance][portable][arithmetic]", ATTN_TEST_NUMBERS) {
    for_each_case(sample_problems(20, 7), [&](const auto& c, const problem& p) {
        INFO(c.name << ": " << describe(p));
        const auto op = c.template make<TestType>(p);
        auto in = random_given<TestType>(p);
        std::fill_n(in.values.data(), in.values.shape().size(), TestType{3});
        const auto exact = reference_of(*op, inputs<TestType>(in), c.has_log_sum_exp);
        const error_bounds bounds(c, p, in, exact);
        CHECK(largest_error(attend(*op, inputs<TestType>(in), c.has_log_sum_exp).values, exact.values) / epsilon<TestType> <=
              bounds.values / epsilon<TestType>);
    });
}

} // namespace attn::testing
