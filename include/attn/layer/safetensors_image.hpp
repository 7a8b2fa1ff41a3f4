// A safetensors file, as it is written.
#pragma once

#include "safetensors_reader.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// A file of parameters, whose numbers are still where these have them.
class file_image {
public:
    explicit file_image(const parameters& weights) {
        for (const auto& name : weights.names()) tensors_.push_back(image_of(weights, name));
        const auto place = [](const tensor_image& t) { return std::pair(8 - t.bytes_of_number, std::string_view(t.name)); };
        std::ranges::sort(tensors_, {}, place);
        std::string text = "{";
        if (!weights.metadata().empty()) text.append("\"__metadata__\":").append(text_of(weights.metadata()));
        for (const auto& t : tensors_) {
            auto size = parameters::text_of(weights.size(t.name));
            size.front() = '[', size.back() = ']';
            text.append(text.size() > 1 ? "," : "").append(quoted(t.name)).append(":{\"dtype\":").append(quoted(std::string(t.type)));
            text.append(",\"shape\":").append(size).append(",\"data_offsets\":[").append(std::to_string(data_bytes_));
            data_bytes_ += t.numbers.size();
            text.append(",").append(std::to_string(data_bytes_)).append("]}");
        }
        text += "}";
        text.append((8 - text.size() % 8) % 8, ' '); // numbers begin on a multiple of 8 bytes
        header_ = bytes_of_length(text.size()) + text;
    }
    /// The size of the file.
    std::size_t bytes() const { return header_.size() + data_bytes_; }
    /// Gives all bytes of it, in order, to put(std::string_view).
    void write(const auto& put) const {
        put(std::string_view(header_));
        for (const auto& t : tensors_) {
            if (is_in_file_order || !is_computed_type(t.type)) {
                put(t.numbers);
                continue;
            }
            constexpr std::size_t at_once = 1 << 16;
            for (std::size_t at = 0; at < t.numbers.size(); at += at_once) {
                std::string part(t.numbers.substr(at, at_once));
                reverse_each(part.data(), part.size(), t.bytes_of_number);
                put(std::string_view(part));
            }
        }
    }

private:
    struct tensor_image {
        std::string name;
        std::string_view type;
        std::size_t bytes_of_number; ///< 0 if not known
        std::string_view numbers;    ///< in memory
    };

    static tensor_image image_of(const parameters& weights, const std::string& name) {
        if (!is_utf8(name) || name == "__metadata__") parameters::refuse(name, "cannot have this name in a safetensors file");
        const auto image = [&](std::string_view type, const auto& numbers) {
            const auto bytes = static_cast<std::size_t>(bytes_of_type(type));
            const auto count = static_cast<std::size_t>(numbers.shape().size());
            const void* const begin = numbers.data();
            return tensor_image{name, type, bytes, {static_cast<const char*>(begin), count * bytes}};
        };
        const auto& extents = weights.size(name);
        const auto format = weights.format(name);
        if (const auto& other = weights.other_type(name); !other.empty())
            return {name, other, static_cast<std::size_t>(bytes_of_type(other)), weights.other_bytes(name)};
        if (weights.is_double(name)) return image("F64", weights.get<double>(name, extents));
        if (format == narrow_format::none) return image("F32", weights.get<float>(name, extents));
        return image(format == narrow_format::half ? "F16" : "BF16", weights.get_stored<float>(name, extents));
    }
    static std::string text_of(const std::map<std::string, std::string>& metadata) {
        std::string texts = "{";
        for (const auto& [key, text] : metadata) {
            if (!is_utf8(key) || !is_utf8(text)) detail::raise(parameter_error("metadata \"" + key + "\" is not UTF-8"));
            texts.append(texts.size() > 1 ? "," : "").append(quoted(key)).append(":").append(quoted(text));
        }
        return texts.append("}");
    }
    static std::string quoted(const std::string& text) {
        std::string result = "\"";
        for (const char c : text) {
            constexpr std::string_view digits = "0123456789abcdef";
            const auto byte = static_cast<unsigned char>(c);
            if (c == '"' || c == '\\') result.append(1, '\\').append(1, c);
            else if (byte < 0x20) result.append("\\u00").append(1, digits[byte >> 4]).append(1, digits[byte & 15]);
            else result += c;
        }
        return result + "\"";
    }

    std::string header_;
    std::vector<tensor_image> tensors_;
    std::size_t data_bytes_ = 0;
};

} // namespace attn::detail
