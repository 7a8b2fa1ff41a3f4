// The weights by name, with their gradients, as they are before anything is learnt.
#pragma once

#include <attn/layer/parameters.hpp>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

namespace train_digits {

using attn::index_t, attn::tensor_view;

/// Weights, and as many gradients of the same names.
struct weights {
    attn::parameters values, gradients;
    std::mt19937 random{3};

    /// Random numbers of that spread.
    void add(const std::string& name, const attn::parameters::extents& size, float spread) {
        std::normal_distribution<float> normal(0, spread);
        std::ranges::generate(place(name, size), [&] { return normal(random); });
    }
    /// The same number everywhere.
    void add_constant(const std::string& name, index_t count, float number) {
        std::ranges::fill(place(name, {count}), number);
    }
    void add_linear(const std::string& name, index_t outputs, index_t inputs) {
        add(name + ".weight", {outputs, inputs}, 1 / std::sqrt(static_cast<float>(inputs)));
        add_constant(name + ".bias", outputs, 0);
    }
    void add_norm(const std::string& name, index_t channels) {
        add_constant(name + ".weight", channels, 1);
        add_constant(name + ".bias", channels, 0);
    }

    attn::linear<float> linear(const std::string& name) const { return values.get_linear<float>(name); }
    std::span<const float> row(const std::string& name) const { return values.get_vector<float>(name); }
    tensor_view<const float> tensor(const std::string& name) const { return values.get<float>(name, values.size(name)); }

private:
    std::span<float> place(const std::string& name, const attn::parameters::extents& size) {
        gradients.add<float>(name, size);
        values.add<float>(name, size);
        return values.elements<float>(name);
    }
};

} // namespace train_digits
