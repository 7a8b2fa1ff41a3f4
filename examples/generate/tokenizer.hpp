// Text to tokens and back: byte-level BPE as a tokenizer.json has it, and llama2.c's tokenizer.bin.
#pragma once

#include "json.hpp"

#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <unordered_map>

namespace generate {

using token = std::ptrdiff_t;

/// What makes tokens of text, and bytes of tokens.
class tokenizer {
public:
    virtual ~tokenizer() = default;
    /// The tokens of a text, behind those that every text begins with. Throws std::runtime_error if a byte has no token.
    virtual std::vector<token> encode(std::string_view text) const = 0;
    /// The bytes of a token that follows another. One that is not known has none.
    virtual std::string decode(token previous, token next) const = 0;
};

/// What joins two neighbours: of all pairs of a text the lowest rank is joined first, of equal ones the leftmost.
struct joined_pair {
    double rank;
    token whole;
};

/// Joins neighbours until no pair can be: pair_of(a, b) is what two tokens become, if anything.
std::vector<token> join_pairs(const std::vector<token>& parts, const auto& pair_of) {
    struct part {
        token id;
        std::ptrdiff_t before, next;
    };
    struct candidate {
        joined_pair pair;
        std::ptrdiff_t left;
        token a, b;
        bool operator<(const candidate& other) const { // the queue has its largest first
            return std::pair(pair.rank, left) > std::pair(other.pair.rank, other.left);
        }
    };
    const auto count = std::ssize(parts);
    std::vector<part> all;
    for (std::ptrdiff_t i = 0; i < count; ++i) all.push_back({parts[static_cast<std::size_t>(i)], i - 1, i + 1});
    const auto at = [&](std::ptrdiff_t i) -> part& { return all[static_cast<std::size_t>(i)]; };
    std::priority_queue<candidate> queue;
    const auto offer = [&](std::ptrdiff_t left) {
        if (left < 0 || at(left).next == count) return;
        const auto a = at(left).id, b = at(at(left).next).id;
        if (const std::optional<joined_pair> pair = pair_of(a, b)) queue.push({*pair, left, a, b});
    };
    for (std::ptrdiff_t i = 0; i < count; ++i) offer(i);
    for (; !queue.empty(); queue.pop()) {
        const auto c = queue.top();
        const auto right = at(c.left).next;
        if (at(c.left).id != c.a || right == count || at(right).id != c.b) continue; // one of them is joined already
        at(c.left) = {c.pair.whole, at(c.left).before, at(right).next};
        at(right).id = -1;
        if (at(c.left).next < count) at(at(c.left).next).before = c.left;
        offer(at(c.left).before);
        offer(c.left);
    }
    std::vector<token> result;
    for (std::ptrdiff_t i = 0; i < count; i = at(i).next) result.push_back(at(i).id);
    return result;
}

/// How a text is cut into words, which are encoded one by one: the regular expression of GPT-2, or that of LLaMA 3 with so many digits a
/// word. Simplified: letters are a .. z, A .. Z and all from U+00C0 on but U+00D7, U+00F7, U+2000 .. U+2BFF and U+3000 .. U+303F; digits
/// and spaces are ASCII's. So other alphabets' digits are letters here, and rare symbols may be too.
struct word_rule {
    bool is_gpt2 = true;
    std::size_t digits = std::numeric_limits<std::size_t>::max();
    bool isolates_digits = false; ///< each is a word, before the expression is applied

    /// How many bytes the first word of a text has, which is not empty.
    std::size_t first_word(std::string_view text) const {
        const auto run = [&](std::size_t from, auto is, std::size_t most = std::numeric_limits<std::size_t>::max()) {
            for (; most > 0 && from < text.size() && is(kind_at(text, from)); --most) from += length_at(text, from);
            return from;
        };
        const auto is = [](kind wanted) { return [wanted](kind k) { return k == wanted; }; };
        const auto is_newline = [&](std::size_t i) { return i < text.size() && (text[i] == '\n' || text[i] == '\r'); };
        if (const auto end = contraction(text)) return end;
        const auto first = length_at(text, 0);
        const bool has_space = text[0] == ' ';
        const auto begins = is_gpt2 ? has_space : kind_at(text, 0) == kind::space ? !is_newline(0) : kind_at(text, 0) == kind::other;
        const auto word = begins ? first : 0;
        if (const auto end = run(word, is(kind::letter)); end > word) return end;
        const auto number = is_gpt2 && has_space ? first : 0;
        if (const auto end = run(number, is(kind::digit), digits); end > number) return end;
        const auto other = has_space ? first : 0;
        if (auto end = run(other, is(kind::other)); end > other) {
            while (!is_gpt2 && is_newline(end)) ++end;
            return end;
        }
        const auto end = run(0, is(kind::space));
        if (const auto last = text.substr(0, end).find_last_of("\r\n"); !is_gpt2 && last != text.npos) return last + 1;
        return end == text.size() || end == 1 ? end : end - 1; // the last space goes to the word behind it
    }

private:
    enum class kind { letter, digit, space, other };

    static std::size_t length_at(std::string_view text, std::size_t i) {
        std::size_t end = i + 1;
        while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) ++end;
        return end - i;
    }
    static kind kind_at(std::string_view text, std::size_t i) {
        const auto byte = static_cast<unsigned char>(text[i]);
        if (byte < 0x80) {
            const char lower = static_cast<char>(byte | 0x20);
            if (lower >= 'a' && lower <= 'z') return kind::letter;
            if (byte >= '0' && byte <= '9') return kind::digit;
            return byte == ' ' || (byte >= '\t' && byte <= '\r') ? kind::space : kind::other;
        }
        const auto length = length_at(text, i);
        std::uint32_t code = length < 2 ? 0 : byte & (0xffU >> (length + 1));
        for (std::size_t k = 1; k < length; ++k) code = code << 6 | (static_cast<unsigned char>(text[i + k]) & 0x3fU);
        const bool is_other =
            code < 0xc0 || code == 0xd7 || code == 0xf7 || (code >= 0x2000 && code < 0x2c00) || (code >= 0x3000 && code < 0x3040);
        return is_other ? kind::other : kind::letter;
    }
    /// The bytes of 's, 't, 're and so on at the beginning; LLaMA 3 takes capitals too.
    std::size_t contraction(std::string_view text) const {
        if (text[0] != '\'') return 0;
        for (const std::string_view ending : {"s", "t", "re", "ve", "m", "ll", "d"}) {
            const auto is_same = [&](char a, char b) { return a == b || (!is_gpt2 && (a | 0x20) == b); };
            const auto found = text.substr(1, ending.size());
            if (std::equal(found.begin(), found.end(), ending.begin(), ending.end(), is_same)) return 1 + ending.size();
        }
        return 0;
    }
};

/// Byte-level BPE: GPT-2's, LLaMA 3's, and that of bytes alone, which joins nothing.
class byte_level_bpe : public tokenizer {
public:
    /// Reads a tokenizer.json. Throws file_error for one of another kind.
    explicit byte_level_bpe(const std::string& path) {
        const auto file = json::read(path);
        const auto refuse = [&](const std::string& problem) { throw file_error(path + ": " + problem); };
        const auto& model = file.at("model");
        if (const auto& type = model["type"]; !type.is_null() && type.text() != "BPE") refuse("the model is " + type.text() + ", not BPE");
        if (!file["normalizer"].is_null()) refuse("has a normalizer, which this program has not");
        ignores_merges_ = !model["ignore_merges"].is_null() && model["ignore_merges"].flag();
        read_words(file["pre_tokenizer"], path);
        if (const auto& added = file["added_tokens"]; !added.is_null())
            for (const auto& a : added.elements()) {
                added_.emplace_back(a.at("content").text(), a.at("id").whole());
                bytes_[added_.back().second] = added_.back().first;
            }
        std::unordered_map<std::string, token> ids; // by the texts of the file
        for (const auto& [text, id] : model.at("vocab").members()) {
            ids.emplace(text, id.whole());
            if (const auto bytes = bytes_of(text)) {
                ids_.emplace(*bytes, id.whole());
                bytes_.try_emplace(id.whole(), *bytes);
            } else if (!bytes_.contains(id.whole())) {
                refuse("is no byte-level BPE: of the token \"" + text + "\"");
            }
        }
        double rank = 0;
        for (const auto& merge : model.at("merges").elements()) {
            const auto [a, b] = parts_of(merge);
            const auto left = ids.find(a), right = ids.find(b), whole = ids.find(a + b);
            if (left == ids.end() || right == ids.end() || whole == ids.end())
                refuse("merges \"" + a + "\" and \"" + b + "\", but the vocabulary has not all three");
            merges_.emplace(std::pair(left->second, right->second), joined_pair{rank++, whole->second});
        }
        read_beginning(file["post_processor"]);
    }

    std::vector<token> encode(std::string_view text) const override {
        auto result = beginning_;
        while (!text.empty()) {
            auto first = text.npos;
            const std::pair<std::string, token>* found = nullptr; // the longest of the first
            for (const auto& a : added_)
                if (const auto at = a.first.empty() ? text.npos : text.find(a.first);
                    at < first || (at == first && found && a.first.size() > found->first.size()))
                    first = at, found = &a;
            encode_plain(text.substr(0, first), result);
            if (!found) break;
            result.push_back(found->second);
            text.remove_prefix(first + found->first.size());
        }
        return result;
    }
    std::string decode(token, token next) const override {
        const auto at = bytes_.find(next);
        return at == bytes_.end() ? "" : at->second;
    }

    /// Which byte each code point of the file's texts stands for: printable ones for themselves, the others for those from U+0100 on.
    static const std::map<std::uint32_t, char>& byte_of_code() {
        static const auto table = [] {
            std::map<std::uint32_t, char> bytes;
            std::uint32_t next = 0x100;
            for (std::uint32_t byte = 0; byte < 256; ++byte) {
                const bool is_printable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
                bytes[is_printable ? byte : next++] = static_cast<char>(static_cast<unsigned char>(byte));
            }
            return bytes;
        }();
        return table;
    }

private:
    static std::optional<std::string> bytes_of(std::string_view text) {
        std::string result;
        for (std::size_t i = 0; i < text.size();) {
            auto code = static_cast<std::uint32_t>(static_cast<unsigned char>(text[i++]));
            if (code >= 0xc2 && code < 0xe0 && i < text.size()) code = (code & 0x1f) << 6 | (static_cast<unsigned char>(text[i++]) & 0x3fU);
            const auto byte = byte_of_code().find(code);
            if (byte == byte_of_code().end()) return {};
            result += byte->second;
        }
        return result;
    }
    static std::pair<std::string, std::string> parts_of(const json& merge) {
        if (merge.is_array()) {
            if (merge.elements().size() != 2) throw file_error(merge.where() + " has a merge that is no pair");
            return {merge.elements()[0].text(), merge.elements()[1].text()};
        }
        const auto& text = merge.text();
        const auto space = text.find(' ');
        if (space == text.npos) throw file_error(merge.where() + " has a merge that is no pair: \"" + text + "\"");
        return {text.substr(0, space), text.substr(space + 1)};
    }
    void read_words(const json& pre, const std::string& path) {
        bool is_byte_level = false;
        const auto read = [&](const json& step) {
            constexpr std::string_view llama3_begin = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})";
            constexpr std::string_view llama3_end = R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
            const auto& type = step.at("type").text();
            const auto flag = [&](const char* name, bool otherwise) { return step[name].is_null() ? otherwise : step[name].flag(); };
            if (type == "ByteLevel") {
                is_byte_level = true;
                adds_space_ = flag("add_prefix_space", false);
                has_words_ = has_words_ || flag("use_regex", true);
            } else if (type == "Digits") {
                words_.isolates_digits = flag("individual_digits", false);
                if (!words_.isolates_digits) throw file_error(path + ": the pre_tokenizer Digits is known with individual_digits only");
            } else {
                const auto& expression = step["pattern"].is_null() ? step["pattern"] : step["pattern"]["Regex"];
                const bool is_split = type == "Split" && expression.is_text();
                words_.is_gpt2 = false;
                words_.digits = is_split && expression.text() == std::string(llama3_begin) + "{1,3}" + std::string(llama3_end) ? 3
                                : is_split && expression.text() == std::string(llama3_begin) + std::string(llama3_end)         ? 1
                                                                                                                               : 0;
                if (words_.digits == 0)
                    throw file_error(path + ": the pre_tokenizer " + type +
                                     " is not known, but ByteLevel, Digits, and Split by LLaMA 3's expression");
                has_words_ = true;
            }
        };
        if (!pre.is_null() && pre.at("type").text() == "Sequence")
            for (const auto& step : pre.at("pretokenizers").elements()) read(step);
        else if (!pre.is_null()) read(pre);
        if (!is_byte_level) throw file_error(path + ": is no byte-level BPE: no pre_tokenizer is ByteLevel");
    }
    /// The special tokens that a template has in front of a text.
    void read_beginning(const json& processor) {
        if (processor.is_null()) return;
        const auto& type = processor.at("type").text();
        if (type == "Sequence")
            for (const auto& step : processor.at("processors").elements()) read_beginning(step);
        if (type != "TemplateProcessing") return;
        for (const auto& piece : processor.at("single").elements()) {
            if (piece["SpecialToken"].is_null()) return;
            const auto& name = piece["SpecialToken"].at("id").text();
            const auto at = std::ranges::find(added_, name, &std::pair<std::string, token>::first);
            if (at == added_.end()) throw file_error(processor.where() + " begins with \"" + name + "\", which is no added token");
            beginning_.push_back(at->second);
        }
    }

    void encode_plain(std::string_view text, std::vector<token>& to) const {
        std::string with_space;
        if (adds_space_ && !text.empty() && text[0] != ' ') text = with_space = " " + std::string(text);
        while (!text.empty()) {
            const auto digit = words_.isolates_digits ? text.find_first_of("0123456789") : text.npos;
            auto part = text.substr(0, digit == 0 ? 1 : digit);
            text.remove_prefix(part.size());
            while (!part.empty()) {
                const auto word = part.substr(0, has_words_ ? words_.first_word(part) : part.size());
                encode_word(word, to);
                part.remove_prefix(word.size());
            }
        }
    }
    void encode_word(std::string_view word, std::vector<token>& to) const {
        const std::string whole(word);
        if (const auto at = ids_.find(whole); ignores_merges_ && at != ids_.end()) return to.push_back(at->second);
        std::vector<token> parts;
        for (const char byte : word) {
            const auto at = ids_.find(std::string(1, byte));
            if (at == ids_.end())
                throw std::runtime_error("tokenizer.json has no token for the byte " + std::to_string(static_cast<unsigned char>(byte)));
            parts.push_back(at->second);
        }
        const auto joined = join_pairs(parts, [&](token a, token b) -> std::optional<joined_pair> {
            const auto at = merges_.find({a, b});
            if (at == merges_.end()) return {};
            return at->second;
        });
        to.insert(to.end(), joined.begin(), joined.end());
    }

    struct pair_hash {
        std::size_t operator()(const std::pair<token, token>& p) const { return std::hash<token>()(p.first * 1'000'003 + p.second); }
    };
    word_rule words_;
    bool has_words_ = false, adds_space_ = false, ignores_merges_ = false;
    std::vector<std::pair<std::string, token>> added_;
    std::vector<token> beginning_;
    std::unordered_map<std::string, token> ids_; ///< by bytes
    std::unordered_map<token, std::string> bytes_;
    std::unordered_map<std::pair<token, token>, joined_pair, pair_hash> merges_;
};

/// llama2.c's tokenizer.bin: the pieces of a SentencePiece model and their scores. Pairs of the highest score are joined first.
class llama2c_tokenizer : public tokenizer {
public:
    /// Reads the pieces of so many tokens: the length of the longest, then of each its score, a float, its number of bytes, an int32, and
    /// its bytes.
    llama2c_tokenizer(const std::string& path, token tokens) {
        const auto file = read_file(path);
        std::size_t at = sizeof(std::int32_t);
        const auto take = [&](void* to, std::size_t bytes) {
            if (at > file.size() || bytes > file.size() - at)
                throw file_error(path + ": ends within the piece " + std::to_string(pieces_.size()) + ", but the model has " +
                                 std::to_string(tokens));
            std::memcpy(to, file.data() + at, bytes);
            at += bytes;
        };
        while (std::ssize(pieces_) < tokens) {
            float score = 0;
            std::int32_t length = 0;
            take(&score, sizeof score);
            take(&length, sizeof length);
            if (length < 0 || static_cast<std::size_t>(length) > file.size())
                throw file_error(path + ": a piece has " + std::to_string(length) + " bytes");
            std::string piece(static_cast<std::size_t>(length), '\0');
            take(piece.data(), piece.size());
            ids_.try_emplace(piece, std::ssize(pieces_));
            pieces_.push_back({std::move(piece), score});
        }
        if (at != file.size()) throw file_error(path + ": has more pieces than the model, which has " + std::to_string(tokens));
    }

    /// Characters, or where the pieces have none the bytes, behind the token 1 and, as SentencePiece has it, a space.
    std::vector<token> encode(std::string_view text) const override {
        std::vector<token> parts;
        const auto add = [&](std::string_view character) {
            if (const auto at = ids_.find(std::string(character)); at != ids_.end()) return parts.push_back(at->second);
            for (const char byte : character) parts.push_back(static_cast<unsigned char>(byte) + first_byte);
        };
        if (!text.empty()) add(" ");
        for (std::size_t i = 0, next; i < text.size(); i = next) {
            for (next = i + 1; next < text.size() && next < i + 4 && (static_cast<unsigned char>(text[next]) & 0xc0) == 0x80;) ++next;
            add(text.substr(i, next - i));
        }
        if (std::ranges::any_of(parts, [&](token t) { return t >= std::ssize(pieces_); }))
            throw std::runtime_error("tokenizer.bin has no piece for a byte of the text");
        auto result = join_pairs(parts, [&](token a, token b) -> std::optional<joined_pair> {
            const auto at = ids_.find(piece(a).bytes + piece(b).bytes);
            if (at == ids_.end()) return {};
            return joined_pair{-static_cast<double>(piece(at->second).score), at->second};
        });
        result.insert(result.begin(), beginning);
        return result;
    }
    std::string decode(token previous, token next) const override {
        if (next < 0 || next >= std::ssize(pieces_)) return "";
        const auto& bytes = piece(next).bytes;
        if (bytes.size() == 6 && bytes.starts_with("<0x") && bytes.back() == '>')
            return std::string(1, static_cast<char>(static_cast<unsigned char>(std::strtoul(bytes.c_str() + 3, nullptr, 16))));
        return previous == beginning && bytes.starts_with(' ') ? bytes.substr(1) : bytes;
    }

    static constexpr token beginning = 1, end = 2; ///< of a text; either ends one

private:
    static constexpr token first_byte = 3;
    struct scored_piece {
        std::string bytes;
        float score;
    };
    const scored_piece& piece(token t) const { return pieces_[static_cast<std::size_t>(t)]; }

    std::vector<scored_piece> pieces_;
    std::unordered_map<std::string, token> ids_;
};

} // namespace generate
