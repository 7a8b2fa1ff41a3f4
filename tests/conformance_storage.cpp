// Every registered operator on tensors that are stored in 16 bits: they are widened first, and the result is rounded last.
#include "catch.hpp"
#include "executors.hpp"
#include "storage.hpp"

namespace attn::testing {

namespace {

struct storage {
    narrow_format format;
    layout where;
};

/// Random numbers, some of them subnormal ones of half.
stored_tensor numbers(const shape& s, unsigned seed, const storage& in) {
    auto x = random_tensor<float>(s, seed);
    for (index_t e = 3; e < s.size(); e += 7) x.data()[e] *= 0x1p-18F;
    return {std::move(x), in.format, in.where};
}

/// q, k, v and out stored so, against floats.
template <Executor E>
void check_storage(const attention_case& c, const problem& p, const std::array<storage, 4>& s, E& executor) {
    INFO(c.name << ": " << describe(p));
    INFO("q " << name_of(s[0].format) << ", k " << name_of(s[1].format) << ", v " << name_of(s[2].format) << ", out " << name_of(s[3].format));
    INFO("layouts " << static_cast<int>(s[0].where) << static_cast<int>(s[1].where) << static_cast<int>(s[2].where) << static_cast<int>(s[3].where));
    const auto op = c.make<float>(p);
    const auto sizes = p.shapes();
    auto q = numbers(sizes.queries, 1, s[0]), k = numbers(sizes.keys, 2, s[1]), v = numbers(sizes.values, 3, s[2]);
    const auto expected = attend(*op, inputs<float>{q.wide, k.wide, v.wide, p.positions}, c.has_log_sum_exp);

    stored_tensor out(tensor<float>(expected.values.shape()), s[3].format, s[3].where);
    tensor<float> log_sum_exp(expected.log_sum_exp.shape());
    workspace memory(op->narrow_workspace_bytes(p.shapes(), executor.concurrency()));
    fill(memory, std::byte{0xff});
    op->attend({q.view(), k.view(), v.view(), p.positions}, {out.view(), c.has_log_sum_exp ? log_sum_exp.view() : tensor_view<float>()},
               execution(executor, memory));

    CHECK(same_bits(log_sum_exp, expected.log_sum_exp));
    CHECK(out.holds(expected.values));
    CHECK((out.guards_intact() && q.guards_intact() && k.guards_intact() && v.guards_intact()));
}

} // namespace

TEST_CASE("every operator: 16-bit tensors are widened first and rounded last", "[conformance][portable]") {
    std::mt19937 random(8);
    const auto any = [&] { return storage{all_formats[random() % 3], all_layouts[random() % all_layouts.size()].value}; };
    auto problems = sample_problems(12, 11);
    problems.push_back({1, 2, 2, 145, 257, 64, 64});
    problems.push_back({2, 4, 2, 33, 131, 17, 20});
    problems.push_back({1, 8, 2, 1, 150, 131, 20}); // few rows: keys are multiplied as they are stored
    problems.push_back({2, 2, 2, 1, 40, 50, 33});
    thread_pool pool(3);
    for_each_case(problems, [&](const auto& c, const problem& p) {
        sequential here;
        const auto each = [](narrow_format f) { return storage{f, layout::head_major}; };
        for (const auto f : {narrow_format::bfloat16, narrow_format::half}) check_storage(c, p, {each(f), each(f), each(f), each(f)}, here);
        check_storage(c, p, {any(), any(), any(), any()}, pool);
    });
}

} // namespace attn::testing
