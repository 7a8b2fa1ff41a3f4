// Every registered operator gives the same bits on every executor, and for a batch entry whatever else is in the batch.
#include "answers.hpp"
#include "catch.hpp"
#include "executors.hpp"

namespace attn::testing {

namespace {

/// The first entries of a batch.
template <Scalar T>
tensor<T> first_entries(const tensor<T>& from, index_t count) {
    const auto& s = from.shape();
    tensor<T> to({count, s.heads, s.tokens, s.channels});
    std::copy_n(from.data(), to.shape().size(), to.data());
    return to;
}

template <Scalar T>
answer<T> first_entries(const answer<T>& from, index_t count) {
    return {first_entries(from.values, count), from.log_sum_exp.data() ? first_entries(from.log_sum_exp, count) : tensor<T>()};
}

} // namespace

TEMPLATE_TEST_CASE("every operator: executors do not change a bit", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    const std::vector<problem> problems{{2, 4, 2, 97, 150, 16, 20}, {1, 1, 1, 5, 9, 3, 2}, {1, 2, 1, 1, 129, 8, 8, {.first_query = 128}}};
    for_each_executor([&](auto& executor, const std::string& name) {
        for_each_case(problems, [&](const auto& c, const problem& p) {
            INFO(c.name << " on " << name << ": " << describe(p));
            const auto op = c.template make<TestType>(p);
            const auto in = random_given<TestType>(p);
            const auto alone = attend(*op, inputs<TestType>(in), c.has_log_sum_exp);
            CHECK(same_bits(attend(*op, inputs<TestType>(in), c.has_log_sum_exp, executor), alone));
        });
    });
}

TEMPLATE_TEST_CASE("every operator: what the other batch entries hold does not matter", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    const std::vector<problem> problems{{3, 2, 1, 40, 60, 16, 9}, {3, 2, 2, 17, 33, 5, 16, position_kind(7, 3, 17, 33)}};
    for_each_case(problems, [](const auto& c, const problem& p) {
        INFO(c.name << ": " << describe(p));
        const auto op = c.template make<TestType>(p);
        const auto in = random_given<TestType>(p);
        auto other = random_given<TestType>(p);
        const auto entry = [](auto& t, index_t b) {
            return std::span(t.data() + b * t.shape().size() / t.shape().batch,
                             static_cast<std::size_t>(t.shape().size() / t.shape().batch));
        };
        const auto expected = attend(*op, inputs<TestType>(in), c.has_log_sum_exp);
        for (index_t b = 0; b < p.batch; ++b) {
            for (auto* t : {&other.queries, &other.keys, &other.values}) {
                std::fill_n(t->data(), t->shape().size(), std::numeric_limits<TestType>::quiet_NaN());
                const auto& own = t == &other.queries ? in.queries : t == &other.keys ? in.keys : in.values;
                std::ranges::copy(entry(own, b), entry(*t, b).begin());
            }
            const auto ours = attend(*op, inputs<TestType>(other), c.has_log_sum_exp);
            CHECK(std::ranges::equal(entry(ours.values, b), entry(expected.values, b), [](auto x, auto y) { return same_bits(x, y); }));
        }
    });
}

// Parameters may depend on the size of the batch: where the definition's result does not, ours must not.
TEMPLATE_TEST_CASE("every operator: how many batch entries there are does not matter", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    std::size_t compared = 0;
    for_each_case({{4, 3, 3, 50, 140, 9, 20}, {4, 2, 1, 24, 48, 64, 64}}, [&](const auto& c, const problem& whole) {
        const auto in = random_given<TestType>(whole);
        const auto op = c.template make<TestType>(whole);
        const auto expected = attend(*op, inputs<TestType>(in), c.has_log_sum_exp);
        const auto exact = reference_of(*op, inputs<TestType>(in), c.has_log_sum_exp);
        for (index_t count = 1; count < whole.batch; ++count) {
            auto p = whole;
            p.batch = count;
            INFO(c.name << ": " << describe(p));
            const given<TestType> some{first_entries(in.queries, count), first_entries(in.keys, count), first_entries(in.values, count),
                                       in.positions};
            const auto fewer = c.template make<TestType>(p);
            if (!same_bits(reference_of(*fewer, inputs<TestType>(some), c.has_log_sum_exp), first_entries(exact, count))) continue;
            CHECK(same_bits(attend(*fewer, inputs<TestType>(some), c.has_log_sum_exp), first_entries(expected, count)));
            ++compared;
        }
    });
    CHECK(compared > 0);
}

} // namespace attn::testing
