// merge: rows that saw nothing or NaN, and what is refused. attn_random joins parts of the keys, which is attention over all of them.
#include "errors.hpp"
#include "softmax_checks.hpp"

#include <attn/attention/merge.hpp>

namespace attn::testing {

namespace {

template <Scalar T>
outputs<T> out_of(tensor<T>& values, tensor<T>& log_sum_exp) {
    return {values, log_sum_exp};
}

std::string merge_error(const outputs<float>& into, const outputs<float>& from) {
    return error_of([&] { merge(into, from); });
}

} // namespace

TEMPLATE_TEST_CASE("merge: rows that saw nothing", "[attention]", ATTN_TEST_NUMBERS) {
    constexpr auto nothing = -std::numeric_limits<TestType>::infinity();
    const shape s{1, 1, 2, 3}, rows{1, 1, 2, 1};
    tensor<TestType> a(s), b(s), l_a(rows), l_b(rows);
    std::fill_n(b.data(), 6, TestType{5});
    std::fill_n(l_a.data(), 2, nothing);
    l_b.data()[0] = TestType(0.5);
    l_b.data()[1] = nothing;
    merge(out_of(a, l_a), out_of(b, l_b));
    for (index_t c = 0; c < 3; ++c) {
        CHECK(a(0, 0, 0, c) == 5);
        CHECK(a(0, 0, 1, c) == 0);
    }
    CHECK(l_a.data()[0] == TestType(0.5));
    CHECK(l_a.data()[1] == nothing);

    // The other way round.
    std::fill_n(b.data(), 6, TestType{0});
    std::fill_n(l_b.data(), 2, nothing);
    merge(out_of(a, l_a), out_of(b, l_b));
    CHECK(a(0, 0, 0, 2) == 5);
    CHECK(l_a.data()[0] == TestType(0.5));

    // What such a row holds was perhaps never written.
    for (const auto never_written : {std::numeric_limits<TestType>::quiet_NaN(), std::numeric_limits<TestType>::infinity()}) {
        std::fill_n(b.data(), 6, never_written);
        merge(out_of(a, l_a), out_of(b, l_b));
        for (index_t c = 0; c < 3; ++c) CHECK((a(0, 0, 0, c) == 5 && a(0, 0, 1, c) == 0));
        tensor<TestType> empty(s), l_empty(rows);
        std::fill_n(empty.data(), 6, never_written);
        std::fill_n(l_empty.data(), 2, nothing);
        merge(out_of(empty, l_empty), out_of(a, l_a));
        for (index_t c = 0; c < 3; ++c) CHECK((empty(0, 0, 0, c) == 5 && empty(0, 0, 1, c) == 0));
    }
}

TEMPLATE_TEST_CASE("merge: NaN stays in its row", "[attention]", ATTN_TEST_NUMBERS) {
    const shape s{1, 1, 2, 1};
    tensor<TestType> a(s), b(s), l_a(s), l_b(s);
    l_b.data()[1] = b.data()[1] = std::numeric_limits<TestType>::quiet_NaN();
    merge(out_of(a, l_a), out_of(b, l_b));
    CHECK(a.data()[0] == 0);
    CHECK(std::isnan(a.data()[1]));
    CHECK(std::isnan(l_a.data()[1]));
}

TEST_CASE("merge: refuses what does not fit", "[attention]") {
    const shape s{2, 3, 4, 5}, rows{2, 3, 4, 1};
    tensor<float> a(s), b(s), short_b({2, 3, 3, 5}), l_a(rows), l_b(rows), short_l({2, 3, 3, 1});
    CHECK_THAT(merge_error(out_of(a, l_a), out_of(short_b, short_l)),
               Contains("merge: from") && Contains("(2, 3, 3, 5)") && Contains("(2, 3, 4, 5)"));
    CHECK_THAT(merge_error({a}, out_of(b, l_b)), Contains("merge: log_sum_exp") && Contains("(2, 3, 4, 1)"));
    CHECK_THAT(merge_error(out_of(a, l_a), {b}), Contains("merge: log_sum_exp"));
    CHECK_THAT(merge_error(out_of(a, l_a), out_of(b, short_l)), Contains("(2, 3, 3, 1)"));
    CHECK_THAT(merge_error(out_of(a, l_a), out_of(a, l_b)), Contains("overlaps"));
    CHECK_THAT(merge_error(out_of(a, l_a), out_of(b, l_a)), Contains("overlaps"));
    const outputs<float> nowhere{{nullptr, s, {60, 20, 5, 1}}, l_b};
    CHECK_THAT(merge_error(out_of(a, l_a), nowhere), Contains("merge: from") && Contains("null"));
}

} // namespace attn::testing
