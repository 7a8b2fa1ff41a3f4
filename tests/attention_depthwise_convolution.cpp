// The depthwise convolution: what it refuses, and weights in another shape. attn_random holds it to its definition.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"

#include <attn/attention/depthwise_convolution.hpp>
#include <attn/attention/simplified_linear_attention.hpp>

namespace attn::testing {

TEST_CASE("depthwise_convolution: what does not fit is refused", "[convolution][portable]") {
    tensor<float> x({1, 2, 12, 4}), out({1, 2, 12, 4}), weights({1, 4, 3, 5});
    const auto refusal = [&](const depthwise_convolution<float>& op, const tensor_view<const float>& from,
                             const tensor_view<float>& to) { return error_of([&] { add_convolution(op, from, to); }); };
    const depthwise_convolution<float> good{.weights = weights.view(), .height = 3, .width = 4};
    CHECK(refusal(good, x.view(), out.view()) == nothing_thrown);
    auto op = good;
    op.width = 5;
    check_says(refusal(op, x.view(), out.view()), {"depthwise_convolution: height and width are 3 and 5, but x has shape (1, 2, 12, 4)"});
    op = good;
    const tensor<float> even({1, 4, 2, 3}), other({1, 5, 3, 3}), heads({3, 4, 3, 3}), row({1, 4, 1, 4});
    op.weights = even.view();
    check_says(refusal(op, x.view(), out.view()), {"weights has shape (1, 4, 2, 3), but a kernel has an odd height and width"});
    op.weights = other.view();
    check_says(refusal(op, x.view(), out.view()), {"weights has shape (1, 5, 3, 3)"});
    op.weights = heads.view();
    check_says(refusal(op, x.view(), out.view()), {"weights has shape (3, 4, 3, 3)"});
    op.weights = row.view();
    op.causal = true;
    check_says(refusal(op, x.view(), out.view()), {"causal"});
    op = good;
    const std::vector<float> bias(5);
    op.bias = bias;
    check_says(refusal(op, x.view(), out.view()), {"bias has 5 entries"});
    check_says(refusal(good, x.view(), x.view()), {"out of shape (1, 2, 12, 4) overlaps x"});
    tensor<float> narrow({1, 2, 12, 3});
    check_says(refusal(good, x.view(), narrow.view()), {"out has shape (1, 2, 12, 3), but x has (1, 2, 12, 4)"});
}

TEST_CASE("depthwise_convolution: weights as PyTorch has them, (c, 1, height, width)", "[attention][convolution]") {
    const auto x = random_tensor<float>({1, 2, 12, 4}, 1), weights = random_tensor<float>({1, 4, 3, 3}, 2);
    const auto theirs = head_major(weights.data(), {4, 1, 3, 3});
    const auto op = [](const tensor_view<const float>& w) { return depthwise_convolution<float>{.weights = w, .height = 3, .width = 4}; };
    CHECK(same_bits(convolve(op(theirs), x), convolve(op(weights), x)));
    const auto attended = [&](const tensor_view<const float>& w) { return attend(simplified_linear_attention<>{.convolution = op(w)}, x, x, x); };
    CHECK(same_bits(attended(theirs), attended(weights)));
    const auto five = random_tensor<float>({5, 1, 3, 3}, 3);
    CHECK_THROWS_AS(convolve(op(five), x), shape_error);
}

} // namespace attn::testing
