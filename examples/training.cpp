// Training in thirty lines: a layer of attention learns to find the one marked token of a sequence and to say its number at every other.
#include <attn/core/tensor.hpp>
#include <attn/layer/multi_head.hpp>

#include <algorithm>
#include <cstdio>
#include <random>

int main() {
    using attn::index_t;
    constexpr index_t batch = 32, tokens = 20, channels = 16;
    auto matrix = [seed = 0u](index_t outputs) mutable { return attn::tensor<float>::random({1, 1, outputs, channels}, ++seed, 0.3f); };
    attn::tensor<float> q = matrix(channels), k = matrix(channels), v = matrix(channels), out = matrix(1);
    const attn::multi_head layer{.heads = 2, .q = attn::linear{q}, .k = attn::linear{k}, .v = attn::linear{v}, .out = attn::linear{out}};

    attn::tensor<float> x({batch, 1, tokens, channels}), y({batch, 1, tokens, 1}), dy(y.shape());
    attn::tensor<float> dq(q.shape()), dk(k.shape()), dv(v.shape()), d_out(out.shape());
    attn::workspace kept(attn::kept_bytes(layer, {.tokens = x})); // what the gradient needs of the way there
    const attn::execution run;
    std::mt19937 random(1);
    for (int step = 0; step <= 300; ++step) {
        double loss = 0;
        for (index_t b = 0; b < batch; ++b) {
            const auto marked = static_cast<index_t>(random() % tokens);
            for (index_t i = 0; i < tokens; ++i) {
                std::fill_n(x.view().row(b, 0, i), channels, 0.0f);
                x(b, 0, i, 0) = static_cast<float>(random()) / 0x1p31f - 1; // the number
                x(b, 0, i, 1) = i == marked ? 3.0f : 0.0f;                  // the mark
                x(b, 0, i, 2) = 1;
            }
            for (index_t i = 0; i < tokens; ++i) dy(b, 0, i, 0) = -x(b, 0, marked, 0);
        }
        attn::forward(layer, {.tokens = x}, y, kept, run);
        for (index_t e = 0; e < y.shape().size(); ++e) {
            const auto error = dy.data()[e] += y.data()[e]; // of the answer
            loss += static_cast<double>(error * error) / static_cast<double>(y.shape().size());
            dy.data()[e] *= 2.0f / static_cast<float>(y.shape().size());
        }
        attn::backward(layer, {.tokens = x}, kept, dy,
                       {.parameters = {.q = {.weight = dq}, .k = {.weight = dk}, .v = {.weight = dv}, .out = {.weight = d_out}}}, run);
        const auto descend = [](attn::tensor<float>& w, const attn::tensor<float>& dw) {
            for (index_t e = 0; e < w.shape().size(); ++e) w.data()[e] -= 0.5f * dw.data()[e];
        };
        descend(q, dq), descend(k, dk), descend(v, dv), descend(out, d_out);
        if (step % 100 == 0) std::printf("step %3d: mean square error %.3f\n", step, loss);
    }
}
