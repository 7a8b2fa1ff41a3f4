// Linformer rests on an observation: the singular values of a softmax attention matrix P fall so fast that 128 of 512 hold nearly their
// whole sum. That is so of trained models (Wang et al. 2020, figure 1), and here of words whose vectors, as trained ones do, have most of
// their length in few directions; it is less so where all directions count alike. Beside it, how near to P v outputs come that are made of
// k rows: by P's best approximation of rank k, which takes all of P, and by Linformer with keys and values averaged to k rows, which
// nobody trained.
//     example_spectrum [FILE]      (README.md, if none is named)
#include <attn/attn.hpp>

#include <Eigen/Eigenvalues>

#include <cctype>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr Eigen::Index width = 256, channels = 64; // of a word's vector, and of a head

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

/// Signs from a hash of the word plus the sinusoids of its place, slow ones first; direction c times (c + 1)^-fall.
Eigen::MatrixXf vectors_of(const std::vector<std::string>& words, float fall) {
    Eigen::MatrixXf x(std::ssize(words), width);
    for (Eigen::Index i = 0; i < x.rows(); ++i) {
        std::uint64_t hash = 14695981039346656037u; // FNV-1a
        for (const char c : words[static_cast<std::size_t>(i)]) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
        for (Eigen::Index c = 0; c < width; ++c) {
            hash = hash * 6364136223846793005u + 1442695040888963407u;
            const auto slowness = static_cast<float>((width - 1 - c) / 2 * 2) / static_cast<float>(width);
            const auto angle = static_cast<float>(i) * std::pow(1e-4f, slowness);
            const auto place = std::sqrt(2.0f) * (c % 2 == 0 ? std::sin(angle) : std::cos(angle));
            x(i, c) = ((hash >> 63 ? 1.0f : -1.0f) + place) * std::pow(static_cast<float>(c + 1), -fall);
        }
    }
    return x;
}

/// One head over the words: queries, keys and values by random linears, scores of standard deviation 2.
struct head {
    Eigen::MatrixXf q, k, v;
    double scale;
};

head head_of(const Eigen::MatrixXf& x) {
    std::mt19937 random(1);
    const auto mapped = [&]() -> Eigen::MatrixXf {
        return x * Eigen::MatrixXf::NullaryExpr(width, channels, [&] { return static_cast<float>(random()) / 0x1p31f - 1; });
    };
    head h{mapped(), mapped(), mapped(), 0};
    const Eigen::ArrayXXf scores = h.q * h.k.transpose();
    h.scale = 2 / static_cast<double>(std::sqrt((scores - scores.mean()).square().mean()));
    return h;
}

double percent(double share) { return 100 * share; }

/// What k singular values hold of the sum of all, and the errors of two outputs made of k rows; all in percent.
struct findings {
    double share, best, pooled;
};

/// Prints what is seen of one head at every k, and returns what is seen at `at`.
findings look_at(const head& h, Eigen::Index at) {
    const auto n = h.q.rows();
    const attn::softmax_attention<> full{.scale = h.scale};
    // The attention matrix is what comes of the unit vectors as values.
    const Eigen::MatrixXf p = attn::attend(full, h.q, h.k, Eigen::MatrixXf(Eigen::MatrixXf::Identity(n, n)));
    // Squares of the singular values, and the right singular vectors, the smallest first.
    const Eigen::MatrixXd wide = p.cast<double>();
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> squares(wide.transpose() * wide);
    const Eigen::VectorXd singular = squares.eigenvalues().cwiseMax(0).cwiseSqrt();
    const Eigen::MatrixXf exact = attn::attend(full, h.q, h.k, h.v);
    const auto error = [&](const Eigen::MatrixXf& out) { return percent(static_cast<double>((out - exact).norm() / exact.norm())); };

    findings found{};
    std::printf("    k   first k singular values   error of out: best rank k of P   mean pooling to k rows\n");
    for (Eigen::Index k = n / 32; k < n; k *= 2) {
        const Eigen::MatrixXf right = squares.eigenvectors().rightCols(k).cast<float>();
        const Eigen::MatrixXf best = p * (right * (right.transpose() * h.v));
        const attn::linformer_attention pooled{.key_projection = attn::mean_pooling{k}, .scale = h.scale};
        const findings seen{percent(singular.tail(k).sum() / singular.sum()), error(best), error(attn::attend(pooled, h.q, h.k, h.v))};
        std::printf("%5td %23.1f %% %31.2f %% %22.1f %%\n", k, seen.share, seen.best, seen.pooled);
        if (k == at) found = seen;
    }
    return found;
}

} // namespace

int main(int count, char** arguments) {
    const char* const file = count > 1 ? arguments[1] : "README.md";
    const auto words = words_of(file, 512);
    const auto n = std::ssize(words);
    if (n < 64) return std::fprintf(stderr, "%s: no text of at least 64 words\n", file), 1;

    const auto k = n / 32 * 8;
    std::printf("%td words, directions that fall as 1 / c\n", n);
    const auto falling = look_at(head_of(vectors_of(words, 1)), k);
    std::printf("\n%td words, directions that count alike\n", n);
    const auto alike = look_at(head_of(vectors_of(words, 0)), k);
    std::printf("\n%td of %td singular values hold %.0f %% of the sum where directions fall, %.0f %% where they count alike.\n", k, n,
                falling.share, alike.share);
    std::printf("Rank %td could give out with an error of %.2f %% and %.2f %%; averages of neighbours, which know nothing of P, have\n"
                "%.0f %% and %.0f %%. Linformer trains its projections.\n",
                k, falling.best, alike.best, falling.pooled, alike.pooled);
}
