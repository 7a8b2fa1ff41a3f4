// The gradient of projecting tokens: what finite differences say, of tokens and parameters; the same bits everywhere; and what is refused.
#include "allocations.hpp"
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"
#include "layouts.hpp"

#include <attn/attention/pooling.hpp>
#include <attn/attention/project_backward.hpp>
#include <attn/attention/projection.hpp>
#include <attn/attention/strided_convolution.hpp>
#include <attn/pattern/lengths.hpp>
#include <attn/pattern/predicate.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

static_assert(std::same_as<decltype(project_gradients<mean_pooling, float>{}.projection), no_gradients>);

template <Scalar T>
tensor<T> filled_with(const shape& s, T number) {
    tensor<T> t(s);
    std::fill_n(t.data(), s.size(), number);
    return t;
}

/// The gradients of tokens and of the parameters that the projection refers to, each with what `wanted` writes, against differences.
template <class P, Pattern V = dense>
void check_slopes(const P& projection, const shape& of_x, const std::vector<std::pair<tensor<double>*, const tensor<double>*>>& parameters,
                  const typename P::template gradients<double>& wanted, const V& pattern = {}) {
    auto x = random_tensor<double>(of_x, 11);
    auto dx = filled_with<double>(of_x, guard<double>);
    const auto d_out = random_tensor<double>(projected_shape<double>(projection, of_x), 12);
    backward(projection, x, d_out, {dx, wanted}, {}, pattern);
    const auto loss = [&] {
        const auto out = project(projection, x, {}, pattern);
        double sum = 0;
        for (index_t e = 0; e < d_out.shape().size(); ++e) sum += out.data()[e] * d_out.data()[e];
        return sum;
    };
    const auto check = [&](tensor<double>& of, const tensor<double>& found) {
        for (index_t e = 0; e < of.shape().size(); ++e) {
            INFO("number " << e << " of " << to_string(of.shape()));
            double& number = of.data()[e];
            const auto kept = number;
            constexpr double step = 1e-5;
            number = kept + step;
            const auto above = loss();
            number = kept - step;
            const auto slope = (above - loss()) / (2 * step);
            number = kept;
            CHECK(std::abs(found.data()[e] - slope) <= 1e-8 * (1 + std::abs(loss()) + std::abs(slope)));
        }
    };
    check(x, dx);
    for (const auto& [parameter, of] : parameters) check(*parameter, *of);
}

/// A call of which everything is right, for tests to spoil one thing of.
struct good_projection {
    tensor<float> x = random_tensor<float>({2, 2, 11, 5}, 1), matrix = random_tensor<float>({1, 1, 3, 12}, 2), bias = random_tensor<float>({1, 2, 3, 1}, 3);
    tensor<float> out_gradient = random_tensor<float>({2, 2, 3, 5}, 4), dx{x.shape()}, of_matrix{matrix.shape()}, of_bias{bias.shape()};
    linear_projection<float> projection{matrix, bias};
    tensor_view<const float> d_out = out_gradient;
    project_gradients<linear_projection<float>, float> wanted{dx, {of_matrix, of_bias}};

    std::string refusal() const {
        return error_of([&] { backward(projection, x, d_out, wanted); });
    }
};

} // namespace

TEST_CASE("project gradient: what finite differences say, of every projection", "[linformer][portable]") {
    const shape x{2, 2, 14, 3};
    const auto some = predicate{[](auto, auto j) { return j % 5 != 2; }};
    const std::vector<index_t> present{0, 9};
    for (const index_t heads : {1, 2}) {
        auto e = random_tensor<double>({1, heads, 5, 16}, 1), bias = random_tensor<double>({1, 3 - heads, 5, 1}, 2);
        auto of_e = filled_with<double>(e.shape(), guard<double>), of_bias = filled_with<double>(bias.shape(), guard<double>);
        const linear_projection<double> both{e, bias}, matrix{e};
        check_slopes(both, x, {{&e, &of_e}, {&bias, &of_bias}}, {of_e, of_bias});
        check_slopes(both, x, {{&e, &of_e}, {&bias, &of_bias}}, {of_e, of_bias}, some);
        check_slopes(both, x, {{&e, &of_e}, {&bias, &of_bias}}, {of_e, of_bias}, lengths{present});
        check_slopes(matrix, x, {{&e, &of_e}}, {of_e});
        for (index_t j = 14; j < 16; ++j) CHECK(of_e(0, 0, 4, j) == 0); // of a longer sequence
    }
    check_slopes(identity_projection{}, x, {}, {}, some);
    check_slopes(mean_pooling{4}, x, {}, {});
    check_slopes(mean_pooling{5}, x, {}, {}, some);
    check_slopes(max_pooling{4}, x, {}, {}, lengths{present});

    auto w = random_tensor<double>({1, 2, 3, 3}, 3), b = random_tensor<double>({1, 1, 1, 3}, 4);
    auto of_w = filled_with<double>(w.shape(), guard<double>), of_b = filled_with<double>(b.shape(), guard<double>);
    check_slopes(channel_convolution<double>{w, b}, x, {{&w, &of_w}, {&b, &of_b}}, {of_w, of_b}, some);
    check_slopes(channel_convolution<double>{w, b}, x, {{&w, &of_w}, {&b, &of_b}}, {of_w, of_b}, lengths{present}); // rows without a token have no bias
    auto mixing = random_tensor<double>({4, 1, 3, 3}, 5);
    auto of_mixing = filled_with<double>(mixing.shape(), guard<double>);
    check_slopes(mixing_convolution<double>{mixing, b}, x, {{&mixing, &of_mixing}, {&b, &of_b}}, {of_mixing, of_b}, some);

    // Heads of different sizes: the rows that one lacks are 0, whatever is said of them.
    auto first = random_tensor<double>({1, 1, 5, 14}, 6), second = random_tensor<double>({1, 1, 2, 15}, 7);
    auto of_first = filled_with<double>(first.shape(), guard<double>), of_second = filled_with<double>(second.shape(), guard<double>);
    const std::vector<linear_projection<double>> each{{first}, {second}};
    const std::vector<linear_projection<double>::gradients<double>> of{{of_first}, {of_second}};
    check_slopes(projection_per_head<linear_projection<double>>{each}, x, {{&first, &of_first}, {&second, &of_second}}, {of});
}

TEST_CASE("project gradient: the same bits for executors, layouts, and whichever are wanted; none beside them", "[linformer][parallel]") {
    const auto x = random_tensor<float>({3, 4, 300, 37}, 1), matrix = random_tensor<float>({1, 1, 70, 300}, 2), bias = random_tensor<float>({1, 4, 70, 1}, 3),
               given = random_tensor<float>({3, 4, 70, 37}, 4);
    const linear_projection<float> projection{matrix, bias};
    const auto visible = predicate{[](auto, auto j) { return j % 7 != 3; }};
    tensor<float> dx(x.shape()), of_matrix(matrix.shape()), of_bias(bias.shape());
    backward(projection, x, given, {dx, {of_matrix, of_bias}}, {}, visible);
    for (index_t c = 0; c < 37; ++c) CHECK(dx(2, 3, 10, c) == 0);

    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        workspace memory(backward_workspace_bytes<float>(projection, x.shape(), executor));
        const execution run(executor, memory);
        auto other_x = filled_with<float>(x.shape(), guard<float>), other_matrix = filled_with<float>(matrix.shape(), guard<float>),
             other_bias = filled_with<float>(bias.shape(), guard<float>);
        backward(projection, x, given, {other_x, {}}, run, visible);
        backward(projection, x, given, {{}, {other_matrix}}, run, visible);
        backward(projection, x, given, {{}, {{}, other_bias}}, run, visible);
        CHECK(same_bits(other_x, dx));
        CHECK(same_bits(other_matrix, of_matrix));
        CHECK(same_bits(other_bias, of_bias));
#ifdef ATTN_COUNTS_ALLOCATIONS
        if (name.find("sequential") != std::string::npos)
            CHECK(allocations_in([&] { backward(projection, x, given, {other_x, {other_matrix, other_bias}}, run, visible); }) == 0);
#endif
    });
    for (const auto& [layout, name] : all_layouts) {
        INFO(name);
        placed<float> x_there(x, layout), dx_there(x.shape(), layout);
        auto other_matrix = filled_with<float>(matrix.shape(), guard<float>);
        backward(projection, x_there.view(), given, {dx_there.view(), {other_matrix}}, {}, visible);
        CHECK(same_bits(dx_there.copy(), dx));
        CHECK(dx_there.guards_intact());
        CHECK(same_bits(other_matrix, of_matrix));
    }
}

TEST_CASE("project gradient: no tokens, no channels, no heads, no batch entries give 0", "[linformer][portable]") {
    for (const auto& s : std::vector<shape>{{1, 2, 0, 5}, {1, 2, 6, 0}, {0, 2, 6, 5}, {1, 0, 6, 5}}) {
        INFO(to_string(s));
        const auto x = random_tensor<float>(s, 1), matrix = random_tensor<float>({1, 1, 3, 6}, 2), bias = random_tensor<float>({1, 1, 3, 1}, 3),
                   given = random_tensor<float>({s.batch, s.heads, s.heads == 0 ? 0 : 3, s.channels}, 4);
        auto dx = filled_with<float>(s, guard<float>), of_matrix = filled_with<float>(matrix.shape(), guard<float>), of_bias = filled_with<float>(bias.shape(), guard<float>);
        backward(linear_projection<float>{matrix, bias}, x, given, {dx, {of_matrix, of_bias}});
        for (const auto* t : {&dx, &of_matrix, &of_bias}) CHECK(std::all_of(t->data(), t->data() + t->shape().size(), [](float number) { return number == 0; }));
    }
}

TEST_CASE("project gradient: a hidden NaN is not read", "[linformer][portable]") {
    auto x = random_tensor<float>({1, 1, 12, 4}, 1);
    const auto matrix = random_tensor<float>({1, 1, 3, 12}, 2), given = random_tensor<float>({1, 1, 3, 4}, 3);
    const auto visible = predicate{[](auto, auto j) { return j != 5; }};
    for (index_t c = 0; c < 4; ++c) x(0, 0, 5, c) = NAN;
    tensor<float> dx(x.shape()), of_matrix(matrix.shape());
    backward(linear_projection<float>{matrix}, x, given, {dx, {of_matrix}}, {}, visible);
    for (const auto* t : {&dx, &of_matrix}) CHECK(std::all_of(t->data(), t->data() + t->shape().size(), [](float number) { return std::isfinite(number); }));
    for (index_t r = 0; r < 3; ++r) CHECK(of_matrix(0, 0, r, 5) == 0);
}

TEST_CASE("project gradient: what is wrong is refused, by name", "[linformer][portable]") {
    CHECK(good_projection().refusal() == nothing_thrown);
    const auto refused = [](auto spoil, const std::vector<std::string>& parts) {
        good_projection call;
        spoil(call);
        check_says(call.refusal(), parts);
    };
    tensor<float> small({1, 1, 3, 11}), few({1, 1, 3, 10}), columns({1, 1, 12, 3}), narrow({2, 2, 3, 4}), channels_first({2, 2, 5, 3});
    refused([&](auto& c) { c.d_out = narrow; }, {"project: d_out has shape (2, 2, 3, 4), but the result has (2, 2, 3, 5)"});
    refused([&](auto& c) { c.d_out = channels_first.view().transposed(); }, {"project: d_out", "the channels of a row must lie side by side"});
    refused([&](auto& c) { c.wanted.x = narrow; }, {"project: wanted.x has shape (2, 2, 3, 4)", "(2, 2, 11, 5)"});
    refused([&](auto& c) { c.wanted.x = c.x; }, {"project: wanted.x", "overlaps x"});
    refused([&](auto& c) { c.wanted.x = head_major(c.out_gradient.data(), {2, 2, 11, 5}); }, {"project: wanted.x", "overlaps d_out"});
    refused([&](auto& c) { c.wanted.projection.matrix = small; }, {"project: wanted.projection.matrix has shape (1, 1, 3, 11)", "(1, 1, 3, 12)"});
    refused([&](auto& c) { c.wanted.projection.matrix = columns.view().transposed(); }, {"wanted.projection.matrix", "contiguous channels"});
    refused([&](auto& c) { c.wanted.projection.matrix = c.matrix; }, {"wanted.projection.matrix", "overlaps the matrix of a projection"});
    refused([&](auto& c) { c.wanted.projection.bias = head_major(c.of_matrix.data(), {1, 2, 3, 1}); }, {"wanted.projection.bias", "overlaps wanted.projection.matrix"});
    refused([&](auto& c) { c.projection.bias = {}; }, {"project: wanted.projection.bias is asked for, but there is no such parameter"});
    refused([&](auto& c) { c.projection.matrix = few; }, {"project: projection matrix has shape (1, 1, 3, 10), made for fewer than 11 tokens"});

    const good_projection call;
    sequential here;
    workspace none;
    check_says(error_of([&] { backward(call.projection, call.x, call.d_out, call.wanted, execution(here, none)); }),
               {"project: workspace has 0 bytes", "the gradient for x of shape (2, 2, 11, 5)"});
    const std::vector<linear_projection<float>> each{{call.matrix}, {call.matrix}};
    const std::vector<linear_projection<float>::gradients<float>> of_one(1);
    check_says(error_of([&] { backward(projection_per_head<linear_projection<float>>{each}, call.x, call.d_out, {{}, {of_one}}); }),
               {"wanted.each has 1 entries, but there are 2 projections"});
}

} // namespace attn::testing
