#include "draw_layout.hpp"
#include "gradient_checks.hpp"
#include "linear_bounds.hpp"
#include "on_threads.hpp"
#include "others.hpp"

#include <attn/attention/depthwise_backward.hpp>
#include <attn/reference/depthwise_convolution.hpp>

namespace attn::fuzz {

namespace {

template <Scalar T>
outcome attempt(draw& random) {
    const bool is_large = random.one_in(8); // so that tokens are shared out to tasks, and sums come in parts
    const auto batch = random.number(0, 3), x_heads = random.number(1, is_large ? 1 : 3), heads = x_heads * random.number(1, 3);
    const auto height = random.number(1, is_large ? 60 : 12), width = random.number(0, is_large ? 60 : 40), channels = random.number(0, is_large ? 20 : 70);
    const bool grid = random.one_in(2), causal = !grid && random.one_in(2);
    const shape from{batch, x_heads, grid ? height * width : width * height, channels}, to{batch, heads, from.tokens, channels};
    const auto number = [&] { return random.real(-1, 1); };
    const auto weights = filled<T>({random.one_in(2) ? heads : 1, channels, grid ? 2 * random.number(0, is_large ? 2 : 4) + 1 : 1,
                                    causal ? random.number(1, 9) : 2 * random.number(0, is_large ? 2 : 4) + 1}, number);
    std::vector<T> bias(static_cast<std::size_t>(random.number(0, 1) * channels * (random.one_in(2) ? heads : 1)));
    std::ranges::generate(bias, [&] { return static_cast<T>(number()); });
    const auto x = filled<T>(from, number), before = filled<T>(to, number);
    const depthwise_convolution<T> op{weights.view(), bias, grid ? height : 0, grid ? width : 0, causal};
    outcome result{joined("x ", from, ", kernel ", weights.shape(), ", grid ", op.height, " x ", op.width, causal ? ", causal" : "", bias.empty() ? "" : ", bias"), {}};

    auto expected = copy_of(before);
    add_convolution(op, x.view(), expected.view());
    const auto g = op.grid(from.tokens);
    const reference::grid where{g.height, g.width, g.top, g.left};
    auto exact = reference::widen(before.view());
    tensor<double> bounds(to);
    const auto wide = reference::widen(x.view()), wide_weights = reference::widen(weights.view());
    const std::vector<double> wide_bias(bias.begin(), bias.end());
    reference::add_depthwise_convolution<double, double>(wide.view(), exact.view(), where, wide_weights.view(), wide_bias);
    add_convolution_bounds(wide.view(), std::as_const(exact).view(), bounds.view(), where, wide_weights.view(), wide_bias, {}, unit_of<T>);
    for (index_t e = 0; e < to.size(); ++e)
        if (!(std::abs(static_cast<double>(expected.data()[e]) - exact.data()[e]) <= 2 * bounds.data()[e] + 2 * unit_of<T>)) {
            result.problem = joined("element ", e, " is ", expected.data()[e], ", not ", exact.data()[e]);
            return result;
        }

    testing::placed<T> other_x(x, draw_layout(random)), out(before, draw_layout(random));
    static thread_pool pool(3);
    workspace memory(op.workspace_bytes(from, 3));
    add_convolution(op, other_x.view(), out.view(), execution(pool, memory));
    if (!other_x.guards_intact() || !out.guards_intact()) result.problem = "wrote beside its output";
    else if (!testing::same_bits(out.copy(), expected)) result.problem = "other bits elsewhere";
    if (!result.problem.empty()) return result;

    const auto given = filled<T>(to, number);
    std::vector<defined_gradient<T>> defined;
    defined.push_back({"input", tensor<bounded<T>>(from)});
    defined.push_back({"weights", tensor<bounded<T>>(weights.shape())});
    if (!bias.empty()) defined.push_back({"bias", tensor<bounded<T>>({1, 1, 1, std::ssize(bias)}), lies::in_one_piece});
    const auto row = []<class U>(const tensor_view<U>& numbers) { return std::span<U>(numbers.data(), static_cast<std::size_t>(numbers.shape().size())); };
    const auto row_of = [&]<class U>(std::size_t number_of, const U& all) { return all.size() > number_of ? row(all[number_of]) : decltype(row(all[0]))(); };
    const auto bounded_x = bounded_copy<T>(x), bounded_given = bounded_copy<T>(given);
    reference::depthwise_gradients<bounded<T>, T>(bounded_x.view(), bounded_given.view(), where, weights.view(), defined[0].exact, defined[1].exact,
                                                  bias.empty() ? std::span<bounded<T>>() : row(defined[2].exact.view()));
    testing::placed<T> other_given(given, draw_layout(random));
    const auto problem = broken_gradient<T>(
        random, defined,
        [&](index_t threads) {
            return on_threads(threads, [&](const execution& on) { return backward_workspace_bytes(op, from, to, on); });
        },
        [&](const auto& wanted, bool elsewhere, const execution& on) {
            const tensor_view<const T> x_here = elsewhere ? other_x.view() : x.view(), given_here = elsewhere ? other_given.view() : given.view();
            backward(op, x_here, given_here, depthwise_gradients<T>{wanted[0], wanted[1], row_of(2, wanted)}, on);
        });
    if (!problem.empty()) result.problem = "gradient of the " + problem;
    return result;
}

} // namespace

outcome check_convolution(draw& random) {
    return in_drawn_numbers(random, [&]<Scalar T>(std::type_identity<T>) { return attempt<T>(random); });
}

} // namespace attn::fuzz
