// LSH attention: its buckets, and what the conformance suite does not ask of it.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"

#include <attn/attention/lsh_attention.hpp>
#include <attn/attention/lsh_backward.hpp>
#include <attn/attention/lsh_buckets.hpp>
#include <attn/attention/random_projection.hpp>
#include <attn/reference/lsh_attention.hpp>

namespace attn::testing {

namespace {

template <Scalar T>
tensor<T> rotations_of(const shape& s, std::uint64_t seed = 1) {
    tensor<T> r(s);
    fill_random_projection<T>(r, seed);
    return r;
}

/// Vectors that hash into bucket 0, 1, 2, ... by the rotations +-identity: two channels, four buckets.
tensor<float> in_buckets(const std::vector<index_t>& buckets) {
    tensor<float> q({1, 1, std::ssize(buckets), 2});
    for (index_t i = 0; i < q.shape().tokens; ++i) {
        const auto w = buckets[static_cast<std::size_t>(i)];
        q(0, 0, i, w % 2) = (w < 2 ? 1.0f : -1.0f) * static_cast<float>(i + 1);
    }
    return q;
}
tensor<float> axes(index_t rounds) {
    tensor<float> r({rounds, 1, 2, 2});
    for (index_t round = 0; round < rounds; ++round) r(round, 0, 0, 0) = r(round, 0, 1, 1) = 1;
    return r;
}
/// The weights of all tokens, (1, 1, n, n): the values are the identity.
tensor<float> weights_of(const lsh_attention<float>& op, const tensor<float>& q) {
    const auto n = q.shape().tokens;
    tensor<float> identity({1, 1, n, n});
    for (index_t i = 0; i < n; ++i) identity(0, 0, i, i) = 1;
    return attend(op, inputs<float>{q, q, identity});
}

} // namespace

TEMPLATE_TEST_CASE("lsh_buckets: the largest product with the rotations and their opposites", "[attention][portable]", ATTN_TEST_NUMBERS) {
    index_t wrong = 0, close = 0, all = 0;
    for (const index_t half : {1, 3, 16, 37})
        for (const index_t heads : {1, 2}) {
            const auto x = random_tensor<TestType>({2, 2, 150, 9}, static_cast<unsigned>(half));
            const auto r = rotations_of<TestType>({3, heads, 9, half});
            const auto buckets = lsh_buckets(x, r);
            REQUIRE(buckets.shape() == shape{2, 2, 150, 3});
            for (index_t b = 0; b < 2; ++b)
                for (index_t h = 0; h < 2; ++h)
                    for (index_t i = 0; i < 150; ++i)
                        for (index_t round = 0; round < 3; ++round) {
                            std::vector<double> products(static_cast<std::size_t>(2 * half));
                            for (index_t w = 0; w < half; ++w) {
                                double sum = 0;
                                for (index_t c = 0; c < 9; ++c)
                                    sum += static_cast<double>(x(b, h, i, c)) * static_cast<double>(r(round, heads == 1 ? 0 : h, c, w));
                                products[static_cast<std::size_t>(w)] = sum;
                                products[static_cast<std::size_t>(w + half)] = -sum;
                            }
                            const auto largest = std::ranges::max_element(products);
                            const auto ours = products[static_cast<std::size_t>(buckets(b, h, i, round))];
                            wrong += ours != *largest && !(*largest - ours < 20 * epsilon<TestType>);
                            close += ours != *largest;
                            ++all;
                        }
        }
    CHECK(wrong == 0);
    CHECK(close * 1000 < all);
}

TEST_CASE("lsh_buckets: equal products, NaN and zeros", "[attention][portable]") {
    const auto r = axes(1);
    tensor<float> x({1, 1, 6, 2});
    const auto nan = std::numeric_limits<float>::quiet_NaN();
    const std::array<std::array<float, 2>, 6> rows{{{1, 1}, {-1, 1}, {-1, -1}, {0, 0}, {nan, nan}, {-3, -5}}};
    for (index_t i = 0; i < 6; ++i)
        for (index_t c = 0; c < 2; ++c) x(0, 0, i, c) = rows[static_cast<std::size_t>(i)][static_cast<std::size_t>(c)];
    const auto buckets = lsh_buckets(x, r);
    for (const auto& [i, bucket] : {std::pair{0, 0}, {1, 1}, {2, 2}, {3, 0}, {4, 0}, {5, 3}}) CHECK(buckets(0, 0, i, 0) == bucket);
    CHECK(error_of([&] { (void)lsh_buckets(x, rotations_of<float>({1, 2, 2, 3})); }) ==
          "lsh_buckets: rotations have shape (1, 2, 2, 3), but tokens of shape (1, 1, 6, 2) need (rounds, heads or 1, channels of a token, buckets / 2)");
    CHECK(error_of([&] { (void)lsh_buckets(x, rotations_of<float>({1, 1, 3, 3})); }) != nothing_thrown);
    CHECK(error_of([&] { (void)lsh_buckets(x, rotations_of<float>({0, 1, 2, 3})); }) != nothing_thrown);
    CHECK(error_of([&] { (void)lsh_buckets(x, rotations_of<float>({1, 1, 2, 0})); }) != nothing_thrown);
}

TEST_CASE("lsh_attention: a token sees its bucket, in its chunk and the one before, and itself only alone", "[attention][portable]") {
    // Sorted: 0 2 3 5 | 1 6 | | 4, in chunks of 3: (0 2 3) (5 1 6) (4).
    const auto q = in_buckets({0, 1, 0, 0, 3, 0, 1});
    const auto r = axes(1);
    const std::vector<std::vector<index_t>> all{{2, 3}, {6}, {0, 3}, {0, 2}, {4}, {0, 2, 3}, {1}}, earlier{{0}, {1}, {0}, {0, 2}, {4}, {0, 2, 3}, {1}};
    for (const lsh_pattern pattern : {lsh_pattern(dense{}), lsh_pattern(causal{})}) {
        const auto weights = weights_of({.rotations = r, .chunk = 3, .pattern = pattern}, q);
        for (index_t i = 0; i < 7; ++i)
            for (index_t j = 0; j < 7; ++j) {
                const auto& seen = (pattern.is_causal ? earlier : all)[static_cast<std::size_t>(i)];
                INFO((pattern.is_causal ? "causal " : "") << i << " " << j);
                CHECK((weights(0, 0, i, j) > 0) == (std::ranges::find(seen, j) != seen.end()));
            }
    }
    // The last of a bucket sees the chunk before, and not the one before that.
    const auto long_bucket = in_buckets(std::vector<index_t>(9, 0));
    const auto weights = weights_of({.rotations = r, .chunk = 3}, long_bucket);
    for (index_t j = 0; j < 9; ++j) {
        CHECK((weights(0, 0, 8, j) > 0) == (j >= 3 && j < 8));
        CHECK((weights(0, 0, 0, j) > 0) == (j >= 1 && j < 3));
    }
}

TEST_CASE("lsh_attention: a pair that meets in every round has the weight of one, and twice the sum", "[attention][portable]") {
    const auto q = in_buckets({0, 1, 0, 0, 3, 0, 1});
    const auto once = axes(1), twice = axes(2);
    const auto v = random_tensor<float>({1, 1, 7, 5}, 3);
    auto a = no_answer<float>(v.shape(), true), b = no_answer<float>(v.shape(), true);
    workspace memory(1 << 20);
    sequential here;
    attend(lsh_attention{.rotations = once}, inputs<float>{q, q, v}, a.out(), execution(here, memory));
    attend(lsh_attention{.rotations = twice}, inputs<float>{q, q, v}, b.out(), execution(here, memory));
    CHECK(largest_error(a.values, reference::widen(b.values.view())) < 1e-6);
    for (index_t i = 0; i < 7; ++i) CHECK(b.log_sum_exp(0, 0, i, 0) == Approx(a.log_sum_exp(0, 0, i, 0) + std::log(2.0f)).margin(1e-5));
}

TEST_CASE("lsh_attention: rounds of large scores count as those of small ones", "[attention][portable]") {
    // One score for all pairs. In the first round everyone meets, in the second those of one sign: 5 and 3.
    const std::vector<float> signs{1, -1, 1, 1, -1, -1, 1, 1};
    for (const float size : {1.0f, 1e4f, 1e8f, 1e30f}) {
        tensor<float> q({1, 1, 8, 2}), r({2, 1, 2, 1});
        for (index_t i = 0; i < 8; ++i) {
            q(0, 0, i, 0) = size;
            q(0, 0, i, 1) = size * 0x1p-20f * signs[static_cast<std::size_t>(i)];
        }
        r(0, 0, 0, 0) = r(1, 0, 1, 0) = 1;
        const auto weights = weights_of({.rotations = r, .chunk = 8, .scale = 1}, q);
        for (index_t i = 0; i < 8; ++i)
            for (index_t j = 0; j < 8; ++j) {
                const auto sign = signs[static_cast<std::size_t>(i)];
                const float times = i == j ? 0 : sign == signs[static_cast<std::size_t>(j)] ? 2 : 1;
                INFO(size << ": " << i << " " << j);
                CHECK(weights(0, 0, i, j) == Approx(times / (sign > 0 ? 11.0f : 9.0f)).epsilon(1e-6));
            }
    }
}

TEST_CASE("lsh_attention: long and short queries are keys of length 1", "[attention][portable]") {
    for (const float size : {1e-40f, 1e-20f, 1e20f, 3e37f}) {
        tensor<float> q({1, 1, 3, 2});
        for (index_t i = 0; i < 3; ++i) q(0, 0, i, 0) = size * static_cast<float>(i + 1);
        const auto r = axes(1);
        const auto v = random_tensor<float>({1, 1, 3, 4}, 2);
        const auto ours = attend(lsh_attention{.rotations = r, .chunk = 3}, inputs<float>{q, q, v});
        for (index_t c = 0; c < 4; ++c) // both others have the same score
            CHECK(ours(0, 0, 0, c) == Approx((v(0, 0, 1, c) + v(0, 0, 2, c)) / 2).margin(1e-6));
    }
}

TEST_CASE("lsh_attention: what does not fit is refused", "[attention]") {
    using Catch::Matchers::StartsWith;
    const auto x = random_tensor<float>({1, 2, 6, 4}, 1), other = random_tensor<float>({1, 2, 6, 4}, 1);
    const auto r = rotations_of<float>({1, 2, 4, 2});
    const lsh_attention op{.rotations = r};
    CHECK(error_of([&] { (void)attend(op, inputs<float>{x, x, x}); }) == nothing_thrown);
    CHECK(error_of([&] { (void)attend(op, inputs<float>{x, other, x}); }) ==
          "lsh_attention: k of shape (1, 2, 6, 4) must be the same view as q of shape (1, 2, 6, 4): a token's key is its query over its length");
    CHECK(error_of([&] { (void)attend(op, inputs<float>{x, x, x, {.first_query = 3}}); }) ==
          "lsh_attention: positions of queries and keys differ, which are the same tokens");
    CHECK(error_of([&] { (void)attend(op, inputs<float>{x, x, x, {.first_query = 3, .first_key = 3}}); }) == nothing_thrown);
    CHECK(error_of([&] { (void)attend(lsh_attention{.rotations = r, .chunk = 0}, inputs<float>{x, x, x}); }) ==
          "lsh_attention: chunk is 0, but 1 at least is needed");
    CHECK(error_of([&] { (void)attend(lsh_attention{.rotations = r, .scale = INFINITY}, inputs<float>{x, x, x}); }) == "lsh_attention: scale is not finite");
    const auto many = head_major<const float>(x.data(), {index_t{1} << 40, 1, 0, 4}); // nothing to compute
    const auto of_one = rotations_of<float>({1, 1, 4, 2});
    CHECK(error_of([&] { attend(lsh_attention{.rotations = of_one}, inputs<float>{many, many, many}, outputs<float>{{nullptr, many.shape(), {}}}); }) == nothing_thrown);
    const auto wrong = rotations_of<float>({1, 3, 4, 2});
    CHECK(error_of([&] { (void)attend(lsh_attention{.rotations = wrong}, inputs<float>{x, x, x}); }) ==
          "lsh_attention: rotations have shape (1, 3, 4, 2), but tokens of shape (1, 2, 6, 4) need (rounds, heads or 1, channels of a token, buckets / 2)");
    auto out = random_tensor<float>({1, 2, 6, 4}, 1);
    const auto onto = head_major<const float>(out.data(), {1, 2, 4, 2});
    CHECK_THAT(error_of([&] { attend(lsh_attention{.rotations = onto}, inputs<float>{x, x, x}, outputs<float>{out}); }),
               StartsWith("lsh_attention: out of shape (1, 2, 6, 4) overlaps rotations"));
    CHECK_THAT(error_of([&] { (void)attend(lsh_attention<float>{}, inputs<float>{x, x, x}); }), StartsWith("lsh_attention: rotations have shape (0, 0, 0, 0)"));
    sequential here;
    CHECK_THAT(error_of([&] { (void)workspace_bytes<float>(lsh_attention<float>{}, {x.shape(), x.shape(), x.shape()}, here); }),
               StartsWith("lsh_attention: rotations have shape (0, 0, 0, 0)"));
}

namespace {

/// A call in double, what it wrote, and the gradient of a loss by that.
struct lsh_call {
    tensor<double> q, v;
    answer<double> saved, loss;

    lsh_call(const lsh_attention<double>& op, tensor<double> tokens, tensor<double> values) : q(std::move(tokens)), v(std::move(values)) {
        saved = no_answer<double>(v.shape(), true);
        attend(op, inputs<double>{q, q, v}, saved.out());
        loss = no_answer<double>(v.shape(), true);
        loss.values = random_tensor<double>(v.shape(), 7);
        loss.log_sum_exp = random_tensor<double>(loss.log_sum_exp.shape(), 8);
    }
    void backward(const lsh_attention<double>& op, const input_gradients<double>& wanted, auto& executor) const {
        attn::backward(op, inputs<double>{q, q, v}, {saved.values, saved.log_sum_exp}, {loss.values, loss.log_sum_exp}, wanted, executor);
    }
};

} // namespace

TEST_CASE("lsh_attention: its gradient over many chunks and segments is the definition's, on any threads", "[attention][portable][arithmetic]") {
    for (const lsh_pattern pattern : {lsh_pattern(dense{}), lsh_pattern(causal{})})
        for (const index_t chunk : {5, 130, 2000}) {
            INFO("chunk " << chunk << (pattern.is_causal ? ", causal" : ""));
            const auto r = rotations_of<double>({3, 2, 6, 4});
            const lsh_attention<double> op{.rotations = r, .chunk = chunk, .pattern = pattern, .scale = 0.9};
            auto tokens = random_tensor<double>({2, 2, 900, 6}, 1);
            for (index_t c = 0; c < 6; ++c) tokens(0, 1, 17, c) = tokens(1, 0, 800, c) = 0;
            const lsh_call call(op, std::move(tokens), random_tensor<double>({2, 2, 900, 3}, 2));
            tensor<double> dq(call.q.shape()), dv(call.v.shape()), exact_q(call.q.shape()), exact_v(call.v.shape());
            const auto buckets = lsh_buckets(call.q, r);
            reference::lsh_gradients<double>({call.q, call.q, call.v}, {call.loss.values, call.loss.log_sum_exp}, {exact_q, {}, exact_v},
                                             buckets.view(), chunk, pattern.is_causal, 0.9);
            sequential here;
            call.backward(op, {dq, {}, dv}, here);
            CHECK(largest_error(dq, exact_q) <= 1e-12 * largest_magnitude(exact_q));
            CHECK(largest_error(dv, exact_v) <= 1e-12 * largest_magnitude(exact_v));
            for_each_executor([&](auto& executor, const std::string& name) {
                INFO("on " << name);
                tensor<double> some_q(call.q.shape()), some_v(call.v.shape());
                call.backward(op, {some_q, {}, {}}, executor);
                call.backward(op, {{}, {}, some_v}, executor);
                CHECK(same_bits(some_q, dq));
                CHECK(same_bits(some_v, dv));
            });
        }
}

TEST_CASE("lsh_attention: the gradient of a token that meets no other, and of nothing", "[attention][portable]") {
    const auto r = axes(2);
    const auto q = in_buckets({0, 1, 2, 3}), v = random_tensor<float>({1, 1, 4, 3}, 2);
    const lsh_attention<float> op{.rotations = r};
    auto saved = no_answer<float>(v.shape(), true);
    attend(op, inputs<float>{q, q, v}, saved.out());
    const auto d_out = random_tensor<float>(v.shape(), 3), d_rows = random_tensor<float>({1, 1, 4, 1}, 4);
    tensor<float> dq(q.shape()), dv(v.shape());
    backward(op, inputs<float>{q, q, v}, {saved.values, saved.log_sum_exp}, {d_out, d_rows}, {dq, {}, dv});
    CHECK(same_bits(dv, d_out));
    for (index_t i = 0; i < 4; ++i) // log_sum_exp = |q| / sqrt(2) + ln 2
        for (index_t c = 0; c < 2; ++c)
            CHECK(std::abs(dq(0, 0, i, c) - d_rows(0, 0, i, 0) / std::sqrt(2.0f) * q(0, 0, i, c) / static_cast<float>(i + 1)) <= 1e-6f);
    tensor<float> dk(q.shape()), none({1, 1, 0, 2}), rows({1, 1, 0, 1});
    CHECK(error_of([&] { backward(op, inputs<float>{q, q, v}, {saved.values, saved.log_sum_exp}, {d_out, d_rows}, {dq, dk, dv}); }) ==
          "lsh_attention: wanted.keys is asked for, but keys are q: wanted.queries has all of its gradient");
    CHECK(error_of([&] { backward(op, inputs<float>{none, none, none}, {none, rows}, {none, rows}, {none, {}, none}); }) == nothing_thrown);
}

} // namespace attn::testing
