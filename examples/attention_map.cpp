// An attention matrix as a picture: the words of a text attend to words that share letters with them, and the matrix goes to a PPM file.
//     example_attention_map [TEXT FILE [PICTURE]]
#include <attn/attention/eigen.hpp>
#include <attn/attention/softmax_attention.hpp>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr const char* sample =
    "attention is a matrix applied to the values and every query gives each key a share of its attention so the matrix has "
    "a row for every query and a column for every key and every row sums to one";

/// Counts of letters, of length 4: words of the same letters have scores of 16, words with none in common 0.
Eigen::MatrixXf letters_of(const std::vector<std::string>& words) {
    Eigen::MatrixXf x = Eigen::MatrixXf::Zero(std::ssize(words), 26);
    for (Eigen::Index i = 0; i < x.rows(); ++i) {
        for (const char c : words[static_cast<std::size_t>(i)])
            if (std::isalpha(static_cast<unsigned char>(c))) x(i, std::tolower(c) - 'a') += 1;
        if (x.row(i).norm() > 0) x.row(i) *= 4 / x.row(i).norm();
    }
    return x;
}

/// Binary PPM, one square of pixels for each weight, from dark blue (0) to yellow (the largest weight of the row).
bool write_picture(const std::string& file, const Eigen::MatrixXf& weights, Eigen::Index pixels) {
    std::ofstream out(file, std::ios::binary);
    out << "P6\n" << weights.cols() * pixels << ' ' << weights.rows() * pixels << "\n255\n";
    for (Eigen::Index y = 0; y < weights.rows() * pixels; ++y) {
        const float largest = weights.row(y / pixels).maxCoeff();
        for (Eigen::Index x = 0; x < weights.cols() * pixels; ++x) {
            const float share = std::sqrt(weights(y / pixels, x / pixels) / largest);
            for (const float level : {20 + 235 * share, 20 + 200 * share, 80 - 60 * share})
                out.put(static_cast<char>(static_cast<unsigned char>(level)));
        }
    }
    return static_cast<bool>(out.flush());
}

} // namespace

int main(int count, char** arguments) {
    std::vector<std::string> words;
    const auto read = [&](std::istream&& text) {
        for (std::string word; words.size() < 200 && text >> word;) words.push_back(word);
    };
    if (count > 1)
        read(std::ifstream(arguments[1]));
    else
        read(std::istringstream(sample));
    if (words.empty()) return std::puts("no words to read"), 1;

    // No operator has code for looking at it: its matrix is what it makes of the unit vectors.
    const Eigen::MatrixXf x = letters_of(words);
    const Eigen::MatrixXf identity = Eigen::MatrixXf::Identity(x.rows(), x.rows());
    const Eigen::MatrixXf weights = attn::attend(attn::softmax_attention{.scale = 1}, x, x, identity);

    const std::string picture = count > 2 ? arguments[2] : "attention_map.ppm";
    if (!write_picture(picture, weights, 8)) return std::printf("cannot write %s\n", picture.c_str()), 1;
    std::printf("%s: %zu x %zu words\n", picture.c_str(), words.size(), words.size());
    for (Eigen::Index i = 0; i < std::min<Eigen::Index>(8, x.rows()); ++i) {
        Eigen::Index best = 0, self = i;
        Eigen::RowVectorXf others = weights.row(i);
        for (Eigen::Index j = 0; j < x.rows(); ++j)
            if (words[static_cast<std::size_t>(j)] == words[static_cast<std::size_t>(self)]) others[j] = 0;
        others.maxCoeff(&best);
        std::printf("%-10s looks most at %s\n", words[static_cast<std::size_t>(i)].c_str(), words[static_cast<std::size_t>(best)].c_str());
    }
}
