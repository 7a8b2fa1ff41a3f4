// libFuzzer: any bytes as a safetensors file. They are read or refused by an exception, nothing else; and what is read is written and read
// again as it was. Once as they are, and once as the text of a header and, behind the first line break, the numbers: so seeds are text.
// And as an index of several files, which are read or refused likewise, and of which none is outside the folder.
#include <attn/layer/safetensors.hpp>

#include <cstdlib>

namespace {

void read_and_write(std::string_view file) {
    attn::parameters read;
    try {
        read = attn::parse_safetensors(file);
    } catch (const attn::parameter_error&) { return; }
    const auto written = attn::safetensors_of(read);
    auto again = attn::parse_safetensors(written);
    if (again.names() != read.names() || again.metadata() != read.metadata() || attn::safetensors_of(again) != written) std::abort();
    for (const auto& name : read.names())
        if (again.size(name) != read.size(name) || again.is_double(name) != read.is_double(name) || again.format(name) != read.format(name) ||
            again.other_type(name) != read.other_type(name) || again.other_bytes(name) != read.other_bytes(name))
            std::abort();
}

void read_index(std::string_view text) {
    try {
        for (const auto& [tensor, file] : attn::detail::json_parser(text).index())
            if (file.find('/') != file.npos || file == "." || file == "..") std::abort();
    } catch (const attn::parameter_error&) { return; }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
    const std::string_view bytes(reinterpret_cast<const char*>(data), size);
    read_and_write(bytes);
    const auto line = std::min(bytes.find('\n'), bytes.size());
    auto file = attn::detail::bytes_of_length(line);
    file.append(bytes.substr(0, line));
    if (line < bytes.size()) file.append(bytes.substr(line + 1));
    read_and_write(file);
    read_index(bytes);
    return 0;
}
