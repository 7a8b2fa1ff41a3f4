// Parameters by name, and safetensors files: by hand, there and back, and every way to be wrong.
#include "catch.hpp"
#include "layer_checks.hpp"

#include <attn/layer/safetensors.hpp>

#include <filesystem>

namespace attn::testing {

namespace {

/// A file of a header and data; its length in front.
std::string file_of(const std::string& header, const std::string& data) {
    std::string file;
    detail::append_little_endian(file, static_cast<std::uint64_t>(header.size()));
    return file + header + data;
}
std::string problem_of(const auto& call) { return error_of<parameter_error>(call); }
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
    CHECK(std::isnan(detail::float_of_half(0x7e00)));
    CHECK(detail::float_of_half(0xfbff) == -65504.0F);
}

TEST_CASE("safetensors: there and back, and into a layer", "[layer]") {
    parameters weights;
    const auto layer = random_linear<float>(weights, "layers.0.attn.q", 32, 24);
    weights.add<double>("mean \"\\\n\t", {2, 1})(0, 0, 0, 0) = 0.1;
    const auto path =
        (std::filesystem::temp_directory_path() / ("attn_" + std::to_string(std::random_device()()) + ".safetensors")).string();
    write_safetensors(path, weights);
    auto read = read_safetensors(path);
    std::filesystem::remove(path);
    CHECK(read.names() == weights.names());
    for (const auto& name : weights.names()) {
        CHECK(read.size(name) == weights.size(name));
        CHECK(read.is_double(name) == weights.is_double(name));
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
    CHECK(problem_of(one("I64", "[1]", "[0,8]"), eight) == "tensor \"w\" has numbers of type I64; F64, F32, F16 and BF16 are read");
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
}

} // namespace attn::testing
