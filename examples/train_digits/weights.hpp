// The weights, and how they learn.
#pragma once

#include <attn/layer/linear.hpp>
#include <attn/layer/parameters.hpp>

#include <algorithm>
#include <cmath>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace train_digits {

using attn::index_t, attn::tensor_view;

/// Weights by name, their gradients, and the optimiser: AdamW (Loshchilov and Hutter 2019).
class weights {
public:
    /// Random numbers of that spread.
    void add(const std::string& name, const attn::parameters::extents& size, float spread) {
        const auto value = place(name, size, true);
        std::normal_distribution<float> normal(0, spread);
        std::generate_n(value.data(), value.shape().size(), [&] { return normal(random_); });
    }
    /// The same number everywhere.
    void add_constant(const std::string& name, index_t count, float number) {
        std::fill_n(place(name, {count}, false).data(), count, number);
    }
    void add_linear(const std::string& name, index_t outputs, index_t inputs) {
        add(name + ".weight", {outputs, inputs}, 1 / std::sqrt(static_cast<float>(inputs)));
        add_constant(name + ".bias", outputs, 0);
    }
    void add_norm(const std::string& name, index_t channels) {
        add_constant(name + ".weight", channels, 1);
        add_constant(name + ".bias", channels, 0);
    }

    const attn::parameters& values() const { return values_; }
    tensor_view<const float> value(const std::string& name) const { return values_.get<float>(name, values_.size(name)); }
    std::span<const float> row(const std::string& name) const { return values_.get_vector<float>(name, values_.size(name)[0]); }
    attn::linear<float> linear(const std::string& name) const { return {value(name + ".weight"), row(name + ".bias")}; }
    tensor_view<float> gradient(const std::string& name) const { return at(name).gradient; }
    std::span<float> gradient_row(const std::string& name) const {
        const auto g = gradient(name);
        return {g.data(), static_cast<std::size_t>(g.shape().size())};
    }
    attn::linear<float>::gradients linear_gradients(const std::string& name) const { return {gradient(name + ".weight"), gradient_row(name + ".bias")}; }

    void step(float rate) {
        constexpr float slow = 0.9f, slower = 0.999f, decay = 0.05f;
        ++steps_;
        const auto scale = rate / (1 - std::pow(slow, static_cast<float>(steps_))), square_scale = 1 / (1 - std::pow(slower, static_cast<float>(steps_)));
        for (auto& w : learnt_)
            for (index_t e = 0; e < w.value.shape().size(); ++e) {
                auto &mean = w.mean[static_cast<std::size_t>(e)], &square = w.square[static_cast<std::size_t>(e)];
                const auto g = w.gradient.data()[e];
                mean = slow * mean + (1 - slow) * g;
                square = slower * square + (1 - slower) * g * g;
                auto& number = w.value.data()[e];
                number -= scale * mean / (std::sqrt(square * square_scale) + 1e-8f) + (w.decays ? rate * decay * number : 0);
            }
    }

private:
    struct learnt {
        std::string name;
        tensor_view<float> value, gradient;
        bool decays;
        std::vector<float> mean, square;
    };
    tensor_view<float> place(const std::string& name, const attn::parameters::extents& size, bool decays) {
        const auto value = values_.add<float>(name, size), gradient = gradients_.add<float>(name, size);
        const std::vector<float> none(static_cast<std::size_t>(value.shape().size()));
        learnt_.push_back({name, value, gradient, decays, none, none});
        return value;
    }
    const learnt& at(const std::string& name) const {
        return *std::ranges::find(learnt_, name, &learnt::name);
    }

    attn::parameters values_, gradients_;
    std::vector<learnt> learnt_;
    std::mt19937 random_{3};
    int steps_ = 0;
};

} // namespace train_digits
