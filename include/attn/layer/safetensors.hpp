// Parameters in files: safetensors, the field's format.
#pragma once

#include "safetensors_image.hpp"
#include "safetensors_reader.hpp"

#include <filesystem>
#include <fstream>
#include <random>
#include <system_error>

namespace attn::inline ATTN_INSTRUCTION_SET {

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

#ifdef __cpp_lib_filesystem // a WebAssembly program may have no files, but bytes
/// The tensors of a safetensors file, see parse_safetensors; or, if the path ends in ".json", of all files of an index, which lie beside
/// it: "model.safetensors.index.json", {"weight_map": {"name": "model-00001-of-00002.safetensors", ...}}. Of metadata that two files have,
/// the first one's stays. All headers are read and checked first; then the numbers go from the files to where they stay, so that it takes
/// little more memory than the files have bytes. Throws parameter_error with the path, and that of the file of an index: as
/// parse_safetensors does, for what cannot be read or has no size, such as a pipe, for an index that is not of this form or names a file of
/// another folder, and where a file has not just the tensors that the index says.
inline parameters read_safetensors(const std::filesystem::path& path) {
    const auto name = path.string();
    return detail::with_name_of(name, [&] {
        detail::file_reader read(path);
        return name.ends_with(".json") ? detail::read_shards(path, read) : detail::read_file(read.bytes(), read);
    });
}

/// Writes a safetensors file, from the numbers where they lie. One of that name is replaced when the new one, which is written beside it,
/// is complete: if that fails it stays as it was. Throws parameter_error if the file cannot be written, or ends in ".json" as an index
/// does; and as safetensors_of does.
inline void write_safetensors(const std::filesystem::path& path, const parameters& weights) {
    namespace files = std::filesystem;
    const auto name = path.string();
    if (name.ends_with(".json")) detail::raise(parameter_error(name + ": a safetensors file does not end in .json, as an index does"));
    const detail::file_image image(weights);
    std::error_code error;
    const auto before = files::status(path, error);
    const bool is_file = files::is_regular_file(before), is_device = !is_file && files::exists(before); // which nothing can replace
    const auto target = is_file ? files::canonical(path, error) : path;                                 // what a link leads to
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
    detail::raise(parameter_error(name + ": cannot be written"));
}
#endif

} // namespace attn
