// PRepBN step by step: training moves from LayerNorm to RepBN, inference is RepBN, and RepBN folds into the linear layer behind it.
#include <attn/norm/fold.hpp>
#include <attn/norm/progressive_rep_batch_norm.hpp>
#include <attn/norm/layer_norm.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

int main() {
    constexpr attn::index_t tokens = 64, channels = 8, outputs = 4;
    constexpr std::int64_t steps = 100;
    std::mt19937 random(1);
    const auto fill = [&](auto* to, attn::index_t count) {
        std::generate_n(to, count, [&] { return static_cast<float>(random()) / 0x1p31f - 1; });
    };

    // Parameters are yours: the norm refers to them, your optimiser moves them.
    std::vector<float> weight(channels, 1.0f), bias(channels, 0.0f);
    attn::batch_norm_statistics statistics(channels);
    const double eta = 0.8;
    const attn::progressive_rep_batch_norm<attn::layer_norm<float>> training{
        .norm = {.weight = weight, .bias = bias},
        .rep = {.batch = {.weight = weight, .bias = bias}, .eta = eta},
    };

    // 1. Training. gamma is the share of LayerNorm; the schedule is a pure function of the step, and the step all there is to save.
    const attn::linear_schedule schedule{.steps = steps, .warm_up = 10};
    attn::tensor<float> x({.tokens = tokens, .channels = channels}), y(x.shape());
    const attn::execution run; // its workspace grows in the first step
    for (std::int64_t step = 0; step <= steps + 10; ++step) {
        fill(x.data(), x.shape().size());
        const auto gamma = schedule(step);
        attn::train(training, x.view(), y.view(), statistics, gamma, run);
        if (step % 22 == 0) {
            if (gamma)
                std::printf("step %3d: gamma %.2f\n", static_cast<int>(step), *gamma);
            else
                std::printf("step %3d: warm-up, LayerNorm alone\n", static_cast<int>(step));
        }
    }
    std::printf("batches in the running statistics: %d\n", static_cast<int>(statistics.batches));

    // 2. Inference: the same norm with the statistics that training gathered. No row of x has a say in another's result.
    auto inference = training;
    inference.rep.batch.mean = statistics.mean;
    inference.rep.batch.variance = statistics.variance;
    const auto normalised = attn::normalise(inference, x.view());

    // 3. RepBN is a plain BatchNorm with other parameters.
    std::vector<float> plain_weight(channels), plain_bias(channels);
    const auto plain = attn::reparameterised(inference.rep, std::span(plain_weight), std::span(plain_bias));
    const auto again = attn::normalise(plain, x.view());
    float difference = 0;
    for (attn::index_t i = 0; i < x.shape().size(); ++i) difference = std::max(difference, std::abs(normalised.data()[i] - again.data()[i]));
    std::printf("re-parameterised as a BatchNorm, the difference is below 1e-6: %s\n", difference < 1e-6f ? "yes" : "no");

    // 4. And a BatchNorm before a linear layer is no work at all: it folds into it.
    std::vector<float> matrix(outputs * channels), offset(outputs), folded_matrix(matrix.size()), folded_offset(outputs);
    fill(matrix.data(), outputs * channels);
    fill(offset.data(), outputs);
    const attn::shape rows{.tokens = outputs, .channels = channels};
    const attn::linear_view<const float> linear{attn::head_major<const float>(matrix.data(), rows), offset};
    const attn::linear_view<float> folded{attn::head_major(folded_matrix.data(), rows), folded_offset};
    const auto largest = attn::fold(inference, linear, folded, x.view());
    std::printf("folded into the linear layer, the largest difference is below 1e-6: %s\n", largest < 1e-6 ? "yes" : "no");
}
