// An encoder of Linformer layers that share one projection: 1024 tokens are attended as 64, by a matrix that all layers refer to.
#include <attn/attention/linformer_attention.hpp>
#include <attn/attention/random_projection.hpp>
#include <attn/norm/layer_norm.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace {

constexpr attn::index_t n = 1024, projected = 64, width = 64, heads = 2, layers = 4;
constexpr attn::shape tokens{.tokens = n, .channels = width};
using tensor = attn::tensor<float>;
using projection = attn::linear_projection<float>;

struct layer {
    tensor queries, keys, values, up, down;          ///< weights (1, 1, outputs, inputs)
    attn::linformer_attention<projection> attention; ///< refers to the projection that all share
};

/// x W^T: stands for the linear layer that your program has.
tensor linear(const tensor& x, const tensor& w) {
    tensor y({.tokens = x.shape().tokens, .channels = w.shape().tokens});
    for (attn::index_t i = 0; i < y.shape().tokens; ++i)
        for (attn::index_t o = 0; o < y.shape().channels; ++o)
            for (attn::index_t c = 0; c < x.shape().channels; ++c) y(0, 0, i, o) += x(0, 0, i, c) * w(0, 0, o, c);
    return y;
}

/// The channels of a token as heads: another view of the same memory.
attn::tensor_view<const float> by_heads(const tensor& x) {
    return attn::token_major(x.data(), {.heads = heads, .tokens = n, .channels = width / heads});
}

void add(tensor& x, const float* y) {
    for (attn::index_t i = 0; i < x.shape().size(); ++i) x.data()[i] += y[i];
}

void forward(const layer& l, tensor& x) {
    const auto a = attn::normalise(attn::layer_norm<float>{}, x.view());
    const auto q = linear(a, l.queries), k = linear(a, l.keys), v = linear(a, l.values);
    const attn::inputs<float> in{by_heads(q), by_heads(k), by_heads(v)};
    tensor out(tokens);
    attn::sequential here;
    attn::workspace memory(attn::workspace_bytes<float>(l.attention, shapes_of(in), here));
    attn::attend(l.attention, in, attn::outputs<float>{attn::token_major(out.data(), in.queries.shape())}, attn::execution(here, memory));
    add(x, out.data());

    auto b = linear(attn::normalise(attn::layer_norm<float>{}, x.view()), l.up);
    std::for_each_n(b.data(), b.shape().size(), [](float& activation) { activation = std::max(activation, 0.0f); });
    add(x, linear(b, l.down).data());
}

} // namespace

int main() {
    auto random_matrix = [seed = 0u](attn::index_t rows, attn::index_t columns, float limit) mutable {
        return tensor::random({.tokens = rows, .channels = columns}, ++seed, limit);
    };

    // One matrix E (64 x 1024) for keys and values, all heads and all layers: the operators are views of it.
    tensor e({.tokens = projected, .channels = n});
    attn::fill_random_projection(e.view(), 7);
    const projection shared{e.view()};

    std::vector<layer> encoder;
    for (attn::index_t l = 0; l < layers; ++l)
        encoder.push_back({random_matrix(width, width, .2f),
                           random_matrix(width, width, .2f),
                           random_matrix(width, width, .2f),
                           random_matrix(4 * width, width, .2f),
                           random_matrix(width, 4 * width, .1f),
                           {.key_projection = shared}});

    auto x = random_matrix(n, width, 1);
    for (const auto& l : encoder) forward(l, x);

    const bool finite = std::ranges::all_of(x.elements(), [](float value) { return std::isfinite(value); });
    const bool one = std::ranges::all_of(encoder, [&](const layer& l) { return l.attention.key_projection.matrix.data() == e.data(); });
    std::printf("%td layers over %td tokens; the result is finite: %s\n", layers, n, finite ? "yes" : "no");
    std::printf("scores of a head: %td instead of %td\n", n * projected, n * n);
    std::printf("all layers refer to one projection of %td numbers: %s\n", e.shape().size(), one ? "yes" : "no");
}
