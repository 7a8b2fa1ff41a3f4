// Attention matrices as one picture.
#pragma once

#include "attn/core/tensor.hpp"

#include <iosfwd>
#include <string>
#include <vector>

namespace attn::bench {

/// The attention matrix of one operator, (1, 1, words, words): row i holds the weights of the words that word i looks at.
struct picture_panel {
    std::string title, subtitle;
    tensor<float> weights;
};

/// Writes an SVG that needs nothing else: one panel for each matrix, the words along both sides. Its colours follow the reader's light
/// or dark scheme; equal steps of colour are equal steps of the root of a weight, so that small weights show. A weight of zero
/// has no colour, negative ones have a hue of their own.
void write_picture(std::ostream& out, const std::string& title, const std::string& subtitle, const std::vector<std::string>& words,
                   const std::vector<picture_panel>& panels);

} // namespace attn::bench
