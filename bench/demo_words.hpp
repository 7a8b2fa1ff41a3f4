// Words of a text file, and vectors for them.
#pragma once

#include "attn/core/tensor.hpp"

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace attn::bench {

/// A file that cannot serve, with a message for whoever named it.
struct unusable_file : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// The words at the beginning of a text.
struct text_words {
    std::vector<std::string> words;
    bool is_all = true; ///< whether the text ends with the last of them
};

/// The first words of a file, at most `limit`: runs of letters and digits (apostrophes and hyphens inside included), in UTF-8; an
/// ideograph is a word. Bytes that are not UTF-8 become U+FFFD. Reads no more of the file than it has to.
/// Throws unusable_file: missing, a directory, unreadable, binary, empty, or without a word.
text_words read_words(const std::string& path, index_t limit);

/// A text in which bytes that are not UTF-8, and what XML does not take, are U+FFFD.
std::string valid_utf8(std::string_view text);

/// One vector for each word, as a transformer begins with: (1, heads, words, channels), channels even. In every head
///     x[i, c] = sqrt(3/8) (sign(word, head, c) + sqrt(2) sinusoid(i, c))
/// with signs from a hash of the word, the same for capitals, and the sinusoids of position of Vaswani et al. 2017: half of a row's squared
/// length, 3/4 channels, is the word's and half is its place's. With 64 channels a word's score with itself is 6, with the same word
/// far off 3 and more, with most others about 2. The same on every machine.
tensor<float> embed(const std::vector<std::string>& words, index_t heads, index_t channels);

} // namespace attn::bench
