// BERT's encoder from its file: sentences of different lengths as one ragged batch, without padding, and how alike they are.
//     example_encoder MODEL.safetensors HEADS "101 7592 2088 102" "101 2204 2851 102" ...      sentences as the numbers of their tokens
// Without arguments, a small model of random weights and three sentences.
#include <attn/layer/named_layers.hpp>
#include <attn/layer/ragged.hpp>
#include <attn/layer/safetensors.hpp>
#include <attn/layer/transformer_block.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/parallel/thread_pool.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using sentence = std::vector<attn::index_t>;
using block = attn::transformer_block<attn::layer_norm<float>, attn::multi_head<float>, attn::feed_forward<float>>;

/// The encoder, by the names of BERT's file, with "bert." in front of them or without.
struct encoder {
    attn::tensor_view<const float> words, places, kinds;
    attn::layer_norm<float> embedding_norm;
    std::vector<block> blocks;

    encoder(attn::parameters& weights, attn::index_t heads) {
        const std::string all = weights.contains("bert.embeddings.word_embeddings.weight") ? "bert." : "", first = all + "embeddings.";
        const auto table = [&](const std::string& name) { return weights.get<float>(first + name, weights.size(first + name)); };
        const attn::layer_norm<float> norm{.eps = 1e-12};
        words = table("word_embeddings.weight");
        places = table("position_embeddings.weight");
        kinds = table("token_type_embeddings.weight");
        embedding_norm = attn::get_norm(weights, first + "LayerNorm", norm);
        for (int i = 0;; ++i) {
            const auto prefix = all + "encoder.layer." + std::to_string(i) + ".";
            if (!weights.contains(prefix + "output.LayerNorm.weight")) break;
            blocks.push_back(attn::get_transformer_block(weights, prefix, heads, norm));
        }
    }

    /// Each sentence as a row: the mean of its tokens' last hidden rows.
    attn::tensor<float> operator()(const std::vector<sentence>& batch, attn::thread_pool& threads) const {
        std::vector<attn::index_t> starts{0};
        for (const auto& s : batch) starts.push_back(starts.back() + std::ssize(s));
        const auto channels = words.shape().channels;
        attn::tensor<float> x({.tokens = starts.back(), .channels = channels});
        float* row = x.data();
        for (const auto& s : batch)
            for (attn::index_t i = 0; i < std::ssize(s); ++i, row += channels) {
                const auto word = s[static_cast<std::size_t>(i)];
                if (word < 0 || word >= words.shape().tokens || i >= places.shape().tokens)
                    throw std::runtime_error("the model has no token " + std::to_string(word) + " at place " + std::to_string(i));
                for (attn::index_t c = 0; c < channels; ++c) row[c] = words(0, 0, word, c) + places(0, 0, i, c) + kinds(0, 0, 0, c);
            }
        attn::normalise(embedding_norm, x, x);
        for (const auto& b : blocks) attn::forward(b, attn::ragged{starts}, {.tokens = x}, x, threads);

        attn::tensor<float> means({.tokens = std::ssize(batch), .channels = channels});
        for (attn::index_t e = 0; e < std::ssize(batch); ++e) {
            const auto first = starts[static_cast<std::size_t>(e)], end = starts[static_cast<std::size_t>(e) + 1];
            for (attn::index_t i = first; i < end; ++i)
                for (attn::index_t c = 0; c < channels; ++c) means(0, 0, e, c) += x(0, 0, i, c) / static_cast<float>(end - first);
        }
        return means;
    }
};

/// A model of two layers, 4 heads and 32 channels, by BERT's names.
attn::parameters random_model() {
    attn::parameters weights;
    std::mt19937 random(1);
    const auto add = [&](const std::string& name, const attn::parameters::extents& size, float middle = 0) {
        const auto t = weights.add<float>(name, size);
        std::generate_n(t.data(), t.shape().size(), [&] { return middle + static_cast<float>(random()) / 0x1p33f - 0.25f; });
    };
    const auto add_norm = [&](const std::string& name) { add(name + ".weight", {32}, 1), add(name + ".bias", {32}); };
    add("embeddings.word_embeddings.weight", {100, 32});
    add("embeddings.position_embeddings.weight", {64, 32});
    add("embeddings.token_type_embeddings.weight", {2, 32});
    add_norm("embeddings.LayerNorm");
    for (const std::string layer : {"encoder.layer.0.", "encoder.layer.1."}) {
        for (const std::string name : {"attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"})
            add(layer + name + ".weight", {32, 32}), add(layer + name + ".bias", {32});
        add(layer + "intermediate.dense.weight", {64, 32}), add(layer + "intermediate.dense.bias", {64});
        add(layer + "output.dense.weight", {32, 64}), add(layer + "output.dense.bias", {32});
        add_norm(layer + "attention.output.LayerNorm"), add_norm(layer + "output.LayerNorm");
    }
    return weights;
}

sentence numbers_of(const std::string& text) {
    std::istringstream words(text);
    sentence s;
    for (attn::index_t word; words >> word;) s.push_back(word);
    if (!words.eof() || s.empty()) throw std::runtime_error("\"" + text + "\" is not the numbers of tokens");
    return s;
}

} // namespace

int main(int count, char** arguments) try {
    auto weights = count > 2 ? attn::read_safetensors(arguments[1]) : random_model();
    const encoder bert(weights, count > 2 ? std::stoi(arguments[2]) : 4);
    std::vector<sentence> batch;
    for (int i = 3; i < count; ++i) batch.push_back(numbers_of(arguments[i]));
    if (batch.empty()) batch = {{1, 17, 42, 8, 99, 2}, {1, 17, 42, 9, 99, 23, 2}, {1, 64, 5, 2}};

    attn::thread_pool threads;
    const auto rows = bert(batch, threads);
    const auto channels = rows.shape().channels;
    std::printf("%zu layers, %zu sentences, rows of %td numbers; how alike they are:\n", bert.blocks.size(), batch.size(), channels);
    for (attn::index_t i = 0; i < rows.shape().tokens; ++i) {
        for (attn::index_t j = 0; j < rows.shape().tokens; ++j) {
            double product = 0, of_i = 0, of_j = 0;
            for (attn::index_t c = 0; c < channels; ++c) {
                const double a = static_cast<double>(rows(0, 0, i, c)), b = static_cast<double>(rows(0, 0, j, c));
                product += a * b, of_i += a * a, of_j += b * b;
            }
            std::printf("%6.2f", product / std::sqrt(of_i * of_j));
        }
        std::printf("\n");
    }
    bool same = true;
    for (attn::index_t e = 0; e < rows.shape().tokens; ++e) {
        const auto alone = bert({batch[static_cast<std::size_t>(e)]}, threads);
        same = same && std::equal(alone.data(), alone.data() + channels, rows.view().row(0, 0, e));
    }
    std::printf("in a batch and alone a sentence has the same bits: %s\n", same ? "yes" : "no");
} catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
}
