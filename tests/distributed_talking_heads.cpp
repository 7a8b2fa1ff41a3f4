// Talking-heads attention over ranks has the bits of the call on one machine.
#include "catch.hpp"
#include "errors.hpp"
#include "rank_checks.hpp"

#include <attn/distributed/thread_communicator.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/on_heads.hpp>
#include <attn/pattern/predicate.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/pattern/lengths.hpp>
#include <attn/score/additive_bias.hpp>
#include <attn/score/alibi.hpp>
#include <attn/score/soft_cap.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

template <Scalar T>
void check_talking(const auto& op, const inputs<T>& in, const std::vector<index_t>& some_ranks = {2, 3, 7}, bool with_log_sum_exp = true) {
    check_over(op, in, partitions(dense{}, in, some_ranks), with_log_sum_exp);
}

/// Mixings of 4 heads of queries to 3, and of these to 6.
struct mixings {
    tensor<double> logits = random_tensor<double>({1, 1, 3, 4}, 5, 0.7), weights = random_tensor<double>({1, 1, 6, 3}, 6, 0.7);
    std::vector<double> logits_bias{0.1, -0.3, 0.2}, weights_bias{0.01, 0.02, -0.01, 0, 0.03, 0.1};
};

} // namespace

TEST_CASE("ranks: talking heads of any pattern, n that nothing divides", "[distributed]") {
    using T = float;
    const mixings mix;
    for (const index_t n : {0, 1, 6, 97, 700}) {
        const given<T> in{random_tensor<T>({2, 4, n, 9}, 1), random_tensor<T>({2, 2, n, 9}, 2), random_tensor<T>({2, 3, n, 5}, 3)};
        const inputs<T> all(in);
        const auto check_both = [&](const auto& pattern, const std::vector<index_t>& ranks) {
            using P = std::remove_cvref_t<decltype(pattern)>;
            talking_heads_attention<P> op{.logits_mix = mix.logits, .pattern = pattern};
            check_talking(op, all, {3});
            op.logits_bias = mix.logits_bias, op.weights_mix = mix.weights, op.weights_bias = mix.weights_bias;
            check_talking(op, all, ranks);
        };
        check_both(dense{}, {1, 2, 3, 4, 5, 6, 7});
        check_both(causal{}, {1, 2, 3, 4, 5, 6, 7});
        check_both(causal{} & local{100}, {2, 5});
        check_both(predicate{[](auto, auto) { return false; }}, {3});
    }
}

TEST_CASE("ranks: talking heads, patterns of heads and batch entries, positions, kinds of storage", "[distributed]") {
    const mixings mix;
    const index_t n = 1'300, m = 1'900;
    const std::vector<index_t> lengths_of{30, 1700};
    for (const auto where : {top_left(), positions{.first_query = -2'000, .first_key = -1'950}, positions{.first_query = 500}}) {
        const given<float> in{random_tensor<float>({2, 4, n, 9}, 1), random_tensor<float>({2, 1, m, 9}, 2), random_tensor<float>({2, 2, m, 5}, 3), where};
        const auto of = [&](const auto& pattern) {
            using P = std::remove_cvref_t<decltype(pattern)>;
            return talking_heads_attention<P>{.logits_mix = mix.logits, .weights_mix = mix.weights, .weights_bias = mix.weights_bias, .pattern = pattern};
        };
        check_talking(of(lengths{lengths_of}), inputs<float>(in));
        check_talking(of((on_heads{0, 1} & strided{4}) | (on_heads{1, 3} & (causal{} & local{50}))), inputs<float>(in));
        check_talking(of(causal{} & (local{9} | strided{11})), inputs<float>(in));
        tensor<Eigen::bfloat16> k(in.keys.shape());
        tensor<Eigen::half> v(in.values.shape());
        std::transform(in.keys.data(), in.keys.data() + in.keys.shape().size(), k.data(), [](float x) { return Eigen::bfloat16(x); });
        std::transform(in.values.data(), in.values.data() + in.values.shape().size(), v.data(), [](float x) { return Eigen::half(x); });
        check_talking(of(causal{} & local{200}), inputs<float>{in.queries, k, v, where});
    }
}

TEST_CASE("ranks: talking heads, score functions and sinks", "[distributed]") {
    const mixings mix;
    const index_t n = 900;
    constexpr auto infinity = std::numeric_limits<double>::infinity();
    const given<float> in{random_tensor<float>({1, 4, n, 8}, 1), random_tensor<float>({1, 4, n, 8}, 2), random_tensor<float>({1, 6, n, 4}, 3)};
    const std::vector<double> slopes{0.1, 0.02, 0.7};
    const auto bias = random_tensor<float>({1, 3, 1, n}, 9);
    const auto check_score = [&](const auto& score, std::span<const double> sinks) {
        using S = std::remove_cvref_t<decltype(score)>;
        const auto& [logits, weights, logits_bias, weights_bias] = mix;
        check_talking(talking_heads_attention<causal, S>{.logits_mix = logits, .weights_mix = weights, .score = score, .sinks = sinks}, inputs<float>(in));
        using of_window = talking_heads_attention<local, S>;
        check_talking(of_window{.logits_mix = logits, .weights_mix = weights, .weights_bias = weights_bias, .score = score, .pattern = local{70}, .sinks = sinks}, inputs<float>(in));
    };
    const std::vector<double> sinks{0.0, 5.0, -3.0}, odd_sinks{-infinity, infinity, std::nan("")};
    check_score(identity_score{}, sinks);
    check_score(alibi{slopes}, {});
    check_score(soft_cap{3}, sinks);
    check_score(additive_bias{bias}, odd_sinks);
}

TEST_CASE("ranks: talking heads, hidden keys may be anything", "[distributed]") {
    const mixings mix;
    const index_t n = 800;
    given<float> in{random_tensor<float>({1, 4, n, 8}, 1), random_tensor<float>({1, 1, n, 8}, 2), random_tensor<float>({1, 1, n, 4}, 3)};
    std::fill_n(in.keys.view().row(0, 0, 400), 8, std::nanf(""));
    std::fill_n(in.values.view().row(0, 0, 401), 4, std::numeric_limits<float>::infinity());
    const auto hides = predicate{[](auto, auto j) { return j != 400 && j != 401; }};
    const auto pattern = causal{} & hides;
    using hiding = talking_heads_attention<std::remove_const_t<decltype(pattern)>>;
    check_talking(hiding{.logits_mix = mix.logits, .weights_mix = mix.weights, .pattern = pattern}, inputs<float>(in), {2, 5}, false);
    check_talking(talking_heads_attention<causal>{.logits_mix = mix.logits, .weights_mix = mix.weights}, inputs<float>(in), {2, 5}, false); // here they are seen
}

TEST_CASE("ranks: talking heads, what is wrong on one rank is thrown on all", "[distributed]") {
    const mixings mix;
    const index_t n = 100, ranks = 3;
    const given<float> in{random_tensor<float>({1, 4, n, 8}, 1), random_tensor<float>({1, 2, n, 8}, 2), random_tensor<float>({1, 3, n, 4}, 3)};
    const inputs<float> all(in);
    const partition parts(dense{}, shapes_of(all), ranks);
    const auto heard = [&](const auto& op, const inputs<float>& of_one, const partition& parts_of_one) { // rank 1 has another call
        std::vector<std::string> errors(static_cast<std::size_t>(ranks));
        on_thread_ranks(ranks, [&](auto& communicator) {
            const auto rank = communicator.rank();
            const auto q = parts.queries(rank), k = parts.keys(rank);
            const auto& from = rank == 1 ? of_one : all;
            const auto own = from.slice({.tokens = q}, {.tokens = k});
            errors[static_cast<std::size_t>(rank)] = error_of<std::exception>([&] {
                if (rank == 1) static_cast<void>(attend(sequence_parallel{op, parts_of_one}, communicator, own));
                else static_cast<void>(attend(sequence_parallel{talking_heads_attention<causal>{.logits_mix = mix.logits}, parts}, communicator, own));
            });
        });
        return errors;
    };
    const auto all_say = [](const std::vector<std::string>& errors, const std::string& what) {
        for (const auto& error : errors) check_says(error, {what});
    };
    const talking_heads_attention<causal> op{.logits_mix = mix.logits};
    all_say(heard(talking_heads_attention<causal>{.logits_mix = mix.weights}, all, parts), "talking_heads_attention: logits_mix has shape (1, 1, 6, 3)");
    const auto bias = random_tensor<float>({1, 3, 1, 70}, 9); // of the rank's own keys, but not of all
    const talking_heads_attention<causal, additive_bias<float>> biased{.logits_mix = mix.logits, .score = additive_bias{bias}};
    all_say(heard(biased, all, parts), "covers key positions 0 to 69, where 0 to 99 occur");
    all_say(heard(talking_heads_attention<local>{.logits_mix = mix.logits, .pattern = local{3}}, all, parts), "ranks 0 and 1 differ in their cuts or patterns");
    const auto one_head = random_tensor<float>({1, 1, n, 4}, 3);
    const inputs<float> other{in.queries, in.keys, one_head};
    all_say(heard(op, other, partition(dense{}, shapes_of(other), ranks)), "ranks 0 and 1 differ in the heads of v: 3 and 1");
}

} // namespace attn::testing
