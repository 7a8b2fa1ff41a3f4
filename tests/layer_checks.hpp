// Layers by their formulas, in double, on plain loops: what the library's are compared with. And random weights for both.
#pragma once

#include "catch.hpp"
#include "executors.hpp"
#include "layer_formulas.hpp"
#include "norm_checks.hpp"

#include <attn/layer/feed_forward.hpp>
#include <attn/layer/multi_head.hpp>
#include <attn/layer/parameters.hpp>
#include <attn/reference/softmax.hpp>

namespace attn::testing {

/// Random numbers under a name; those of a linear are small enough that sums over its inputs stay near 1.
template <Scalar T>
tensor_view<T> add_random(parameters& weights, const std::string& name, const parameters::extents& size, unsigned seed, double scale = 1) {
    const auto t = weights.add<T>(name, size);
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0, scale);
    std::generate_n(t.data(), t.shape().size(), [&] { return static_cast<T>(normal(random)); });
    return t;
}
template <Scalar T>
linear<T> random_linear(parameters& weights, const std::string& name, index_t outputs, index_t inputs, bool has_bias = true) {
    const auto seed = static_cast<unsigned>(std::hash<std::string>()(name));
    add_random<T>(weights, name + ".weight", {outputs, inputs}, seed, 1 / std::sqrt(static_cast<double>(std::max<index_t>(1, inputs))));
    if (has_bias) add_random<T>(weights, name + ".bias", {outputs}, seed + 1);
    return weights.get_linear<T>(name, outputs, inputs);
}
/// Projections of d_k channels for keys and d_v for values.
template <Scalar T, class A = softmax_attention<>>
multi_head<T, A> random_multi_head(parameters& weights, const std::string& name, index_t channels, index_t heads, index_t kv_heads, index_t d_k,
                                   index_t d_v, const A& attention = {}, bool has_bias = true) {
    return {.heads = heads,
            .kv_heads = kv_heads,
            .q = random_linear<T>(weights, name + ".q", heads * d_k, channels, has_bias),
            .k = random_linear<T>(weights, name + ".k", kv_heads * d_k, channels, has_bias),
            .v = random_linear<T>(weights, name + ".v", kv_heads * d_v, channels, has_bias),
            .out = random_linear<T>(weights, name + ".out", channels, heads * d_v, has_bias),
            .attention = attention};
}

// The formulas. Tokens are (batch, 1, n, channels), in double.

template <Scalar T>
tensor<double> plain_linear(const tensor<double>& x, const linear<T>& l) {
    const auto& s = x.shape();
    tensor<double> y({s.batch, 1, s.tokens, l.outputs()});
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t i = 0; i < s.tokens; ++i)
            for (index_t o = 0; o < l.outputs(); ++o) {
                double sum = l.bias.empty() ? 0 : static_cast<double>(l.bias[static_cast<std::size_t>(o)]);
                for (index_t c = 0; c < s.channels; ++c) sum += static_cast<double>(l.weight(0, 0, o, c)) * x(b, 0, i, c);
                y(b, 0, i, o) = sum;
            }
    return y;
}
inline tensor<double> plain_sum(const tensor<double>& a, const tensor<double>& b) {
    tensor<double> y(a.shape());
    std::transform(a.data(), a.data() + a.shape().size(), b.data(), y.data(), std::plus{});
    return y;
}
template <Scalar T, class F>
tensor<double> plain_feed_forward(const tensor<double>& x, const feed_forward<T, F>& layer, double (*activation)(double)) {
    auto hidden = plain_linear(x, layer.up);
    const auto gates = layer.gated() ? plain_linear(x, layer.gate) : tensor<double>();
    for (index_t e = 0; e < hidden.shape().size(); ++e)
        hidden.data()[e] = layer.gated() ? activation(gates.data()[e]) * hidden.data()[e] : activation(hidden.data()[e]);
    return plain_linear(hidden, layer.down);
}
/// Heads copied out of rows and back.
inline tensor<double> heads_of(const tensor<double>& rows, index_t heads) {
    const auto& s = rows.shape();
    tensor<double> t({s.batch, heads, s.tokens, s.channels / heads});
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t h = 0; h < heads; ++h)
            for (index_t i = 0; i < s.tokens; ++i)
                for (index_t c = 0; c < t.shape().channels; ++c) t(b, h, i, c) = rows(b, 0, i, h * t.shape().channels + c);
    return t;
}
inline tensor<double> rows_of_heads(const tensor<double>& t) {
    const auto& s = t.shape();
    tensor<double> rows({s.batch, 1, s.tokens, s.heads * s.channels});
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t h = 0; h < s.heads; ++h)
            for (index_t i = 0; i < s.tokens; ++i)
                for (index_t c = 0; c < s.channels; ++c) rows(b, 0, i, h * s.channels + c) = t(b, h, i, c);
    return rows;
}
/// attend(q, k, v), heads first, gives the attention's result; turn(t, first) turns queries and keys. y: the tokens of keys and values.
template <class M, class F, class R>
tensor<double> plain_multi_head(const tensor<double>& x, const tensor<double>& y, const M& layer, const F& attend, const R& turn,
                                const positions& where = {}) {
    auto q = heads_of(plain_linear(x, layer.q), layer.heads), k = heads_of(plain_linear(y, layer.k), layer.kv_heads);
    const auto v = heads_of(plain_linear(y, layer.v), layer.kv_heads);
    turn(q, where.first_query[0]);
    turn(k, where.first_key[0]);
    auto attended = rows_of_heads(attend(q, k, v));
    if (layer.gate.weight.data()) {
        const auto gates = plain_linear(x, layer.gate);
        const auto& s = attended.shape();
        for (index_t row = 0; row < s.batch * s.tokens; ++row)
            for (index_t c = 0; c < s.channels; ++c)
                attended.data()[row * s.channels + c] /= 1 + std::exp(-gates.data()[row * gates.shape().channels + c * gates.shape().channels / s.channels]);
    }
    return plain_linear(attended, layer.out);
}
template <class M, class F>
tensor<double> plain_multi_head(const tensor<double>& x, const M& layer, const F& attend) {
    return plain_multi_head(x, x, layer, attend, [](auto&, index_t) {});
}
/// The reference of softmax attention, as plain_multi_head calls it.
template <class P = dense>
auto plain_softmax(const P& pattern = {}, const positions& where = {}) {
    return [=](const tensor<double>& q, const tensor<double>& k, const tensor<double>& v) {
        tensor<double> out({q.shape().batch, q.shape().heads, q.shape().tokens, v.shape().channels});
        reference::softmax<double>(inputs<double>{q, k, v, where}, {out.view()}, {}, identity_score{}, pattern);
        return out;
    };
}
/// What a layer gives on the calling thread.
template <Layer L>
tensor<typename L::scalar> result_of(const L& layer, const tensor<typename L::scalar>& x) {
    return forward(layer, {.tokens = x});
}

/// Errors of sums of a few hundred terms near 1.
template <Scalar T>
bool close(const tensor<T>& ours, const tensor<double>& exact) {
    return largest_error(ours, exact) <= 32 * epsilon<T> * std::max(1.0, largest_magnitude(exact));
}

template <Layer L, Executor E>
tensor<typename L::scalar> result_on(const L& layer, const layer_inputs<typename L::scalar>& in, E& executor) {
    using T = typename L::scalar;
    tensor<T> out(layer.output_shape(in.tokens.shape()));
    std::fill_n(out.data(), out.shape().size(), guard<T>);
    workspace memory(layer.workspace_bytes(in.tokens.shape(), in.context.shape(), std::max<index_t>(1, executor.concurrency())));
    fill(memory, std::byte{0xff});
    forward(layer, in, out.view(), execution(executor, memory));
    return out;
}

/// The same bits for every executor and every layout of the rows, from a residual in place, and for a batch entry on its own.
template <Layer L>
void check_bits(const L& layer, const tensor<typename L::scalar>& x, bool adds_residual = true) {
    using T = typename L::scalar;
    const auto expected = result_of(layer, x);
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        CHECK(same_bits(result_on(layer, {.tokens = x}, executor), expected));
    });
    const auto residual = random_rows<T>(expected.shape(), 17);
    const auto added = adds_residual ? forward(layer, {.tokens = x, .residual = residual}) : forward(layer, {.tokens = x});
    if (adds_residual) CHECK(close(added, plain_sum(reference::widen(expected.view()), reference::widen(residual.view()))));
    sequential here;
    workspace memory(layer.workspace_bytes(x.shape(), {}, 1));
    for (const auto l : row_layouts) {
        placed<T> tokens(x, l), out(residual, l);
        const auto added_to = adds_residual ? out.view() : tensor_view<T>();
        forward(layer, {.tokens = tokens.view(), .residual = added_to}, out.view(), execution(here, memory));
        CHECK(same_bits(out.copy(), added));
        CHECK(out.guards_intact());
        if (!L::in_place || expected.shape() != x.shape()) continue;
        forward(layer, {.tokens = tokens.view()}, tokens.view(), execution(here, memory));
        CHECK(same_bits(tokens.copy(), expected));
    }
    const auto& s = x.shape();
    const auto alone = forward(layer, {.tokens = x.slice({.batch = {s.batch - 1, 1}})});
    CHECK(std::memcmp(alone.data(), expected.data() + (s.batch - 1) * alone.shape().size(),
                      static_cast<std::size_t>(alone.shape().size()) * sizeof(T)) == 0);
}

template <Scalar T>
tensor<double> wide(const tensor<T>& t) {
    return reference::widen(t.view());
}

} // namespace attn::testing
