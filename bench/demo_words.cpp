#include "demo_words.hpp"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace attn::bench {

namespace {

constexpr char32_t replacement = 0xFFFD;
const std::string spelt_replacement = "\xEF\xBF\xBD";

/// A character of UTF-8 and the bytes it takes; of a byte that begins none, U+FFFD and 1.
struct character {
    char32_t code = replacement;
    std::size_t bytes = 1;
};

character first_character(std::string_view text) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const auto lead = byte(0);
    if (lead < 0x80) return {lead, 1};
    const std::size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4 || text.size() < bytes) return {};
    char32_t code = lead & (0x7Fu >> bytes);
    for (std::size_t i = 1; i < bytes; ++i) {
        if (byte(i) >> 6 != 2) return {};
        code = code << 6 | (byte(i) & 0x3Fu);
    }
    constexpr char32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (code < least[bytes] || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return {};
    return {code, bytes};
}

bool is_ideograph(char32_t c) { return (c >= 0x3040 && c <= 0x9FFF) || (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x20000 && c <= 0x3FFFF); }

/// Of a word wherever it stands: letters and digits, and beyond ASCII all but spaces, punctuation, symbols and what is no character.
bool is_letter(char32_t c) {
    if (c < 0x80) return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
    if (c < 0xC0) return c == 0xAA || c == 0xB5 || c == 0xBA;
    const bool is_symbol = c == 0xD7 || c == 0xF7 || (c >= 0x2000 && c <= 0x2BFF) || (c >= 0x3000 && c <= 0x303F) || (c >= 0xE000 && c <= 0xF8FF) ||
                           (c >= 0xFE00 && c <= 0xFE6F) || (c >= 0xFF00 && c <= 0xFF0F) || (c >= 0x1F000 && c <= 0x1FAFF);
    return !is_symbol && (c & 0xFFFE) != 0xFFFE;
}

/// Of a word between two letters: "don't", "head-major".
bool is_joint(char32_t c) { return c == '\'' || c == '-' || c == 0x2019; }

/// Whether the beginning of a file looks like no text: a zero byte, or control characters in plenty.
bool is_binary(std::string_view bytes) {
    const auto is_control = [](char c) { return (c >= 0 && c < ' ' && c != '\t' && c != '\n' && c != '\r' && c != '\f') || c == 0x7F; };
    return bytes.find('\0') != std::string_view::npos || std::ranges::count_if(bytes, is_control) * 20 > std::ssize(bytes);
}

std::string beginning_of(const std::string& path, std::size_t limit) {
    std::error_code unknown;
    const auto status = std::filesystem::status(path, unknown);
    if (!std::filesystem::exists(status)) throw unusable_file(path + ": there is no such file");
    if (std::filesystem::is_directory(status)) throw unusable_file(path + " is a directory; the demo reads one text file");
    std::ifstream file(path, std::ios::binary);
    if (!file) throw unusable_file(path + " cannot be read: " + std::strerror(errno));
    std::string bytes(limit, '\0');
    file.read(bytes.data(), static_cast<std::streamsize>(limit));
    if (file.bad()) throw unusable_file(path + " cannot be read: " + std::strerror(errno));
    bytes.resize(static_cast<std::size_t>(file.gcount()));
    return bytes;
}

/// The words of a text, at most one more than `limit`.
std::vector<std::string> split(std::string_view text, std::size_t limit) {
    std::vector<std::string> words;
    std::string word, joint;
    const auto end_word = [&] {
        if (!word.empty()) words.push_back(std::move(word));
        word.clear();
        joint.clear();
    };
    while (!text.empty() && words.size() <= limit) {
        const auto [code, bytes] = first_character(text);
        const auto spelt = code == replacement ? spelt_replacement : std::string(text.substr(0, bytes));
        text.remove_prefix(bytes);
        if (is_ideograph(code)) {
            end_word();
            words.push_back(spelt);
        } else if (is_letter(code)) {
            word += joint + spelt;
            joint.clear();
        } else if (is_joint(code) && !word.empty() && joint.empty()) {
            joint = spelt;
        } else {
            end_word();
        }
    }
    end_word();
    return words;
}

std::uint64_t mixed(std::uint64_t x) { // the finaliser of splitmix64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

std::uint64_t hash(std::string_view word) { // FNV-1a
    std::uint64_t h = 0xCBF29CE484222325u;
    for (const char c : word) h = (h ^ static_cast<unsigned char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c)) * 0x100000001B3u;
    return h;
}

} // namespace

text_words read_words(const std::string& path, index_t limit) {
    // Words of more than 64 bytes on average would be no text.
    const auto bytes_to_read = static_cast<std::size_t>(limit) * 64;
    const auto bytes = beginning_of(path, bytes_to_read);
    if (bytes.empty()) throw unusable_file(path + " is empty");
    if (is_binary(bytes)) throw unusable_file(path + " looks like a binary file; the demo reads text in UTF-8");
    auto words = split(bytes, static_cast<std::size_t>(limit));
    if (words.empty()) throw unusable_file(path + " holds no words");
    const bool is_all = std::ssize(words) <= limit && bytes.size() < bytes_to_read;
    if (std::ssize(words) > limit) words.resize(static_cast<std::size_t>(limit));
    return {std::move(words), is_all};
}

std::string valid_utf8(std::string_view text) {
    std::string valid;
    while (!text.empty()) {
        const auto [code, bytes] = first_character(text);
        valid += code == replacement || code < ' ' || (code & 0xFFFE) == 0xFFFE ? spelt_replacement : std::string(text.substr(0, bytes));
        text.remove_prefix(bytes);
    }
    return valid;
}

tensor<float> embed(const std::vector<std::string>& words, index_t heads, index_t channels) {
    const auto n = std::ssize(words);
    tensor<float> vectors({1, heads, n, channels});
    for (index_t i = 0; i < n; ++i) {
        const auto word = hash(words[static_cast<std::size_t>(i)]);
        for (index_t h = 0; h < heads; ++h)
            for (index_t c = 0; c < channels; ++c) {
                const auto bits = mixed(word + static_cast<std::uint64_t>(h * channels + c) * 0x9E3779B97F4A7C15u);
                const auto sign = bits >> 63 ? -1.0 : 1.0;
                const auto angle = static_cast<double>(i) * std::pow(10'000.0, -static_cast<double>(c / 2 * 2) / static_cast<double>(channels));
                vectors(0, h, i, c) = static_cast<float>(std::sqrt(0.375) * (sign + std::sqrt(2.0) * (c % 2 == 0 ? std::sin(angle) : std::cos(angle))));
            }
    }
    return vectors;
}

} // namespace attn::bench
