// Attention on a text in a browser: words look at words that share letters with them. WebAssembly for index.html, which writes a text to memory,
// calls `attend` and reads the weights. examples/README.md says how to build it.
#include <attn/attention/softmax_attention.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>

namespace {

using attn::index_t, attn::tensor;

constexpr index_t most_words = 64, letters = 128;

std::array<char, 8192> memory_of_text;
/// Where the words begin and end in the text.
std::array<int, 2 * most_words> places;
tensor<float> weights;

/// What of a byte counts as a letter, if any: small letters and digits of ASCII, and of others the bytes by which they differ most.
index_t letter_of(char c) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80) return std::isalnum(byte) ? std::tolower(byte) : -1;
    return byte < 0xc0 ? byte - 0x80 : -1;
}

/// Finds the words of a text of so many bytes; how many there are.
index_t find_words(int bytes) {
    const auto is_space = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
    const auto* const begin = memory_of_text.data();
    const auto* const end = begin + std::clamp(bytes, 0, static_cast<int>(memory_of_text.size()));
    index_t count = 0;
    for (const auto* at = begin; count < most_words; ++count) {
        at = std::find_if_not(at, end, is_space);
        if (at == end) break;
        places[static_cast<std::size_t>(2 * count)] = static_cast<int>(at - begin);
        at = std::find_if(at, end, is_space);
        places[static_cast<std::size_t>(2 * count + 1)] = static_cast<int>(at - begin);
    }
    return count;
}

/// Counts of the letters of each word, of length 1: the product of two is the cosine of the angle between them.
tensor<float> letters_of_words(index_t count) {
    tensor<float> x({.tokens = count, .channels = letters});
    for (index_t i = 0; i < count; ++i) {
        float squares = 0;
        for (auto at = places[static_cast<std::size_t>(2 * i)]; at < places[static_cast<std::size_t>(2 * i + 1)]; ++at)
            if (const auto letter = letter_of(memory_of_text[static_cast<std::size_t>(at)]); letter >= 0)
                squares += 2 * x(0, 0, i, letter)++ + 1; // (n + 1)^2 - n^2
        for (index_t c = 0; c < letters && squares > 0; ++c) x(0, 0, i, c) /= std::sqrt(squares);
    }
    return x;
}

/// The matrix that an operator applies to the values: what it makes of the unit vectors.
template <class P>
tensor<float> weights_of(const P& pattern, double sharpness, const tensor<float>& x) {
    const auto count = x.shape().tokens;
    tensor<float> unit({.tokens = count, .channels = count});
    for (index_t i = 0; i < count; ++i) unit(0, 0, i, i) = 1;
    return attn::attend(attn::softmax_attention{.scale = sharpness, .pattern = pattern}, x, x, unit);
}

} // namespace

extern "C" {

[[clang::export_name("text")]] char* text() { return memory_of_text.data(); }
[[clang::export_name("text_size")]] int text_size() { return static_cast<int>(memory_of_text.size()); }

/// Attention among the words of the text, of so many bytes: all see all (0), those up to themselves (1), or three to each side (2). Scores are
/// between 0 and `sharpness`. Returns how many words there are.
[[clang::export_name("attend")]] int attend(int bytes, int pattern, double sharpness) {
    const auto x = letters_of_words(find_words(bytes));
    if (x.shape().tokens == 0) return 0;
    weights = pattern == 0   ? weights_of(attn::dense{}, sharpness, x)
              : pattern == 1 ? weights_of(attn::causal{}, sharpness, x)
                             : weights_of(attn::pattern::local{3, 3}, sharpness, x);
    return static_cast<int>(x.shape().tokens);
}

/// Two numbers for each word: the bytes where it begins and ends.
[[clang::export_name("words")]] const int* words() { return places.data(); }
/// Row i: how much of its attention word i gives each word.
[[clang::export_name("weights")]] const float* weight_matrix() { return weights.data(); }
}
