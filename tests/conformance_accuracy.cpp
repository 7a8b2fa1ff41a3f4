// Every registered operator against its definition in double.
#include "answers.hpp"
#include "catch.hpp"

namespace attn::testing {

namespace {

template <Scalar T>
void check_accuracy(const attention_case& c, const problem& p, const given<T>& in, double slack = 1) {
    INFO(c.name << ": " << describe(p));
    const auto op = c.make<T>(p);
    const auto exact = reference_of(*op, inputs<T>(in), c.has_log_sum_exp);
    const auto ours = attend(*op, inputs<T>(in), c.has_log_sum_exp);
    const error_bounds bounds(c, p, in, exact);
    const auto error = largest_error(ours.values, exact.values), log_error = largest_error(ours.log_sum_exp, exact.log_sum_exp);
    CHECK(error / epsilon<T> <= slack * bounds.values / epsilon<T>);
    CHECK(log_error / epsilon<T> <= slack * bounds.log_sum_exp / epsilon<T>);
}

template <Scalar T>
void scale(tensor<T>& t, T factor) {
    for (index_t e = 0; e < t.shape().size(); ++e) t.data()[e] *= factor;
}

} // namespace

TEMPLATE_TEST_CASE("every operator: accuracy at the edges of registers and tiles", "[conformance]", ATTN_TEST_NUMBERS) {
    for_each_case(sample_problems(24, 1), [](const auto& c, const problem& p) { check_accuracy(c, p, random_given<TestType>(p)); });
}

TEMPLATE_TEST_CASE("every operator: accuracy on some problems", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    for_each_case(sample_problems(14, 2), [](const auto& c, const problem& p) { check_accuracy(c, p, random_given<TestType>(p)); });
}

// A strided key is one of several hundred before a tile is full.
TEMPLATE_TEST_CASE("every operator: accuracy with many keys", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    const std::vector<problem> problems{{1, 1, 1, 20, 2100, 3, 5, {.first_query = 2085}}, {1, 2, 1, 300, 300, 4, 4}};
    for_each_case(problems, [](const auto& c, const problem& p) { check_accuracy(c, p, random_given<TestType>(p)); });
}

// Such a score is rounded by a thousand epsilons. Where a cap leaves one key in hundreds sensitive to that, the textbook formula may be
// lucky with it: hence the slack.
TEMPLATE_TEST_CASE("every operator: accuracy with scores of +-1e4", "[conformance][portable][arithmetic]", ATTN_TEST_NUMBERS) {
    const std::vector<problem> problems{{1, 2, 1, 50, 150, 16, 16}, {2, 1, 1, 17, 40, 8, 5}};
    for_each_case(problems, [](const auto& c, const problem& p) {
        auto in = random_given<TestType>(p);
        scale(in.queries, TestType{100});
        scale(in.keys, TestType{100});
        check_accuracy(c, p, in, 2);
    });
}

} // namespace attn::testing
