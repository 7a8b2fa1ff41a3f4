// Training, step by step: a layer of attention learns to find the one marked token of a sequence and to say its number at every other.
#include <attn/core/tensor.hpp>
#include <attn/layer/multi_head.hpp>

#include <algorithm>
#include <cstdio>
#include <random>

int main() {
    constexpr int batch = 32, tokens = 20, channels = 16;
    const auto matrix = [](int outputs, unsigned seed) { return attn::tensor<float>::random({1, 1, outputs, channels}, seed, 0.3f); };
    attn::tensor<float> q = matrix(channels, 1), k = matrix(channels, 2), v = matrix(channels, 3), out = matrix(1, 4);
    const attn::multi_head layer{.heads = 2, .q = attn::linear{q}, .k = attn::linear{k}, .v = attn::linear{v}, .out = attn::linear{out}};

    attn::tensor<float> x({batch, 1, tokens, channels}), y({batch, 1, tokens, 1}), wanted(y.shape()), dy(y.shape());
    attn::tensor<float> dq(q.shape()), dk(k.shape()), dv(v.shape()), d_out(out.shape());
    attn::workspace kept(attn::kept_bytes(layer, {.tokens = x})); // what the gradient needs of the way there
    const auto descend = [](attn::tensor<float>& w, const attn::tensor<float>& dw) {
        std::ranges::transform(w.elements(), dw.elements(), w.data(), [](float number, float slope) { return number - 0.5f * slope; });
    };
    std::mt19937 random(1);
    for (int step = 0; step <= 300; ++step) {
        for (int b = 0; b < batch; ++b) {
            const int marked = static_cast<int>(random() % tokens);
            for (int i = 0; i < tokens; ++i) {
                x(b, 0, i, 0) = static_cast<float>(random()) / 0x1p31f - 1; // the number
                x(b, 0, i, 1) = i == marked ? 3.0f : 0.0f;                  // the mark
                x(b, 0, i, 2) = 1;
            }
            for (int i = 0; i < tokens; ++i) wanted(b, 0, i, 0) = x(b, 0, marked, 0);
        }
        attn::forward(layer, {.tokens = x}, y, kept);
        float loss = 0;
        std::ranges::transform(y.elements(), wanted.elements(), dy.data(), [&](float ours, float theirs) {
            loss += (ours - theirs) * (ours - theirs) / (batch * tokens);
            return 2 * (ours - theirs) / (batch * tokens);
        });
        attn::backward(layer, {.tokens = x}, kept, dy,
                       {.parameters = {.q = {.weight = dq}, .k = {.weight = dk}, .v = {.weight = dv}, .out = {.weight = d_out}}});
        descend(q, dq), descend(k, dk), descend(v, dv), descend(out, d_out);
        if (step % 100 == 0) std::printf("step %3d: mean square error %.3f\n", step, static_cast<double>(loss));
    }
}
