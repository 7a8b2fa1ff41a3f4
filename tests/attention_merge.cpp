// merge: attention over parts of the keys, joined, is attention over all of them.
#include "errors.hpp"
#include "softmax_checks.hpp"
#include "some_rows.hpp"

#include <attn/attention/merge.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

/// Keys begin .. end - 1 at their own positions.
template <Scalar T>
inputs<T> keys_between(const inputs<T>& in, index_t begin, index_t end) {
    const auto part = [&](const auto& t) { return some_rows(t, begin, end - begin); };
    return {in.queries, part(in.keys), part(in.values), {in.positions.first_query, in.positions.first_key[0] + begin}};
}

/// Cuts the keys at random places; the sinks go with the first part.
template <Scalar T, Pattern P>
void check_merged(const P& pattern, const problem& p, index_t parts, std::mt19937& random) {
    INFO(describe(p) << ", " << parts << " parts");
    const auto in = random_given<T>(p);
    const std::vector<double> sinks(static_cast<std::size_t>(p.heads), 0.25);
    std::vector<index_t> cuts{0, p.keys};
    while (std::ssize(cuts) <= parts) cuts.push_back(static_cast<index_t>(random() % static_cast<unsigned>(p.keys + 1)));
    std::ranges::sort(cuts);

    const auto whole = attend_rows<T>(softmax_attention{.pattern = pattern, .sinks = sinks}, in);
    auto merged = attend_rows<T>(softmax_attention{.pattern = pattern, .sinks = sinks}, keys_between<T>(in, cuts[0], cuts[1]));
    for (std::size_t part = 1; part + 1 < cuts.size(); ++part) {
        auto more = attend_rows<T>(softmax_attention{.pattern = pattern}, keys_between<T>(in, cuts[part], cuts[part + 1]));
        merge(merged.out(), more.out());
    }
    CHECK(largest_error(merged.values, reference::widen(whole.values.view())) <= 16 * epsilon<T>);
    CHECK(largest_error(merged.log_sum_exp, reference::widen(whole.log_sum_exp.view())) <= 16 * epsilon<T>);
}

template <Scalar T>
outputs<T> out_of(tensor<T>& values, tensor<T>& log_sum_exp) {
    return {values, log_sum_exp};
}

std::string merge_error(const outputs<float>& into, const outputs<float>& from) {
    return error_of([&] { merge(into, from); });
}

} // namespace

TEMPLATE_TEST_CASE("merge: parts of the keys joined are all keys", "[attention]", ATTN_TEST_NUMBERS) {
    std::mt19937 random(8);
    for (const index_t parts : {1, 2, 3}) {
        check_merged<TestType>(dense{}, {2, 3, 3, 25, 140, 9, 20}, parts, random);
        check_merged<TestType>(causal{}, {1, 4, 2, 50, 97, 16, 16, position_kind(4, 1, 50, 97)}, parts, random);
        check_merged<TestType>(causal{}, {1, 1, 1, 5, 3, 1, 1}, parts, random);
        // Parts beyond the window see nothing.
        check_merged<TestType>(local{3}, {1, 2, 1, 60, 60, 8, 5}, parts, random);
    }
}

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
