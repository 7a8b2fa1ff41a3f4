// A model of the LLaMA kind: its sizes, its blocks, which refer to weights by their usual names, and its run beside a cache.
#pragma once

#include <attn/attention/sparse_attention.hpp>
#include <attn/layer/cached.hpp>
#include <attn/layer/named_layers.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/parallel/thread_pool.hpp>

#include <numbers>
#include <optional>

namespace generate {

using attn::index_t;

/// What a config.json says.
struct model_config {
    index_t channels = 0, hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_channels = 0, vocabulary = 0;
    index_t positions = 0;              ///< the longest text
    std::optional<index_t> window = {}; ///< how many tokens a token sees, itself too, if not all before
    double eps = 1e-5;
    attn::rotary_frequencies frequencies = {};
    attn::rotary_pairs pairs = attn::rotary_pairs::half_split;
    bool is_tied = false;           ///< the last linear is the embedding
    std::vector<index_t> ends = {}; ///< tokens that end a text
};

/// LLaMA 3's: what turns slowly is interpolated, as if the text were `factor` times shorter; fast pairs stay, and those between are mixed.
inline attn::rotary_frequencies llama3_frequencies(attn::rotary_frequencies f, double factor, double low, double high,
                                                   double trained_length) {
    for (auto& frequency : f.values) {
        const auto turns = trained_length * frequency / (2 * std::numbers::pi);
        const auto stays = std::clamp((turns - low) / (high - low), 0.0, 1.0);
        frequency *= stays + (1 - stays) / factor;
    }
    return f;
}

using causal_window = decltype(attn::sliding_window(1));
using attention = attn::softmax_attention<causal_window>;
using block = attn::transformer_block<attn::rms_norm<float>, attn::multi_head<float, attention>, attn::feed_forward<float, attn::silu>>;

/// The name of a block, and those of its linears and norms within it.
inline std::string block_name(index_t layer) { return "model.layers." + std::to_string(layer); }
struct matrix {
    enum number : std::size_t { q, k, v, out, gate, up, down }; ///< among matrices_of
    const char* name;
    index_t outputs, inputs;
};
inline std::vector<matrix> matrices_of(const model_config& c) {
    const auto q = c.heads * c.head_channels, kv = c.kv_heads * c.head_channels;
    return {{".self_attn.q_proj", q, c.channels},    {".self_attn.k_proj", kv, c.channels},    {".self_attn.v_proj", kv, c.channels},
            {".self_attn.o_proj", c.channels, q},    {".mlp.gate_proj", c.hidden, c.channels}, {".mlp.up_proj", c.hidden, c.channels},
            {".mlp.down_proj", c.channels, c.hidden}};
}
inline constexpr const char *attention_norm = ".input_layernorm", *feed_forward_norm = ".post_attention_layernorm",
                            *last_norm = "model.norm", *embedding_name = "model.embed_tokens.weight", *head_name = "lm_head.weight";

/// The norm behind the last block.
inline attn::rms_norm<float> norm_of(const model_config& c, attn::parameters& weights) {
    return attn::get_norm(weights, last_norm, attn::rms_norm<float>{.eps = c.eps});
}
/// The blocks of a model. The rotation outlives them, as the weights do.
inline std::vector<block> blocks_of(const model_config& c, attn::parameters& weights, const attn::rotary<float>& rotation) {
    const attention of_window{.pattern = attn::sliding_window(c.window.value_or(attn::farthest_position))};
    std::vector<block> all;
    for (index_t l = 0; l < c.layers; ++l) {
        auto b = attn::get_transformer_block(weights, block_name(l) + ".", c.heads, attn::rms_norm<float>{.eps = c.eps}, of_window, attn::silu{});
        b.attention.rotation = &rotation;
        all.push_back(b);
    }
    return all;
}
inline attn::stored_view<const float> embedding_of(const model_config& c, attn::parameters& weights) {
    return weights.get_stored<float>(embedding_name, {c.vocabulary, c.channels});
}
/// The last linear, to a score for each token.
inline attn::linear<float> head_of(const model_config& c, attn::parameters& weights) {
    return {c.is_tied ? embedding_of(c, weights) : weights.get_stored<float>(head_name, {c.vocabulary, c.channels})};
}

/// The rows of an embedding for some tokens, one after the other.
inline void embed(const attn::stored_view<const float>& embedding, std::span<const index_t> tokens, float* to) {
    for (const auto token : tokens)
        for (index_t c = 0; c < embedding.shape().channels; ++c) *to++ = embedding(0, 0, token, c);
}

/// A model with a cache: it has read some tokens, and reads the next ones.
class model {
public:
    /// For texts of so many tokens at most. The weights outlive the model.
    model(const model_config& config, attn::parameters& weights, index_t tokens, attn::cache_format format, attn::thread_pool& threads)
        : rotation_(tokens, config.frequencies, config.pairs), embedding_(embedding_of(config, weights)),
          blocks_(blocks_of(config, weights, rotation_)), norm_(norm_of(config, weights)), head_(head_of(config, weights)),
          pool_(
              {.kv_heads = config.kv_heads, .key_channels = config.head_channels, .value_channels = config.head_channels, .format = format},
              config.layers * ((tokens + 127) / 128)),
          run_(threads) {
        for (index_t l = 0; l < config.layers; ++l) caches_.emplace_back(pool_);
    }
    model(const model&) = delete;
    model& operator=(const model&) = delete;

    /// Reads the next tokens. Of the last `count` of them, a score for each token that may follow: (1, 1, count, vocabulary).
    attn::tensor<float> read(std::span<const index_t> tokens, index_t count) {
        attn::tensor<float> x({.tokens = std::ssize(tokens), .channels = embedding_.shape().channels});
        embed(embedding_, tokens, x.data());
        for (std::size_t l = 0; l < blocks_.size(); ++l) attn::forward(blocks_[l], caches_[l], {.tokens = x}, x, run_);
        const auto last = x.slice({.tokens = {std::ssize(tokens) - count, count}});
        attn::normalise(norm_, last, last, run_);
        return attn::forward(head_, {.tokens = last}, run_);
    }
    /// Forgets all but the first tokens.
    void truncate(index_t tokens) {
        for (auto& cache : caches_) cache.truncate(tokens);
    }

private:
    attn::rotary<float> rotation_;
    attn::stored_view<const float> embedding_;
    std::vector<block> blocks_;
    attn::rms_norm<float> norm_;
    attn::linear<float> head_;
    attn::key_value_pool<float> pool_;
    std::vector<attn::sequence<float>> caches_;
    attn::execution run_;
};

} // namespace generate
