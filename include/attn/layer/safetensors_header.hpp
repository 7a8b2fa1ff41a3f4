// The header of a safetensors file, and the index of several: a parser of the JSON that they are.
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
        const std::size_t more = first < 0x80                    ? 0
                                 : first >= 0xc2 && first < 0xe0 ? 1
                                 : first >= 0xe0 && first < 0xf0 ? 2
                                 : first >= 0xf0 && first < 0xf5 ? 3
                                                                 : 4;
        if (more == 4) return false;
        for (std::size_t k = 1; k <= more; ++k)
            if ((byte(i + k) & 0xc0) != 0x80) return false;
        const auto second = byte(i + 1);
        if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second >= 0xa0) || (first == 0xf0 && second < 0x90) ||
            (first == 0xf4 && second >= 0x90))
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

/// JSON of the forms that safetensors have. Anything else is refused.
class json_parser {
public:
    explicit json_parser(std::string_view text) : text_(text) {}

    /// The header of a file: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...} and, if there, "__metadata__":
    /// {"key": "value", ...}. metadata: where its texts go.
    std::vector<stored_tensor> header(std::map<std::string, std::string>& metadata) {
        what_ = "header";
        std::vector<stored_tensor> tensors;
        object([&](const std::string& name) {
            if (name == "__metadata__") return object([&](const std::string& key) { metadata[key] = string(); });
            stored_tensor t{.name = name};
            object([&](const std::string& key) {
                if (key == "dtype") t.type = string();
                else if (key == "shape") t.size = numbers(), t.has_size = true;
                else if (key == "data_offsets") t.offsets = numbers();
                else fail("the key \"" + key + "\" of tensor \"" + name + "\" is not known");
            });
            if (t.type.empty() || !t.has_size || t.offsets.size() != 2)
                fail("tensor \"" + name + "\" has no dtype, no shape or no two data_offsets");
            tensors.push_back(std::move(t));
        });
        end();
        return tensors;
    }
    /// The index of several files: {"weight_map": {"name": "model-00001-of-00002.safetensors", ...}, ...}, the file of each tensor, beside
    /// the index. What else it says, as does "metadata": {"total_size": 24}, is passed over.
    std::map<std::string, std::string> index() {
        what_ = "index";
        std::map<std::string, std::string> files;
        bool has_map = false;
        object([&](const std::string& key) {
            if (key != "weight_map") return value(0);
            has_map = true;
            object([&](const std::string& name) { files[name] = file_name(); });
        });
        end();
        if (!has_map) fail("there is no weight_map");
        return files;
    }

private:
    [[noreturn]] void fail(const std::string& problem) const {
        detail::raise(parameter_error(what_ + ", at byte " + std::to_string(at_) + ": " + problem));
    }
    void end() {
        skip_spaces();
        if (at_ != text_.size()) fail("something follows the object");
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
    void object(const auto& member) {
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
    /// Calls element() at each value of an array.
    void array(const auto& element) {
        take('[');
        if (take_if(']')) return;
        do element();
        while (take_if(','));
        take(']');
    }
    std::vector<std::uint64_t> numbers() {
        std::vector<std::uint64_t> result;
        array([&] { result.push_back(number()); });
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
    bool is_at(std::string_view any) const { return at_ < text_.size() && any.find(text_[at_]) != any.npos; }
    /// Passes over a value of any kind.
    void value(int depth) {
        if (depth == 100) fail("a value is nested too deep"); // before the stack is
        skip_spaces();
        if (is_at("{")) return object([&](const std::string&) { value(depth + 1); });
        if (is_at("[")) return array([&] { value(depth + 1); });
        if (is_at("\"")) return static_cast<void>(string());
        for (const std::string_view word : {"true", "false", "null"})
            if (text_.substr(at_).starts_with(word)) {
                at_ += word.size();
                return;
            }
        if (is_at("-")) ++at_;
        const bool begins_with_zero = is_at("0");
        if (digits() > 1 && begins_with_zero) fail("expected a number without zeros in front");
        if (is_at(".")) ++at_, digits();
        if (!is_at("eE")) return;
        ++at_;
        if (is_at("+-")) ++at_;
        digits();
    }
    /// Passes over at least one; how many there were.
    std::size_t digits() {
        const auto begin = at_;
        while (is_at("0123456789")) ++at_;
        if (at_ == begin) fail("expected a value");
        return at_ - begin;
    }
    /// The name of a file in the folder of the index.
    std::string file_name() {
        const auto name = string();
        if (!name.ends_with(".safetensors") || name.find_first_of(std::string_view("/\\:\0", 4)) != name.npos)
            fail("the name of a safetensors file beside the index is needed, not \"" + name + "\"");
        return name;
    }
    std::string string() {
        take('"');
        std::string result;
        for (char c = next(); c != '"'; c = next()) {
            if (static_cast<unsigned char>(c) < 0x20) fail("a string holds a control character");
            if (c == '\\') escape(result);
            else result += c;
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
        if (code < 0x80) put(code);
        else if (code < 0x800) put(0xc0 | code >> 6), rest(0);
        else if (code < 0x10000) put(0xe0 | code >> 12), rest(6), rest(0);
        else put(0xf0 | code >> 18), rest(12), rest(6), rest(0);
    }

    std::string_view text_;
    std::string what_; ///< for errors
    std::size_t at_ = 0;
};

} // namespace attn::detail
