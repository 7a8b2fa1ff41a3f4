// Parameters by name, and safetensors files: by hand, there and back, and every way to be wrong.
#include "allocations.hpp"
#include "catch.hpp"
#include "layer_checks.hpp"

#include <attn/layer/safetensors.hpp>

#include <Eigen/Core>

#include <filesystem>
#include <fstream>

#if __has_include(<sys/resource.h>)
#include <csignal>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace attn::testing {

namespace {

/// A file of a header and data; its length in front.
std::string file_of(const std::string& header, const std::string& data) {
    return detail::bytes_of_length(header.size()) + header + data;
}
std::string problem_of(const auto& call) { return error_of<parameter_error>(call); }
/// A folder for the files of one test.
class scratch_folder {
public:
    scratch_folder() { std::filesystem::create_directory(path_); }
    ~scratch_folder() { std::filesystem::remove_all(path_); }
    std::string operator/(const std::string& name) const { return (path_ / name).string(); }
    /// The names in it, sorted.
    std::vector<std::string> names() const {
        std::vector<std::string> result;
        for (const auto& file : std::filesystem::directory_iterator(path_)) result.push_back(file.path().filename().string());
        std::ranges::sort(result);
        return result;
    }

private:
    std::filesystem::path path_ = std::filesystem::temp_directory_path() / ("attn_" + std::to_string(std::random_device()()));
};
std::string bytes_of_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}
void write_file(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }
std::string problem_of(const std::string& header, const std::string& data) {
    return problem_of([&] { parse_safetensors(file_of(header, data)); });
}

} // namespace

TEST_CASE("parameters: by name, converted, refused by name", "[layer]") {
    parameters weights;
    const auto w = weights.add<float>("w", {2, 3});
    w(0, 0, 1, 2) = 0.1F;
    weights.add<double>("v", {3})(0, 0, 0, 1) = 0.1;
    weights.add<float>("five", {2, 1, 3, 1, 2});
    CHECK(weights.get<float>("w", {2, 3}).data() == w.data());
    CHECK(weights.get<double>("w", {2, 3})(0, 0, 1, 2) == static_cast<double>(0.1F));
    CHECK(weights.get<double>("w", {2, 3}).data() == weights.get<double>("w", {2, 3}).data());
    CHECK(weights.get_vector<float>("v", 3)[1] == 0.1F);
    CHECK(weights.get<float>("five", {2, 1, 3, 1, 2}).shape() == shape{2, 3, 1, 2});
    CHECK(weights.names() == std::vector<std::string>{"five", "v", "w"});
    CHECK(problem_of([&] { weights.get<float>("w", {3, 2}); }) == "tensor \"w\" has shape (2, 3), but (3, 2) is needed");
    CHECK(problem_of([&] { weights.get_linear<float>("attn.q", 2, 3); }) == "tensor \"attn.q.weight\" is missing");
    CHECK(problem_of([&] { weights.add<float>("w", {1}); }) == "tensor \"w\" is there already");
    const auto& constant = weights;
    CHECK(constant.get<float>("w", {2, 3}).data() == w.data());
    CHECK(constant.get<double>("w", {2, 3})(0, 0, 1, 2) == static_cast<double>(0.1F)); // converted above
    CHECK(constant.get_vector<double>("v", 3)[1] == 0.1);
    CHECK(problem_of([&] { constant.get<double>("five", {2, 1, 3, 1, 2}); }) ==
          "tensor \"five\" holds float, and const parameters convert nothing");
    CHECK(problem_of([&] { constant.get_linear<float>("attn.q", 2, 3); }) == "tensor \"attn.q.weight\" is missing");
    CHECK(problem_of([&] { weights.add<float>("n", {-1}); }) == "tensor \"n\" has the negative shape (-1)");
}

TEST_CASE("parameters: linears of whatever size they have, of several side by side, of a convolution's patches", "[layer]") {
    parameters weights;
    add_random<float>(weights, "qkv.weight", {12, 5}, 1);
    add_random<float>(weights, "qkv.bias", {12}, 2);
    add_random<float>(weights, "patches.weight", {6, 3, 2, 2}, 3);
    const auto qkv = weights.get_linear<float>("qkv");
    CHECK(qkv.weight.shape() == shape{1, 1, 12, 5});
    CHECK(weights.get_vector<float>("qkv.bias").size() == 12);

    const auto x = random_rows<float>({2, 1, 7, 5}, 4);
    const auto all = result_of(qkv, x);
    const auto parts = split_outputs<3>(qkv), uneven = split_outputs<3>(qkv, {6, 4, 2});
    index_t first = 0, first_uneven = 0;
    for (std::size_t i = 0; i < 3; ++i) {
        for (const auto& [part, from] : {std::pair{parts[i], first}, std::pair{uneven[i], first_uneven}}) {
            const auto own = result_of(part, x);
            detail::for_each_number(own.shape(), [&](index_t b, index_t h, index_t r, index_t c) { CHECK(own(b, h, r, c) == all(b, h, r, from + c)); });
        }
        first += parts[i].outputs(), first_uneven += uneven[i].outputs();
    }
    CHECK(first == 12);
    CHECK(first_uneven == 12);

    const auto patches = weights.get_linear<float>("patches", 6, 12);
    CHECK(patches.weight.shape() == shape{1, 1, 6, 12});
    CHECK(patches.bias.empty());
    CHECK(patches.weight.numbers()(0, 0, 4, 2 * 4 + 1 * 2 + 1) == weights.get<float>("patches.weight", {6, 3, 2, 2})(4, 2, 1, 1));

    CHECK(problem_of([&] { weights.get_linear<float>("qkv", 12, 6); }) == "tensor \"qkv.weight\" has shape (12, 5), but (12, 6) is needed");
    CHECK(problem_of([&] { weights.get_linear<float>("qkv", 3); }) == "tensor \"qkv.weight\" has shape (12, 5), but (3, any) is needed");
    weights.add<float>("flat.weight", {4});
    CHECK(problem_of([&] { weights.get_linear<float>("flat"); }) == "tensor \"flat.weight\" has shape (4), but (any, any) is needed");
    CHECK(problem_of([&] { weights.get_vector<float>("qkv.weight"); }) == "tensor \"qkv.weight\" has shape (12, 5), but one dimension is needed");
    const auto problem_of_parts = [&](const std::array<index_t, 2>& outputs) {
        try {
            static_cast<void>(split_outputs<2>(qkv, outputs));
        } catch (const shape_error& e) { return std::string(e.what()); }
        return std::string();
    };
    for (const auto& wrong : {std::array<index_t, 2>{12, 1}, {6, 5}, {-1, 13}, {13, -1}})
        CHECK(problem_of_parts(wrong) == "split_outputs: outputs do not add up to the 12 of the linear");
    CHECK_THROWS_AS(split_outputs<5>(qkv), shape_error);
}

TEST_CASE("safetensors: a file by hand, with every type", "[layer]") {
    const std::string header =
        " {\"__metadata__\":{\"format\":\"pt\"}, \"a.\\u00e9\\ud83d\\ude00\\\"\" : "
        "{\"shape\":[2],\"dtype\":\"F16\",\"data_offsets\":[4,8]},\n"
        "\"b\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},\"c\":{\"dtype\":\"BF16\",\"shape\":[1,2],\"data_offsets\":[8,12]},"
        "\"d\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[12,20]},\"e\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[20,20]"
        "}}  ";
    const std::string data("\x00\x00\xc0\x3f"
                           "\x00\x3e\x01\x80"
                           "\xc0\x3f\x80\x7f"
                           "\x00\x00\x00\x00\x00\x00\xf8\xbf",
                           20);
    auto weights = parse_safetensors(file_of(header.substr(1), data));
    CHECK(weights.get<float>("b", {}).data()[0] == 1.5F);
    const auto halves = weights.get_vector<float>("a.\xc3\xa9\xf0\x9f\x98\x80\"", 2);
    CHECK(halves[0] == 1.5F);
    CHECK(halves[1] == -std::ldexp(1.0F, -24)); // the smallest half
    CHECK(weights.get<float>("c", {1, 2}).data()[0] == 1.5F);
    CHECK(weights.get<float>("c", {1, 2}).data()[1] == std::numeric_limits<float>::infinity());
    CHECK(weights.get<double>("d", {1}).data()[0] == -1.5);
    CHECK(weights.size("e") == parameters::extents{0, 7});
    CHECK(problem_of(header, data) == "safetensors: the header does not begin with {");
}

TEST_CASE("safetensors: 16-bit tensors stay what they are, read and written", "[layer]") {
    std::string all; // the numbers 0 to 65535, lowest byte first
    for (int bits = 0; bits < 65536; ++bits) all.append(1, static_cast<char>(bits & 255)).append(1, static_cast<char>(bits >> 8));
    for (const auto& [type, format] : {std::pair("BF16", narrow_format::bfloat16), std::pair("F16", narrow_format::half)}) {
        const auto read = parse_safetensors(file_of(std::string("{\"w\":{\"dtype\":\"") + type + "\",\"shape\":[256,256],\"data_offsets\":[0,131072]}}", all));
        CHECK(read.format("w") == format);
        CHECK(!read.is_double("w"));
        const auto stored = read.get_stored<float>("w", {256, 256});
        CHECK(stored.format() == format);
        CHECK(stored(0, 0, 0x3f, 0x80) == (format == narrow_format::half ? 1.875F : 1.0F));
        const auto written = safetensors_of(read);
        CHECK_THAT(written, Contains(std::string("\"dtype\":\"") + type + "\""));
        CHECK(written.substr(written.size() - all.size()) == all);
        CHECK(safetensors_of(parse_safetensors(written)) == written);
        CHECK(problem_of([&] { (void)read.get<float>("w", {256, 256}); }) ==
              std::string("tensor \"w\" holds ") + (format == narrow_format::half ? "half" : "bfloat16") + ", and const parameters convert nothing");
    }
}

TEST_CASE("parameters: 16-bit weights are read by linears as they lie, and converted for who wants others", "[layer]") {
    parameters weights;
    const auto w = weights.add("attn.q.weight", {3, 5}, narrow_format::half);
    const auto b = weights.add("attn.q.bias", {3}, narrow_format::bfloat16);
    for (index_t o = 0; o < 3; ++o) {
        b(0, 0, 0, o) = 0.1F;
        for (index_t c = 0; c < 5; ++c) w(0, 0, o, c) = 0.3F * static_cast<float>(o - c);
    }
    const auto layer = weights.get_linear<float>("attn.q", 3, 5);
    CHECK(layer.weight.data() == w.data());
    CHECK(layer.weight.format() == narrow_format::half);
    CHECK(layer.bias[2] == 0.10009765625F); // the nearest bfloat16
    const auto x = random_rows<float>({1, 1, 7, 5}, 2);
    CHECK(close(result_of(layer, x), plain_linear(wide(x), layer)));
    const auto floats = weights.get<float>("attn.q.weight", {3, 5});
    CHECK(floats.data() == weights.get<float>("attn.q.weight", {3, 5}).data());
    const auto doubles = weights.get_linear<double>("attn.q", 3, 5);
    for (index_t o = 0; o < 3; ++o)
        for (index_t c = 0; c < 5; ++c) CHECK((floats(0, 0, o, c) == w(0, 0, o, c) && doubles.weight(0, 0, o, c) == static_cast<double>(floats(0, 0, o, c))));
    CHECK(doubles.bias[1] == static_cast<double>(layer.bias[1]));
    CHECK(weights.get_linear<float>("attn.q", 3, 5).weight.is_narrow()); // as it lies, also after it was converted
    CHECK(std::as_const(weights).get_linear<float>("attn.q", 3, 5).bias.data() == layer.bias.data());

    CHECK(weights.get_stored<double>("attn.q.weight", {3, 5}).numbers().data() == doubles.weight.numbers().data());
    weights.add<float>("plain", {2, 2});
    CHECK(!weights.get_stored<float>("plain", {2, 2}).is_narrow());
    CHECK(problem_of([&] { weights.get_stored<float>("attn.q.weight", {5, 3}); }) == "tensor \"attn.q.weight\" has shape (3, 5), but (5, 3) is needed");
    CHECK(problem_of([&] { weights.add("plain", {2}, narrow_format::half); }) == "tensor \"plain\" is there already");
    CHECK(problem_of([&] { weights.add("other", {-2}, narrow_format::half); }) == "tensor \"other\" has the negative shape (-2)");
    CHECK(weights.add("floats", {2}, narrow_format::none).format() == narrow_format::none);
    CHECK(!weights.contains("other"));
}

TEMPLATE_TEST_CASE("parameters: tensors of 16-bit types are added like others", "[layer]", Eigen::bfloat16, Eigen::half) {
    parameters weights;
    const tensor_view<TestType> w = weights.add<TestType>("w", {2, 3});
    w(0, 0, 1, 2) = static_cast<TestType>(1.5F);
    CHECK(weights.format("w") == narrow_format_of<TestType>);
    CHECK(weights.get<float>("w", {2, 3})(0, 0, 1, 2) == 1.5F);
    CHECK(weights.get<float>("w", {2, 3})(0, 0, 0, 1) == 0);
    CHECK(weights.get_stored<float>("w", {2, 3}).data() == w.data());
}

TEST_CASE("safetensors: there and back, and into a layer", "[layer]") {
    parameters weights;
    const auto layer = random_linear<float>(weights, "layers.0.attn.q", 32, 24);
    weights.add<double>("mean \"\\\n\t", {2, 1})(0, 0, 0, 0) = 0.1;
    weights.add("bias", {3}, narrow_format::bfloat16)(0, 0, 0, 2) = 0.1F;
    const scratch_folder folder;
    write_safetensors(folder / "a", weights);
    auto read = read_safetensors(folder / "a");
    CHECK((bytes_of_file(folder / "a") == safetensors_of(weights)));
    CHECK(folder.names() == std::vector<std::string>{"a"});
    CHECK(read.names() == weights.names());
    for (const auto& name : weights.names()) {
        CHECK(read.size(name) == weights.size(name));
        CHECK(read.is_double(name) == weights.is_double(name));
        CHECK(read.format(name) == weights.format(name));
        const auto a = weights.get<double>(name, weights.size(name)), b = read.get<double>(name, read.size(name));
        CHECK(std::equal(a.data(), a.data() + a.shape().size(), b.data()));
    }
    const auto again = read.get_linear<float>("layers.0.attn.q", 32, 24);
    const auto x = random_rows<float>({1, 1, 7, 24}, 2);
    CHECK(same_bits(result_of(again, x), result_of(layer, x)));
    CHECK(problem_of([&] { read.get_linear<float>("layers.0.attn.q", 24, 32); }) ==
          "tensor \"layers.0.attn.q.weight\" has shape (32, 24), but (24, 32) is needed");

    // Cut or lengthened anywhere, it is refused, and nothing outside it is read.
    parameters few;
    add_random<float>(few, "w", {2, 3}, 1);
    const auto bytes = safetensors_of(few);
    CHECK(bytes.size() % 8 == 0);
    for (auto end = bytes.begin(); end != bytes.end(); ++end) {
        const std::vector<char> part(bytes.begin(), end);
        if (problem_of([&] { parse_safetensors({part.data(), part.size()}); }) == nothing_thrown)
            FAIL(part.size() << " bytes were accepted");
    }
    CHECK(problem_of([&] { parse_safetensors(bytes + "x"); }) == "safetensors: 1 bytes follow the last tensor");
    CHECK(problem_of([&] { read_safetensors("/nowhere/at/all"); }) == "/nowhere/at/all: cannot be read");
    CHECK(problem_of([&] { write_safetensors("/nowhere/at/all", few); }) == "/nowhere/at/all: cannot be written");
}

TEST_CASE("safetensors: a file is read and written in the memory of its tensors", "[layer]") {
    parameters weights;
    weights.add<float>("w", {1024, 1024});
    weights.add<double>("d", {256, 1024});
    weights.add("h", {1024, 1024}, narrow_format::half);
    weights.add_bytes("i", {256, 1024}, "I64", std::string(std::size_t{1} << 21, 'i'));
    const scratch_folder folder;
    const auto path = folder / "a";
    const auto written = bytes_allocated_in([&] { write_safetensors(path, weights); });
    const auto size = static_cast<std::size_t>(std::filesystem::file_size(path));
    CHECK(size > std::size_t{10} << 20);
    CHECK(written < size / 5);
    CHECK(bytes_allocated_in([&] { read_safetensors(path); }) < size / 5 * 6);
    std::string bytes;
    CHECK(bytes_allocated_in([&] { bytes = safetensors_of(weights); }) < size / 5 * 6);
    CHECK(bytes_allocated_in([&] { parse_safetensors(bytes); }) < size / 5 * 6);
    CHECK((bytes == bytes_of_file(path)));
}

TEST_CASE("safetensors: a file is replaced by a complete one, or stays", "[layer]") {
    parameters first, second;
    add_random<float>(first, "w", {2, 3}, 1);
    add_random<float>(second, "w", {64, 64}, 2);
    const scratch_folder folder;
    const auto path = folder / "a", link = folder / "link";
    write_safetensors(path, first);
    namespace files = std::filesystem;
    files::permissions(path, files::perms::owner_read | files::perms::owner_write);
    files::create_symlink("a", link);

#if __has_include(<sys/resource.h>)
    rlimit limit{};
    getrlimit(RLIMIT_FSIZE, &limit);
    const auto unlimited = limit;
    limit.rlim_cur = 64; // a full disk, which shows at once, or as the last bytes go there
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    const auto problem = problem_of([&] { write_safetensors(path, second); });
    const auto of_new = problem_of([&] { write_safetensors(folder / "b", first); });
    setrlimit(RLIMIT_FSIZE, &unlimited);
    std::signal(SIGXFSZ, handler);
    CHECK(problem == path + ": cannot be written");
    CHECK(of_new == folder / "b" + ": cannot be written");
    CHECK((bytes_of_file(path) == safetensors_of(first)));
    CHECK(folder.names() == std::vector<std::string>{"a", "link"});
#endif

    write_safetensors(link, second);
    CHECK(files::is_symlink(link));
    CHECK((bytes_of_file(path) == safetensors_of(second)));
    CHECK(files::status(path).permissions() == (files::perms::owner_read | files::perms::owner_write));
    CHECK(folder.names() == std::vector<std::string>{"a", "link"});

    files::permissions(path, files::perms::owner_read);
    if (!std::ofstream(path, std::ios::app)) { // root may write it all the same
        CHECK(problem_of([&] { write_safetensors(path, first); }) == path + ": cannot be written");
        CHECK((bytes_of_file(path) == safetensors_of(second)));
    }
    second.add<float>("\xff", {});
    CHECK_THAT(problem_of([&] { write_safetensors(path, second); }), Contains("cannot have this name"));
    CHECK(folder.names() == std::vector<std::string>{"a", "link"});
    CHECK(problem_of([&] { write_safetensors(folder / "", first); }) == folder / "" + ": cannot be written");

#if __has_include(<sys/resource.h>)
    const auto pipe = folder / "pipe";
    REQUIRE(mkfifo(pipe.c_str(), S_IRUSR | S_IWUSR) == 0);
    const int both_ends = ::open(pipe.c_str(), O_RDWR | O_NONBLOCK);
    write_safetensors(pipe, first);
    std::string through(2 * safetensors_of(first).size(), ' ');
    const auto count = ::read(both_ends, through.data(), through.size());
    CHECK(files::is_fifo(pipe));
    CHECK((through.substr(0, static_cast<std::size_t>(count)) == safetensors_of(first)));
    CHECK(problem_of([&] { read_safetensors(pipe); }) == pipe + ": cannot be read");
    ::close(both_ends);
#endif
}

TEST_CASE("safetensors: a file that ends as it is read is refused; numbers of the other byte order", "[layer]") {
    const scratch_folder folder;
    write_file(folder / "a", "0123456789");
    detail::file_reader read(folder / "a");
    CHECK(read.bytes() == 10);
    std::filesystem::resize_file(folder / "a", 9);
    char bytes[8];
    CHECK(problem_of([&] { read(bytes, 8); }) == nothing_thrown);
    CHECK(std::string_view(bytes, 8) == "01234567");
    CHECK(problem_of([&] { read(bytes, 2); }) == "cannot be read");

    std::string numbers = "abcdefgh";
    detail::reverse_each(numbers.data(), 8, 4);
    CHECK(numbers == "dcbahgfe");
    detail::reverse_each(numbers.data(), 8, 2);
    CHECK(numbers == "cdabghef");
}

TEST_CASE("safetensors: several files by their index", "[layer]") {
    const scratch_folder folder;
    const std::string one = "model-00001-of-00002.safetensors", two = "model-00002-of-00002.safetensors";
    const auto index = folder / "model.safetensors.index.json";
    parameters first, second;
    const auto layer = random_linear<float>(second, "q", 8, 4);
    first.add("h", {1024, 1024}, narrow_format::half)(0, 0, 1, 2) = 1.5F;
    first.add_bytes("n", {}, "I64", "12345678");
    first.metadata() = {{"format", "pt"}, {"part", "1"}};
    second.metadata() = {{"format", "pt"}, {"part", "2"}, {"second", ""}};
    write_safetensors(folder / one, first);
    write_safetensors(folder / two, second);
    using places = std::map<std::string, std::string>;
    const auto write_index = [&](const places& files) {
        std::string text = "{\"metadata\": {\"total_size\": 2097320}, \"weight_map\": {";
        for (const auto& [name, file] : files) text.append(name == "h" ? "" : ", ").append("\"" + name + "\": \"" + file + "\"");
        write_file(index, text + "}}\n");
    };
    const places complete{{"h", one}, {"n", one}, {"q.bias", two}, {"q.weight", two}};
    const auto problem_with = [&](const std::string& name, const std::string& file) {
        auto files = complete;
        files[name] = file;
        write_index(files);
        return problem_of([&] { read_safetensors(index); });
    };

    write_index(complete);
    parameters read;
    CHECK(bytes_allocated_in([&] { read = read_safetensors(index); }) < (std::size_t{1} << 21) / 5 * 6);
    CHECK(read.names() == std::vector<std::string>{"h", "n", "q.bias", "q.weight"});
    CHECK(read.get_stored<float>("h", {1024, 1024})(0, 0, 1, 2) == 1.5F);
    CHECK(read.other_bytes("n") == "12345678");
    const auto x = random_rows<float>({1, 1, 7, 4}, 2);
    CHECK(same_bits(result_of(read.get_linear<float>("q", 8, 4), x), result_of(layer, x)));
    CHECK(read.metadata() == std::map<std::string, std::string>{{"format", "pt"}, {"part", "1"}, {"second", ""}});

    const auto is_here = [](const std::string& name) { return ": tensor \"" + name + "\" is here, but "; };
    const auto is_missing = [](const std::string& name) { return ": tensor \"" + name + "\" is missing, which by the index is here"; };
    write_index({{"h", one}, {"n", one}, {"q.weight", two}});
    CHECK(problem_of([&] { read_safetensors(index); }) == index + ": " + two + is_here("q.bias") + "not in the index");
    CHECK(problem_with("i", one) == index + ": " + one + is_missing("i"));
    CHECK(problem_with("q.bias", one) == index + ": " + one + is_missing("q.bias"));
    CHECK(problem_with("n", two) == index + ": " + one + is_here("n") + "by the index in " + two);
    CHECK(problem_with("i", "none.safetensors") == index + ": none.safetensors: cannot be read");
    parameters twice;
    twice.add<float>("i", {});
    twice.add<float>("n", {});
    write_safetensors(folder / "twice.safetensors", twice);
    CHECK(problem_with("i", "twice.safetensors") == index + ": twice.safetensors" + is_here("n") + "by the index in " + one);

    // Nothing of the first file is read unless the last one is as it should be.
    write_index(complete);
    std::filesystem::resize_file(folder / two, safetensors_of(second).size() - 1);
    std::string problem;
    CHECK(bytes_allocated_in([&] { problem = problem_of([&] { read_safetensors(index); }); }) < std::size_t{1} << 20);
    CHECK(problem == index + ": " + two + ": tensor \"q.weight\" ends at byte 160 of the data, which has 159");
    CHECK(problem_of([&] { read_safetensors(folder / "none.json"); }) == folder / "none.json" + ": cannot be read");
    CHECK(problem_of([&] { write_safetensors(index, first); }) == index + ": a safetensors file does not end in .json, as an index does");
    CHECK_THAT(bytes_of_file(index), Contains("weight_map"));
    std::filesystem::resize_file(index, 100'000'001);
    CHECK(problem_of([&] { read_safetensors(index); }) == index + ": an index has no 100000001 bytes");
}

TEST_CASE("safetensors: files and folders with names of any letters", "[layer]") {
    const scratch_folder folder;
    const auto inner = std::filesystem::path(folder / "") / u8"größe 重み";
    std::filesystem::create_directory(inner);
    parameters weights;
    add_random<float>(weights, "w", {2, 3}, 1);
    const auto file = inner / u8"ä.safetensors", index = inner / u8"ä.safetensors.index.json";
    for (int round = 0; round < 2; ++round) { // once there is none yet
        write_safetensors(file, weights);
        CHECK(read_safetensors(file).names() == weights.names());
    }
    std::ofstream(index, std::ios::binary) << "{\"weight_map\": {\"w\": \"ä.safetensors\"}}";
    CHECK(read_safetensors(index).names() == weights.names());
}

TEST_CASE("safetensors: what is no index is refused", "[layer]") {
    const scratch_folder folder;
    const auto index = folder / "a.json";
    const auto problem_with = [&](const std::string& text) {
        write_file(index, text);
        return problem_of([&] { read_safetensors(index); });
    };
    const auto refused = [&](const std::string& text, const std::string& why) {
        const auto problem = problem_with(text);
        if (!problem.starts_with(index + ": index, at byte ") || !problem.ends_with(why)) FAIL(text << ": " << problem);
    };
    write_safetensors(folder / "w.safetensors", {});
    const std::string map = "\"weight_map\":{}";
    CHECK(problem_with("{" + map + "}") == nothing_thrown);
    for (const char* value : {"0", "-0", "10", "2.50", "1e9", "1E+09", "-12.5e-3", "true", "false", "null", "\"\\u00e9\"",
                               "[]", "[1, [2], \"\"]", "{}", "{\"a\": {\"weight_map\": 1}}"}) {
        INFO(value);
        CHECK(problem_with("{\"metadata\": " + std::string(value) + " , " + map + "}") == nothing_thrown);
        CHECK(problem_with("{" + map + ",\"metadata\":" + value + "}") == nothing_thrown);
    }
    for (const char* value : {"", "-", "01", "1.", ".5", "1e", "1e+", "+1", "True", "nul", "'a'",
                              "[1,]", "[1 2]", "{1: 2}", "{\"a\": 1, \"a\": 2}", "\"\xff\"", "{\"a\"}"})
        refused("{\"metadata\":" + std::string(value) + "," + map + "}", "");
    const auto nested = [&](std::size_t depth) {
        return "{\"metadata\":" + std::string(depth, '[') + std::string(depth, ']') + "," + map + "}";
    };
    CHECK(problem_with(nested(100)) == nothing_thrown);
    refused(nested(101), "a value is nested too deep");
    refused(nested(1'000'000), "a value is nested too deep");
    refused("", "expected {");
    refused("[]", "expected {");
    refused("{}", "there is no weight_map");
    refused("{\"architectures\": [\"a\"], \"sizes\": {" + map + "}}", "there is no weight_map");
    refused("{" + map + "}{", "something follows the object");
    refused("{" + map + "," + map + "}", "the key \"weight_map\" comes twice");
    refused("{\"weight_map\":[]}", "expected {");
    refused("{\"weight_map\":{\"w\":1}}", "expected \"");
    refused("{\"weight_map\":{\"w\":\"a.safetensors\",\"w\":\"b.safetensors\"}}", "the key \"w\" comes twice");
    for (const std::string file : {"../w.safetensors", "/w.safetensors", "a/../w.safetensors", "./w.safetensors", "..\\\\w.safetensors",
                                   "C:w.safetensors", "w.safetensors\\u0000.safetensors", "..", ".", "", "w.bin", "a.json"})
        CHECK_THAT(problem_with("{\"weight_map\":{\"w\":\"" + file + "\"}}"),
                   Contains(": the name of a safetensors file beside the index is needed, not \"" + file.substr(0, 2)));
    CHECK(problem_with("{\"weight_map\":{\"w\":\"w.safetensors\"}}") ==
          index + ": w.safetensors: tensor \"w\" is missing, which by the index is here");
}

TEST_CASE("safetensors: what is not computed with is kept, and metadata, and tensors begin where their numbers may", "[layer]") {
    // A BatchNorm of PyTorch counts its batches in an I64.
    const std::string header = "{\"__metadata__\":{\"format\":\"pt\",\"a \\\"\":\"b\\n\"},\"bn.num_batches_tracked\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
                               "\"bn.weight\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]},\"mask\":{\"dtype\":\"BOOL\",\"shape\":[3],\"data_offsets\":[12,15]}}";
    auto read = parse_safetensors(file_of(header, std::string("\x07\0\0\0\0\0\0\0\0\0\xc0\x3f\1\0\1", 15)));
    CHECK(read.get_vector<float>("bn.weight", 1)[0] == 1.5F);
    CHECK(read.other_type("bn.num_batches_tracked") == "I64");
    CHECK(read.other_bytes("bn.num_batches_tracked") == std::string_view("\x07\0\0\0\0\0\0\0", 8));
    CHECK(read.other_type("bn.weight").empty());
    CHECK(problem_of([&] { read.get<float>("bn.num_batches_tracked", {}); }) == "tensor \"bn.num_batches_tracked\" holds numbers of type I64, which are kept as bytes");
    CHECK(problem_of([&] { read.get_stored<float>("mask", {3}); }) == "tensor \"mask\" holds numbers of type BOOL, which are kept as bytes");
    CHECK(read.metadata() == std::map<std::string, std::string>{{"a \"", "b\n"}, {"format", "pt"}});

    read.add("half", {1}, narrow_format::half);
    read.add<double>("wide", {1})(0, 0, 0, 0) = 0.5;
    read.metadata()["made by"] = "a test";
    const auto written = safetensors_of(read);
    auto again = parse_safetensors(written);
    CHECK(safetensors_of(again) == written);
    CHECK(again.metadata() == read.metadata());
    CHECK(again.names() == read.names());
    CHECK(again.other_bytes("mask") == read.other_bytes("mask"));
    CHECK_THAT(written, Contains("\"bn.num_batches_tracked\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]}"));
    CHECK_THAT(written, Contains("\"data_offsets\":[8,16]}") && Contains("\"data_offsets\":[16,20]}") && Contains("\"data_offsets\":[20,22]}") && Contains("\"data_offsets\":[22,25]}"));
    again.metadata()["x"] = "\xff";
    CHECK(problem_of([&] { safetensors_of(again); }) == "metadata \"x\" is not UTF-8");
}

TEST_CASE("safetensors: names are text in UTF-8, read and written", "[layer]") {
    const auto named = [](const std::string& name) { return "{\"" + name + "\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}"; };
    const std::string four(4, '\0');
    for (const std::string name : {"\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80", "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
        auto read = parse_safetensors(file_of(named("a" + name + "b"), four));
        CHECK(read.names() == std::vector<std::string>{"a" + name + "b"});
        CHECK(parse_safetensors(safetensors_of(read)).names() == read.names());
    }
    for (const std::string name : {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xc2", "\xe0\x9f\xbf", "\xe2\x82", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff",
                                   "\xc2\xc2\x80", "\xf0\x90\x80"}) {
        for (const std::string end : {"", "b", "\\u00e9"}) CHECK_THAT(problem_of(named("a" + name + end), four), Contains("a string is not UTF-8"));
        parameters weights;
        weights.add<float>("a" + name, {});
        CHECK_THAT(problem_of([&] { safetensors_of(weights); }), Contains("cannot have this name in a safetensors file"));
    }
    parameters weights;
    weights.add<float>("__metadata__", {});
    CHECK_THAT(problem_of([&] { safetensors_of(weights); }), Contains("cannot have this name"));
}

TEST_CASE("safetensors: wrong files are refused, by tensor where there is one", "[layer]") {
    const std::string four(4, '\0'), eight(8, '\0');
    const auto one = [](const std::string& type, const std::string& size, const std::string& offsets) {
        return "{\"w\":{\"dtype\":\"" + type + "\",\"shape\":" + size + ",\"data_offsets\":" + offsets + "}}";
    };
    CHECK(problem_of(one("F32", "[1]", "[0,4]"), four) == nothing_thrown);
    CHECK(problem_of(one("I64", "[2]", "[0,8]"), eight) == "tensor \"w\" has 8 bytes, which is not what its shape needs");
    CHECK(problem_of(one("F4", "[16]", "[0,8]"), eight) == nothing_thrown); // two in a byte
    CHECK(problem_of(one("F32", "[2]", "[0,4]"), four) == "tensor \"w\" has 4 bytes, which is not what its shape needs");
    CHECK(problem_of(one("F32", "[2]", "[0,8]"), four) == "tensor \"w\" ends at byte 8 of the data, which has 4");
    CHECK(problem_of(one("F32", "[1]", "[4,8]"), eight) == "tensor \"w\" does not begin where the one before it ends");
    CHECK(problem_of(one("F32", "[1]", "[4,0]"), eight) == "tensor \"w\" does not begin where the one before it ends");
    CHECK(problem_of(one("F32", "[4294967296,4294967296]", "[0,4]"), four) == "tensor \"w\" has a shape too large for a file");
    CHECK_THAT(problem_of(one("F32", "[0]", "[0,99999999999999999999]"), ""), Contains("too large"));
    const std::string w = "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]";
    CHECK(problem_of("{\"v\":{" + w + "},\"w\":{" + w + "}}", four) == "tensor \"w\" does not begin where the one before it ends");
    CHECK_THAT(problem_of("{\"w\":{" + w + "},\"w\":{" + w + "}}", four), Contains("\"w\" comes twice"));
    CHECK_THAT(problem_of("{\"w\":{" + w + ",\"shape\":[1]}}", four), Contains("\"shape\" comes twice"));
    CHECK_THAT(problem_of("{\"w\":{" + w + ",\"more\":1}}", four), Contains("\"more\" of tensor \"w\" is not known"));
    for (const char* part : {"\"dtype\":\"F32\",\"shape\":[1]", "\"dtype\":\"F32\",\"data_offsets\":[0,4]", "\"shape\":[1],\"data_offsets\":[0,4]"})
        CHECK_THAT(problem_of("{\"w\":{" + std::string(part) + "}}", four), Contains("tensor \"w\" has no dtype, no shape or no two data_offsets"));
    for (const char* size : {"[0,281474976710656,281474976710656]", "[281474976710656,0,2]", "[281474976710657,0]", "[4294967296,4294967296,0,4294967296,4294967296]"})
        CHECK(problem_of(one("F32", size, "[0,0]"), "") == "tensor \"w\" has a shape too large for a file");
    CHECK(problem_of(one("F32", "[0,1099511627776]", "[0,0]"), "") == nothing_thrown);
    for (const char* header : {"{", "{}x", "{\"w\"}", "{\"w\":{}}", "{\"w\":1}", "{\"w\":[]}", "{\"\\x\":{}}", "{\"\\ud800\":{}}",
                               "{\"\\u00zz\":{}}", "{\"a\nb\":{}}", "{,}"})
        if (!Contains("header, at byte").match(problem_of(header, ""))) FAIL(header << " was accepted: " << problem_of(header, ""));
    for (const char* size : {"[01]", "[-1]", "[1.0]", "[1,]", "[]]", "1", "[1 1]"})
        if (!Contains("header, at byte").match(problem_of(one("F32", size, "[0,4]"), four))) FAIL(size << " was accepted");
    CHECK(problem_of([] { parse_safetensors("{}"); }) == "safetensors: the file has 2 bytes, too few for a header");
    CHECK(problem_of([] { parse_safetensors(std::string(8, '\xff') + "{}"); }) ==
          "safetensors: the header would have 18446744073709551615 bytes, the file has 10");
    CHECK(problem_of("{}", "") == nothing_thrown);
    CHECK(problem_of([] { read_safetensors("/"); }) == "/: cannot be read"); // a folder
    CHECK(problem_of([] { read_safetensors("/no such file"); }) == "/no such file: cannot be read");
}

} // namespace attn::testing
