// A model in files: config.json and safetensors, or llama2.c's own file.
#pragma once

#include "model.hpp"
#include "tokenizer.hpp"

#include <attn/layer/safetensors.hpp>

#include <bit>

namespace generate {

/// All that there is of a model.
struct checkpoint {
    model_config config;
    attn::parameters weights;
    std::unique_ptr<tokenizer> text;
};

/// Throws file_error unless sizes fit each other.
inline void check_config(const model_config& c, const std::string& path) {
    const auto require = [&](const char* what, index_t number) {
        constexpr index_t most = 1 << 24; // of which the products below fit
        if (number < 1 || number > most) throw file_error(path + ": " + what + " are " + std::to_string(number));
    };
    require("channels", c.channels);
    require("hidden channels", c.hidden);
    require("layers", c.layers);
    require("heads", c.heads);
    require("heads of keys and values", c.kv_heads);
    require("channels of a head", c.head_channels);
    require("tokens of the vocabulary", c.vocabulary);
    require("positions", c.positions);
    if (c.window) require("tokens of the window", *c.window);
    if (c.heads % c.kv_heads != 0)
        throw file_error(path + ": " + std::to_string(c.heads) + " heads cannot share " + std::to_string(c.kv_heads) +
                         " of keys and values");
    if (c.head_channels % 2 != 0)
        throw file_error(path + ": a head has " + std::to_string(c.head_channels) + " channels, which are turned in pairs");
}

/// How fast pairs turn: geometric, or as the configuration scales that.
inline attn::rotary_frequencies read_frequencies(const json& config, index_t head_channels, const std::string& path) {
    const auto& newer = config["rope_parameters"]; // which has rope_theta too
    const auto& scaling = newer.is_null() ? config["rope_scaling"] : newer;
    const auto& base = newer.is_null() ? config["rope_theta"] : newer["rope_theta"];
    const auto theta = base.is_null() ? 10000 : base.number();
    const auto geometric = [&] { return attn::rotary_frequencies::geometric(head_channels, theta); };
    if (scaling.is_null()) return geometric();
    const auto& type = scaling["rope_type"].is_null() ? scaling.at("type").text() : scaling["rope_type"].text();
    if (type == "default") return geometric();
    if (type == "linear") return attn::rotary_frequencies::interpolated(head_channels, scaling.at("factor").number(), theta);
    if (type == "llama3")
        return llama3_frequencies(geometric(), scaling.at("factor").number(), scaling.at("low_freq_factor").number(),
                                  scaling.at("high_freq_factor").number(), scaling.at("original_max_position_embeddings").number());
    throw file_error(path + ": rope_scaling of type \"" + type + "\" is not known, but default, linear and llama3");
}

/// What a config.json says. Throws file_error if the model is of another kind, whose weights would mean something else.
inline model_config read_config(const std::string& path) {
    const auto file = json::read(path);
    const auto& type = file.at("model_type").text();
    if (type != "llama" && type != "mistral") throw file_error(path + ": model_type \"" + type + "\" is not known, but llama and mistral");
    if (const auto& f = file["hidden_act"]; !f.is_null() && f.text() != "silu")
        throw file_error(path + ": hidden_act is " + f.text() + ", not silu");
    model_config c;
    c.channels = file.at("hidden_size").whole();
    c.hidden = file.at("intermediate_size").whole();
    c.layers = file.at("num_hidden_layers").whole();
    c.heads = file.at("num_attention_heads").whole();
    c.kv_heads = file["num_key_value_heads"].is_null() ? c.heads : file["num_key_value_heads"].whole();
    c.head_channels = file["head_dim"].is_null() ? c.channels / std::max<index_t>(1, c.heads) : file["head_dim"].whole();
    c.vocabulary = file.at("vocab_size").whole();
    c.positions = file.at("max_position_embeddings").whole();
    if (const auto& window = file["sliding_window"]; !window.is_null()) c.window = window.whole();
    c.eps = file.at("rms_norm_eps").number();
    c.is_tied = !file["tie_word_embeddings"].is_null() && file["tie_word_embeddings"].flag();
    if (const auto& end = file["eos_token_id"]; end.is_array())
        for (const auto& each : end.elements()) c.ends.push_back(each.whole());
    else if (!end.is_null()) c.ends.push_back(end.whole());
    check_config(c, path);
    c.frequencies = read_frequencies(file, c.head_channels, path);
    return c;
}

/// Throws file_error unless the weights are those of such a model: if there are others, it is of another kind.
inline void check_weights(const model_config& c, const attn::parameters& weights, const std::string& path) {
    std::set<std::string> known;
    const auto expect = [&](const std::string& name, const attn::parameters::extents& size, bool is_needed = true) {
        known.insert(name);
        if (!weights.contains(name) && !is_needed) return;
        if (!weights.contains(name)) throw file_error(path + ": the tensor \"" + name + "\" is missing");
        if (const auto& found = weights.size(name); found != size)
            throw file_error(path + ": the tensor \"" + name + "\" has shape " + attn::parameters::text_of(found) +
                             ", but by the configuration " + attn::parameters::text_of(size));
    };
    expect(embedding_name, {c.vocabulary, c.channels});
    expect(head_name, {c.vocabulary, c.channels}, !c.is_tied);
    expect(std::string(last_norm) + ".weight", {c.channels});
    for (index_t l = 0; l < c.layers; ++l) {
        for (const auto& m : matrices_of(c)) {
            expect(block_name(l) + m.name + ".weight", {m.outputs, m.inputs});
            expect(block_name(l) + m.name + ".bias", {m.outputs}, false);
        }
        for (const auto* norm : {attention_norm, feed_forward_norm}) expect(block_name(l) + norm + ".weight", {c.channels});
    }
    for (const auto& name : weights.names())
        if (!known.contains(name) && !name.ends_with(".rotary_emb.inv_freq")) // old files have these frequencies
            throw file_error(path + ": a model of " + std::to_string(c.layers) + " such layers has no tensor \"" + name + "\"");
}

/// A folder of config.json, tokenizer.json, and model.safetensors or an index of several.
inline checkpoint read_folder(const std::string& folder) {
    checkpoint all;
    all.config = read_config(folder + "/config.json");
    all.text = std::make_unique<byte_level_bpe>(folder + "/tokenizer.json");
    const auto index = folder + "/model.safetensors.index.json";
    const auto file = std::filesystem::exists(index) ? index : folder + "/model.safetensors";
    all.weights = attn::read_safetensors(file);
    check_weights(all.config, all.weights, file);
    return all;
}

/// llama2.c's file, beside whose tokenizer.bin it lies: seven int32 (channels, hidden, layers, heads, kv_heads, vocabulary, positions; a
/// negative vocabulary has a head of its own), then float32: each matrix of all layers, one after the other. They get the usual names.
inline checkpoint read_llama2c(const std::string& path) {
    static_assert(std::endian::native == std::endian::little, "the file's numbers have their lowest byte first");
    std::ifstream in(path, std::ios::binary);
    std::array<std::int32_t, 7> header{};
    if (!in.read(reinterpret_cast<char*>(header.data()), sizeof header))
        throw file_error(path + ": cannot be read, or ends within the header");
    checkpoint all;
    auto& c = all.config;
    c.channels = header[0], c.hidden = header[1], c.layers = header[2], c.heads = header[3], c.kv_heads = header[4];
    c.vocabulary = std::abs(index_t{header[5]}), c.positions = header[6];
    c.is_tied = header[5] > 0;
    c.head_channels = c.channels / std::max<index_t>(1, c.heads);
    c.pairs = attn::rotary_pairs::interleaved;
    check_config(c, path);
    if (c.channels % c.heads != 0)
        throw file_error(path + ": " + std::to_string(c.channels) + " channels cannot be shared by " + std::to_string(c.heads) + " heads");
    c.frequencies = attn::rotary_frequencies::geometric(c.head_channels);
    c.ends = {llama2c_tokenizer::beginning, llama2c_tokenizer::end};

    struct piece {
        std::string name; ///< none of what is passed over
        attn::parameters::extents size;
    };
    std::vector<piece> pieces{{embedding_name, {c.vocabulary, c.channels}}};
    const auto each_layer = [&](const std::string& name, const attn::parameters::extents& size) {
        for (index_t l = 0; l < c.layers; ++l) pieces.push_back({block_name(l) + name + ".weight", size});
    };
    const auto each_matrix = [&](std::initializer_list<matrix::number> numbers) {
        for (const auto number : numbers) {
            const auto m = matrices_of(c)[number];
            each_layer(m.name, {m.outputs, m.inputs});
        }
    };
    each_layer(attention_norm, {c.channels});
    each_matrix({matrix::q, matrix::k, matrix::v, matrix::out});
    each_layer(feed_forward_norm, {c.channels});
    each_matrix({matrix::gate, matrix::down, matrix::up});
    pieces.push_back({std::string(last_norm) + ".weight", {c.channels}});
    pieces.push_back({"", {c.positions, c.head_channels}}); // cosines and sines
    if (!c.is_tied) pieces.push_back({head_name, {c.vocabulary, c.channels}});

    double numbers = 0;
    for (const auto& p : pieces) numbers += static_cast<double>(p.size[0]) * static_cast<double>(p.size.size() > 1 ? p.size[1] : 1);
    const auto bytes = std::filesystem::file_size(path);
    if (const auto needed = sizeof header + sizeof(float) * numbers; needed != static_cast<double>(bytes))
        throw file_error(path + ": has " + std::to_string(bytes) + " bytes, but the sizes in its header need " +
                         std::to_string(static_cast<std::uint64_t>(needed)));
    for (const auto& p : pieces) {
        if (p.name.empty()) {
            in.seekg(static_cast<std::streamoff>(sizeof(float)) * p.size[0] * p.size[1], std::ios::cur);
            continue;
        }
        const auto to = all.weights.add<float>(p.name, p.size);
        in.read(reinterpret_cast<char*>(to.data()), static_cast<std::streamsize>(sizeof(float)) * to.shape().size());
    }
    if (!in) throw file_error(path + ": cannot be read to its end");
    all.text = std::make_unique<llama2c_tokenizer>((std::filesystem::path(path).parent_path() / "tokenizer.bin").generic_string(), c.vocabulary);
    return all;
}

/// A model at a path: a folder, or llama2.c's file.
inline checkpoint read_checkpoint(const std::string& path) {
    if (!std::filesystem::exists(path)) throw file_error(path + ": is not there");
    return std::filesystem::is_directory(path) ? read_folder(path) : read_llama2c(path);
}

} // namespace generate
