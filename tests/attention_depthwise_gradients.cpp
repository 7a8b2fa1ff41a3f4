// The gradient of the depthwise convolution: its definition against finite differences, and what is refused. attn_random holds the library
// to its definition.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"

#include <attn/attention/depthwise_backward.hpp>
#include <attn/reference/depthwise_convolution.hpp>

namespace attn::testing {

namespace {

struct convolution_sizes {
    index_t height, width, channels, kernel_height, kernel_width;
    index_t batch = 1, heads = 1, x_heads = 1;
    bool causal = false, per_head = false;

    index_t tokens() const { return height * width; }
    index_t kernels() const { return per_head ? heads : 1; }
    reference::grid grid() const { return {height, width, kernel_height / 2, causal ? kernel_width - 1 : kernel_width / 2}; }
};

/// What a gradient reads.
template <Scalar T>
struct convolved {
    convolution_sizes dimensions;
    tensor<T> x, given, weights, bias;

    explicit convolved(const convolution_sizes& s)
        : dimensions(s), x(random_tensor<T>({s.batch, s.x_heads, s.tokens(), s.channels}, 1)),
          given(random_tensor<T>({s.batch, s.heads, s.tokens(), s.channels}, 2)),
          weights(random_tensor<T>({s.kernels(), s.channels, s.kernel_height, s.kernel_width}, 3)),
          bias(random_tensor<T>({1, 1, s.kernels(), s.channels}, 4)) {}

    std::span<const T> biases() const { return {bias.data(), static_cast<std::size_t>(bias.shape().size())}; }
    depthwise_convolution<T> op() const { return op(weights.view()); }
    depthwise_convolution<T> op(const tensor_view<const T>& kernels) const {
        depthwise_convolution<T> result{.weights = kernels, .bias = biases(), .causal = dimensions.causal};
        if (dimensions.height > 1) result.height = dimensions.height, result.width = dimensions.width;
        return result;
    }
};

/// Room for the gradients of a problem, all guards.
template <Scalar T>
struct answer_of {
    tensor<T> input, weights, bias;

    explicit answer_of(const convolved<T>& p) : input(p.x.shape()), weights(p.weights.shape()), bias(p.bias.shape()) {
        for (auto* t : {&input, &weights, &bias}) std::fill_n(t->data(), t->shape().size(), guard<T>);
    }
    std::span<T> biases() { return {bias.data(), static_cast<std::size_t>(bias.shape().size())}; }
    depthwise_gradients<T> wanted() { return {input, weights, biases()}; }
    friend bool same_bits(const answer_of& a, const answer_of& b) {
        return testing::same_bits(a.input, b.input) && testing::same_bits(a.weights, b.weights) && testing::same_bits(a.bias, b.bias);
    }
};

template <Scalar T>
answer_of<T> ours_of(const convolved<T>& p) {
    answer_of<T> result(p);
    backward(p.op(), p.x, p.given, result.wanted());
    return result;
}

template <Scalar T>
answer_of<T> defined(const convolved<T>& p, std::span<const index_t> present = {}) {
    answer_of<T> result(p);
    reference::depthwise_gradients<T, T>(p.x, p.given, p.dimensions.grid(), p.weights, result.input, result.weights, result.biases(), present);
    return result;
}

std::string describe(const convolution_sizes& s) {
    return std::to_string(s.batch) + " x " + std::to_string(s.heads) + " heads of " + std::to_string(s.x_heads) + ", " + std::to_string(s.height) + " x " +
           std::to_string(s.width) + ", " + std::to_string(s.channels) + " channels, kernel " + std::to_string(s.kernel_height) + " x " +
           std::to_string(s.kernel_width) + (s.causal ? " causal" : "") + (s.per_head ? ", of each head" : "");
}

} // namespace

TEST_CASE("depthwise_convolution: the definition of its gradient against finite differences", "[convolution][gradients]") {
    for (const auto& s : {convolution_sizes{3, 4, 2, 3, 5, 2, 4, 2, false, true}, convolution_sizes{3, 4, 2, 5, 3, 2, 4, 2, false, false},
                          convolution_sizes{1, 7, 3, 1, 4, 2, 2, 1, true, false}}) {
        INFO(describe(s));
        convolved<double> p(s);
        std::vector<index_t> present(static_cast<std::size_t>(s.batch), s.tokens() - 2);
        const auto loss = [&] {
            tensor<double> out(p.given.shape());
            std::fill_n(out.data(), out.shape().size(), 0.0);
            reference::add_depthwise_convolution<double, double>(p.x, out.view(), s.grid(), p.weights, p.biases(), present);
            return std::inner_product(out.data(), out.data() + out.shape().size(), p.given.data(), 0.0);
        };
        const auto gradients = defined(p, present);
        const auto check = [&](tensor<double>& of, const tensor<double>& gradient) {
            for (index_t e = 0; e < of.shape().size(); ++e) {
                const auto held = of.data()[e], step = 1e-3; // the loss is linear in each: the difference is exact but for rounding
                of.data()[e] = held + step;
                const auto above = loss();
                of.data()[e] = held - step;
                const auto below = loss();
                of.data()[e] = held;
                CHECK(std::abs((above - below) / (2 * step) - gradient.data()[e]) < 1e-9);
            }
        };
        check(p.x, gradients.input);
        check(p.weights, gradients.weights);
        check(p.bias, gradients.bias);
    }
}

TEST_CASE("depthwise_convolution: gradients of weights as PyTorch has them, (c, 1, height, width)", "[convolution][gradients]") {
    const convolved<float> p({6, 7, 9, 3, 5, 2, 4, 2});
    const auto expected = ours_of(p);
    answer_of<float> ours(p);
    const shape theirs{9, 1, 3, 5};
    backward(p.op(head_major(p.weights.data(), theirs)), p.x, p.given, {ours.input, head_major(ours.weights.data(), theirs), ours.biases()});
    CHECK(same_bits(ours, expected));
    CHECK_THROWS_AS(backward(p.op(head_major(p.weights.data(), theirs)), p.x, p.given, ours.wanted()), shape_error);
}

TEST_CASE("depthwise_convolution: what is wrong with a gradient is refused, by name", "[convolution][gradients]") {
    const convolved<float> p({3, 4, 5, 3, 3, 2, 4, 2});
    answer_of<float> to(p);
    const auto refused = [&](const depthwise_convolution<float>& op, const tensor_view<const float>& given, const depthwise_gradients<float>& wanted,
                             const std::vector<std::string>& parts) {
        check_says(error_of([&] { backward(op, p.x, given, wanted); }), parts);
        CHECK(same_bits(to, answer_of<float>(p)));
    };
    const auto op = p.op();
    const auto given = p.given.view();
    const tensor<float> three({2, 3, 12, 5}), narrow({2, 4, 12, 4});
    refused(op, three, to.wanted(), {"depthwise_convolution: d_out has shape (2, 3, 12, 5), but x has (2, 2, 12, 5)"});
    refused(op, narrow, to.wanted(), {"d_out has shape (2, 4, 12, 4)"});
    refused(op, given, {.input = to.weights}, {"wanted.input", "(1, 5, 3, 3)", "(2, 2, 12, 5)"});
    refused(op, given, {.input = to.input, .weights = to.input}, {"wanted.weights", "(2, 2, 12, 5)", "(1, 5, 3, 3)"});
    refused(op, given, {.bias = to.biases().first(4)}, {"wanted.bias", "(1, 1, 1, 4)", "(1, 1, 1, 5)"});
    refused(op, given, {.input = head_major(const_cast<float*>(p.x.data()), p.x.shape())}, {"wanted.input", "overlaps x"});
    refused(op, given, {.weights = head_major(const_cast<float*>(p.weights.data()), p.weights.shape())},
            {"wanted.weights", "overlaps the convolution's weights"});
    refused(op, given, {.input = to.input, .bias = std::span(to.input.data(), 5)}, {"wanted.bias", "overlaps wanted.input"});
    refused(op, given, {.weights = tensor_view<float>(to.weights.data(), to.weights.shape(), {0, 0, 3, 1})}, {"wanted.weights"});
    auto other = op;
    other.bias = {};
    refused(other, given, to.wanted(), {"wanted.bias is asked for, but the convolution has no bias"});
    other = op;
    other.width = 5;
    refused(other, given, to.wanted(), {"height and width are 3 and 5"});
    sequential here;
    workspace memory(backward_workspace_bytes(op, p.x.shape(), given.shape(), here) - 1);
    check_says(error_of([&] { backward(op, p.x, given, to.wanted(), execution(here, memory)); }), {"depthwise_convolution: workspace has"});
    CHECK(same_bits(to, answer_of<float>(p)));
}

} // namespace attn::testing
