// A SLAB vision block on an image: patches, a block with RepBN and simplified linear attention, and the same block with its norms folded
// away.
//     example_vision_block [IMAGE.ppm]            binary PPM (P6), as `convert picture.png picture.ppm` writes it
#include <attn/attention/simplified_linear_attention.hpp>
#include <attn/layer/fold.hpp>
#include <attn/norm/rep_batch_norm.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr attn::index_t patch = 8, channels = 32, heads = 2, pixels = 3 * patch * patch;
constexpr std::size_t rounds = 51;

struct image {
    attn::index_t width = 96, height = 64;
    std::vector<unsigned char> rgb;
};

/// Throws std::runtime_error unless the file is a binary PPM of one byte a number.
image read_ppm(const std::string& name) {
    std::ifstream file(name, std::ios::binary);
    std::string kind;
    image picture;
    int max_value = 0;
    file >> kind >> picture.width >> picture.height >> max_value;
    file.get();
    if (!file || kind != "P6" || max_value != 255 || picture.width < patch || picture.height < patch || picture.width * picture.height > 1 << 26)
        throw std::runtime_error(name + " is not a binary PPM of at least 8 x 8 pixels");
    picture.rgb.resize(static_cast<std::size_t>(3 * picture.width * picture.height));
    if (!file.read(reinterpret_cast<char*>(picture.rgb.data()), std::ssize(picture.rgb))) throw std::runtime_error(name + " is cut off");
    return picture;
}

/// Something to look at if there is no file: a disc on a slope of grey.
image drawn() {
    image picture;
    for (attn::index_t y = 0; y < picture.height; ++y)
        for (attn::index_t x = 0; x < picture.width; ++x)
            for (const int tint : {0, 40, 80}) {
                const bool disc = (x - 40) * (x - 40) + (y - 30) * (y - 30) < 400;
                picture.rgb.push_back(static_cast<unsigned char>(disc ? 170 + tint : x + y));
            }
    return picture;
}

/// Each patch of 8 x 8 pixels as a row of numbers between -1 and 1: the tokens of a vision transformer, row by row.
attn::tensor<float> patches_of(const image& picture) {
    const auto across = picture.width / patch, down = picture.height / patch;
    attn::tensor<float> tokens({.tokens = across * down, .channels = pixels});
    for (attn::index_t i = 0; i < across * down; ++i)
        for (attn::index_t p = 0; p < pixels; ++p) {
            const auto y = i / across * patch + p / (3 * patch), x = i % across * patch + p / 3 % patch;
            tokens(0, 0, i, p) =
                static_cast<float>(picture.rgb[static_cast<std::size_t>(3 * (y * picture.width + x) + p % 3)]) / 127.5f - 1;
        }
    return tokens;
}

double median(std::vector<double> times) {
    std::ranges::nth_element(times, times.begin() + rounds / 2);
    return times[rounds / 2];
}

} // namespace

int main(int count, char** arguments) try {
    const auto picture = count > 1 ? read_ppm(arguments[1]) : drawn();
    const attn::index_t width = picture.width / patch, height = picture.height / patch;

    // Weights by name, random here; read_safetensors reads trained ones.
    attn::parameters weights;
    std::mt19937 random(1);
    const auto add = [&](const std::string& name, const attn::parameters::extents& size) {
        const auto t = weights.add<float>(name, size);
        const auto spread = 1 / std::sqrt(static_cast<float>(size.back()));
        std::generate_n(t.data(), t.shape().size(), [&] { return spread * (static_cast<float>(random()) / 0x1p31f - 1); });
        return t;
    };
    const auto add_linear = [&](const std::string& name, attn::index_t outputs, attn::index_t inputs) {
        add(name + ".weight", {outputs, inputs});
        add(name + ".bias", {outputs});
        return weights.get_linear<float>(name, outputs, inputs);
    };

    // RepBN with the statistics that training gathered, simplified linear attention with its convolution over the grid of patches.
    std::vector<double> mean(channels), variance(channels);
    for (auto& m : mean) m = static_cast<double>(random()) / 0x1p32 - 0.5;
    for (auto& v : variance) v = static_cast<double>(random()) / 0x1p32 + 0.5;
    const attn::rep_batch_norm<float> norm{.batch = {.mean = mean, .variance = variance}, .eta = 0.7};
    const auto kernel = add("convolution", {1, channels / heads, 5, 5});
    const attn::depthwise_convolution convolution{.weights = kernel, .height = height, .width = width};
    const attn::multi_head mixing{.heads = heads,
                                  .q = add_linear("q", channels, channels),
                                  .k = add_linear("k", channels, channels),
                                  .v = add_linear("v", channels, channels),
                                  .out = add_linear("out", channels, channels),
                                  .attention = attn::simplified_linear_attention{.convolution = convolution}};
    const attn::feed_forward mlp{.up = add_linear("up", 4 * channels, channels), .down = add_linear("down", channels, 4 * channels)};
    const attn::transformer_block block{.attention_norm = norm, .attention = mixing, .feed_forward_norm = norm, .feed_forward = mlp};

    // For inference the norms disappear into the linears behind them.
    attn::parameters folded;
    const auto fast = attn::fold(block, folded);

    const auto patches = patches_of(picture);
    const auto tokens = attn::forward(add_linear("embedding", channels, pixels), {.tokens = patches});
    attn::tensor<float> out(tokens.shape());
    const auto microseconds = [&](const auto& layer) {
        const auto began = std::chrono::steady_clock::now();
        attn::forward(layer, {.tokens = tokens}, out);
        return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - began).count();
    };
    // In turn, so that what else the machine does meets both.
    std::vector<double> with_norms(rounds), without(rounds);
    for (std::size_t i = 0; i < rounds; ++i) with_norms[i] = microseconds(block), without[i] = microseconds(fast);
    const auto a = attn::forward(block, {.tokens = tokens}), b = attn::forward(fast, {.tokens = tokens});
    float largest = 0, difference = 0;
    for (attn::index_t e = 0; e < a.shape().size(); ++e) {
        largest = std::max(largest, std::abs(a.data()[e]));
        difference = std::max(difference, std::abs(a.data()[e] - b.data()[e]));
    }
    std::printf("%td x %td pixels, %td x %td patches, tokens of shape %s\n", picture.width, picture.height, width, height,
                to_string(a.shape()).c_str());
    std::printf("with its norms folded away the block is the same to rounding: %s\n", difference < 1e-5f * largest ? "yes" : "no");
    std::fprintf(stderr, "medians of %zu: %.0f us with norms, %.0f us without\n", rounds, median(with_norms), median(without));
} catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
}
