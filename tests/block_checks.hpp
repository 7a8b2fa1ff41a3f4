// Transformer blocks by their formula, and random norms for them.
#pragma once

#include "executors.hpp"
#include "layer_checks.hpp"

#include <attn/layer/fold.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/norm/rep_batch_norm.hpp>

namespace attn::testing {

inline std::span<const float> random_vector(parameters& weights, const std::string& name, index_t count, double scale = 1) {
    add_random<float>(weights, name, {count}, static_cast<unsigned>(std::hash<std::string>()(name)), scale);
    return weights.get_vector<float>(name, count);
}
inline layer_norm<float> random_layer_norm(parameters& weights, const std::string& name, index_t channels) {
    return {random_vector(weights, name + ".weight", channels), random_vector(weights, name + ".bias", channels)};
}
inline feed_forward<float> random_feed_forward(parameters& weights, const std::string& name, index_t channels, index_t hidden) {
    return {.up = random_linear<float>(weights, name + ".up", hidden, channels),
            .down = random_linear<float>(weights, name + ".down", channels, hidden)};
}
inline auto plain_layer_norm(const layer_norm<float>& norm) {
    return [=](const tensor<double>& t) {
        tensor<double> y(t.shape());
        const std::vector<double> w(norm.weight.begin(), norm.weight.end()), b(norm.bias.begin(), norm.bias.end());
        reference::layer_norm<double>(t.view(), y.view(), w, b, 1e-5);
        return y;
    };
}
/// A RepBN as training leaves it.
struct random_statistics {
    std::span<const float> weight, bias;
    std::vector<double> mean, variance;

    random_statistics(parameters& weights, const std::string& name, index_t channels)
        : weight(random_vector(weights, name + ".weight", channels)), bias(random_vector(weights, name + ".bias", channels)),
          mean(random_numbers<double>(channels, 8)), variance(random_numbers<double>(channels, 9)) {
        for (auto& v : variance) v = 0.5 + v * v;
    }
    rep_batch_norm<float> norm() const { return {{weight, bias, mean, variance}, 0.8}; }
    auto formula() const {
        return [this](const tensor<double>& t) {
            tensor<double> y(t.shape());
            const std::vector<double> w(weight.begin(), weight.end()), b(bias.begin(), bias.end());
            reference::rep_batch_norm<double>(t.view(), y.view(), mean, variance, w, b, 0.8, 1e-5);
            return y;
        };
    }
};

/// y = x + attention(norm1(x)), out = y + feed_forward(norm2(y)).
template <class N1, class M, class N2, class F>
tensor<double> plain_block(const tensor<double>& x, const N1& norm1, const M& attention, const N2& norm2, const F& feed_forward) {
    const auto y = plain_sum(x, attention(norm1(x)));
    return plain_sum(y, feed_forward(norm2(y)));
}
/// y = norm1(x + attention(x)), out = norm2(y + feed_forward(y)).
template <class N1, class M, class N2, class F>
tensor<double> plain_post_norm_block(const tensor<double>& x, const N1& norm1, const M& attention, const N2& norm2, const F& feed_forward) {
    const auto y = norm1(plain_sum(x, attention(x)));
    return norm2(plain_sum(y, feed_forward(y)));
}

} // namespace attn::testing
