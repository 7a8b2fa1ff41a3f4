// The gradient of softmax attention over ranks: that of one machine but for rounding, with the same bits from run to run.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"
#include "rank_checks.hpp"
#include "sequence_checks.hpp"

#include <attn/distributed/backward.hpp>
#include <attn/distributed/thread_communicator.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/predicate.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/score/additive_bias.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

/// Gradients of a whole call.
template <Scalar T>
struct whole_gradients {
    tensor<T> queries, keys, values, sinks, bias;

    explicit whole_gradients(const inputs<T>& in, index_t sink_count, const shape& of_bias)
        : queries(in.queries.shape()), keys(in.keys.shape()), values(in.values.shape()), sinks({1, sink_count, 1, 1}), bias(of_bias) {}
};

template <Scalar T, class Op>
gradients_of<Op, T> wanted_of(const Op& op, whole_gradients<T>& g, const tensor_view<T>& dq, const tensor_view<T>& dk, const tensor_view<T>& dv) {
    gradients_of<Op, T> wanted{{dq, dk, dv}};
    if (!op.sinks.empty()) wanted.sinks = g.sinks;
    if constexpr (requires { wanted.score.bias; }) wanted.score.bias = g.bias;
    return wanted;
}

/// Largest difference, as a part of the largest number.
template <Scalar T>
double difference(const tensor<T>& a, const tensor<T>& b) {
    double largest = 0, apart = 0;
    for (index_t i = 0; i < a.shape().size(); ++i) {
        largest = std::max(largest, std::abs(static_cast<double>(b.data()[i])));
        apart = std::max(apart, std::abs(static_cast<double>(a.data()[i]) - static_cast<double>(b.data()[i])));
    }
    return largest > 0 ? apart / largest : apart;
}

/// On one machine, and on threads for each of the partitions, twice.
template <Scalar T>
void check_backward_over(const auto& op, const inputs<T>& in, std::vector<partition> all_parts, const shape& of_bias = {}) {
    const auto s = shapes_of(in);
    const auto out_shape = op.output_shape(s);
    auto row_shape = out_shape;
    row_shape.channels = 1;
    tensor<T> out(out_shape), log_sum_exp(row_shape);
    attend(op, in, outputs<T>{out, log_sum_exp});
    const auto d_out = random_tensor<T>(out_shape, 17), d_rows = random_tensor<T>(row_shape, 18);
    const auto sink_count = static_cast<index_t>(op.sinks.size());
    whole_gradients<T> expected(in, sink_count, of_bias);
    backward(op, in, {out, log_sum_exp}, {d_out, d_rows}, wanted_of<T>(op, expected, expected.queries, expected.keys, expected.values));

    for (const auto& parts : all_parts) {
        CAPTURE(s.queries.tokens, s.keys.tokens, parts.ranks());
        std::optional<whole_gradients<T>> first;
        for (const bool again : {false, true}) {
            whole_gradients<T> found(in, sink_count, of_bias);
            CHECK_NOTHROW(on_thread_ranks(parts.ranks(), [&](auto& ranks) {
                const auto q = parts.queries(ranks.rank()), k = parts.keys(ranks.rank());
                const rank_rows<T> own_queries(in.queries, q), own_keys(in.keys, k), own_values(in.values, k);
                whole_gradients<T> own({own_queries.view, own_keys.view, own_values.view}, sink_count, of_bias); // its own sinks and bias
                thread_pool threads(again ? 2 : 1);
                backward(sequence_parallel{op, parts}, ranks, inputs<T>{own_queries.view, own_keys.view, own_values.view},
                         saved_outputs<T>{out, log_sum_exp}.slice({.tokens = q}), output_gradients<T>{d_out, d_rows}.slice({.tokens = q}),
                         wanted_of<T>(op, own, found.queries.slice({.tokens = q}), found.keys.slice({.tokens = k}), found.values.slice({.tokens = k})),
                         threads);
                if (ranks.rank() == ranks.size() - 1) found.sinks = std::move(own.sinks), found.bias = std::move(own.bias);
            }));
            const auto near = 200 * static_cast<double>(std::numeric_limits<T>::epsilon());
            CHECK(difference(found.queries, expected.queries) < near);
            CHECK(difference(found.keys, expected.keys) < near);
            CHECK(difference(found.values, expected.values) < near);
            CHECK(difference(found.sinks, expected.sinks) < near);
            CHECK(difference(found.bias, expected.bias) < near);
            if (!again) {
                first.emplace(std::move(found));
                continue;
            }
            CHECK(same_bits(found.queries, first->queries));
            CHECK(same_bits(found.keys, first->keys));
            CHECK(same_bits(found.values, first->values));
            CHECK(same_bits(found.sinks, first->sinks));
            CHECK(same_bits(found.bias, first->bias));
            if (parts.ranks() == 1 && s.keys.tokens <= 4096 && s.queries.tokens > 0) CHECK(same_bits(found.keys, expected.keys));
        }
    }
}

} // namespace

TEST_CASE("ranks: the gradient of softmax attention is that of one machine", "[distributed][parallel]") {
    using T = float;
    for (const index_t n : {0, 1, 6, 97, 900}) {
        const auto given = random_given<T>({1, 2, 1, n, n, 9, 5});
        const inputs<T> in(given);
        check_backward_over(softmax_attention{}, in, partitions(dense{}, in));
        check_backward_over(softmax_attention{.pattern = causal{}}, in, partitions(causal{}, in, {3, 7}));
        const softmax_attention both{.pattern = causal{} & (local{9} | strided{11})};
        check_backward_over(both, in, partitions(both.pattern, in, {4}));
        check_backward_over(softmax_attention{.pattern = predicate{[](auto, auto) { return false; }}}, in, partitions(dense{}, in, {3}));
    }
}

TEST_CASE("ranks: gradients of several pieces, of few ranks that see each, with sinks and a bias", "[distributed]") {
    const index_t n = 5'301;
    const auto given = random_given<float>({1, 2, 2, n, n, 8, 4});
    const inputs<float> in(given);
    const std::vector<index_t> some{2, 3, 7};
    check_backward_over(softmax_attention{.pattern = causal{}}, in, partitions(causal{}, in, some));
    check_backward_over(softmax_attention{.pattern = local{300}}, in, partitions(local{300}, in, some));
    const softmax_attention strides{.pattern = causal{} & (local{9} | strided{3})};
    check_backward_over(strides, in, partitions(strides.pattern, in, {3}));

    const std::vector<double> sinks{0.5, -1};
    const auto bias = random_tensor<float>({1, 2, 1, n}, 9);
    const softmax_attention full{.score = additive_bias{bias}, .pattern = causal{} & local{3'000}, .sinks = sinks};
    check_backward_over(full, in, partitions(full.pattern, in, some), bias.shape());

    // Beside scores of such a size a row's weights are summed over all pieces first.
    const auto few = random_given<float>({1, 2, 2, 300, n, 8, 4, {.first_query = 5'001}});
    const std::vector<double> large_sinks{10'008, 9'990};
    auto large_bias = random_tensor<float>(bias.shape(), 9);
    for (index_t e = 0; e < bias.shape().size(); ++e) large_bias.data()[e] += 10'000;
    const softmax_attention large{.score = additive_bias{large_bias}, .pattern = causal{}, .sinks = large_sinks};
    check_backward_over(large, inputs<float>(few), partitions(causal{}, inputs<float>(few), some), bias.shape());

    const auto empty = random_given<float>({1, 2, 1, 97, 97, 8, 0}); // values without channels
    check_backward_over(softmax_attention{}, inputs<float>(empty), partitions(dense{}, inputs<float>(empty), {3}));
    const auto moved = random_given<float>({2, 4, 2, 500, 5'300, 17, 12, {.first_query = 1'000, .first_key = -3'000}});
    check_backward_over(softmax_attention{.pattern = causal{}}, inputs<float>(moved), partitions(causal{}, inputs<float>(moved), {3, 5}));
}

TEST_CASE("ranks: a rank gets the gradients that it wants, whatever the others want", "[distributed]") {
    const index_t n = 5'000;
    const auto given = random_given<float>({1, 1, 1, n, n, 8, 4});
    const inputs<float> in(given);
    const softmax_attention op{.pattern = causal{}};
    const partition parts(op.pattern, shapes_of(in), 3);
    tensor<float> out({1, 1, n, 4}), rows({1, 1, n, 1});
    attend(op, in, outputs<float>{out, rows});
    const auto d_out = random_tensor<float>(out.shape(), 5);
    const auto run = [&](bool all) {
        tensor<float> dk(in.keys.shape()), dv(in.values.shape());
        CHECK_NOTHROW(on_thread_ranks(3, [&](auto& ranks) {
            const auto own = parts.queries(ranks.rank());
            const tensor_part part{.tokens = own};
            input_gradients<float> wanted;
            if (all || ranks.rank() == 0) wanted.keys = dk.slice(part);
            if (all || ranks.rank() == 2) wanted.values = dv.slice(part);
            backward(sequence_parallel{op, parts}, ranks, in.slice(part, part), saved_outputs<float>{out, rows}.slice(part), {d_out.slice(part)}, {wanted});
        }));
        return std::pair(std::move(dk), std::move(dv));
    };
    const auto all = run(true), some = run(false);
    const auto k = parts.keys(0), v = parts.keys(2);
    CHECK(std::equal(all.first.data(), all.first.data() + k.count * 8, some.first.data()));
    CHECK(std::equal(all.second.data() + v.first * 4, all.second.data() + v.end() * 4, some.second.data() + v.first * 4));
}

TEST_CASE("ranks: a gradient that fails on one rank fails on all", "[distributed][parallel]") {
    const index_t n = 9'000;
    const auto given = random_given<float>({1, 1, 1, n, n, 8, 4});
    const std::vector<double> sinks{0};
    const softmax_attention op{.pattern = local{500}, .sinks = sinks};
    const partition parts(op.pattern, shapes_of(inputs<float>(given)), 3);
    tensor<float> out({1, 1, n, 4}), rows({1, 1, n, 1}), d_out({1, 1, n, 4});
    check_failures("sequence_parallel", 3, [&](auto& communicator, auto& executor) {
        const auto own = parts.queries(communicator.rank());
        const tensor_part part{.tokens = own};
        tensor<float> dq({1, 1, own.count, 8}), dk(dq.shape()), of_sinks({1, 1, 1, 1});
        backward(sequence_parallel{op, parts}, communicator, inputs<float>(given).slice(part, part), saved_outputs<float>{out, rows}.slice(part), {d_out.slice(part)},
                 {{dq, dk}, of_sinks}, executor);
    });
}

TEST_CASE("ranks: sinks whose gradient one rank does not want, or another call, are refused on all", "[distributed]") {
    const index_t n = 60;
    const auto given = random_given<float>({1, 1, 1, n, n, 8, 4});
    const inputs<float> in(given);
    const std::vector<double> sinks{0};
    const softmax_attention op{.sinks = sinks};
    const partition parts(op.pattern, shapes_of(in), 3);
    tensor<float> out({1, 1, n, 4}), rows({1, 1, n, 1}), d_out({1, 1, n, 4});
    const auto heard = [&](const auto& call) {
        std::vector<std::string> errors(3, nothing_thrown);
        on_thread_ranks(3, [&](auto& ranks) {
            const auto own = parts.queries(ranks.rank());
            const tensor_part part{.tokens = own};
            tensor<float> dq({1, 1, own.count, 8}), dk(dq.shape());
            errors[static_cast<std::size_t>(ranks.rank())] = error_of<std::exception>([&] {
                call(ranks, in.slice(part, part), saved_outputs<float>{out, rows}.slice(part), output_gradients<float>{d_out}.slice(part), input_gradients<float>{dq, dk});
            });
        });
        return errors;
    };
    const sequence_parallel over{op, parts};
    for (const auto& error : heard([&](auto& ranks, const auto& own, const auto& saved, const auto& d, const auto& wanted) {
             tensor<float> of_sinks({1, 1, 1, 1});
             backward(over, ranks, own, saved, d, {wanted, ranks.rank() == 1 ? tensor_view<float>() : of_sinks.view()});
         }))
        check_says(error, {"sequence_parallel: ranks 0 and 1 differ in what is asked of it, a number of which is"});
    for (const auto& error : heard([&](auto& ranks, const auto& own, const auto& saved, const auto& d, const auto& wanted) {
             if (ranks.rank() == 2) static_cast<void>(attend(over, ranks, own));
             else backward(over, ranks, own, saved, d, {wanted});
         }))
        check_says(error, {"sequence_parallel: ranks 0 and 2 differ in what is asked of it"});
    const auto errors = heard([&](auto& ranks, const auto& own, auto saved, const auto& d, const auto& wanted) {
        if (ranks.rank() == 0) saved.log_sum_exp = {};
        backward(over, ranks, own, saved, d, {wanted});
    });
    check_says(errors[0], {"softmax_attention", "saved.log_sum_exp", "(1, 1, 20, 1)"});
    check_says(errors[1], {"rank 0 has failed", "saved.log_sum_exp"});
    for (const auto& error : heard([&](auto& ranks, const auto& own, const auto& saved, const auto& d, const auto& wanted) {
             workspace none;
             sequential one;
             backward(over, ranks, own, saved, d, {wanted}, execution(one, none));
         }))
        check_says(error, {"workspace has 0 bytes, but the gradient for q of shape "});
}

} // namespace attn::testing
