// The header of a safetensors file: a parser of the one form of JSON that it has.
#pragma once

#include "parameters.hpp"

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Whether bytes are text in UTF-8: no overlong form, no half of a pair, nothing beyond U+10FFFF.
inline bool is_utf8(std::string_view text) {
    for (std::size_t i = 0; i < text.size();) {
        const auto byte = [&](std::size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0U; };
        const auto first = byte(i);
        const std::size_t more = first < 0x80 ? 0 : first >= 0xc2 && first < 0xe0 ? 1 : first >= 0xe0 && first < 0xf0 ? 2 : first >= 0xf0 && first < 0xf5 ? 3 : 4;
        if (more == 4) return false;
        for (std::size_t k = 1; k <= more; ++k)
            if ((byte(i + k) & 0xc0) != 0x80) return false;
        const auto second = byte(i + 1);
        if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second >= 0xa0) || (first == 0xf0 && second < 0x90) || (first == 0xf4 && second >= 0x90))
            return false;
        i += 1 + more;
    }
    return true;
}

/// What a header says of one tensor.
struct stored_tensor {
    std::string name, type = {};
    std::vector<std::uint64_t> size = {}, offsets = {};
    bool has_size = false; ///< [] is that of a single number
};

/// The header of a safetensors file, which is JSON of one form: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
/// and, if there, "__metadata__": {"key": "value", ...}. Anything else is refused.
class header_parser {
public:
    explicit header_parser(std::string_view text) : text_(text) {}

    /// metadata: where the texts of "__metadata__" go.
    std::vector<stored_tensor> parse(std::map<std::string, std::string>& metadata) {
        std::vector<stored_tensor> tensors;
        object([&](const std::string& name) {
            if (name == "__metadata__") return object([&](const std::string& key) { metadata[key] = string(); });
            stored_tensor t{.name = name};
            object([&](const std::string& key) {
                if (key == "dtype")
                    t.type = string();
                else if (key == "shape")
                    t.size = numbers(), t.has_size = true;
                else if (key == "data_offsets")
                    t.offsets = numbers();
                else
                    fail("the key \"" + key + "\" of tensor \"" + name + "\" is not known");
            });
            if (t.type.empty() || !t.has_size || t.offsets.size() != 2) fail("tensor \"" + name + "\" has no dtype, no shape or no two data_offsets");
            tensors.push_back(std::move(t));
        });
        skip_spaces();
        if (at_ != text_.size()) fail("something follows the object");
        return tensors;
    }

private:
    [[noreturn]] void fail(const std::string& problem) const {
        throw parameter_error("header, at byte " + std::to_string(at_) + ": " + problem);
    }
    void skip_spaces() {
        while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) ++at_;
    }
    bool take_if(char c) {
        skip_spaces();
        if (at_ == text_.size() || text_[at_] != c) return false;
        ++at_;
        return true;
    }
    void take(char c) {
        if (!take_if(c)) fail(std::string("expected ") + c);
    }
    char next() {
        if (at_ == text_.size()) fail("it ends inside a string");
        return text_[at_++];
    }
    /// Calls member(key) at each value of an object. A key may not come twice.
    template <class F>
    void object(const F& member) {
        take('{');
        if (take_if('}')) return;
        std::vector<std::string> keys;
        do {
            keys.push_back(string());
            take(':');
            member(keys.back());
        } while (take_if(','));
        take('}');
        std::ranges::sort(keys);
        if (const auto twice = std::ranges::adjacent_find(keys); twice != keys.end()) fail("the key \"" + *twice + "\" comes twice");
    }
    std::vector<std::uint64_t> numbers() {
        std::vector<std::uint64_t> result;
        take('[');
        if (take_if(']')) return result;
        do result.push_back(number());
        while (take_if(','));
        take(']');
        return result;
    }
    std::uint64_t number() {
        skip_spaces();
        const auto begin = at_;
        std::uint64_t value = 0;
        for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
            const auto digit = static_cast<std::uint64_t>(text_[at_] - '0');
            if (value > (UINT64_MAX - digit) / 10) fail("a number is too large");
            value = value * 10 + digit;
        }
        if (at_ == begin || (text_[begin] == '0' && at_ > begin + 1)) fail("expected a whole number");
        return value;
    }
    std::string string() {
        take('"');
        std::string result;
        for (char c = next(); c != '"'; c = next()) {
            if (static_cast<unsigned char>(c) < 0x20) fail("a string holds a control character");
            if (c == '\\')
                escape(result);
            else
                result += c;
        }
        if (!is_utf8(result)) fail("a string is not UTF-8");
        return result;
    }
    void escape(std::string& to) {
        constexpr std::string_view letters = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
        const char c = next();
        if (const auto i = letters.find(c); i != letters.npos) {
            to += meant[i];
            return;
        }
        if (c != 'u') fail("a string holds an unknown escape");
        auto code = four_digits();
        if (code >= 0xd800 && code < 0xdc00 && next() == '\\' && next() == 'u') { // the first of a pair of UTF-16
            const auto second = four_digits();
            if (second < 0xdc00 || second >= 0xe000) fail("a string holds half a character");
            code = 0x10000 + (code - 0xd800) * 0x400 + (second - 0xdc00);
        }
        if (code >= 0xd800 && code < 0xe000) fail("a string holds half a character");
        append_utf8(to, code);
    }
    std::uint32_t four_digits() {
        std::uint32_t code = 0;
        for (int i = 0; i < 4; ++i) {
            constexpr std::string_view digits = "0123456789abcdef";
            const char c = next();
            const auto digit = digits.find(c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c);
            if (digit == digits.npos) fail("\\u needs four hexadecimal digits");
            code = code * 16 + static_cast<std::uint32_t>(digit);
        }
        return code;
    }
    static void append_utf8(std::string& to, std::uint32_t code) {
        const auto put = [&](std::uint32_t byte) { to += static_cast<char>(static_cast<unsigned char>(byte)); };
        const auto rest = [&](int shift) { put(0x80 | (code >> shift & 0x3f)); };
        if (code < 0x80)
            put(code);
        else if (code < 0x800)
            put(0xc0 | code >> 6), rest(0);
        else if (code < 0x10000)
            put(0xe0 | code >> 12), rest(6), rest(0);
        else
            put(0xf0 | code >> 18), rest(12), rest(6), rest(0);
    }

    std::string_view text_;
    std::size_t at_ = 0;
};

} // namespace attn::detail
