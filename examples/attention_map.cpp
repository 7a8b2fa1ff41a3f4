// Attention matrices as a picture: the words of a text look at words that share letters with them, under three patterns; an SVG file with
// the words along its sides.
//     example_attention_map [TEXT FILE [PICTURE]]
#include <attn/attention/eigen.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>

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

/// Counts of letters, of length 2.5: words of the same letters have scores of 6.25, words with none in common 0.
Eigen::MatrixXf letters_of(const std::vector<std::string>& words) {
    Eigen::MatrixXf x = Eigen::MatrixXf::Zero(std::ssize(words), 26);
    for (Eigen::Index i = 0; i < x.rows(); ++i) {
        for (const char c : words[static_cast<std::size_t>(i)])
            if (std::isalpha(static_cast<unsigned char>(c))) x(i, std::tolower(c) - 'a') += 1;
        if (x.row(i).norm() > 0) x.row(i) *= 2.5f / x.row(i).norm();
    }
    return x;
}

struct map {
    std::string title;
    Eigen::MatrixXf weights;
};

/// No operator has code for looking at it: its matrix is what it makes of the unit vectors.
template <class P>
map map_of(const char* title, const P& pattern, const Eigen::MatrixXf& x) {
    const Eigen::MatrixXf identity = Eigen::MatrixXf::Identity(x.rows(), x.rows());
    return {title, attn::attend(attn::softmax_attention{.scale = 1, .pattern = pattern}, x, x, identity)};
}

std::string escaped(const std::string& word) {
    std::string text;
    for (const char c : word) text += c == '&' ? "&amp;" : c == '<' ? "&lt;" : std::string(1, c);
    return text;
}

/// The maps beside each other: a square for each weight, darker the larger its root is; queries down, keys across.
bool write_picture(const std::string& file, const std::vector<map>& maps, const std::vector<std::string>& words) {
    constexpr int cell = 10, room = 80, gap = 20;
    const auto side = static_cast<int>(words.size()) * cell, width = static_cast<int>(maps.size()) * (room + side + gap) + gap;
    std::ofstream out(file);
    out << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << width << "\" height=\"" << 2 * room + side
        << "\" font-family=\"sans-serif\" font-size=\"9\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
    for (std::size_t m = 0; m < maps.size(); ++m) {
        out << "<g transform=\"translate(" << static_cast<int>(m) * (room + side + gap) + room << ' ' << room + 40 << ")\">\n"
            << "<text y=\"-80\" font-size=\"14\">" << maps[m].title << "</text>\n"
            << "<text y=\"-60\">keys \xE2\x86\x92</text>\n"
            << "<text x=\"" << -room + 20 << "\" y=\"-6\">queries \xE2\x86\x93</text>\n"
            << "<rect width=\"" << side << "\" height=\"" << side << "\" fill=\"none\" stroke=\"#c0c0c0\"/>\n";
        for (Eigen::Index i = 0; i < maps[m].weights.rows(); ++i) {
            const auto word = escaped(words[static_cast<std::size_t>(i)]);
            const auto at = static_cast<int>(i) * cell;
            out << "<text text-anchor=\"end\" x=\"-3\" y=\"" << at + 8 << "\">" << word << "</text><text transform=\"translate(" << at + 8
                << " -3) rotate(-90)\">" << word << "</text>\n";
            for (Eigen::Index j = 0; j < maps[m].weights.cols(); ++j)
                if (const auto weight = maps[m].weights(i, j); weight > 0)
                    out << "<rect x=\"" << static_cast<int>(j) * cell << "\" y=\"" << at << "\" width=\"" << cell << "\" height=\"" << cell
                        << "\" fill=\"#1f4e9c\" fill-opacity=\"" << std::sqrt(weight) << "\"/>\n";
        }
        out << "</g>\n";
    }
    out << "</svg>\n";
    return static_cast<bool>(out.flush());
}

} // namespace

int main(int count, char** arguments) {
    std::vector<std::string> words;
    const auto read = [&](std::istream&& text) {
        for (std::string word; words.size() < 64 && text >> word;) words.push_back(word);
    };
    if (count > 1)
        read(std::ifstream(arguments[1]));
    else
        read(std::istringstream(sample));
    if (words.empty()) return std::puts("no words to read"), 1;

    const Eigen::MatrixXf x = letters_of(words);
    const std::vector<map> maps{map_of("dense", attn::dense{}, x), map_of("causal", attn::causal{}, x),
                                map_of("local{3, 3}", attn::pattern::local{3, 3}, x)};

    const std::string picture = count > 2 ? arguments[2] : "attention_map.svg";
    if (!write_picture(picture, maps, words)) return std::printf("cannot write %s\n", picture.c_str()), 1;
    std::printf("%s: %zu x %zu words, each row a query that looks at the keys of the columns\n", picture.c_str(), words.size(),
                words.size());

    // Every word looks most at itself; at which other word then.
    std::printf("\n%-14s", "looks most at");
    for (const auto& m : maps) std::printf("  %12s", m.title.c_str());
    std::puts("");
    for (Eigen::Index i = 0; i < std::min<Eigen::Index>(8, x.rows()); ++i) {
        std::printf("%-14s", words[static_cast<std::size_t>(i)].c_str());
        for (const auto& m : maps) {
            Eigen::RowVectorXf others = m.weights.row(i);
            for (Eigen::Index j = 0; j < x.rows(); ++j)
                if (words[static_cast<std::size_t>(j)] == words[static_cast<std::size_t>(i)]) others[j] = 0;
            Eigen::Index best = 0;
            std::printf("  %12s", others.maxCoeff(&best) > 0 ? words[static_cast<std::size_t>(best)].c_str() : "-");
        }
        std::puts("");
    }
}
