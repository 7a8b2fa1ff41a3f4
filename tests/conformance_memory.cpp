// Every registered operator stays inside its memory: it allocates nothing, writes its outputs and nothing else, and needs little.
#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "layouts.hpp"

namespace attn::testing {

#ifdef ATTN_COUNTS_ALLOCATIONS

TEMPLATE_TEST_CASE("every operator: forward allocates nothing", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    const std::vector<problem> problems{{2, 4, 2, 97, 150, 16, 20}, {1, 1, 1, 5, 0, 3, 2}};
    const auto check = [&](auto& executor) {
        for_each_case(problems, [&](const auto& c, const problem& p) {
            INFO(c.name << ": " << describe(p));
            const auto op = c.template make<TestType>(p);
            const auto in = random_given<TestType>(p);
            auto result = no_answer<TestType>(*op, p.shapes(), c.has_log_sum_exp);
            workspace memory(op->workspace_bytes(p.shapes(), executor.concurrency()));
            const execution run(executor, memory);
            op->attend(in, result.out(), run);
            CHECK(allocations_in([&] { op->attend(in, result.out(), run); }) == 0);
            CHECK(allocations_in([&] { op->attend(in, {result.values}, run); }) == 0);
        });
    };
    sequential one;
    check(one);
    thread_pool pool(3);
    check(pool);
}

#endif

TEMPLATE_TEST_CASE("every operator: asked for or not, log_sum_exp leaves the values as they are", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    for_each_case(sample_problems(16, 4), [](const auto& c, const problem& p) {
        INFO(c.name << ": " << describe(p));
        const auto op = c.template make<TestType>(p);
        const auto in = random_given<TestType>(p);
        CHECK(same_bits(attend(*op, inputs<TestType>(in), c.has_log_sum_exp).values, attend(*op, inputs<TestType>(in), false).values));
    });
}

TEMPLATE_TEST_CASE("every operator: workspace_bytes suffice and may hold anything", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    thread_pool pool(3);
    for_each_case(sample_problems(24, 5), [&](const auto& c, const problem& p) {
        INFO(c.name << ": " << describe(p));
        const auto op = c.template make<TestType>(p);
        const auto in = random_given<TestType>(p);
        const auto expected = attend(*op, inputs<TestType>(in), c.has_log_sum_exp);
        for (const auto filling : {std::byte{0}, std::byte{0xff}}) {
            // The one with all it asks for, the other with the least.
            const auto all = op->workspace_bytes(p.shapes(), pool.concurrency()), least = op->least_workspace_bytes(p.shapes(), pool.concurrency());
            const auto bytes = filling == std::byte{0} ? all : least;
            // Guards behind it, but not so many that the least becomes all.
            workspace memory(bytes + (bytes < all ? std::min<std::size_t>(4096, all - bytes - 1) : 4096));
            fill(memory, filling);
            auto ours = no_answer<TestType>(*op, p.shapes(), c.has_log_sum_exp);
            op->attend(in, ours.out(), execution(pool, memory));
            CHECK(same_bits(ours, expected));
            CHECK(std::ranges::all_of(memory.bytes().subspan(bytes), [=](std::byte b) { return b == filling; }));
        }
    });
}

TEMPLATE_TEST_CASE("every operator: extra memory is under a megabyte a thread at 4096 tokens, and never grows faster than they do", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    const problem small{1, 12, 12, 8, 8, 64, 64}, large{1, 12, 12, 4096, 4096, 64, 64}, twice{1, 12, 12, 8192, 8192, 64, 64};
    for (const auto& c : all_cases()) {
        if (!c.supports(small)) continue;
        INFO(c.name);
        const auto op = c.template make<TestType>(small);
        const std::size_t megabyte = std::size_t{1} << 20;
        CHECK(op->least_workspace_bytes(large.shapes(), 1) < megabyte * sizeof(TestType) / 4);
        CHECK(op->least_workspace_bytes(large.shapes(), 16) < 16 * megabyte * sizeof(TestType) / 4);
        CHECK(op->workspace_bytes(twice.shapes(), 1) <= 2 * op->workspace_bytes(large.shapes(), 1));
    }
}

} // namespace attn::testing
