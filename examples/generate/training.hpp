// A character model is trained: bytes for tokens, and attn's own gradients.
#pragma once

#include "../adamw.hpp"
#include "checkpoint.hpp"

#include <chrono>
#include <cstdio>
#include <functional>
#include <random>

namespace generate {

/// The character model: four blocks of 128 channels, and a window of 256 bytes, which a text may be longer than.
inline model_config character_model() {
    model_config c{
        .channels = 128, .hidden = 344, .layers = 4, .heads = 4, .kv_heads = 4, .head_channels = 32, .vocabulary = 256, .positions = 65536};
    c.window = 256;
    c.frequencies = attn::rotary_frequencies::geometric(c.head_channels);
    c.is_tied = true;
    return c;
}

/// A model that learns: weights, their gradients, and the optimiser.
class trainer {
public:
    trainer(const model_config& config, index_t batch, index_t context, attn::thread_pool& threads)
        : config_(config), batch_(batch), context_(context), threads_(threads), run_(threads),
          rotation_(context, config.frequencies, config.pairs) {
        const auto spread_of = [](index_t inputs) { return 1 / std::sqrt(static_cast<float>(inputs)); };
        add(embedding_name, {config.vocabulary, config.channels}, 0.05f);
        for (index_t l = 0; l < config.layers; ++l) {
            for (const auto& m : matrices_of(config))
                add(block_name(l) + m.name + ".weight", {m.outputs, m.inputs}, spread_of(m.inputs) / 2);
            for (const auto* norm : {attention_norm, feed_forward_norm}) add(block_name(l) + norm + ".weight", {config.channels}, 0);
        }
        add(std::string(last_norm) + ".weight", {config.channels}, 0);

        const attn::shape rows{.batch = batch, .tokens = context, .channels = config.channels};
        for (index_t l = 0; l <= config.layers; ++l) x_.emplace_back(rows);
        for (auto* t : {&normal_, &of_x_, &of_previous_}) *t = attn::tensor<float>(rows);
        of_scores_ = attn::tensor<float>({.batch = batch, .tokens = context, .channels = config.vocabulary});
        blocks_ = blocks_of(config, weights_, rotation_); // refer to the weights, which change where they are
        for (const auto& b : blocks_) kept_.emplace_back(attn::kept_bytes(b, {.tokens = x_[0]}));
    }

    /// The mean loss of the next token, in nats, on texts of context + 1 tokens each, one after the other; and its gradient by all weights.
    double differentiate(std::span<const index_t> texts) {
        const auto embedding = embedding_of(config_, weights_);
        const auto norm = norm_of(config_, weights_);
        const auto head = head_of(config_, weights_);
        for (index_t b = 0; b < batch_; ++b)
            embed(embedding, texts.subspan(place(b), static_cast<std::size_t>(context_)), x_[0].view().row(b, 0, 0));
        for (std::size_t l = 0; l < blocks_.size(); ++l) attn::forward(blocks_[l], {.tokens = x_[l]}, x_[l + 1], kept_[l], run_);
        attn::normalise(norm, x_.back(), normal_, run_);
        attn::forward(head, {.tokens = normal_}, of_scores_, run_);
        const auto loss = differentiate_loss(texts);

        const auto of_embedding = gradients_.writable<float>(embedding_name);
        attn::backward(head, {.tokens = normal_}, nothing_, of_scores_, {.tokens = of_previous_, .parameters = {.weight = of_embedding}},
                       run_);
        auto of_norm = attn::get_gradients(norm, gradients_, last_norm);
        of_norm.x = of_x_;
        attn::backward(norm, x_.back(), of_previous_, of_norm, run_);
        for (auto l = blocks_.size(); l-- > 0; std::swap(of_x_, of_previous_))
            attn::backward(blocks_[l], {.tokens = x_[l]}, kept_[l], of_x_,
                           {.tokens = of_previous_,
                            .parameters = attn::get_gradients(blocks_[l], gradients_, block_name(static_cast<index_t>(l)) + ".")},
                           run_);
        for (index_t b = 0; b < batch_; ++b)
            for (index_t i = 0; i < context_; ++i)
                for (index_t c = 0; c < config_.channels; ++c)
                    of_embedding(0, 0, texts[place(b) + static_cast<std::size_t>(i)], c) += of_x_(b, 0, i, c);
        return loss;
    }
    /// One step against the gradient.
    void learn(float rate) { optimiser_.step(weights_, gradients_, rate, threads_); }
    attn::parameters& weights() { return weights_; }
    attn::parameters& gradients() { return gradients_; }
    /// How many texts there are in a step, and of how many tokens.
    index_t batch() const { return batch_; }
    index_t context() const { return context_; }

private:
    /// Random numbers of that spread; ones without.
    void add(const std::string& name, const attn::parameters::extents& size, float spread) {
        gradients_.add<float>(name, size);
        weights_.add<float>(name, size);
        std::normal_distribution<float> normal(0, spread);
        std::ranges::generate(weights_.elements<float>(name), [&] { return spread > 0 ? normal(random_) : 1; });
    }
    std::size_t place(index_t text) const { return static_cast<std::size_t>(text * (context_ + 1)); }
    /// The mean of -log softmax(scores)[next token]; the scores become its gradient by them.
    double differentiate_loss(std::span<const index_t> texts) {
        const auto rows = batch_ * context_;
        std::vector<double> losses(static_cast<std::size_t>(rows));
        const auto of_row = [&](index_t r) {
            const auto b = r / context_, i = r % context_, next = texts[place(b) + static_cast<std::size_t>(i + 1)];
            const std::span row(of_scores_.view().row(b, 0, i), static_cast<std::size_t>(config_.vocabulary));
            const auto largest = std::ranges::max(row), score = row[static_cast<std::size_t>(next)];
            float sum = 0;
            for (auto& x : row) sum += x = std::exp(x - largest);
            for (auto& x : row) x /= sum * static_cast<float>(rows);
            row[static_cast<std::size_t>(next)] -= 1 / static_cast<float>(rows);
            losses[static_cast<std::size_t>(r)] = static_cast<double>(std::log(sum) + largest - score);
        };
        threads_.parallel_for(rows, of_row);
        double sum = 0;
        for (const auto loss : losses) sum += loss;
        return sum / static_cast<double>(rows);
    }

    model_config config_;
    index_t batch_, context_;
    attn::thread_pool& threads_;
    attn::execution run_;
    attn::rotary<float> rotation_;
    attn::parameters weights_, gradients_;
    adamw optimiser_{.slower = 0.99f, .decay = 0.1f};
    std::vector<block> blocks_;
    std::vector<attn::workspace> kept_;
    std::vector<attn::tensor<float>> x_; ///< before each block, and behind the last
    attn::tensor<float> normal_, of_x_, of_previous_, of_scores_;
    attn::workspace nothing_; ///< what a linear keeps
    std::mt19937 random_{3};
};

/// What a training was.
struct trained {
    index_t steps = 0;
    double loss = 0; ///< the mean of the last fifty steps, in nats a byte
};

/// Learns a text for so many minutes at most, or so many steps. The rate rises, and falls to nothing as the time does. Calls
/// tell(step, loss, minutes left) every second.
inline trained train(trainer& learner, std::string_view text, double minutes, index_t most_steps,
                     const std::function<void(index_t, double, double)>& tell) {
    const auto context = learner.context();
    if (std::ssize(text) <= context) throw std::runtime_error("the text has " + std::to_string(text.size()) + " bytes: too few to learn");
    using clock = std::chrono::steady_clock;
    const auto began = clock::now();
    std::mt19937 random(4);
    std::vector<index_t> texts;
    std::vector<double> losses;
    trained result;
    for (double told = -1; result.steps < most_steps; ++result.steps) {
        const auto gone = std::chrono::duration<double, std::ratio<60>>(clock::now() - began).count();
        const auto part = std::max(gone / minutes, static_cast<double>(result.steps) / static_cast<double>(most_steps));
        if (part >= 1) break;
        texts.clear();
        for (index_t b = 0; b < learner.batch(); ++b) {
            const auto first = random() % static_cast<std::size_t>(std::ssize(text) - context);
            for (const char byte : text.substr(first, static_cast<std::size_t>(context + 1)))
                texts.push_back(static_cast<unsigned char>(byte));
        }
        const auto rate =
            3e-3 * std::min(1.0, 0.001 + static_cast<double>(result.steps) / 50) * (1 + std::cos(std::numbers::pi * part)) / 2;
        losses.push_back(learner.differentiate(texts));
        learner.learn(static_cast<float>(rate));
        const auto latest = std::span(losses).last(std::min<std::size_t>(50, losses.size()));
        result.loss = 0;
        for (const auto loss : latest) result.loss += loss / static_cast<double>(latest.size());
        if (gone - told < 1.0 / 60) continue;
        tell(result.steps + 1, result.loss, minutes - gone);
        told = gone;
    }
    return result;
}

/// Writes what read_folder reads: the character model is one like any other, whose tokens are bytes.
inline void write_character_model(const std::string& folder, const model_config& c, const attn::parameters& weights) {
    std::filesystem::create_directories(folder);
    const auto write = [&](const char* name, const std::string& text) {
        const auto path = folder + "/" + name;
        if (std::ofstream out(path, std::ios::binary); !(out << text).flush()) throw file_error(path + ": cannot be written");
    };
    std::string config = std::string("{\n  \"model_type\": ") + (c.window ? "\"mistral\"" : "\"llama\"");
    const auto add = [&](const char* name, const std::string& value) {
        config.append(",\n  \"").append(name).append("\": ").append(value);
    };
    add("hidden_size", std::to_string(c.channels));
    add("intermediate_size", std::to_string(c.hidden));
    add("num_hidden_layers", std::to_string(c.layers));
    add("num_attention_heads", std::to_string(c.heads));
    add("num_key_value_heads", std::to_string(c.kv_heads));
    add("head_dim", std::to_string(c.head_channels));
    add("vocab_size", std::to_string(c.vocabulary));
    add("max_position_embeddings", std::to_string(c.positions));
    if (c.window) add("sliding_window", std::to_string(*c.window));
    add("rms_norm_eps", "1e-5");
    add("rope_theta", "10000");
    add("tie_word_embeddings", "true");
    write("config.json", config + "\n}\n");

    std::string vocabulary;
    for (const auto& [code, byte] : byte_level_bpe::byte_of_code()) {
        std::string name;
        json::append_utf8(name, code);
        if (byte == '"' || byte == '\\') name.insert(0, "\\");
        vocabulary.append(vocabulary.empty() ? "" : ", ").append("\"" + name + "\": " + std::to_string(static_cast<unsigned char>(byte)));
    }
    write("tokenizer.json",
          "{\n  \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false},\n  \"model\": {\"type\": \"BPE\", \"vocab\": {" +
              vocabulary + "}, \"merges\": []}\n}\n");
    attn::write_safetensors(folder + "/model.safetensors", weights);
}

/// All files of a folder, one after the other, without what lines are indented by; links are left out, which lead to others of them.
inline std::string read_texts(const std::string& folder) {
    if (!std::filesystem::is_directory(folder)) throw file_error(folder + ": is no folder of texts to learn");
    std::set<std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
        if (entry.is_regular_file() && !entry.is_symlink()) files.insert(entry.path().string());
    std::string all;
    for (const auto& file : files)
        for (const char c : read_file(file) + "\n")
            if (const bool begins = all.empty() || all.back() == '\n'; !begins || (c != ' ' && c != '\t')) all += c;
    return all;
}

} // namespace generate
