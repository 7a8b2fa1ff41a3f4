// Linear attention over ranks has the bits of the call on one machine.
#include "catch.hpp"
#include "sequence_checks.hpp"

#include <attn/distributed/thread_communicator.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/lengths.hpp>
#include <attn/pattern/prefix.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

template <Scalar T>
void check_linear(const auto& op, const inputs<T>& in, const std::vector<index_t>& all_ranks) {
    auto whole = no_answer<T>(op.output_shape(shapes_of(in)), false);
    attend(op, in, whole.out());
    const auto s = shapes_of(in);
    const auto n = s.queries.tokens, m = s.keys.tokens;
    std::vector<partition> all_parts;
    for (const auto ranks : all_ranks) all_parts.emplace_back(op.pattern, s, ranks, in.positions);
    all_parts.emplace_back(op.pattern, s, std::vector<index_t>{0, 0, n / 3, n / 3, n}, std::vector<index_t>{0, m / 2, m / 2, m, m}, in.positions);
    all_parts.emplace_back(op.pattern, s, std::vector<index_t>{0, n, n}, std::vector<index_t>{0, 0, m}, in.positions);
    for (const auto& parts : all_parts) {
        CAPTURE(n, m, parts.ranks());
        CHECK_NOTHROW(on_thread_ranks(parts.ranks(), [&](auto& ranks) {
            thread_pool threads(1 + ranks.rank() % 2);
            check_rank(op, ranks, parts, in, whole.out(), threads);
        }));
    }
}

} // namespace

TEMPLATE_TEST_CASE("ranks: linear attention", "[distributed][parallel]", float, double) {
    using T = TestType;
    const std::vector<index_t> ranks{1, 2, 3, 4, 5, 6, 7}, some{2, 3, 7};
    for (const index_t n : {0, 1, 6, 97, 333, 1500}) {
        const auto in = random_given<T>({2, 4, 2, n, n, 9, 17});
        check_linear(linear_attention{}, inputs<T>(in), ranks);
        check_linear(linear_attention{.pattern = causal{}}, inputs<T>(in), ranks);
    }
    const std::vector<index_t> lengths_of{30, 6'000};
    const auto in = random_given<T>({2, 2, 1, 9'001, 9'001, 8, 12});
    check_linear(linear_attention{}, inputs<T>(in), ranks);
    check_linear(linear_attention{.pattern = causal{}, .normalise = false, .scale = 0.1}, inputs<T>(in), some);
    check_linear(linear_attention{.pattern = lengths{lengths_of}}, inputs<T>(in), some);
    check_linear(linear_attention{.pattern = causal{} & lengths{lengths_of}}, inputs<T>(in), some);
    check_linear(linear_attention{.feature_map = relu{}, .pattern = prefix{3'000}}, inputs<T>(in), some);
}

TEST_CASE("ranks: linear attention at other positions, of other keys than queries, of 16-bit numbers", "[distributed]") {
    const std::vector<index_t> some{2, 3, 7};
    for (const auto where : {positions{}, positions{.first_query = 2'000, .first_key = -700}, positions{.first_query = -100}, positions{.first_query = 5'123, .first_key = 5'001}}) {
        const auto in = random_given<float>({1, 2, 2, 700, 5'000, 33, 16, where});
        check_linear(linear_attention{}, inputs<float>(in), some);
        check_linear(linear_attention{.pattern = causal{}}, inputs<float>(in), some);
    }
    const auto in = random_given<float>({1, 2, 2, 3'000, 3'000, 16, 8});
    tensor<Eigen::bfloat16> k(in.keys.shape());
    std::transform(in.keys.data(), in.keys.data() + in.keys.shape().size(), k.data(), [](float x) { return Eigen::bfloat16(x); });
    check_linear(linear_attention{.pattern = causal{}}, inputs<float>{in.queries, k, in.values}, some);
    check_linear(linear_attention{}, inputs<float>{in.queries, k, in.values}, some);
}

} // namespace attn::testing
