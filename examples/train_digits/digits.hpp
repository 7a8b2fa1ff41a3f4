// The digits: images of them, read or drawn, cut into patches.
#pragma once

#include <attn/core/tensor.hpp>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <numbers>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace train_digits {

using attn::index_t, attn::tensor;

constexpr index_t side = 28, patch = 4, grid = side / patch, patches = grid * grid, pixels = patch * patch, classes = 10;

/// Images of 28 x 28 numbers between 0 and 1, row by row.
struct digits {
    std::vector<std::vector<float>> images;
    std::vector<int> labels;

    index_t count() const { return std::ssize(labels); }
    void shuffle() {
        std::mt19937 random(1);
        for (auto left = images.size(); left > 1; --left) {
            const auto other = random() % left;
            std::swap(images[left - 1], images[other]);
            std::swap(labels[left - 1], labels[other]);
        }
    }
    /// Some of them as tokens, (count, 1, patches, pixels); each moved by up to two pixels if there are random numbers for it, so that no image
    /// is seen twice.
    tensor<float> tokens(index_t first, index_t count, std::mt19937* random = nullptr) const {
        tensor<float> all({count, 1, patches, pixels});
        float* of_image = all.data();
        for (index_t b = 0; b < count; ++b, of_image += patches * pixels) {
            const auto move = [&] { return random ? static_cast<index_t>((*random)() % 5) - 2 : index_t{0}; };
            const auto& image = images[static_cast<std::size_t>(first + b)];
            const auto down = move(), right = move();
            for (index_t y = 0; y < side; ++y)
                for (index_t x = 0; x < side; ++x) {
                    const auto from_y = y - down, from_x = x - right;
                    const bool within = std::min(from_y, from_x) >= 0 && std::max(from_y, from_x) < side;
                    of_image[(y / patch * grid + x / patch) * pixels + y % patch * patch + x % patch] =
                        (within ? image[static_cast<std::size_t>(from_y * side + from_x)] : 0) - 0.5f;
                }
        }
        return all;
    }
};

/// Throws std::runtime_error unless the folder holds 0.json ... 9.json, each { "data": [...] } with 28 x 28 numbers for each image.
inline digits read_digits(const std::string& folder) {
    digits all;
    for (int digit = 0; digit < classes; ++digit) {
        const auto name = folder + "/" + std::to_string(digit) + ".json";
        std::ifstream file(name, std::ios::binary);
        const std::string text{std::istreambuf_iterator<char>(file), {}};
        const auto begin = text.find('[');
        if (!file || begin == std::string::npos) throw std::runtime_error(name + " is not there, or holds no digits");
        const char* at = text.c_str() + begin;
        while (*at == '[' || *at == ',') {
            if (all.images.empty() || std::ssize(all.images.back()) == side * side) all.images.emplace_back(), all.labels.push_back(digit);
            char* end = nullptr;
            all.images.back().push_back(std::strtof(at + 1, &end));
            if (end == at + 1) throw std::runtime_error(name + " holds something that is no number");
            for (at = end; *at == ' ' || *at == '\n';) ++at;
        }
        if (std::ssize(all.images.back()) != side * side) throw std::runtime_error(name + " ends within an image");
    }
    all.shuffle();
    return all;
}

/// Ten figures to learn from if there are no digits: a bar of one of ten directions, with noise.
inline digits drawn_digits(index_t count) {
    digits all;
    std::mt19937 random(2);
    const auto noise = [&] { return static_cast<float>(random()) / 0x1p32f; };
    for (index_t n = 0; n < count; ++n) {
        const auto digit = static_cast<int>(n % classes);
        const auto angle = std::numbers::pi_v<float> * static_cast<float>(digit) / classes;
        auto& image = all.images.emplace_back();
        for (index_t p = 0; p < side * side; ++p) {
            const auto x = static_cast<float>(p % side) - 13.5f, y = static_cast<float>(p / side) - 13.5f;
            image.push_back((std::abs(x * std::sin(angle) - y * std::cos(angle)) < 3 ? 0.7f : 0.0f) + 0.3f * noise());
        }
        all.labels.push_back(digit);
    }
    all.shuffle();
    return all;
}

} // namespace train_digits
