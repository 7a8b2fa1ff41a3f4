// Parameters in files: safetensors, the field's format.
#pragma once

#include "parameters.hpp"
#include "safetensors_header.hpp"

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// An unsigned number from bytes, the lowest first, on machines of any order.
template <class U>
U from_little_endian(const char* bytes) {
    U value = 0;
    for (std::size_t i = 0; i < sizeof(U); ++i)
        value = static_cast<U>(value | static_cast<U>(static_cast<U>(static_cast<unsigned char>(bytes[i])) << 8 * i));
    return value;
}
template <class U>
void append_little_endian(std::string& to, U value) {
    for (std::size_t i = 0; i < sizeof(U); ++i) to += static_cast<char>(static_cast<unsigned char>(value >> 8 * i & 0xff));
}

/// Numbers in memory, of as many bits as U, from bytes of a file.
template <class U>
void read_numbers(const char* bytes, std::uint64_t count, void* to) {
    for (std::uint64_t e = 0; e < count; ++e) {
        const auto bits = from_little_endian<U>(bytes + e * sizeof(U));
        std::memcpy(static_cast<std::byte*>(to) + e * sizeof(U), &bits, sizeof(U));
    }
}
/// The same backwards.
template <class U>
void append_numbers(std::string& to, const void* numbers, index_t count) {
    for (index_t e = 0; e < count; ++e) {
        U bits;
        std::memcpy(&bits, static_cast<const std::byte*>(numbers) + e * index_t{sizeof(U)}, sizeof(U));
        append_little_endian(to, bits);
    }
}

/// Whether numbers of a type are computed with.
constexpr bool is_computed_type(std::string_view type) { return type == "F64" || type == "F32" || type == "F16" || type == "BF16"; }
/// Bytes of a number; 0 of a type that is not known, or has several numbers in a byte.
constexpr std::uint64_t bytes_of_type(std::string_view type) {
    constexpr std::pair<std::string_view, std::uint64_t> all[] = {{"F64", 8}, {"I64", 8}, {"U64", 8}, {"C64", 8}, {"F32", 4}, {"I32", 4}, {"U32", 4},
        {"F16", 2}, {"BF16", 2}, {"I16", 2}, {"U16", 2}, {"I8", 1}, {"U8", 1}, {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}};
    for (const auto& [name, bytes] : all)
        if (name == type) return bytes;
    return 0;
}

/// The number of elements; throws where it does not fit into a file, or would not but for an extent of 0.
inline std::uint64_t count_of(const stored_tensor& t) {
    std::uint64_t count = 1;
    bool is_empty = false;
    for (const auto extent : t.size) {
        constexpr auto limit = std::uint64_t{1} << 48;
        if (extent > 0 && count > limit / extent) parameters::refuse(t.name, "has a shape too large for a file");
        count *= std::max<std::uint64_t>(extent, 1);
        is_empty = is_empty || extent == 0;
    }
    return is_empty ? 0 : count;
}

} // namespace detail

/// The tensors of a safetensors file, given as its bytes: F64, F32, and F16 and BF16, which stay 16-bit numbers; those of other types are kept as
/// bytes (I64, BOOL, F8_E4M3 and what the format may yet have), and "__metadata__" too. The format is: 8 bytes N, lowest first; N bytes of JSON, which
/// name type, shape and place of every tensor; then their numbers, lowest byte first, row-major, without gaps. Throws parameter_error for anything
/// else, with the tensor's name: truncated, too long, gaps or overlaps, a header that is not of this form, sizes that are not those of the shape.
inline parameters parse_safetensors(std::string_view file) {
    constexpr std::uint64_t max_header = 100'000'000;
    const auto refuse = [](const std::string& problem) { throw parameter_error("safetensors: " + problem); };
    if (file.size() < 8) refuse("the file has " + std::to_string(file.size()) + " bytes, too few for a header");
    const auto header_size = detail::from_little_endian<std::uint64_t>(file.data());
    if (header_size > max_header || header_size > file.size() - 8)
        refuse("the header would have " + std::to_string(header_size) + " bytes, the file has " + std::to_string(file.size()));
    if (header_size == 0 || file[8] != '{') refuse("the header does not begin with {");
    parameters result;
    auto tensors = detail::header_parser(file.substr(8, header_size)).parse(result.metadata());
    const auto data = file.substr(8 + header_size);
    std::ranges::sort(tensors, {}, &detail::stored_tensor::offsets);
    std::uint64_t end = 0;
    for (const auto& t : tensors) {
        const auto bytes = detail::bytes_of_type(t.type);
        if (t.offsets[0] != end || t.offsets[1] < end) parameters::refuse(t.name, "does not begin where the one before it ends");
        if (t.offsets[1] > data.size())
            parameters::refuse(t.name,
                               "ends at byte " + std::to_string(t.offsets[1]) + " of the data, which has " + std::to_string(data.size()));
        end = t.offsets[1];
        if (const auto needed = detail::count_of(t) * bytes; bytes > 0 && end - t.offsets[0] != needed)
            parameters::refuse(t.name, "has " + std::to_string(end - t.offsets[0]) + " bytes, which is not what its shape needs");
    }
    if (end != data.size()) refuse(std::to_string(data.size() - end) + " bytes follow the last tensor");

    for (const auto& t : tensors) {
        const char* const from = data.data() + t.offsets[0];
        const auto count = detail::count_of(t);
        const parameters::extents size(t.size.begin(), t.size.end());
        if (!detail::is_computed_type(t.type))
            result.add_bytes(t.name, size, t.type, {from, static_cast<std::size_t>(t.offsets[1] - t.offsets[0])});
        else if (t.type == "F64")
            detail::read_numbers<std::uint64_t>(from, count, result.add<double>(t.name, size).data());
        else if (t.type == "F32")
            detail::read_numbers<std::uint32_t>(from, count, result.add<float>(t.name, size).data());
        else
            detail::read_numbers<std::uint16_t>(from, count, result.add(t.name, size, t.type == "F16" ? narrow_format::half : narrow_format::bfloat16).data());
    }
    return result;
}

/// The bytes of a safetensors file of the parameters, of the types in which they were added, the largest numbers first: so each tensor begins on a
/// multiple of its number's size. Throws parameter_error for a name that cannot be in one: not UTF-8, or "__metadata__"; or a text of the metadata.
inline std::string safetensors_of(const parameters& weights) {
    const auto quoted = [](const std::string& text) {
        std::string result = "\"";
        for (const char c : text) {
            constexpr std::string_view digits = "0123456789abcdef";
            const auto byte = static_cast<unsigned char>(c);
            if (c == '"' || c == '\\')
                result.append(1, '\\').append(1, c);
            else if (byte < 0x20)
                result.append("\\u00").append(1, digits[byte >> 4]).append(1, digits[byte & 15]);
            else
                result += c;
        }
        return result + "\"";
    };
    std::string header = "{", data;
    if (!weights.metadata().empty()) {
        std::string texts;
        for (const auto& [key, text] : weights.metadata()) {
            if (!detail::is_utf8(key) || !detail::is_utf8(text)) throw parameter_error("metadata \"" + key + "\" is not UTF-8");
            texts.append(texts.empty() ? "" : ",").append(quoted(key)).append(":").append(quoted(text));
        }
        header.append("\"__metadata__\":{").append(texts).append("}");
    }
    const auto number_bytes = [&](const std::string& name) -> std::uint64_t {
        const auto& other = weights.other_type(name);
        return !other.empty() ? detail::bytes_of_type(other) : weights.is_double(name) ? 8 : weights.format(name) == narrow_format::none ? 4 : 2;
    };
    auto names = weights.names();
    std::ranges::sort(names, std::ranges::less{}, [&](const std::string& name) { return std::pair(8 - number_bytes(name), name); });
    for (const auto& name : names) {
        if (!detail::is_utf8(name) || name == "__metadata__") parameters::refuse(name, "cannot have this name in a safetensors file");
        const auto begin = data.size();
        std::string_view type;
        const auto append = [&]<class U>(const auto& numbers, U, std::string_view of_type) {
            detail::append_numbers<U>(data, numbers.data(), numbers.shape().size());
            type = of_type;
        };
        const auto& extents = weights.size(name);
        const auto format = weights.format(name);
        if (const auto& other = weights.other_type(name); !other.empty()) {
            data.append(weights.other_bytes(name));
            type = other;
        } else if (weights.is_double(name))
            append(weights.get<double>(name, extents), std::uint64_t{}, "F64");
        else if (format == narrow_format::none)
            append(weights.get<float>(name, extents), std::uint32_t{}, "F32");
        else
            append(weights.get_stored<float>(name, extents), std::uint16_t{}, format == narrow_format::half ? "F16" : "BF16");
        auto size = parameters::text_of(extents);
        size.front() = '[', size.back() = ']';
        header.append(header.size() > 1 ? "," : "").append(quoted(name)).append(":{\"dtype\":").append(quoted(std::string(type)));
        header.append(",\"shape\":").append(size).append(",\"data_offsets\":[").append(std::to_string(begin));
        header.append(",").append(std::to_string(data.size())).append("]}");
    }
    header += "}";
    header.append((8 - header.size() % 8) % 8, ' '); // numbers begin on a multiple of 8 bytes
    std::string file;
    detail::append_little_endian(file, static_cast<std::uint64_t>(header.size()));
    return file + header + data;
}

/// Reads a safetensors file: see parse_safetensors. Throws parameter_error with the path.
inline parameters read_safetensors(const std::string& path) {
    std::string bytes;
    try {
        std::ifstream in(path, std::ios::binary);
        bytes.assign(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
        if (!in.is_open() || in.bad()) throw parameter_error(path + ": cannot be read");
    } catch (const std::ios_base::failure&) { throw parameter_error(path + ": cannot be read"); } // a folder
    try {
        return parse_safetensors(bytes);
    } catch (const parameter_error& error) { throw parameter_error(path + ": " + error.what()); }
}
/// Writes one. Throws parameter_error if the file cannot be written.
inline void write_safetensors(const std::string& path, const parameters& weights) {
    const auto bytes = safetensors_of(weights);
    std::ofstream out(path, std::ios::binary);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    out.flush();
    if (!out) throw parameter_error(path + ": cannot be written");
}

} // namespace attn
