#include "allocations.hpp"
#include "answers.hpp"
#include "catch.hpp"
#include "norm_checks.hpp"

#include <attn/attention/causal_convolution.hpp>
#include <attn/attention/depthwise_convolution.hpp>
#include <attn/attention/eigen.hpp>
#include <attn/attention/merge.hpp>
#include <attn/attention/pooling.hpp>
#include <attn/attention/project.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/softmax_backward.hpp>
#include <attn/distributed/backward.hpp>
#include <attn/layer/feed_forward.hpp>
#include <attn/layer/ragged.hpp>
#include <attn/layer/rotary.hpp>
#include <attn/layer/windows.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/parallel/thread_pool.hpp>

#include <vector>

namespace attn::testing {
namespace {

constexpr shape tokens{.batch = 2, .heads = 3, .tokens = 16, .channels = 8};

/// call(out, executor or execution) writes a tensor of that shape. Every form must leave the same bits as `expected`.
template <class F>
void check_forms(const tensor<float>& expected, const F& call) {
    const auto check = [&](auto&&... how) {
        tensor<float> out(expected.shape());
        call(out, how...);
        CHECK(same_bits(out, expected));
    };
    check();
    sequential here;
    const sequential always_here;
    thread_pool two(2);
    workspace memory(1 << 20);
    check(here);
    check(always_here);
    check(two);
    check(execution(here, memory));
    check(execution(two, memory));
    check(thread_pool(2));
    check(execution());
    const execution kept(two);
    check(kept);
    check(kept);
}

} // namespace

TEST_CASE("calls: every operation takes an execution, an executor or nothing, and returns what it would write", "[parallel][portable]") {
    const auto x = random_rows<float>(tokens, 1), y = random_rows<float>(tokens, 2);
    SECTION("attend") {
        const softmax_attention<> op;
        const inputs<float> in{x, y, y};
        check_forms(attend(op, in), [&](auto& out, auto&... how) { attend(op, in, outputs<float>{out}, how...); });
        check_forms(attend(op, x, y.view(), y), [&](auto& out, auto&... how) { attend(op, x, y, y.view(), out, how...); });
        CHECK(same_bits(attend(op, in, thread_pool(2)), attend(op, x, y.view(), y)));
        CHECK(same_bits(attend(op, in), attend(op, x, stored_view<const float>(y), y)));
        CHECK(same_bits(attend(op, in, thread_pool(2)), attend(op, x, y, y, thread_pool(2))));
    }
    SECTION("attend on Eigen matrices") {
        const Eigen::MatrixXf q = Eigen::MatrixXf::Random(20, 4), k = Eigen::MatrixXf::Random(30, 4), v = Eigen::MatrixXf::Random(30, 4);
        const auto expected = attend(softmax_attention{}, q, k, v);
        Eigen::MatrixXf out(20, 4), wide = Eigen::MatrixXf::Zero(20, 8);
        attend(softmax_attention{}, q, k, v, out);
        CHECK(out == expected);
        attend(softmax_attention{}, q, k, v, wide.middleCols(2, 4), thread_pool(2));
        CHECK(wide.middleCols(2, 4) == expected);
        CHECK(wide.leftCols(2).isZero());
        CHECK_THROWS_AS(attend(softmax_attention{}, q, k, v, wide), shape_error);
    }
    SECTION("merge") {
        const tensor<float> sums(log_sum_exp_shape(softmax_attention{}, {tokens, tokens, tokens}));
        const auto merged = [&](auto& out, auto&&... how) {
            std::copy_n(x.data(), x.shape().size(), out.data());
            tensor<float> into(sums.shape()), from(sums.shape());
            auto other = random_rows<float>(tokens, 2);
            merge(outputs<float>{out, into}, outputs<float>{other, from}, how...);
        };
        tensor<float> expected(tokens);
        merged(expected);
        check_forms(expected, merged);
        CHECK(expected.data()[5] == (x.data()[5] + y.data()[5]) / 2);
    }
    SECTION("normalise") {
        const layer_norm<float> norm;
        check_forms(normalise(norm, x), [&](auto& out, auto&... how) { normalise(norm, x, out, how...); });
        CHECK(same_bits(normalise(norm, x.view(), thread_pool(2)), normalise(norm, x)));
    }
    SECTION("project") {
        const mean_pooling projection{4};
        check_forms(project(projection, x), [&](auto& out, auto&... how) { project(projection, x, out, how...); });
        CHECK(same_bits(project(projection, x.view(), thread_pool(2)), project(projection, x)));
        tensor<float> none(tokens);
        CHECK_THROWS_AS(project(projection, x, none), shape_error);
    }
    SECTION("depthwise convolution") {
        const auto weights = random_rows<float>({1, 8, 1, 3}, 3);
        const depthwise_convolution<float> op{.weights = weights};
        check_forms(convolve(op, x), [&](auto& out, auto&... how) { add_convolution(op, x, out, how...); });
        CHECK(same_bits(convolve(op, x.view(), thread_pool(2)), convolve(op, x)));
    }
    SECTION("causal convolution") {
        const auto weights = random_rows<float>({1, 24, 1, 4}, 3);
        const causal_convolution op{.weights = weights, .activation = silu{}};
        check_forms(convolve(op, x), [&](auto& out, auto&... how) { convolve(op, x, out, how...); });
        CHECK(same_bits(convolve(op, x.view(), thread_pool(2)), convolve(op, x)));
    }
    SECTION("rotate") {
        const rotary<float> turns(40, 6);
        const auto expected = rotate(turns, x, 20);
        check_forms(expected, [&](auto& out, auto&... how) { rotate(turns, x, 20, out, how...); });
        auto in_place = random_rows<float>(tokens, 1);
        rotate(turns, in_place, 20, in_place);
        CHECK(same_bits(in_place, expected));
        CHECK(expected(1, 2, 3, 7) == x(1, 2, 3, 7)); // beyond the channels that are turned
        CHECK_THROWS_AS(rotate(turns, x, 25), argument_error);
    }
    SECTION("windows") {
        const window_grid grid{.height = 4, .width = 4, .window_height = 2, .window_width = 2, .shift_height = 1};
        const auto windows = window_partition(grid, x);
        check_forms(windows, [&](auto& out, auto&... how) { window_partition(grid, x, out, how...); });
        check_forms(x, [&](auto& out, auto&... how) { window_reverse(grid, windows, out, how...); });
        CHECK(same_bits(window_reverse(grid, windows.view(), thread_pool(2)), x));
        CHECK_THROWS_AS(window_reverse(grid, random_rows<float>({7, 3, 4, 8}, 1)), shape_error);
    }
    SECTION("forward") {
        const auto rows = random_rows<float>({.batch = 2, .tokens = 16, .channels = 8}, 4), up = random_rows<float>({.tokens = 12, .channels = 8}, 5),
                   down = random_rows<float>({.tokens = 8, .channels = 12}, 6);
        const feed_forward<float> layer{.up = {.weight = up}, .down = {.weight = down}};
        const layer_inputs<float> in{.tokens = rows};
        check_forms(forward(layer, in), [&](auto& out, auto&... how) { forward(layer, in, out, how...); });
        CHECK(same_bits(forward(layer, in, thread_pool(2)), forward(layer, in)));
    }
}

TEST_CASE("calls: an execution that is kept allocates until its workspace serves all of them, then nothing", "[parallel]") {
    thread_pool two(2);
    const execution run(two);
    const softmax_attention<> op;
    const auto x = random_rows<float>(tokens, 1), large = random_rows<float>({.batch = 2, .heads = 3, .tokens = 300, .channels = 8}, 2);
    tensor<float> out(x.shape()), of_large(large.shape());
    const auto attend_both = [&] {
        attend(op, inputs<float>{x, x, x}, outputs<float>{out}, run);
        attend(op, inputs<float>{large, large, large}, outputs<float>{of_large}, run);
    };
    attend_both();
    const auto bytes = run.workspace().size_bytes();
    CHECK(bytes >= workspace_bytes<float>(op, {large.shape(), large.shape(), large.shape()}, run));
    const auto first = attend(op, x, x, x);
    CHECK(allocations_in(attend_both) == 0);
    CHECK(run.workspace().size_bytes() == bytes);
    CHECK(same_bits(out, first));
}

TEST_CASE("workspace_bytes: takes what the call takes", "[parallel]") {
    const softmax_attention<> op;
    const input_shapes s{tokens, tokens, tokens};
    thread_pool two(2);
    const auto alone = workspace_bytes<float>(op, s), shared = workspace_bytes<float>(op, s, two);
    CHECK(alone < shared);
    CHECK(workspace_bytes<float>(op, s, sequential{}) == alone);
    CHECK(workspace_bytes<float>(op, s, execution()) == alone);
    CHECK(workspace_bytes<float>(op, s, execution(two)) == shared);
    CHECK(workspace_bytes<float>(op, s, thread_pool(2)) == shared);

    const layer_norm<float> norm;
    CHECK(workspace_bytes<float>(norm, tokens) == norm.workspace_bytes(tokens, 1));
    CHECK(workspace_bytes<Eigen::bfloat16>(norm, tokens, thread_pool(2)) == norm.workspace_bytes(tokens, 2, true));
    CHECK(workspace_bytes<float>(mean_pooling{4}, tokens, thread_pool(2)) == 2 * workspace_bytes<float>(mean_pooling{4}, tokens));
    CHECK(backward_workspace_bytes<float>(op, s, thread_pool(2)) == op.backward_workspace_bytes<float>(s, 2));
    CHECK(backward_workspace_bytes(norm, tokens, thread_pool(2)) == norm.backward_workspace_bytes(tokens, 2));

    const auto rows = random_rows<float>({.batch = 1, .tokens = 16, .channels = 8}, 4),
               weight = random_rows<float>({.tokens = 12, .channels = 8}, 5);
    const linear<float> layer{.weight = weight};
    CHECK(workspace_bytes(layer, {.tokens = rows}, thread_pool(2)) == layer.workspace_bytes(rows.shape(), {}, 2));
    CHECK(backward_workspace_bytes(layer, {.tokens = rows}, thread_pool(2)) == layer.backward_workspace_bytes(rows.shape(), {}, 2));
    const std::vector<index_t> starts{0, 6, 16};
    CHECK(workspace_bytes(layer, ragged{starts}, {.tokens = rows}, thread_pool(2)) > 0);
    CHECK(workspace_bytes<float>(op, ragged{starts}, inputs<float>{rows, rows, rows}, thread_pool(2)) > 0);
    const sequence_parallel over{op, partition(dense{}, {rows.shape(), rows.shape(), rows.shape()}, 2)};
    CHECK(workspace_bytes<float>(over, 1, thread_pool(2)) > workspace_bytes<float>(over, 1));
    CHECK(backward_workspace_bytes<float>(over, 1, thread_pool(2)) > backward_workspace_bytes<float>(over, 1));
}

} // namespace attn::testing
