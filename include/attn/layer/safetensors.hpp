// Parameters in files: safetensors, the field's format.
#pragma once

#include "parameters.hpp"
#include "safetensors_header.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <system_error>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// Whether numbers lie in memory as in a file, the lowest byte first.
inline constexpr bool is_in_file_order = std::endian::native == std::endian::little;
/// Turns numbers of so many bytes each from the order of a file to the other, or back.
inline void reverse_each(char* numbers, std::size_t bytes, std::size_t bytes_of_number) {
    for (std::size_t at = 0; at < bytes; at += bytes_of_number) std::reverse(numbers + at, numbers + at + bytes_of_number);
}

/// The length of a header, as it comes first in a file.
inline std::string bytes_of_length(std::uint64_t length) {
    std::string bytes(reinterpret_cast<const char*>(&length), 8);
    if constexpr (!is_in_file_order) reverse_each(bytes.data(), 8, 8);
    return bytes;
}

/// Whether numbers of a type are computed with.
constexpr bool is_computed_type(std::string_view type) { return type == "F64" || type == "F32" || type == "F16" || type == "BF16"; }
/// Bytes of a number; 0 of a type that is not known, or has several numbers in a byte.
constexpr std::uint64_t bytes_of_type(std::string_view type) {
    constexpr std::pair<std::string_view, std::uint64_t> all[] = {
        {"F64", 8}, {"I64", 8}, {"U64", 8}, {"C64", 8}, {"F32", 4},  {"I32", 4},     {"U32", 4},     {"F16", 2},    {"BF16", 2},
        {"I16", 2}, {"U16", 2}, {"I8", 1},  {"U8", 1},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}};
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

/// The most bytes of a header, or of an index.
inline constexpr std::uint64_t max_header = 100'000'000;

/// What a file says of its tensors, in the order of their numbers, which follow it.
struct file_header {
    std::vector<stored_tensor> tensors;
    std::map<std::string, std::string> metadata;
};

/// Reads the header of a file of so many bytes: read(to, count) has the next ones of them. What it says fits the file: all is checked here.
file_header read_header(std::uint64_t file_bytes, auto& read) {
    const auto refuse = [](const auto&... problem) { throw parameter_error(joined({"safetensors: ", piece_of(problem)...})); };
    if (file_bytes < 8) refuse("the file has ", file_bytes, " bytes, too few for a header");
    std::uint64_t header_bytes = 0;
    const auto length = reinterpret_cast<char*>(&header_bytes);
    read(length, 8);
    if constexpr (!is_in_file_order) reverse_each(length, 8, 8);
    if (header_bytes > max_header || header_bytes > file_bytes - 8)
        refuse("the header would have ", header_bytes, " bytes, the file has ", file_bytes);
    std::string text(static_cast<std::size_t>(header_bytes), '\0');
    read(text.data(), text.size());
    if (!text.starts_with('{')) refuse("the header does not begin with {");
    file_header header;
    header.tensors = json_parser(text).header(header.metadata);
    std::ranges::sort(header.tensors, {}, &stored_tensor::offsets);
    const auto data_bytes = file_bytes - 8 - header_bytes;
    std::uint64_t end = 0;
    for (const auto& t : header.tensors) {
        const auto bytes = bytes_of_type(t.type);
        if (t.offsets[0] != end || t.offsets[1] < end) parameters::refuse(t.name, "does not begin where the one before it ends");
        if (t.offsets[1] > data_bytes) parameters::refuse(t.name, "ends at byte ", t.offsets[1], " of the data, which has ", data_bytes);
        end = t.offsets[1];
        if (const auto needed = count_of(t) * bytes; bytes > 0 && end - t.offsets[0] != needed)
            parameters::refuse(t.name, "has ", end - t.offsets[0], " bytes, which is not what its shape needs");
    }
    if (end != data_bytes) refuse(data_bytes - end, " bytes follow the last tensor");
    return header;
}

/// Adds the tensors of a file, whose numbers go from what reads it to where they stay.
void add_tensors(parameters& to, const std::vector<stored_tensor>& tensors, auto& read) {
    for (const auto& t : tensors) {
        const auto bytes = static_cast<std::size_t>(t.offsets[1] - t.offsets[0]);
        const parameters::extents size(t.size.begin(), t.size.end());
        if (!is_computed_type(t.type)) {
            std::string other(bytes, '\0');
            read(other.data(), bytes);
            to.add_bytes(t.name, size, t.type, std::move(other));
            continue;
        }
        void* numbers = nullptr;
        if (t.type == "F64") numbers = to.add<double>(t.name, size).data();
        else if (t.type == "F32") numbers = to.add<float>(t.name, size).data();
        else numbers = to.add(t.name, size, t.type == "F16" ? narrow_format::half : narrow_format::bfloat16).data();
        read(static_cast<char*>(numbers), bytes);
        if constexpr (!is_in_file_order) reverse_each(static_cast<char*>(numbers), bytes, bytes_of_type(t.type));
    }
}

/// All that is in one file.
parameters read_file(std::uint64_t bytes, auto& read) {
    auto header = read_header(bytes, read);
    parameters result;
    add_tensors(result, header.tensors, read);
    result.metadata() = std::move(header.metadata);
    return result;
}

/// A file that is read from its beginning. Throws parameter_error where it cannot be.
class file_reader {
public:
    explicit file_reader(const std::string& path) : in_(path, std::ios::binary | std::ios::ate) {
        const auto end = in_.tellg();
        if (!in_.seekg(0)) fail();
        bytes_ = static_cast<std::uint64_t>(end);
    }
    /// The size of the file.
    std::uint64_t bytes() const { return bytes_; }
    /// Reads the next bytes of the file.
    void operator()(char* to, std::size_t count) {
        if (!in_.read(to, static_cast<std::streamsize>(count))) fail();
    }

private:
    [[noreturn]] static void fail() { throw parameter_error("cannot be read"); }

    std::ifstream in_;
    std::uint64_t bytes_ = 0;
};

/// What f() returns; its errors get the name of the file.
auto with_name_of(const std::string& path, const auto& f) {
    try {
        return f();
    } catch (const parameter_error& error) { throw parameter_error(path + ": " + error.what()); }
}

/// All that is in the files of an index, which is at that path.
inline parameters read_shards(const std::string& path, file_reader& index) {
    if (index.bytes() > max_header) throw parameter_error("an index has no " + std::to_string(index.bytes()) + " bytes");
    std::string text(static_cast<std::size_t>(index.bytes()), '\0');
    index(text.data(), text.size());
    const auto file_of = json_parser(text).index();
    std::map<std::string, std::set<std::string>> files;
    for (const auto& [name, file] : file_of) files[file].insert(name);

    const auto each_file = [&](const auto& f) {
        for (const auto& [file, names] : files)
            with_name_of(file, [&] {
                file_reader read((std::filesystem::path(path).parent_path() / file).string());
                f(read_header(read.bytes(), read), read, names);
            });
    };
    each_file([&](const file_header& header, const file_reader&, std::set<std::string> missing) { // all is checked before it is read
        for (const auto& t : header.tensors) {
            if (missing.erase(t.name) == 1) continue;
            const auto at = file_of.find(t.name);
            parameters::refuse(t.name, "is here, but ", (at == file_of.end() ? "not in the index" : "by the index in " + at->second));
        }
        if (!missing.empty()) parameters::refuse(*missing.begin(), "is missing, which by the index is here");
    });
    parameters result;
    each_file([&](const file_header& header, file_reader& read, const auto&) {
        add_tensors(result, header.tensors, read);
        result.metadata().insert(header.metadata.begin(), header.metadata.end());
    });
    return result;
}

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
            if (!is_utf8(key) || !is_utf8(text)) throw parameter_error("metadata \"" + key + "\" is not UTF-8");
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

} // namespace detail

/// The tensors of a safetensors file, given as its bytes: F64, F32, and F16 and BF16, which stay 16-bit numbers; those of other types are
/// kept as bytes (I64, BOOL, F8_E4M3 and what the format may yet have), and "__metadata__" too. The format is: 8 bytes N, lowest first; N
/// bytes of JSON, which name type, shape and place of every tensor; then their numbers, lowest byte first, row-major, without gaps. Throws
/// parameter_error for anything else, with the tensor's name: truncated, too long, gaps or overlaps, a header that is not of this form,
/// sizes that are not those of the shape.
inline parameters parse_safetensors(std::string_view file) {
    const auto read = [&rest = file](char* to, std::size_t count) {
        rest.copy(to, count);
        rest.remove_prefix(count);
    };
    return detail::read_file(file.size(), read);
}

/// The bytes of a safetensors file of the parameters, of the types in which they were added, the largest numbers first: so each tensor
/// begins on a multiple of its number's size. Throws parameter_error for a name that cannot be in one: not UTF-8, or "__metadata__"; or a
/// text of the metadata.
inline std::string safetensors_of(const parameters& weights) {
    const detail::file_image image(weights);
    std::string file;
    file.reserve(image.bytes());
    image.write([&](std::string_view bytes) { file += bytes; });
    return file;
}

/// The tensors of a safetensors file, see parse_safetensors; or, if the path ends in ".json", of all files of an index, which lie beside
/// it: "model.safetensors.index.json", {"weight_map": {"name": "model-00001-of-00002.safetensors", ...}}. Of metadata that two files have,
/// the first one's stays. All headers are read and checked first; then the numbers go from the files to where they stay, so that it takes
/// little more memory than the files have bytes. Throws parameter_error with the path, and that of the file of an index: as
/// parse_safetensors does, for what cannot be read or has no size, such as a pipe, for an index that is not of this form or names a file of
/// another folder, and where a file has not just the tensors that the index says.
inline parameters read_safetensors(const std::string& path) {
    return detail::with_name_of(path, [&] {
        detail::file_reader read(path);
        return path.ends_with(".json") ? detail::read_shards(path, read) : detail::read_file(read.bytes(), read);
    });
}

/// Writes a safetensors file, from the numbers where they lie. One of that name is replaced when the new one, which is written beside it,
/// is complete: if that fails it stays as it was. Throws parameter_error if the file cannot be written, or ends in ".json" as an index
/// does; and as safetensors_of does.
inline void write_safetensors(const std::string& path, const parameters& weights) {
    namespace files = std::filesystem;
    if (path.ends_with(".json")) throw parameter_error(path + ": a safetensors file does not end in .json, as an index does");
    const detail::file_image image(weights);
    std::error_code error;
    const auto before = files::status(path, error);
    const bool is_file = files::is_regular_file(before), is_device = !is_file && files::exists(before); // which nothing can replace
    const auto target = is_file ? files::canonical(path, error) : files::path(path);                    // what a link leads to
    auto written = target;
    if (!is_device) written += "." + std::to_string(std::random_device()()) + ".part";
    const bool may_be_written = !is_file || std::ofstream(target, std::ios::binary | std::ios::app);
    std::ofstream out;
    if (may_be_written) out.open(written, std::ios::binary);
    if (is_file) files::permissions(written, before.permissions(), error);
    image.write([&](std::string_view bytes) { out.write(bytes.data(), static_cast<std::streamsize>(bytes.size())); });
    out.close();
    error = out ? std::error_code() : std::make_error_code(std::errc::io_error);
    if (!error && !is_device) files::rename(written, target, error);
    if (!error) return;
    if (!is_device) files::remove(written, error);
    throw parameter_error(path + ": cannot be written");
}

} // namespace attn
