#include "plain_step.hpp"

#include <algorithm>
#include <cmath>

namespace attn::bench {

void plain_step(const float* q, const float* k, const float* v, std::ptrdiff_t heads, std::ptrdiff_t keys, std::ptrdiff_t channels,
                float* scores, float* out) {
    const float scale = 1 / std::sqrt(static_cast<float>(channels));
    for (std::ptrdiff_t h = 0; h < heads; ++h, q += channels, out += channels) {
        float most = -INFINITY, sum = 0;
        for (std::ptrdiff_t j = 0; j < keys; ++j, k += channels) {
            float x = 0;
            for (std::ptrdiff_t c = 0; c < channels; ++c) x += q[c] * k[c];
            scores[j] = x * scale;
            most = std::max(most, scores[j]);
        }
        std::fill_n(out, channels, 0.0F);
        for (std::ptrdiff_t j = 0; j < keys; ++j, v += channels) {
            const float weight = std::exp(scores[j] - most);
            sum += weight;
            for (std::ptrdiff_t c = 0; c < channels; ++c) out[c] += weight * v[c];
        }
        for (std::ptrdiff_t c = 0; c < channels; ++c) out[c] /= sum;
    }
}

} // namespace attn::bench
