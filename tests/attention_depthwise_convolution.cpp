// The depthwise convolution alone against a direct sum, on whole numbers, whose sums are exact in any order.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"
#include "layouts.hpp"

#include <attn/attention/depthwise_convolution.hpp>
#include <attn/attention/simplified_linear_attention.hpp>
#include <attn/reference/depthwise_convolution.hpp>

namespace attn::testing {

namespace {

template <Scalar T>
tensor<T> whole_numbers(const shape& s, unsigned seed) {
    tensor<T> t(s);
    std::mt19937 random(seed);
    std::generate_n(t.data(), s.size(), [&] { return static_cast<T>(static_cast<int>(random() % 9) - 4); });
    return t;
}

struct sizes {
    index_t height, width, channels, kernel_height, kernel_width;
    index_t batch = 1, heads = 1, x_heads = 1;
    bool causal = false, per_head = false;
};

template <Scalar T>
std::string describe(const sizes& s, const named_layout& l) {
    return std::to_string(s.height) + " x " + std::to_string(s.width) + ", " + std::to_string(s.channels) + " channels, kernel " +
           std::to_string(s.kernel_height) + " x " + std::to_string(s.kernel_width) + (s.causal ? " causal, " : ", ") + l.name;
}

/// Added to what out holds, in a layout, with guards of NaN around every tensor.
template <Scalar T>
void check(const sizes& s, const named_layout& l) {
    INFO(describe<T>(s, l));
    const auto n = s.height * s.width;
    const auto x = whole_numbers<T>({s.batch, s.x_heads, n, s.channels}, 1), held = whole_numbers<T>({s.batch, s.heads, n, s.channels}, 2);
    const auto weights = whole_numbers<T>({s.per_head ? s.heads : 1, s.channels, s.kernel_height, s.kernel_width}, 3);
    const auto bias = whole_numbers<T>({1, 1, s.per_head ? s.heads : 1, s.channels}, 4);
    const std::span<const T> biases(bias.data(), static_cast<std::size_t>(bias.shape().size()));
    auto expected = whole_numbers<T>(held.shape(), 2);
    const reference::grid g{s.height, s.width, s.kernel_height / 2, s.causal ? s.kernel_width - 1 : s.kernel_width / 2};
    reference::add_depthwise_convolution<T, T>(x.view(), expected.view(), g, weights.view(), biases);

    placed<T> from(x, l.value), to(held, l.value), kernels(weights, l.value);
    depthwise_convolution<T> op{.weights = kernels.view(), .bias = biases, .causal = s.causal};
    if (s.height > 1) op.height = s.height, op.width = s.width;
    add_convolution(op, from.view(), to.view());
    CHECK(same_bits(to.copy(), expected));
    CHECK(to.guards_intact());
}

} // namespace

TEMPLATE_TEST_CASE("depthwise_convolution: grids, kernels and channels against a direct sum", "[convolution][portable]", ATTN_TEST_NUMBERS) {
    const std::vector<sizes> all{{56, 56, 4, 5, 5}, {14, 14, 33, 5, 5}, {7, 7, 20, 3, 3},   {7, 9, 17, 7, 7},  {1, 1, 3, 5, 5},
                                 {3, 2, 16, 9, 11}, {2, 15, 5, 1, 1},   {29, 3, 8, 5, 3},   {5, 31, 64, 3, 5}, {4, 100, 9, 5, 7},
                                 {1, 300, 6, 1, 5}, {1, 130, 12, 1, 9}, {12, 13, 2, 13, 1}, {4, 16, 40, 5, 5}};
    for (const auto& s : all)
        for (const auto& l : {all_layouts[0], all_layouts[3]}) check<TestType>(s, l);
}

TEMPLATE_TEST_CASE("depthwise_convolution: layouts, heads, and causal sequences", "[convolution][portable]", ATTN_TEST_NUMBERS) {
    for (const auto& l : all_layouts) {
        check<TestType>({6, 18, 16, 5, 5, 2, 4, 2, false, true}, l);
        check<TestType>({1, 140, 20, 1, 4, 1, 2, 1, true, false}, l);
        check<TestType>({1, 9, 3, 1, 12, 1, 1, 1, true, false}, l);
    }
}

TEMPLATE_TEST_CASE("depthwise_convolution: executors do not change a bit", "[convolution][portable][parallel]", ATTN_TEST_NUMBERS) {
    const auto x = random_tensor<TestType>({2, 3, 30 * 47, 20}, 1), weights = random_tensor<TestType>({3, 20, 5, 5}, 2);
    const depthwise_convolution<TestType> op{.weights = weights.view(), .height = 30, .width = 47};
    tensor<TestType> expected(x.shape());
    add_convolution(op, x.view(), expected.view());
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        tensor<TestType> out(x.shape());
        workspace memory(op.workspace_bytes(x.shape(), executor.concurrency()));
        add_convolution(op, x.view(), out.view(), execution(executor, memory));
        CHECK(same_bits(out, expected));
    });
}

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
