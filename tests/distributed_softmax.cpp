// Softmax attention over ranks has the bits of the call on one machine.
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"
#include "rank_checks.hpp"
#include "sequence_checks.hpp"

#include <attn/attention/pointwise_attention.hpp>
#include <attn/attention/products.hpp>
#include <attn/attention/sparse_attention.hpp>
#include <attn/distributed/thread_communicator.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/global.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/on_heads.hpp>
#include <attn/pattern/predicate.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/pattern/segments.hpp>
#include <attn/score/additive_bias.hpp>
#include <attn/score/alibi.hpp>
#include <attn/score/composed_score.hpp>
#include <attn/score/soft_cap.hpp>

#include <atomic>
#include <chrono>
#include <numeric>

namespace attn::testing {

using namespace pattern;

namespace {

template <Scalar T>
void check_op(const auto& op, const inputs<T>& in, const std::vector<index_t>& ranks = {1, 2, 3, 4, 5, 6, 7}) {
    check_over(op, in, partitions(op.pattern, in, ranks));
}

std::vector<std::int32_t> documents(index_t n) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i / 700 + i / 1100);
    return ids;
}

} // namespace

TEST_CASE("ranks: softmax attention of any pattern, n that nothing divides", "[distributed][parallel]") {
    for (const index_t n : {0, 1, 6, 97, 1500}) {
        CAPTURE(n);
        const auto in = random_given<float>({1, 2, 1, n, n, 9, 5});
        check_op(softmax_attention{}, inputs<float>(in));
        check_op(softmax_attention{.pattern = causal{}}, inputs<float>(in));
        check_op(softmax_attention{.pattern = causal{} & local{100}}, inputs<float>(in));
        check_op(softmax_attention{.pattern = segments(documents(n))}, inputs<float>(in));
        check_op(softmax_attention{.pattern = causal{} & (local{9} | strided{11})}, inputs<float>(in));
        check_op(softmax_attention{.pattern = predicate{[](auto, auto) { return false; }}}, inputs<float>(in));
        // Of many keys the range arithmetic cannot tell that none is seen, of one it can.
        const predicate uncertain{[](auto, auto j) { return floor_mod(j, 2) - floor_mod(j, 2) == 1; }};
        check_op(softmax_attention{.pattern = uncertain}, inputs<float>(in), {3});
    }
}

TEST_CASE("ranks: several pieces of keys, which spans and passes go through in order", "[distributed]") {
    const index_t n = 5'301;
    const auto in = random_given<float>({1, 2, 1, n, n, 8, 4});
    const std::vector<index_t> some{2, 3, 7};
    check_op(softmax_attention{.pattern = causal{}}, inputs<float>(in), some);
    check_op(softmax_attention{}, inputs<float>(in), {5});
    check_op(softmax_attention{.pattern = local{300}}, inputs<float>(in), some);
    check_op(softmax_attention{.pattern = causal{} & (local{9} | strided{3})}, inputs<float>(in), some); // spans of 3072 keys in the second pass
    check_op(softmax_attention{.pattern = strided{2} | strided{5} | local{20}}, inputs<float>(in), {4});
    check_op(softmax_attention{.pattern = (on_heads{0, 1} & strided{4}) | (on_heads{1, 2} & (local{50} | strided{6}))}, inputs<float>(in), some);
    check_op(softmax_attention{.pattern = global{5} | local{40}}, inputs<float>(in), some);
    check_op(softmax_attention{.pattern = sparse_transformer_strided(96)}, inputs<float>(in), some);
    check_op(softmax_attention{.pattern = sparse_transformer_fixed(128, 8)}, inputs<float>(in), {3});
}

TEST_CASE("ranks: score functions and sinks", "[distributed]") {
    const index_t n = 2'500;
    constexpr auto infinity = std::numeric_limits<double>::infinity();
    const auto in = random_given<float>({1, 3, 3, n, n, 8, 4});
    const std::vector<double> slopes{0.1, 0.02, 0.7};
    const auto bias = random_tensor<float>({1, 3, 1, n}, 9);
    const auto lambda = []<class S>(S score, auto query, auto key) { return score - S(0.001) * S(query - key); };
    const std::vector<index_t> some{2, 5};
    check_op(softmax_attention{.score = alibi{slopes}, .pattern = causal{}}, inputs<float>(in), some);
    check_op(softmax_attention{.score = composed_score{soft_cap{3}, lambda}}, inputs<float>(in), some);
    check_op(softmax_attention{.score = additive_bias{bias}, .pattern = causal{}}, inputs<float>(in), some);
    for (const auto& sinks : {std::vector{0.0, 5.0, -3.0}, std::vector{-infinity, infinity, std::nan("")}}) {
        check_op(softmax_attention{.pattern = causal{} & local{700, 0}, .sinks = sinks}, inputs<float>(in), some);
        check_op(softmax_attention{.pattern = strided{7} | predicate{[](auto i, auto j) { return j < i - 900; }}, .sinks = sinks}, inputs<float>(in), some);
    }
}

TEST_CASE("ranks: pointwise attention", "[distributed]") {
    const index_t n = 2'500;
    const auto in = random_given<float>({1, 2, 1, n, n, 8, 4});
    const auto check = [&](const auto& op) { check_over(op, inputs<float>(in), partitions(op.pattern, inputs<float>(in), {2, 5}), false); };
    check(pointwise_attention{.weight = sigmoid{-6}, .pattern = causal{}});
    check(pointwise_attention{.weight = squared_relu{}, .pattern = causal{} & (local{9} | strided{3}), .score = soft_cap{3}});
    check(pointwise_attention{.weight = relu_over{2500}, .pattern = predicate{[](auto i, auto j) { return j < i - 900; }}});
}

TEST_CASE("ranks: queries beside other keys than theirs say where they stand", "[distributed]") {
    const input_shapes crossed{{1, 1, 10, 4}, {1, 1, 12, 4}, {1, 1, 12, 4}};
    const std::vector<double> slopes{0.1};
    const auto heard = [&](const auto& op, const positions& where) {
        const sequence_parallel over{op, partition(dense{}, crossed, 2, where)};
        std::vector<std::string> errors(2);
        on_thread_ranks(2, [&](auto& ranks) {
            const auto rank = ranks.rank();
            const tensor<float> q(over.partition.shapes(rank).queries), k(over.partition.shapes(rank).keys);
            errors[static_cast<std::size_t>(rank)] = error_of([&] { (void)attend(over, ranks, inputs<float>{q, k, k}); });
        });
        CHECK(errors[0] == errors[1]);
        return errors[0];
    };
    check_says(heard(softmax_attention{.score = alibi{slopes}}, {}), {"softmax_attention: positions are not given, but q has 10 tokens and k 12, and the score"});
    check_says(heard(softmax_attention{.pattern = causal{}}, {}), {"softmax_attention: positions are not given, but q has 10 tokens and k 12, and the pattern"});
    CHECK(heard(softmax_attention{.score = alibi{slopes}, .pattern = causal{}}, top_left()) == nothing_thrown);
    CHECK(heard(softmax_attention{}, {}) == nothing_thrown);
}

TEST_CASE("ranks: 16-bit keys, values and results, and bf16 products", "[distributed]") {
    const index_t n = 2'700;
    const auto in = random_given<float>({1, 2, 1, n, n, 8, 6});
    tensor<Eigen::bfloat16> k(in.keys.shape()), out(shape{1, 2, n, 6});
    tensor<Eigen::half> v(in.values.shape());
    std::transform(in.keys.data(), in.keys.data() + n * 8, k.data(), [](float x) { return Eigen::bfloat16(x); });
    std::transform(in.values.data(), in.values.data() + n * 6, v.data(), [](float x) { return Eigen::half(x); });
    const inputs<float> narrow{in.queries, k, v};
    check_op(softmax_attention{.pattern = causal{}}, narrow, {3});
    check_op(softmax_attention{.pattern = causal{}, .products = bf16_products{}}, narrow, {3});
    const softmax_attention op{.pattern = causal{} & (local{40} | strided{5})};
    attend(op, narrow, outputs<float>{out});
    for (const auto& parts : partitions(op.pattern, narrow, {1, 3, 4}))
        CHECK_NOTHROW(on_thread_ranks(parts.ranks(), [&](auto& ranks) {
            check_rank(op, ranks, parts, narrow, outputs<float>{out}, 1);
        }));
}

TEST_CASE("ranks: a partition of another pattern gives the same, and hidden keys may be anything", "[distributed]") {
    const index_t n = 1'800;
    auto in = random_given<float>({1, 1, 1, n, n, 8, 4});
    std::fill_n(in.keys.view().row(0, 0, 900), 8, std::nanf(""));
    const softmax_attention op{.pattern = causal{} & predicate{[](auto, auto j) { return j != 900; }}};
    check_over(op, inputs<float>(in), partitions(dense{}, inputs<float>(in), {2, 5}), false);
    check_over(softmax_attention{.pattern = causal{}}, inputs<float>(in), partitions(local{3}, inputs<float>(in), {3}), false); // here it is seen
}

TEST_CASE("ranks: a rank's own rows leave before it gets to them", "[distributed][parallel]") {
    // The second rank is done with its pieces, of which it needs all five of the first's, while that is at its first one.
    const index_t n = 40'000;
    const auto pattern = causal{} & local{18'000};
    const shape s{1, 1, n, 1};
    const positions where;
    const kernel::visible_keys_of<float, std::remove_const_t<decltype(pattern)>> visible(pattern, {s, s, s}, where);
    const detail::row_cuts cuts{{0, n / 2, n}};
    const detail::key_plan plan({visible, s, 0, 0}, cuts, cuts);
    tensor<float> numbers(s);
    std::iota(numbers.data(), numbers.data() + n, 0.f);
    std::atomic<bool> is_done = false;
    CHECK_NOTHROW(on_thread_ranks(2, [&](auto& ranks) {
        const auto rank = ranks.rank();
        const auto held = cuts.of(rank);
        const auto rows_held = numbers.slice({.tokens = held});
        const inputs<float> own{rows_held, rows_held, rows_held};
        detail::stream_memory<float> memory(plan, rank, own);
        detail::key_stream<float, thread_communicator> stream(ranks, plan, own, held, memory);
        stream.run([&](index_t, const row_range& rows, const auto& keys, const auto& values) {
            for (index_t i = 0; i < rows.count; ++i)
                require(keys(0, 0, i, 0) == static_cast<float>(rows.first + i) && values(0, 0, i, 0) == keys(0, 0, i, 0), "rows arrive");
            for (const auto began = std::chrono::steady_clock::now(); rank == 0 && !is_done; stream.progress())
                require(std::chrono::steady_clock::now() - began < std::chrono::seconds(30), "the second rank does not wait for the first to compute");
        });
        is_done = true;
    }));
}

TEST_CASE("ranks: who throws makes all throw, whatever the others wait for", "[distributed][parallel]") {
    const index_t n = 2'000, ranks = 4;
    const auto in = random_given<float>({1, 1, 1, n, n, 8, 4});
    const inputs<float> all(in);
    const partition parts(dense{}, shapes_of(all), ranks);
    const auto own = [&](index_t rank) {
        return all.slice({.tokens = parts.queries(rank)}, {.tokens = parts.keys(rank)});
    };
    /// What each rank hears.
    const auto heard = [&](const auto& call) {
        std::vector<std::string> errors(static_cast<std::size_t>(ranks), nothing_thrown);
        on_thread_ranks(ranks, [&](auto& communicator) {
            try {
                call(communicator);
            } catch (const std::exception& error) { errors[static_cast<std::size_t>(communicator.rank())] = error.what(); }
        });
        return errors;
    };

    // In the middle of the computation, on one rank: its executor fails.
    check_failures("sequence_parallel", ranks, [&](auto& communicator, auto& executor) {
        static_cast<void>(attend(sequence_parallel{softmax_attention{}, parts}, communicator, own(communicator.rank()), executor));
    });

    // Before it: shapes that are not the partition's, positions, a workspace too small, a partition of another size.
    const sequence_parallel op{softmax_attention{}, parts};
    const auto all_hear = [&](const std::string& thrown_there, const auto& call) {
        const auto errors = heard([&](auto& communicator) {
            if (communicator.rank() == 2) call(communicator);
            else static_cast<void>(attend(op, communicator, own(communicator.rank())));
        });
        for (index_t rank = 0; rank < ranks; ++rank) {
            if (rank == 2) check_says(errors[2], {thrown_there});
            else check_says(errors[static_cast<std::size_t>(rank)], {"sequence_parallel: rank 2 has failed: ", thrown_there});
        }
    };
    all_hear("k has shape (1, 1, 499, 8), but rank 2 of the partition holds (1, 1, 500, 8)", [&](auto& communicator) {
        auto wrong = own(2);
        wrong.keys = wrong.keys.slice({.tokens = {0, 499}});
        static_cast<void>(attend(op, communicator, wrong));
    });
    all_hear("positions are given, but they are the partition's", [&](auto& communicator) {
        auto wrong = own(2);
        wrong.positions.first_query = 1000;
        static_cast<void>(attend(op, communicator, wrong));
    });
    all_hear("workspace has 0 bytes, but q of shape ", [&](auto& communicator) {
        workspace none;
        sequential one;
        tensor<float> out({1, 1, 500, 4});
        attend(op, communicator, own(2), outputs<float>{out}, execution(one, none));
    });
    all_hear("out has shape (1, 1, 500, 3), but the result has (1, 1, 500, 4)", [&](auto& communicator) {
        tensor<float> out({1, 1, 500, 3});
        attend(op, communicator, own(2), outputs<float>{out});
    });
    all_hear("partition is for 3 ranks, but the communicator has 4", [&](auto& communicator) {
        static_cast<void>(attend(sequence_parallel{softmax_attention{}, partition(dense{}, shapes_of(all), 3)}, communicator, own(2)));
    });

    // And what only the ranks together can see.
    const auto differing = [&](const auto& other, const auto& of_other) {
        return heard([&](auto& communicator) {
            if (communicator.rank() == 2) static_cast<void>(attend(other, communicator, of_other));
            else static_cast<void>(attend(op, communicator, own(communicator.rank())));
        });
    };
    const auto wider = random_given<float>({1, 1, 1, 500, 500, 10, 4});
    auto shapes = shapes_of(all);
    shapes.queries.channels = shapes.keys.channels = 10;
    for (const auto& error : differing(sequence_parallel{softmax_attention{}, partition(dense{}, shapes, ranks)}, inputs<float>(wider)))
        CHECK(error == "sequence_parallel: ranks 0 and 2 differ in the channels of k: 8 and 10");
    for (const auto& error : differing(sequence_parallel{softmax_attention{.pattern = causal{}}, parts}, own(2)))
        check_says(error, {"sequence_parallel: ranks 0 and 2 differ in their cuts or patterns"});
}

} // namespace attn::testing
