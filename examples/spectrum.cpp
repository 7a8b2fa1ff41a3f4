// Linformer rests on an observation: the singular values of attention matrices fall, so that few projected keys can say most of what all say. How
// fast they fall for the words of a text, as vectors that nobody trained, and what fewer keys then cost.
//     example_spectrum [FILE]      (README.md, if none is named)
#include <attn/attn.hpp>

#include <Eigen/SVD>

#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace {

std::vector<std::string> words_of(const char* file, std::size_t limit) {
    std::ifstream text(file);
    std::vector<std::string> words(1);
    for (char c; words.size() <= limit && text.get(c);) {
        if (std::isalnum(static_cast<unsigned char>(c))) words.back() += static_cast<char>(std::tolower(c));
        else if (!words.back().empty()) words.emplace_back();
    }
    words.pop_back();
    return words;
}

/// Half of a vector is its word's, random signs, and half its place's, sinusoids.
Eigen::MatrixXf vectors_of(const std::vector<std::string>& words, Eigen::Index channels) {
    Eigen::MatrixXf x(std::ssize(words), channels);
    for (Eigen::Index i = 0; i < x.rows(); ++i) {
        std::uint64_t hash = 14695981039346656037u; // FNV-1a
        for (const char c : words[static_cast<std::size_t>(i)]) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
        for (Eigen::Index c = 0; c < channels; ++c) {
            hash = hash * 6364136223846793005u + 1442695040888963407u;
            const auto angle = static_cast<double>(i) * std::pow(1e-4, static_cast<double>(c / 2 * 2) / static_cast<double>(channels));
            const auto place = std::sqrt(2.0) * (c % 2 == 0 ? std::sin(angle) : std::cos(angle));
            x(i, c) = static_cast<float>(std::sqrt(3.0 / 8) * ((hash >> 63 ? 1 : -1) + place));
        }
    }
    return x;
}

template <class Op>
double milliseconds(const Op& op, const Eigen::MatrixXf& x) {
    double best = 1e9;
    for (int i = 0; i < 5; ++i) {
        const auto began = std::chrono::steady_clock::now();
        attn::attend(op, x, x, x);
        best = std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count());
    }
    return best;
}

} // namespace

int main(int count, char** arguments) {
    const char* const file = count > 1 ? arguments[1] : "README.md";
    const auto words = words_of(file, 512);
    const auto n = std::ssize(words);
    if (n < 16) return std::fprintf(stderr, "%s: no text of at least 16 words\n", file), 1;
    const auto x = vectors_of(words, 64);

    // The attention matrix is what comes of the unit vectors as values.
    const attn::softmax_attention<> full;
    const Eigen::MatrixXf matrix = attn::attend(full, x, x, Eigen::MatrixXf(Eigen::MatrixXf::Identity(n, n)));
    const Eigen::VectorXf singular = Eigen::BDCSVD<Eigen::MatrixXf>(matrix).singularValues();
    const Eigen::MatrixXf exact = attn::attend(full, x, x, x);

    std::printf("%td words; the first k singular values of their attention matrix, as a share of the sum of all\n\n", n);
    for (Eigen::Index k = 1; k <= n; k *= 2) {
        const auto share = singular.head(k).sum() / singular.sum();
        std::printf("%5td  %5.1f %%  %s\n", k, 100 * static_cast<double>(share), std::string(static_cast<std::size_t>(60 * share), '#').c_str());
    }

    // The error that no rank k can undercut, and what keys and values that were averaged to k rows reach.
    std::printf("\n    k   least error of rank k   error of mean pooling     time\n");
    for (Eigen::Index k = 8; k < n; k *= 2) {
        const auto op = attn::linformer_attention{.key_projection = attn::mean_pooling<>{k}};
        const auto least = singular.tail(n - k).norm() / singular.norm();
        const Eigen::MatrixXf out = attn::attend(op, x, x, x);
        std::printf("%5td %19.1f %% %19.1f %% %8.3f ms\n", k, 100 * static_cast<double>(least), 100 * static_cast<double>((out - exact).norm() / exact.norm()),
                    milliseconds(op, x));
    }
    std::printf(" full                                               %8.3f ms\n", milliseconds(full, x));
}
