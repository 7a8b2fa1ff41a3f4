// What is in safetensors files, and in the files of an index: read and checked.
#pragma once

#include "parameters.hpp"
#include "safetensors_header.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

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
    const auto refuse = [](const auto&... problem) { detail::raise(parameter_error(joined({"safetensors: ", piece_of(problem)...}))); };
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

#ifdef __cpp_lib_filesystem // a WebAssembly program may have none
/// A file that is read from its beginning. Throws parameter_error where it cannot be.
class file_reader {
public:
    explicit file_reader(const std::filesystem::path& path) : in_(path, std::ios::binary | std::ios::ate) {
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
    [[noreturn]] static void fail() { detail::raise(parameter_error("cannot be read")); }

    std::ifstream in_;
    std::uint64_t bytes_ = 0;
};

/// What f() returns; its errors get the name of the file.
auto with_name_of(const std::string& name, const auto& f) {
    return try_catch<parameter_error>(f, [&](const auto& error) -> decltype(f()) { raise(parameter_error(name + ": " + error.what())); });
}

/// All that is in the files of an index, which is at that path.
inline parameters read_shards(const std::filesystem::path& path, file_reader& index) {
    if (index.bytes() > max_header) detail::raise(parameter_error("an index has no " + std::to_string(index.bytes()) + " bytes"));
    std::string text(static_cast<std::size_t>(index.bytes()), '\0');
    index(text.data(), text.size());
    const auto file_of = json_parser(text).index();
    std::map<std::string, std::set<std::string>> files;
    for (const auto& [name, file] : file_of) files[file].insert(name);

    const auto each_file = [&](const auto& f) {
        for (const auto& [file, names] : files)
            with_name_of(file, [&] {
                file_reader read(path.parent_path() / std::u8string(file.begin(), file.end()));
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
#endif

} // namespace attn::detail
