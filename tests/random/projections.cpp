// Problems of projecting tokens as an operation of its own, and of its gradient.
#include "draw_layout.hpp"
#include "drawn_projection.hpp"
#include "gradient_checks.hpp"
#include "on_threads.hpp"
#include "others.hpp"
#include "random_pattern.hpp"

#include <attn/attention/project_backward.hpp>

namespace attn::fuzz {

namespace {

/// The projection and its gradient, of which the projected rows are the first that is judged.
template <Scalar T, class P>
std::string check_projected(draw& random, const P& projection, projected_by how, const drawn_projection<T>& d, const tensor<T>& x, const random_pattern& pattern) {
    const auto s = x.shape(), to = projected_shape<T>(projection, s);
    const auto given = filled<T>(to, [&] { return random.real(-1, 1); });
    std::vector<defined_gradient<T>> defined;
    defined.push_back({"rows", tensor<bounded<T>>(to), lies::in_rows});
    defined.push_back({"gradient of x", tensor<bounded<T>>(s)});
    for (const auto* parameter : {&d.weights, &d.bias})
        if (parameter->data()) defined.push_back({parameter == &d.bias ? "gradient of the bias" : "gradient of the weights", tensor<bounded<T>>(parameter->shape()), lies::in_rows});
    const auto parameters = [&]<class U>(const std::vector<tensor_view<U>>& all) {
        std::array<tensor_view<U>, 2> named{};
        std::size_t next = 2;
        if (d.weights.data()) named[0] = all[next++];
        if (d.bias.data()) named[1] = all[next];
        return named;
    };
    std::vector<tensor_view<bounded<T>>> exact;
    for (auto& each : defined) exact.push_back(each.exact.view());

    const auto bounded_x = bounded_copy<T>(x);
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t h = 0; h < s.heads; ++h) {
            reference::tokens<bounded<T>> tokens{bounded_x, b, h, {}};
            for (index_t j = 0; j < s.tokens; ++j) tokens.visible.push_back(pattern.at(b, h).visible(index_t{0}, j));
            const auto rows = define<bounded<T>>(how, d, tokens);
            reference::projected_tokens<bounded<T>> of_rows(rows.size());
            for (std::size_t r = 0; r < rows.size(); ++r)
                for (index_t c = 0; rows[r] && c < s.channels; ++c) {
                    if (c == 0) of_rows[r].emplace();
                    exact[0](b, h, static_cast<index_t>(r), c) = (*rows[r])[static_cast<std::size_t>(c)];
                    of_rows[r]->push_back(given(b, h, static_cast<index_t>(r), c));
                }
            define_gradients(how, d, tokens, of_rows, exact[1].slice({.batch = {b, 1}, .heads = {h, 1}}), parameters(exact));
        }

    testing::placed<T> other_x(x, draw_layout(random)), other_given(given, draw_row_layout(random));
    return broken_gradient<T>(
        random, defined,
        [&](index_t threads) {
            return on_threads(threads, [&](const execution& on) {
                return std::max(workspace_bytes<T>(projection, s, on), backward_workspace_bytes<T>(projection, s, on));
            });
        },
        [&](const auto& wanted, bool elsewhere, const execution& on) {
            const tensor_view<const T> x_here = elsewhere ? other_x.view() : x.view(), given_here = elsewhere ? other_given.view() : given.view();
            if (wanted[0].data()) project(projection, x_here, wanted[0], on, pattern);
            project_gradients<P, T> gradients{wanted[1], {}};
            const auto [of_weights, of_bias] = parameters(wanted);
            if constexpr (requires { gradients.projection.matrix; }) gradients.projection = {of_weights, of_bias};
            if constexpr (requires { gradients.projection.weights; }) gradients.projection = {of_weights, of_bias};
            backward(projection, x_here, given_here, gradients, on, pattern);
        });
}

template <Scalar T>
outcome attempt_projection(draw& random) {
    const bool is_long = random.one_in(8); // so that the gradient of a matrix comes in parts
    const auto batch = random.number(0, is_long ? 1 : 3), heads = random.number(1, 3), tokens = random.number(0, is_long ? 600 : 60), channels = random.number(0, is_long ? 20 : 70);
    sizes s{.batch = batch, .heads = heads, .kv_heads = heads, .queries = 1, .keys = tokens, .key_dim = channels, .value_dim = channels, .first_query = {0}, .first_key = {0}};
    const auto number = [&] { return random.real(-1, 1); };
    const auto x = filled<T>({batch, heads, tokens, channels}, number);
    const auto tree = draw_pattern(random, s);
    const random_pattern pattern{tree.get()};
    const auto some_heads = [&] { return random.one_in(2) ? heads : 1; };
    const bool has_bias = random.one_in(2);
    drawn_projection<T> d;
    const auto how = random.one_of({projected_by::matrix, projected_by::matrix, projected_by::mean, projected_by::largest, projected_by::channels, projected_by::mixing});
    outcome result;
    const auto check = [&](const char* name, const auto& projection) {
        result.name = joined(name, " of x ", x.shape(), ", weights ", d.weights.shape(), has_bias ? ", bias; " : "; ", tree->name());
        result.problem = check_projected<T>(random, projection, how, d, x, pattern);
    };
    const auto kernel = random.number(1, 9);
    switch (how) {
    case projected_by::matrix:
        d.weights = filled<T>({1, some_heads(), random.number(1, is_long ? 150 : 40), tokens + random.number(0, 3)}, number);
        if (has_bias) d.bias = filled<T>({1, some_heads(), d.weights.shape().tokens, 1}, number);
        check("matrix", d.template as<linear_projection<T>>());
        break;
    case projected_by::mean:
        d.projected = random.number(1, 40);
        check("mean", mean_pooling{d.projected});
        break;
    case projected_by::largest:
        d.projected = random.number(1, 40);
        check("largest", max_pooling{d.projected});
        break;
    case projected_by::channels:
        d.weights = filled<T>({1, some_heads(), kernel, channels}, number);
        if (has_bias) d.bias = filled<T>({1, some_heads(), 1, channels}, number);
        check("channels", d.template as<channel_convolution<T>>());
        break;
    case projected_by::mixing:
        d.weights = filled<T>({kernel, some_heads(), channels, channels}, number);
        if (has_bias) d.bias = filled<T>({1, some_heads(), 1, channels}, number);
        check("mixing", d.template as<mixing_convolution<T>>());
        break;
    }
    return result;
}

} // namespace

outcome check_projection(draw& random) {
    return in_drawn_numbers(random, [&]<Scalar T>(std::type_identity<T>) { return attempt_projection<T>(random); });
}

} // namespace attn::fuzz
