// A reader of JSON: the files that lie beside a model.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace generate {

/// What a file lacks or has wrong; the text begins with the file's name.
struct file_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// All bytes of a file.
inline std::string read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    std::string bytes{std::istreambuf_iterator<char>(in), {}};
    if (!in) throw file_error(path + ": cannot be read");
    return bytes;
}

/// A value of JSON. What is asked for in another kind than it is throws file_error, which says where in the file it is.
class json {
public:
    using array = std::vector<json>;
    using object = std::vector<std::pair<std::string, json>>; ///< in the file's order

    /// The value that a file holds.
    static json read(const std::string& path) { return reader(path, read_file(path)).whole(); }

    bool is_null() const { return std::holds_alternative<std::nullptr_t>(value_); }
    bool is_text() const { return std::holds_alternative<std::string>(value_); }
    bool is_array() const { return std::holds_alternative<array>(value_); }

    const std::string& text() const { return get<std::string>("a text"); }
    bool flag() const { return get<bool>("true or false"); }
    double number() const { return get<double>("a number"); }
    /// A whole number between 0 and 2^53.
    std::int64_t whole() const {
        const auto x = number();
        if (!(x >= 0 && x <= 0x1p53) || x != std::floor(x)) throw file_error(where_ + " is no whole number");
        return static_cast<std::int64_t>(x);
    }
    const array& elements() const { return get<array>("an array"); }
    const object& members() const { return get<object>("an object"); }
    /// The member of that name, or null if there is none.
    const json& operator[](std::string_view name) const {
        static const json none;
        for (const auto& [key, value] : members())
            if (key == name) return value;
        return none;
    }
    /// The member of that name, which must be there.
    const json& at(std::string_view name) const {
        const auto& member = (*this)[name];
        if (member.is_null()) throw file_error(where_ + " has no \"" + std::string(name) + "\"");
        return member;
    }
    /// Where in which file the value is.
    const std::string& where() const { return where_; }

private:
    template <class T>
    const T& get(const char* kind) const {
        if (const auto* value = std::get_if<T>(&value_)) return *value;
        throw file_error(where_ + " is not " + kind);
    }

    class reader {
    public:
        reader(const std::string& path, std::string text) : path_(path), text_(std::move(text)) {}

        json whole() {
            auto result = value(path_ + ": the file", 0);
            skip_spaces();
            if (at_ != text_.size()) fail("something follows the value");
            return result;
        }

    private:
        [[noreturn]] void fail(const std::string& problem) const {
            throw file_error(path_ + ": no JSON, at byte " + std::to_string(at_) + ": " + problem);
        }
        void skip_spaces() { at_ = std::min(text_.find_first_not_of(" \n\t\r", at_), text_.size()); }
        bool take_if(std::string_view word) {
            skip_spaces();
            if (text_.compare(at_, word.size(), word) != 0) return false;
            at_ += word.size();
            return true;
        }
        void take(std::string_view word) {
            if (!take_if(word)) fail("expected " + std::string(word));
        }
        char next() {
            if (at_ == text_.size()) fail("the file ends within a text");
            return text_[at_++];
        }
        /// where: names the value in errors; only members of an object are named, since a vocabulary has a hundred thousand numbers.
        json value(std::string where, int depth) {
            if (depth == 100) fail("values are nested too deep");
            json result;
            result.where_ = std::move(where);
            if (take_if("{")) result.value_ = members(depth);
            else if (take_if("[")) result.value_ = elements(result.where_, depth);
            else if (take_if("\"")) result.value_ = text();
            else if (take_if("true")) result.value_ = true;
            else if (take_if("false")) result.value_ = false;
            else if (!take_if("null")) result.value_ = number();
            return result;
        }
        object members(int depth) {
            object all;
            if (take_if("}")) return all;
            do {
                take("\"");
                auto name = text();
                take(":");
                auto member = value(path_ + ": \"" + name + "\"", depth + 1);
                all.emplace_back(std::move(name), std::move(member));
            } while (take_if(","));
            take("}");
            return all;
        }
        array elements(const std::string& where, int depth) {
            array all;
            if (take_if("]")) return all;
            do all.push_back(value(where, depth + 1));
            while (take_if(","));
            take("]");
            return all;
        }
        double number() {
            skip_spaces();
            double number = 0;
            if (at_ == text_.size() || std::string_view("-0123456789").find(text_[at_]) == std::string_view::npos) fail("expected a value");
            const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), number);
            if (error != std::errc()) fail("expected a value");
            at_ = static_cast<std::size_t>(end - text_.data());
            return number;
        }
        std::string text() {
            std::string result;
            for (char c = next(); c != '"'; c = next()) {
                if (c == '\\') escape(result);
                else result += c;
            }
            return result;
        }
        void escape(std::string& to) {
            constexpr std::string_view letters = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
            const char c = next();
            if (const auto i = letters.find(c); i != letters.npos) {
                to += meant[i];
                return;
            }
            if (c != 'u') fail("a text has an unknown escape");
            auto code = four_digits();
            if (code >= 0xd800 && code < 0xdc00 && text_.compare(at_, 2, "\\u") == 0) { // the first half of a pair of UTF-16
                at_ += 2;
                const auto second = four_digits();
                if (second < 0xdc00 || second >= 0xe000) fail("a text has half a character");
                code = 0x10000 + (code - 0xd800) * 0x400 + (second - 0xdc00);
            }
            append_utf8(to, code);
        }
        std::uint32_t four_digits() {
            std::uint32_t code = 0;
            const auto* const begin = text_.data() + at_;
            const auto* const end = text_.data() + std::min(at_ + 4, text_.size());
            if (std::from_chars(begin, end, code, 16).ptr != begin + 4) fail("\\u needs four hexadecimal digits");
            at_ += 4;
            return code;
        }

        std::string path_, text_;
        std::size_t at_ = 0;
    };

public:
    /// Appends a code point to a text of UTF-8.
    static void append_utf8(std::string& to, std::uint32_t code) {
        const auto put = [&](std::uint32_t byte) { to += static_cast<char>(static_cast<unsigned char>(byte)); };
        if (code < 0x80) return put(code);
        if (code < 0x800) put(0xc0 | code >> 6);
        else if (code < 0x10000) put(0xe0 | code >> 12), put(0x80 | (code >> 6 & 0x3f));
        else put(0xf0 | (code >> 18 & 7)), put(0x80 | (code >> 12 & 0x3f)), put(0x80 | (code >> 6 & 0x3f));
        put(0x80 | (code & 0x3f));
    }

private:
    std::variant<std::nullptr_t, bool, double, std::string, array, object> value_ = nullptr;
    std::string where_;
};

} // namespace generate
