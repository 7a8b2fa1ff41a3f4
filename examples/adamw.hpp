// An optimiser of all weights: AdamW (Loshchilov and Hutter 2019).
#pragma once

#include <attn/layer/named_gradients.hpp>
#include <attn/parallel/thread_pool.hpp>

#include <cmath>

/// Moves weights against their gradients, each by the mean of what its gradients were, over the root of the mean of their squares. Weights of more than
/// one dimension decay; biases and the weights of norms do not.
struct adamw {
    float slow = 0.9f, slower = 0.999f, decay = 0.01f; ///< of the mean, and of that of the squares, in a step; of weights, in one of rate 1
    attn::parameters means = {}, squares = {};
    int steps = 0;

    void step(attn::parameters& weights, attn::parameters& gradients, float rate, attn::thread_pool& threads) {
        if (steps++ == 0) means = attn::zeros_like<float>(weights), squares = attn::zeros_like<float>(weights);
        const auto scale = rate / (1 - std::pow(slow, static_cast<float>(steps))), square_scale = 1 / (1 - std::pow(slower, static_cast<float>(steps)));
        for (const auto& name : weights.names()) {
            const auto w = weights.elements<float>(name), g = gradients.elements<float>(name), m = means.elements<float>(name), s = squares.elements<float>(name);
            const auto falls = weights.size(name).size() > 1 ? rate * decay : 0;
            const auto count = std::ssize(w), parts = threads.concurrency();
            const auto move = [&](attn::index_t part) {
                for (auto e = count * part / parts; e < count * (part + 1) / parts; ++e) {
                    const auto slope = g.data()[e];
                    auto &mean = m.data()[e], &square = s.data()[e], &number = w.data()[e];
                    mean = slow * mean + (1 - slow) * slope;
                    square = slower * square + (1 - slower) * slope * slope;
                    number -= scale * mean / (std::sqrt(square * square_scale) + 1e-8f) + falls * number;
                }
            };
            threads.parallel_for(parts, move);
        }
    }
};
