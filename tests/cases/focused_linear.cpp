#include "linear_case.hpp"

#include "attn/attention/focused_linear_attention.hpp"
#include "attn/reference/linear_attention.hpp"

#include <random>

namespace attn::testing {

namespace {

template <Scalar T>
struct focused_parameters {
    tensor<T> weights;
    std::vector<T> bias, scale;
};

const auto focused_case = linear_case(
    "focused_linear", "4 n d_k d_v + 50 n d_v",
    []<class T>(const problem& p) {
        const auto own = std::make_shared<focused_parameters<T>>(focused_parameters<T>{tensor<T>({1, p.value_dim, 5, 5}), {}, {}});
        std::mt19937 random(29);
        std::normal_distribution<T> normal(0, T(0.3));
        std::generate_n(own->weights.data(), own->weights.shape().size(), [&] { return normal(random); });
        own->bias.resize(static_cast<std::size_t>(p.value_dim));
        std::ranges::generate(own->bias, [&] { return normal(random); });
        own->scale.resize(static_cast<std::size_t>(p.heads == p.kv_heads ? p.heads * p.key_dim : p.key_dim));
        std::ranges::generate(own->scale, [&] { return normal(random); });
        const auto [height, width] = grid_of(p.queries);
        const focused_linear_attention<dense, T> op{.scale = own->scale, .convolution = {own->weights.view(), own->bias, height, width}};
        const auto g = op.convolution.grid(p.queries);

        const auto attend = [=]<Scalar S>(const inputs<S>& in, const outputs<S>& out, const auto& then) {
            const auto q = reference::focused_features<S, T>(in.queries, op.power, op.scale),
                       k = reference::focused_features<S, T>(in.keys, op.power, op.scale);
            then(inputs<S>{q, k, in.values, in.positions}, op.eps * static_cast<double>(in.keys.shape().tokens));
            static_cast<void>(out);
        };
        const auto reference = [=]<Scalar S>(const inputs<S>& in, const outputs<S>& out) {
            attend(in, out, [&](const inputs<S>& mapped, double eps) {
                reference::linear_attention<S>(mapped, out, identity_features{}, dense{}, true, eps, 1);
            });
            reference::add_depthwise_convolution<S, T>(in.values, out.values, {g.height, g.width, g.top, g.left}, op.convolution.weights,
                                                       op.convolution.bias, {}, first_row(in, p));
        };
        const auto naive = [=](const inputs<T>& in, const outputs<T>& out) {
            attend(in, out,
                   [&](const inputs<T>& mapped, double eps) { naive_linear<T>(mapped, out, [](T*, index_t) {}, {}, static_cast<T>(eps)); });
            add_naive_convolution<T>(in.values, out.values, {g.height, g.width, g.top, g.left}, op.convolution.weights,
                                     op.convolution.bias);
        };
        return made_linear{op, reference, naive, linear_flops(p) + 50.0 * static_cast<double>(p.batch * p.heads * p.queries * p.value_dim),
                           own};
    },
    [](const problem& p) { return p.queries == p.keys; });

} // namespace

} // namespace attn::testing
