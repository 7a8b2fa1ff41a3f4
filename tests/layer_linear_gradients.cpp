// The gradient of a linear layer, against its formula in double.
#include "allocations.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"
#include "layer_checks.hpp"

namespace attn::testing {

namespace {

template <Scalar T>
struct gradients_of_linear {
    tensor<T> tokens, weight;
    std::vector<T> bias;

    gradients_of_linear(const linear<T>& layer, const shape& x) : tokens(x), weight(layer.weight.shape()), bias(static_cast<std::size_t>(layer.outputs()), guard<T>) {
        std::fill_n(tokens.data(), tokens.shape().size(), guard<T>);
        std::fill_n(weight.data(), weight.shape().size(), guard<T>);
    }
    layer_gradients<linear<T>> wanted() { return {.tokens = tokens, .parameters = {weight, bias}}; }
    friend bool same_bits(const gradients_of_linear& a, const gradients_of_linear& b) {
        return testing::same_bits(a.tokens, b.tokens) && testing::same_bits(a.weight, b.weight) &&
               std::ranges::equal(a.bias, b.bias, [](T x, T y) { return testing::same_bits(x, y); });
    }
};

/// Whether a sum of so many products of numbers near 1 is right.
template <Scalar T>
bool is_near(T ours, double exact, double magnitudes) {
    return std::abs(static_cast<double>(ours) - exact) <= 4 * epsilon<T> * (1 + magnitudes);
}

const workspace none; // a linear keeps nothing

} // namespace

TEMPLATE_TEST_CASE("linear: gradients of tokens, weight and bias", "[layer][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const auto& [batch, tokens, inputs, outputs] : std::vector<std::array<index_t, 4>>{
             {1, 1, 1, 1}, {2, 5, 7, 3}, {3, 17, 64, 65}, {1, 97, 130, 33}, {2, 0, 4, 4}, {0, 3, 4, 4}, {2, 3, 0, 5}, {2, 3, 5, 0}, {1, 400, 40, 20}}) {
        INFO(batch << " x " << tokens << " x " << inputs << " to " << outputs);
        parameters weights;
        const auto layer = random_linear<T>(weights, "linear", outputs, inputs);
        const auto x = random_rows<T>({batch, 1, tokens, inputs}, 3), given = random_rows<T>({batch, 1, tokens, outputs}, 4);
        gradients_of_linear<T> ours(layer, x.shape());
        backward(layer, {.tokens = x}, none, given, ours.wanted());

        const auto product = [](T a, T b) { return static_cast<double>(a) * static_cast<double>(b); };
        index_t wrong = 0;
        for (index_t b = 0; b < batch; ++b)
            for (index_t i = 0; i < tokens; ++i)
                for (index_t c = 0; c < inputs; ++c) {
                    double sum = 0, magnitudes = 0;
                    for (index_t o = 0; o < outputs; ++o) {
                        const auto term = product(layer.weight(0, 0, o, c), given(b, 0, i, o));
                        sum += term, magnitudes += std::abs(term);
                    }
                    wrong += !is_near(ours.tokens(b, 0, i, c), sum, magnitudes);
                }
        for (index_t o = 0; o < outputs; ++o)
            for (index_t c = -1; c < inputs; ++c) { // -1: the bias
                double sum = 0, magnitudes = 0;
                for (index_t b = 0; b < batch; ++b)
                    for (index_t i = 0; i < tokens; ++i) {
                        const auto term = product(given(b, 0, i, o), c < 0 ? T{1} : x(b, 0, i, c));
                        sum += term, magnitudes += std::abs(term);
                    }
                wrong += !is_near(c < 0 ? ours.bias[static_cast<std::size_t>(o)] : ours.weight(0, 0, o, c), sum, magnitudes);
            }
        CHECK(wrong == 0);
    }
}

TEMPLATE_TEST_CASE("linear: gradients have the same bits for every executor, rows apart, and whatever else is wanted", "[layer][portable][parallel]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    parameters weights;
    const auto layer = random_linear<T>(weights, "linear", 70, 45);
    const auto x = random_rows<T>({3, 1, 130, 45}, 3), given = random_rows<T>({3, 1, 130, 70}, 4);
    gradients_of_linear<T> expected(layer, x.shape());
    backward(layer, {.tokens = x}, none, given, expected.wanted());
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO("on " << name);
        gradients_of_linear<T> ours(layer, x.shape());
        workspace memory(layer.backward_workspace_bytes(x.shape(), {}, std::max<index_t>(1, executor.concurrency())));
        backward(layer, {.tokens = x}, none, given, ours.wanted(), execution(executor, memory));
        CHECK(same_bits(ours, expected));
    });
    placed<T> from(x, layout::padded_rows), of_out(given, layout::padded_rows), to(x.shape(), layout::padded_rows);
    backward(layer, {.tokens = from.view()}, none, of_out.view(), {.tokens = to.view()});
    CHECK(to.guards_intact());
    CHECK(testing::same_bits(to.copy(), expected.tokens));

    gradients_of_linear<T> some(layer, x.shape());
    backward(layer, {.tokens = x}, none, given, {.parameters = {.bias = some.bias}});
    CHECK(some.bias == expected.bias);
    CHECK(testing::same_bits(some.weight.data()[0], guard<T>));
    sequential here;
    workspace memory(layer.backward_workspace_bytes(x.shape(), {}, 1));
    const execution run(here, memory);
    CHECK(allocations_in([&] { backward(layer, {.tokens = x}, none, given, some.wanted(), run); }) == 0);
}

TEST_CASE("linear: what is wrong with a gradient is refused, by name", "[layer]") {
    parameters weights;
    const auto layer = random_linear<float>(weights, "linear", 6, 4);
    const auto x = random_rows<float>({2, 1, 3, 4}, 3), given = random_rows<float>({2, 1, 3, 6}, 4);
    gradients_of_linear<float> to(layer, x.shape());
    const auto refused = [&](const tensor_view<const float>& of_out, const layer_gradients<linear<float>>& wanted, const std::vector<std::string>& parts) {
        check_says(error_of([&] { backward(layer, {.tokens = x}, none, of_out, wanted); }), parts);
    };
    refused(x, to.wanted(), {"linear", "d_out", "(2, 1, 3, 4)", "6"});
    refused(given, {.tokens = to.weight}, {"linear", "wanted.tokens", "(1, 1, 6, 4)", "(2, 1, 3, 4)"});
    const tensor_view<float> itself(const_cast<float*>(layer.weight.numbers().data()), layer.weight.shape(), layer.weight.strides());
    refused(given, {.parameters = {.weight = itself}}, {"wanted.weight", "overlaps the weight of a linear"});
    refused(given, {.parameters = {.bias = std::span(to.bias).first(5)}}, {"wanted.bias", "(1, 1, 1, 5)", "(1, 1, 1, 6)"});
    refused(given, {.tokens = to.tokens, .parameters = {.bias = std::span(to.tokens.data(), 6)}}, {"wanted.bias", "overlaps wanted.tokens"});
    sequential here;
    workspace memory(layer.backward_workspace_bytes(x.shape(), {}, 1) - 1);
    check_says(error_of([&] { backward(layer, {.tokens = x}, none, given, to.wanted(), execution(here, memory)); }), {"linear", "workspace"});
}

} // namespace attn::testing
