// Training, step by step: a layer of attention learns to find the one marked token of a sequence and to say its number at every other.
#include <attn/layer/named_gradients.hpp>

#include <algorithm>
#include <cstdio>
#include <random>

int main() {
    constexpr int batch = 32, tokens = 20, channels = 16;
    attn::parameters weights;
    for (const char* name : {"q.weight", "k.weight", "v.weight"}) weights.add_initial<float>(name, {channels, channels});
    weights.add_initial<float>("out.weight", {1, channels});
    attn::parameters gradients = attn::zeros_like<float>(weights);
    const auto layer = attn::get_multi_head<float>(weights, "", 2); // of two heads, and of the weights as they are at each call

    attn::tensor<float> x({batch, 1, tokens, channels}), y({batch, 1, tokens, 1}), dy(y.shape());
    attn::workspace kept(attn::kept_bytes(layer, {.tokens = x})); // what the gradient needs of the way there
    std::mt19937 random(3);
    for (int step = 0; step <= 400; ++step) {
        int marked[batch];
        for (int b = 0; b < batch; ++b) {
            marked[b] = static_cast<int>(random() % tokens);
            for (int i = 0; i < tokens; ++i) {
                x(b, 0, i, 0) = static_cast<float>(random()) / 0x1p31f - 1; // the number
                x(b, 0, i, 1) = i == marked[b] ? 3.0f : 0.0f;               // the mark
                x(b, 0, i, 2) = 1;
            }
        }
        attn::forward(layer, {.tokens = x}, y, kept);
        float loss = 0; // the mean of squares, and dy its gradient
        for (int b = 0; b < batch; ++b)
            for (int i = 0; i < tokens; ++i) {
                const float wrong = y(b, 0, i, 0) - x(b, 0, marked[b], 0);
                loss += wrong * wrong / (batch * tokens);
                dy(b, 0, i, 0) = 2 * wrong / (batch * tokens);
            }
        attn::backward(layer, {.tokens = x}, kept, dy, {.parameters = attn::get_gradients(layer, gradients, "")});
        for (const auto& name : weights.names())
            std::ranges::transform(weights.elements<float>(name), gradients.elements<float>(name), weights.elements<float>(name).begin(),
                                   [](float number, float slope) { return number - 0.5f * slope; });
        if (step % 100 == 0) std::printf("step %3d: mean square error %.2f\n", step, static_cast<double>(loss));
    }
}
