// The network: a small vision transformer, around softmax or simplified linear attention, with LayerNorm or PRepBN.
#pragma once

#include "../adamw.hpp"
#include "digits.hpp"
#include "weights.hpp"

#include <attn/attention/simplified_linear_attention.hpp>
#include <attn/attention/simplified_linear_backward.hpp>
#include <attn/layer/transformer_block.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/norm/train_backward.hpp>
#include <attn/parallel/thread_pool.hpp>

namespace train_digits {

constexpr index_t channels = 64, heads = 4, hidden = 128, depth = 2, batch = 50;

using attention_norm = attn::layer_norm<float>;
using progressive = attn::progressive_rep_batch_norm<attn::layer_norm<float>>;

/// Softmax attention has no weights of its own.
struct softmax_mixing {
    using attention = attn::softmax_attention<>;

    static void add(weights&, const std::string&) {}
    static attention of(const weights&, const std::string&) { return {}; }
    static auto gradients(weights&, const std::string&) { return attn::gradients_of<attention, float>{}; }
};

/// Simplified linear attention with a convolution over the grid of patches.
struct linear_mixing {
    using attention = attn::simplified_linear_attention<>;

    static constexpr index_t kernel = 3;
    static void add(weights& w, const std::string& name) {
        w.add(name + ".convolution.weight", {1, channels / heads, kernel, kernel}, 1.0f / kernel);
        w.add_constant(name + ".convolution.bias", channels / heads, 0);
    }
    static attention of(const weights& w, const std::string& name) {
        return {.convolution = {.weights = w.tensor(name + ".convolution.weight"), .bias = w.row(name + ".convolution.bias"), .height = grid, .width = grid}};
    }
    static auto gradients(weights& w, const std::string& name) {
        attn::gradients_of<attention, float> g;
        g.convolution.weights = w.gradients.writable<float>(name + ".convolution.weight");
        g.convolution.bias = w.gradients.elements<float>(name + ".convolution.bias");
        return g;
    }
};

/// Patches to tokens, blocks, the mean of the tokens, and a linear layer to ten scores.
template <class Mixing>
class network {
public:
    template <class N>
    using block = attn::transformer_block<N, attn::multi_head<float, typename Mixing::attention>, attn::feed_forward<float>>;

    explicit network(bool is_progressive) : is_progressive_(is_progressive) {
        w_.add_linear("patch", channels, pixels);
        w_.add("position", {patches, channels}, 0.02f);
        for (index_t l = 0; l < depth; ++l) {
            for (const std::string name : {".q", ".k", ".v", ".out"}) w_.add_linear(named(l) + name, channels, channels);
            w_.add_linear(named(l) + ".up", hidden, channels);
            w_.add_linear(named(l) + ".down", channels, hidden);
            Mixing::add(w_, named(l));
            for (const std::string norm : {".norm1", ".norm2"}) {
                w_.add_norm(named(l) + norm, channels);
                if (!is_progressive) continue;
                w_.add_norm(named(l) + norm + ".rep", channels);
                w_.add_constant(named(l) + norm + ".rep.eta", 1, 0.5f);
            }
        }
        w_.add_linear("head", classes, channels);
        statistics_.assign(2 * depth, attn::batch_norm_statistics(channels));
    }

    /// One step on some images: their mean loss.
    double learn(const tensor_view<const float>& images, const int* labels, double gamma, float rate, attn::thread_pool& threads) {
        const auto loss = is_progressive_ ? learn(training_blocks(gamma), images, labels, threads) : learn(plain_blocks(), images, labels, threads);
        optimiser_.step(w_.values, w_.gradients, rate, threads);
        return loss;
    }
    /// The scores of images, by blocks of any norm.
    template <class N>
    tensor<float> scores(const std::vector<block<N>>& blocks, const tensor_view<const float>& images, attn::thread_pool& threads) const {
        auto x = attn::forward(w_.linear("patch"), {.tokens = images, .residual = positions(images.shape().batch)}, threads);
        for (const auto& b : blocks) attn::forward(b, {.tokens = x}, x, threads);
        const auto mean = mean_of(x);
        return attn::forward(w_.linear("head"), {.tokens = mean}, threads);
    }
    /// Takes the running statistics anew, with the weights as they are: the mean over all batches.
    void recalibrate(const digits& data, attn::thread_pool& threads) {
        statistics_.assign(2 * depth, attn::batch_norm_statistics(channels));
        auto blocks = training_blocks(0);
        for (auto& b : blocks) b.attention_norm.norm.rep.batch.momentum = b.feed_forward_norm.norm.rep.batch.momentum = {};
        for (index_t first = 0; first + batch <= data.count(); first += batch) {
            const auto tokens = data.tokens(first, batch);
            scores(blocks, tokens, threads);
        }
    }

    bool is_progressive() const { return is_progressive_; }
    std::vector<block<attention_norm>> plain_blocks() const {
        return blocks<attention_norm>([this](const std::string& name, index_t) { return attn::get_norm<attention_norm>(w_.values, name); });
    }
    std::vector<block<progressive>> progressive_blocks() const {
        return blocks<progressive>([this](const std::string& name, index_t number) {
            auto norm = progressive_norm(name);
            norm.rep.batch.mean = statistics_[static_cast<std::size_t>(number)].mean;
            norm.rep.batch.variance = statistics_[static_cast<std::size_t>(number)].variance;
            return norm;
        });
    }

private:
    static std::string named(index_t layer) { return "block" + std::to_string(layer); }
    tensor_view<const float> positions(index_t images) const {
        return {w_.tensor("position").data(), {images, 1, patches, channels}, {0, 0, channels, 1}}; // the same for every image
    }
    progressive progressive_norm(const std::string& name) const {
        return {.norm = attn::get_norm<attention_norm>(w_.values, name),
                .rep = {.batch = attn::get_norm<attn::batch_norm<float>>(w_.values, name + ".rep"), .eta = static_cast<double>(w_.row(name + ".rep.eta")[0])}};
    }
    template <class N, class F>
    std::vector<block<N>> blocks(const F& norm_of) const {
        std::vector<block<N>> all;
        for (index_t l = 0; l < depth; ++l) {
            all.push_back({.attention_norm = norm_of(named(l) + ".norm1", 2 * l),
                           .attention = attn::get_multi_head<float>(w_.values, named(l) + ".", heads, Mixing::of(w_, named(l))),
                           .feed_forward_norm = norm_of(named(l) + ".norm2", 2 * l + 1),
                           .feed_forward = attn::get_feed_forward<float>(w_.values, named(l) + ".")});
        }
        return all;
    }
    std::vector<block<attn::in_training<progressive>>> training_blocks(double gamma) {
        return blocks<attn::in_training<progressive>>([this, gamma](const std::string& name, index_t number) {
            return attn::in_training<progressive>{progressive_norm(name), &statistics_[static_cast<std::size_t>(number)], gamma};
        });
    }
    attn::norm_gradients<float> gradients_of(const attention_norm& norm, const std::string& name) { return attn::get_gradients(norm, w_.gradients, name); }
    attn::in_training<progressive>::gradients gradients_of(const attn::in_training<progressive>& training, const std::string& name) {
        return {.norm = attn::get_gradients(training.norm.norm, w_.gradients, name), .rep = attn::get_gradients(training.norm.rep, w_.gradients, name + ".rep")};
    }
    template <class N>
    typename block<N>::gradients gradients_of(const block<N>& b, index_t layer) {
        const auto name = named(layer);
        auto attention = attn::get_gradients(b.attention, w_.gradients, name + ".");
        attention.attention = Mixing::gradients(w_, name);
        return {.attention_norm = gradients_of(b.attention_norm, name + ".norm1"),
                .attention = attention,
                .feed_forward_norm = gradients_of(b.feed_forward_norm, name + ".norm2"),
                .feed_forward = attn::get_gradients(b.feed_forward, w_.gradients, name + ".")};
    }

    /// The mean of each image's tokens, (1, 1, images, channels).
    static tensor<float> mean_of(const tensor<float>& x) {
        tensor<float> mean({.tokens = x.shape().batch, .channels = channels});
        std::fill_n(mean.data(), mean.shape().size(), 0.0f);
        for (index_t b = 0; b < x.shape().batch; ++b)
            for (index_t i = 0; i < patches; ++i)
                for (index_t c = 0; c < channels; ++c) mean(0, 0, b, c) += x(b, 0, i, c) / patches;
        return mean;
    }
    /// The mean of -log softmax(scores)[label], and its gradient.
    static double cross_entropy(const tensor<float>& scores, const int* labels, tensor<float>& gradient) {
        double loss = 0;
        const auto images = scores.shape().tokens;
        for (index_t b = 0; b < images; ++b) {
            const float* const row = scores.view().row(0, 0, b);
            const auto largest = *std::max_element(row, row + classes);
            float sum = 0;
            for (index_t c = 0; c < classes; ++c) sum += std::exp(row[c] - largest);
            for (index_t c = 0; c < classes; ++c)
                gradient(0, 0, b, c) = (std::exp(row[c] - largest) / sum - (c == labels[b] ? 1 : 0)) / static_cast<float>(images);
            loss += static_cast<double>(std::log(sum) + largest - row[labels[b]]) / static_cast<double>(images);
        }
        return loss;
    }
    /// Forward, loss, and the gradients of all weights.
    template <class N>
    double learn(const std::vector<block<N>>& blocks, const tensor_view<const float>& images, const int* labels, attn::thread_pool& threads) {
        const auto embedding = w_.linear("patch"), head = w_.linear("head");
        std::vector<tensor<float>> x;
        std::vector<attn::workspace> kept(static_cast<std::size_t>(depth));
        x.push_back(attn::forward(embedding, {.tokens = images, .residual = positions(images.shape().batch)}, threads));
        for (std::size_t l = 0; l < blocks.size(); ++l) {
            x.emplace_back(x.back().shape());
            kept[l].reserve(attn::kept_bytes(blocks[l], {.tokens = x[l]}));
            attn::forward(blocks[l], {.tokens = x[l]}, x[l + 1], kept[l], threads);
        }
        const auto mean = mean_of(x.back());
        const auto scores = attn::forward(head, {.tokens = mean}, threads);
        tensor<float> of_scores(scores.shape()), of_mean(mean.shape()), of_x(x[0].shape()), of_previous(x[0].shape());
        const auto loss = cross_entropy(scores, labels, of_scores);

        attn::backward(head, {.tokens = mean}, nothing_, of_scores, {.tokens = of_mean, .parameters = attn::get_gradients(head, w_.gradients, "head")}, threads);
        for (index_t b = 0; b < images.shape().batch; ++b)
            for (index_t i = 0; i < patches; ++i)
                for (index_t c = 0; c < channels; ++c) of_x(b, 0, i, c) = of_mean(0, 0, b, c) / patches;
        for (auto l = blocks.size(); l-- > 0; std::swap(of_x, of_previous))
            attn::backward(blocks[l], {.tokens = x[l]}, kept[l], of_x, {.tokens = of_previous, .parameters = gradients_of(blocks[l], static_cast<index_t>(l))}, threads);
        attn::backward(embedding, {.tokens = images}, nothing_, of_x, {.parameters = attn::get_gradients(embedding, w_.gradients, "patch")}, threads);
        const auto of_positions = w_.gradients.elements<float>("position");
        std::ranges::fill(of_positions, 0.0f);
        for (index_t b = 0; b < images.shape().batch; ++b)
            for (index_t e = 0; e < patches * channels; ++e) of_positions[static_cast<std::size_t>(e)] += of_x.data()[b * patches * channels + e];
        return loss;
    }

    bool is_progressive_;
    weights w_;
    adamw optimiser_{.decay = 0.05f};
    std::vector<attn::batch_norm_statistics> statistics_; ///< of each norm
    attn::workspace nothing_;                             ///< what a linear keeps
};

} // namespace train_digits
