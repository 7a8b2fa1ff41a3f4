// Every registered operator gives the same bits whatever the layout of its inputs and outputs, and writes nothing else.
#include "catch.hpp"
#include "layouts.hpp"

namespace attn::testing {

namespace {

/// The operator with q, k, v and out in these layouts, against all of them contiguous.
template <Scalar T>
void check_layouts(const attention_case& c, const problem& p, std::array<named_layout, 4> layouts) {
    INFO(c.name << ": " << describe(p));
    INFO("q " << layouts[0].name << ", k " << layouts[1].name << ", v " << layouts[2].name << ", out " << layouts[3].name);
    const auto op = c.make<T>(p);
    const auto in = random_given<T>(p);
    const auto expected = attend(*op, inputs<T>(in), c.has_log_sum_exp);

    placed<T> q(in.queries, layouts[0].value), k(in.keys, layouts[1].value), v(in.values, layouts[2].value);
    placed<T> out(expected.values.shape(), layouts[3].value), log_sum_exp(expected.log_sum_exp.shape(), layouts[3].value);
    sequential here;
    workspace memory(op->workspace_bytes(p.shapes(), 1));
    const outputs<T> to{out.view(), c.has_log_sum_exp ? log_sum_exp.view() : tensor_view<T>()};
    op->attend({q.view(), k.view(), v.view(), p.positions}, to, execution(here, memory));

    CHECK(same_bits(out.copy(), expected.values));
    CHECK(same_bits(log_sum_exp.copy(), expected.log_sum_exp));
    CHECK(out.guards_intact());
    CHECK(log_sum_exp.guards_intact());
    CHECK(same_bits(q.copy(), in.queries));
    CHECK(same_bits(k.copy(), in.keys));
    CHECK(same_bits(v.copy(), in.values));
    CHECK((q.guards_intact() && k.guards_intact() && v.guards_intact()));
}

} // namespace

TEMPLATE_TEST_CASE("every operator: layouts do not change a bit", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    const std::vector<problem> problems{{2, 4, 2, 33, 131, 17, 20}, {1, 2, 2, 49, 30, 64, 33, position_kind(4, 1, 49, 30)}};
    for_each_case(problems, [](const auto& c, const problem& p) {
        for (const auto l : all_layouts) check_layouts<TestType>(c, p, {l, l, l, l});
    });
}

TEMPLATE_TEST_CASE("every operator: any mixture of layouts", "[conformance]", ATTN_TEST_NUMBERS) {
    std::mt19937 random(5);
    const auto any = [&] { return all_layouts[random() % all_layouts.size()]; };
    for_each_case(sample_problems(48, 3),
                  [&](const auto& c, const problem& p) { check_layouts<TestType>(c, p, {any(), any(), any(), any()}); });
}

TEMPLATE_TEST_CASE("every operator: inputs may repeat elements by strides of 0", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    for_each_case({{3, 4, 2, 20, 40, 8, 16}}, [](const auto& c, const problem& p) {
        INFO(c.name << ": " << describe(p));
        const auto op = c.template make<TestType>(p);
        const auto one = random_given<TestType>({1, 1, 1, 1, p.keys, p.key_dim, p.value_dim});
        const auto s = p.shapes();
        // One head and batch entry of keys and values for all, one query for all queries.
        const tensor_view<const TestType> q(one.queries.data(), s.queries, {0, 0, 0, 1}), k(one.keys.data(), s.keys, {0, 0, p.key_dim, 1}),
            v(one.values.data(), s.values, {0, 0, p.value_dim, 1});
        given<TestType> copies{tensor<TestType>(s.queries), tensor<TestType>(s.keys), tensor<TestType>(s.values)};
        const auto copy = [](const auto& from, auto& to) {
            for (index_t row = 0; row < to.shape().batch * to.shape().heads * to.shape().tokens; ++row)
                std::copy_n(from.row(0, 0, row % to.shape().tokens), to.shape().channels, to.data() + row * to.shape().channels);
        };
        copy(q, copies.queries);
        copy(k, copies.keys);
        copy(v, copies.values);
        CHECK(same_bits(attend(*op, {q, k, v, copies.positions}, c.has_log_sum_exp), attend(*op, inputs<TestType>(copies), c.has_log_sum_exp)));
    });
}

} // namespace attn::testing
