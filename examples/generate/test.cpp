// The test of `generate`: tiny models, written here in each format, against a plain implementation in double, and through the program.
//     example_generate_test PROGRAM
#include "continuation.hpp"
#include "training.hpp"

#include <cstdio>
#include <cstdlib>

namespace {

using namespace generate;

int failures = 0;

void check(bool holds, const std::string& what) {
    if (!holds) std::printf("FAILED: %s\n", what.c_str()), ++failures;
}

void write(const std::string& path, std::string_view bytes) { std::ofstream(path, std::ios::binary) << bytes; }

// --- Tiny models --------------------------------------------------------------------------------------------------------------------

constexpr token first_word = 256, special = 263; // the tokens of the tiny vocabulary beyond bytes

/// A tokenizer.json: bytes, some words that are joined of them, and a special token, with which every text begins.
std::string tokenizer_json(const std::string& changed = "", const std::string& to = "") {
    std::string vocabulary, merges;
    for (const auto& [code, byte] : byte_level_bpe::byte_of_code()) {
        std::string name;
        json::append_utf8(name, code);
        if (byte == '"' || byte == '\\') name.insert(0, "\\");
        vocabulary.append("\"" + name + "\": " + std::to_string(static_cast<unsigned char>(byte)) + ", ");
    }
    token id = first_word;
    for (const auto& [a, b] :
         {std::pair{"l", "o"}, {"e", "r"}, {"\\u0120", "lo"}, {"lo", "w"}, {"n", "e"}, {"ne", "w"}}) { // \u0120 is a space
        vocabulary.append(std::string("\"") + a + b + "\": " + std::to_string(id++) + ", ");
        merges.append(merges.empty() ? "" : ", ")
            .append(id % 2 ? std::string("\"") + a + " " + b + "\"" : std::string("[\"") + a + "\", \"" + b + "\"]");
    }
    std::string text = R"({"normalizer": null, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
 "post_processor": {"type": "Sequence", "processors": [{"type": "TemplateProcessing",
  "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}]},
 "added_tokens": [{"id": 263, "content": "<|begin|>", "special": true}],
 "model": {"type": "BPE", "vocab": {)" +
                       vocabulary + R"("\u0120low": 262, "<|begin|>": 263}, "merges": [)" + merges + "]}}";
    if (!changed.empty()) text.replace(text.find(changed), changed.size(), to);
    return text;
}
std::string config_json(const std::string& changed = "", const std::string& to = "") {
    std::string text = R"({"model_type": "llama", "hidden_act": "silu", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 264, "max_position_embeddings": 300, "rms_norm_eps": 1e-3,
 "rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
 "original_max_position_embeddings": 64}, "tie_word_embeddings": false, "bos_token_id": 263, "eos_token_id": [263]})";
    if (!changed.empty()) text.replace(text.find(changed), changed.size(), to);
    return text;
}

std::mt19937 random_bits(1);
float random_float(float spread) { return (static_cast<float>(random_bits()) * 0x1p-31f - 1) * spread; }

/// Random weights of such a model, stored in some format.
attn::parameters random_weights(const model_config& c, attn::narrow_format format) {
    attn::parameters weights;
    const auto add = [&](const std::string& name, const attn::parameters::extents& size, float around, float spread) {
        const auto w = weights.add(name, size, format);
        for (index_t i = 0; i < w.shape().tokens; ++i)
            for (index_t k = 0; k < w.shape().channels; ++k) w(0, 0, i, k) = around + random_float(spread);
    };
    add(embedding_name, {c.vocabulary, c.channels}, 0, 1);
    if (!c.is_tied) add(head_name, {c.vocabulary, c.channels}, 0, 0.6f);
    add(std::string(last_norm) + ".weight", {c.channels}, 1, 0.3f);
    for (index_t l = 0; l < c.layers; ++l) {
        for (const auto& m : matrices_of(c)) add(block_name(l) + m.name + ".weight", {m.outputs, m.inputs}, 0, 0.6f);
        for (const auto* norm : {attention_norm, feed_forward_norm}) add(block_name(l) + norm + ".weight", {c.channels}, 1, 0.3f);
    }
    return weights;
}

void write_folder(const std::string& folder, const std::string& config, attn::narrow_format format) {
    std::filesystem::create_directories(folder);
    write(folder + "/config.json", config);
    write(folder + "/tokenizer.json", tokenizer_json());
    attn::write_safetensors(folder + "/model.safetensors", random_weights(read_config(folder + "/config.json"), format));
}

template <class T>
void put(std::string& to, T number) {
    to.append(reinterpret_cast<const char*>(&number), sizeof number);
}

/// llama2.c's file of such weights, and its tokenizer.
void write_llama2c(const std::string& folder, const model_config& c, attn::parameters& weights) {
    std::filesystem::create_directories(folder);
    std::string file;
    for (const auto number : {c.channels, c.hidden, c.layers, c.heads, c.kv_heads, c.is_tied ? c.vocabulary : -c.vocabulary, c.positions})
        put(file, static_cast<std::int32_t>(number));
    const auto add = [&](const std::string& name) {
        const auto& size = weights.size(name);
        const auto numbers = weights.get<float>(name, size);
        for (index_t i = 0; i < numbers.shape().size(); ++i) put(file, numbers.data()[i]);
    };
    const auto each_layer = [&](const std::string& name) {
        for (index_t l = 0; l < c.layers; ++l) add(block_name(l) + name + ".weight");
    };
    add(embedding_name);
    each_layer(attention_norm);
    for (const char* name : {".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj", ".self_attn.o_proj"}) each_layer(name);
    each_layer(feed_forward_norm);
    for (const char* name : {".mlp.gate_proj", ".mlp.down_proj", ".mlp.up_proj"}) each_layer(name);
    add(std::string(last_norm) + ".weight");
    for (index_t i = 0; i < c.positions * c.head_channels; ++i) put(file, 1e30f); // what is not read
    if (!c.is_tied) add(head_name);
    write(folder + "/model.bin", file);

    std::string pieces;
    put(pieces, std::int32_t{6});
    const auto piece = [&](std::string_view text, float score) {
        put(pieces, score);
        put(pieces, static_cast<std::int32_t>(text.size()));
        pieces += text;
    };
    piece("<unk>", 0), piece("\n<s>\n", 0), piece("\n</s>\n", 0);
    for (int byte = 0; byte < 256; ++byte) {
        char name[8];
        std::snprintf(name, sizeof name, "<0x%02X>", byte);
        piece(name, 0);
    }
    for (const char* character : {" ", "l", "o", "w", "e", "r"}) piece(character, -10);
    piece("lo", -1), piece("er", -2), piece(" lo", -4), piece("low", -3), piece(" low", -5);
    write(folder + "/tokenizer.bin", pieces);
}

// --- The same model, plainly --------------------------------------------------------------------------------------------------------

using row = std::vector<double>;

row times(const attn::parameters& weights, const std::string& name, const row& x) {
    const auto& size = weights.size(name);
    row y(static_cast<std::size_t>(size[0]), 0.0);
    for (std::size_t o = 0; o < y.size(); ++o)
        for (std::size_t i = 0; i < x.size(); ++i)
            y[o] += static_cast<double>(weights.get<float>(name, size)(0, 0, static_cast<index_t>(o), static_cast<index_t>(i))) * x[i];
    return y;
}
row normal(const attn::parameters& weights, const std::string& name, const row& x, double eps) {
    double squares = 0;
    for (const auto number : x) squares += number * number;
    row y;
    for (std::size_t i = 0; i < x.size(); ++i)
        y.push_back(x[i] / std::sqrt(squares / static_cast<double>(x.size()) + eps) *
                    static_cast<double>(weights.get<float>(name + ".weight", {std::ssize(x)}).data()[i]));
    return y;
}
/// How fast pair p turns, of a configuration that says "rope_theta" and LLaMA 3's scaling as config_json has them; or 10000 and none.
double frequency(index_t p, index_t head_channels, bool is_scaled) {
    const auto f = std::pow(is_scaled ? 500.0 : 10000.0, -2.0 * static_cast<double>(p) / static_cast<double>(head_channels));
    if (!is_scaled) return f;
    const auto wavelength = 2 * std::numbers::pi / f, longest = 64 / 1.0, shortest = 64 / 4.0;
    if (wavelength < shortest) return f;
    if (wavelength > longest) return f / 4;
    const auto smooth = (64 / wavelength - 1) / (4 - 1);
    return (1 - smooth) * f / 4 + smooth * f;
}
void turn(row& x, index_t heads, const model_config& c, index_t position, bool is_scaled) {
    const bool is_split = c.pairs == attn::rotary_pairs::half_split;
    for (index_t h = 0; h < heads; ++h)
        for (index_t p = 0; p < c.head_channels / 2; ++p) {
            auto& a = x[static_cast<std::size_t>(h * c.head_channels + (is_split ? p : 2 * p))];
            auto& b = x[static_cast<std::size_t>(h * c.head_channels + (is_split ? p + c.head_channels / 2 : 2 * p + 1))];
            const auto angle = static_cast<double>(position) * frequency(p, c.head_channels, is_scaled);
            const auto before = a;
            a = before * std::cos(angle) - b * std::sin(angle);
            b = before * std::sin(angle) + b * std::cos(angle);
        }
}

/// The scores behind every token.
std::vector<row> plain_scores(const model_config& c, const attn::parameters& weights, const std::vector<index_t>& tokens, bool is_scaled) {
    std::vector<row> x, result;
    for (const auto t : tokens) {
        auto& embedded = x.emplace_back();
        for (index_t k = 0; k < c.channels; ++k)
            embedded.push_back(static_cast<double>(weights.get<float>(embedding_name, {c.vocabulary, c.channels})(0, 0, t, k)));
    }
    const auto add = [](row& to, const row& y) {
        for (std::size_t i = 0; i < to.size(); ++i) to[i] += y[i];
    };
    for (index_t l = 0; l < c.layers; ++l) {
        const auto name = [&](const char* part) { return block_name(l) + part; };
        std::vector<row> keys, values;
        for (std::size_t i = 0; i < x.size(); ++i) {
            const auto within = normal(weights, name(attention_norm), x[i], c.eps);
            auto q = times(weights, name(".self_attn.q_proj.weight"), within);
            keys.push_back(times(weights, name(".self_attn.k_proj.weight"), within));
            values.push_back(times(weights, name(".self_attn.v_proj.weight"), within));
            turn(q, c.heads, c, static_cast<index_t>(i), is_scaled);
            turn(keys.back(), c.kv_heads, c, static_cast<index_t>(i), is_scaled);
            row attended(q.size(), 0.0);
            for (index_t h = 0; h < c.heads; ++h) {
                const auto head = static_cast<std::size_t>(h * c.head_channels);
                const auto of_keys = static_cast<std::size_t>(h / (c.heads / c.kv_heads) * c.head_channels);
                const auto channels = static_cast<std::size_t>(c.head_channels);
                const auto first = c.window ? std::max<std::ptrdiff_t>(0, static_cast<index_t>(i) - *c.window + 1) : 0;
                row shares;
                double sum = 0;
                for (auto j = static_cast<std::size_t>(first); j <= i; ++j) {
                    double score = 0;
                    for (std::size_t k = 0; k < channels; ++k) score += q[head + k] * keys[j][of_keys + k];
                    shares.push_back(std::exp(score / std::sqrt(static_cast<double>(c.head_channels))));
                    sum += shares.back();
                }
                for (auto j = static_cast<std::size_t>(first); j <= i; ++j)
                    for (std::size_t k = 0; k < channels; ++k)
                        attended[head + k] += shares[j - static_cast<std::size_t>(first)] / sum * values[j][of_keys + k];
            }
            add(x[i], times(weights, name(".self_attn.o_proj.weight"), attended));
        }
        for (auto& of : x) {
            const auto within = normal(weights, name(feed_forward_norm), of, c.eps);
            const auto gate = times(weights, name(".mlp.gate_proj.weight"), within);
            auto hidden = times(weights, name(".mlp.up_proj.weight"), within);
            for (std::size_t i = 0; i < hidden.size(); ++i) hidden[i] *= gate[i] / (1 + std::exp(-gate[i]));
            add(of, times(weights, name(".mlp.down_proj.weight"), hidden));
        }
    }
    for (const auto& of : x)
        result.push_back(times(weights, c.is_tied ? embedding_name : head_name, normal(weights, last_norm, of, c.eps)));
    return result;
}

// --- What is tested -----------------------------------------------------------------------------------------------------------------

std::vector<float> scores_of(model& m, const std::vector<index_t>& tokens, const std::vector<index_t>& cuts) {
    std::vector<float> all;
    index_t first = 0;
    for (std::size_t i = 0; first < std::ssize(tokens); ++i) {
        const auto count = std::min(cuts[i % cuts.size()], std::ssize(tokens) - first);
        const auto scores = m.read(std::span(tokens).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)), count);
        all.insert(all.end(), scores.data(), scores.data() + scores.shape().size());
        first += count;
    }
    m.truncate(0);
    return all;
}

/// The scores against the plain ones; the same bits however a prompt is cut; the same text with drafts and without, in every format.
void test_model(const std::string& path, bool is_scaled, attn::thread_pool& threads) {
    auto of = read_checkpoint(path);
    attn::thread_pool alone(1); // so small a model gains nothing by threads, which wait for each other on a busy machine
    std::vector<index_t> prompt;
    for (int i = 0; i < 150; ++i) prompt.push_back(static_cast<index_t>(random_bits() % static_cast<std::uint32_t>(of.config.vocabulary)));
    {
        model m(of.config, of.weights, 300, attn::cache_format::full, threads);
        const auto scores = scores_of(m, prompt, {150});
        for (const auto& cuts : std::vector<std::vector<index_t>>{{1}, {1, 7, 40, 2}, {149, 1}})
            check(scores_of(m, prompt, cuts) == scores, path + ": a prompt in pieces has other scores");
        for (const auto& name : of.weights.names())
            static_cast<void>(of.weights.get<float>(name, of.weights.size(name))); // widened, to be read below
        double most_wrong = 0;
        std::size_t at = 0;
        for (const auto& plain : plain_scores(of.config, of.weights, prompt, is_scaled))
            for (const auto expected : plain) most_wrong = std::max(most_wrong, std::abs(static_cast<double>(scores[at++]) - expected));
        check(at == scores.size() && most_wrong < 2e-4, path + ": scores are wrong by " + std::to_string(most_wrong));
    }
    using attn::cache_format;
    for (const auto temperature : {0.0, 0.1}) {
        index_t accepted = 0, rejected = 0;
        for (const auto format : {cache_format::full, cache_format::bfloat16, cache_format::half, cache_format::int8, cache_format::int4}) {
            model m(of.config, of.weights, 300, format, alone);
            std::vector<std::vector<index_t>> texts;
            for (const index_t drafts : {0, 1, 6}) {
                auto text = std::vector<index_t>(prompt.begin(), prompt.begin() + 20);
                text.insert(text.end(), text.begin(), text.begin() + 20);
                const auto s =
                    proceed(m, text, {}, {.tokens = 200, .temperature = temperature, .seed = 5, .drafts = drafts}, [](index_t, index_t) {});
                m.truncate(0);
                check(s.tokens == 200 && text.size() == 240, path + ": a text has " + std::to_string(text.size()) + " tokens");
                accepted += s.accepted, rejected += s.drafts - s.accepted;
                texts.push_back(std::move(text));
            }
            const auto what =
                path + ", format " + std::to_string(static_cast<int>(format)) + ", temperature " + std::to_string(temperature);
            check(texts[1] == texts[0] && texts[2] == texts[0], what + ": drafts change the text");
        }
        check(accepted > 0 && rejected > 0, path + ": " + std::to_string(accepted) + " drafts were right and " + std::to_string(rejected) +
                                                " wrong, so that they are not tested");
    }
}

/// What the program prints.
std::string run(const std::string& command) {
    std::string result;
    auto* const pipe = popen((command + " 2>&1").c_str(), "r");
    for (int c; pipe && (c = std::fgetc(pipe)) != EOF;) result += static_cast<char>(c);
    if (pipe) pclose(pipe);
    return result;
}
std::string text_of(const std::string& said) { // the line of statistics is behind the text
    const auto end = said.rfind('\n', said.size() - 2);
    return said.substr(0, std::min(end, said.size()));
}
void test_program(const std::string& program, const std::string& model_path, attn::thread_pool& threads) {
    const auto command = program + " " + model_path + " \"new lower\" --tokens=60 --threads=1";
    for (const std::string how : {"", " --temperature=0.5 --seed=9"}) {
        const auto without = run(command + " --drafts=0" + how);
        check(without.find("60 of text: ") != std::string::npos && without.starts_with("new lower"), command + " says " + without);
        for (const std::string other : {" --drafts=5", " --drafts=3 --threads=2"})
            check(text_of(run(command + how + other)) == text_of(without), command + how + ": other text with" + other);
        check(how.empty() || text_of(run(command + " --temperature=0.5 --seed=10")) != text_of(without),
              command + ": a seed changes nothing");
    }
    auto of = read_checkpoint(model_path);
    auto tokens = of.text->encode("new lower");
    model m(of.config, of.weights, std::ssize(tokens) + 60, attn::cache_format::int8, threads);
    std::string expected = "new lower";
    proceed(m, tokens, of.config.ends, {.tokens = 60}, [&](token previous, token next) { expected += of.text->decode(previous, next); });
    check(text_of(run(command + " --cache=int8")) == expected, command + " --cache=int8: other text than the parts of the program make");
}

std::vector<std::string> words_of(const word_rule& rule, std::string_view text) {
    std::vector<std::string> all;
    for (; !text.empty(); text.remove_prefix(all.back().size())) all.emplace_back(text.substr(0, rule.first_word(text)));
    return all;
}
using words = std::vector<std::string>;

void test_tokenizers(const std::string& folder) {
    // As the regular expressions cut them.
    const std::string text = "I'll say  'it's\tOK',\n\n  at 12345km  ";
    check(words_of({}, text) == words{"I", "'ll", " say", " ", " '", "it", "'s", "\t", "OK", "',", "\n\n ", " at", " 12345", "km", "  "},
          "GPT-2's words");
    check(words_of({.is_gpt2 = false, .digits = 3}, text) ==
              words{"I", "'ll", " say", " ", " '", "it", "'s", "\tOK", "',\n\n", " ", " at", " ", "123", "45", "km", "  "},
          "LLaMA 3's words");
    check(words_of({.is_gpt2 = false, .digits = 1}, "WE'LL 42 \n x") == words{"WE", "'LL", " ", "4", "2", " \n", " x"},
          "words of single digits");
    check(words_of({}, "Käse – naïve “x”") == words{"Käse", " –", " naïve", " “", "x", "”"}, "words that are not ASCII");

    const auto path = folder + "/tokenizer.json";
    const byte_level_bpe bytes(path);
    using tokens = std::vector<token>;
    check(bytes.encode("lower low") == tokens{special, 259, 257, 258, 'w'},
          "byte-level BPE: lower low"); // of " low" the pair " lo" is joined before "low"
    check(bytes.encode("new<|begin|>er") == tokens{special, 261, special, 257}, "byte-level BPE: a special token");
    check(bytes.encode("") == tokens{special}, "byte-level BPE: an empty text");
    write(path, tokenizer_json("\"type\": \"BPE\"", "\"type\": \"BPE\", \"ignore_merges\": true"));
    check(byte_level_bpe(path).encode("low low") == tokens{special, 259, 262}, "byte-level BPE: words that are tokens");
    write(path, tokenizer_json("\"add_prefix_space\": false", "\"add_prefix_space\": true"));
    check(byte_level_bpe(path).encode("low") == tokens{special, 258, 'w'}, "byte-level BPE: a space in front");
    write(path, tokenizer_json());

    const llama2c_tokenizer pieces(folder + "/tokenizer.bin", 270);
    check(pieces.encode("low") == tokens{1, 269}, "llama2.c: low");
    check(pieces.encode("lower\n") == tokens{1, 269, 266, 13}, "llama2.c: lower, and a byte");
    check(pieces.encode("") == tokens{1}, "llama2.c: an empty text");

    for (const std::string any : {"", " ", "low lower\r\n", "Käse – naïve “x” \xf0\x9f\x98\x80 \"\\\x01\x7f", "\xff\xfe"})
        for (const tokenizer* each : {static_cast<const tokenizer*>(&bytes), static_cast<const tokenizer*>(&pieces)}) {
            std::string again;
            const auto all = each->encode(any);
            for (std::size_t i = 1; i < all.size(); ++i)
                again += each->decode(all[i - 1], all[i]); // behind the one that every text begins with
            check(again == any, "a text is not the same after encoding and decoding: " + any + " becomes " + again);
        }
}

/// What is wrong with files is said, with their names.
void test_errors(const std::string& folder) {
    const auto expect = [](const std::string& path, const std::string& file, const std::string& problem) {
        try {
            read_checkpoint(path);
            check(false, path + ": taken, but " + problem);
        } catch (const std::exception& error) {
            const std::string said = error.what();
            check(said.starts_with(file) && said.find(problem) != std::string::npos,
                  "\"" + said + "\" should name " + file + " and say " + problem);
        }
    };
    const auto each = [&](const std::string& name, const std::string& good, const std::string& bad, const std::string& problem) {
        const auto path = folder + "/" + name;
        write(path, bad);
        expect(folder, path, problem);
        write(path, good);
    };
    const auto config = [&](const std::string& changed, const std::string& to, const std::string& problem) {
        each("config.json", config_json(), config_json(changed, to), problem);
    };
    const auto text = [&](const std::string& changed, const std::string& to, const std::string& problem) {
        each("tokenizer.json", tokenizer_json(), tokenizer_json(changed, to), problem);
    };
    expect(folder + "/none", folder + "/none", "is not there");
    config("{", "[", "no JSON, at byte");
    config("\"hidden_size\"", "\"size\"", "has no \"hidden_size\"");
    config("24", "\"24\"", "\"hidden_size\" is not a number");
    config("24", "24.5", "\"hidden_size\" is no whole number");
    config("24", "0", "channels are 0");
    config("\"llama\"", "\"gemma\"", "model_type \"gemma\" is not known");
    config("\"silu\"", "\"gelu\"", "hidden_act is gelu");
    config("heads\": 4", "heads\": 3", "3 heads cannot share 2");
    config("head_dim\": 8", "head_dim\": 7", "7 channels, which are turned in pairs");
    config("\"llama3\"", "\"yarn\"", "of type \"yarn\" is not known");
    config("263]", "263", "no JSON, at byte");
    text("\"BPE\"", "\"Unigram\"", "the model is Unigram, not BPE");
    text("null", "{\"type\": \"NFC\"}", "has a normalizer");
    text("\"ByteLevel\"", "\"Metaspace\"", "the pre_tokenizer Metaspace is not known");
    text("\"pre_tokenizer\"", "\"other\"", "no pre_tokenizer is ByteLevel");
    text("\"lo\"", "\"\xe2\x96\x81lo\"", "is no byte-level BPE");
    text("\"l o\"", "\"l q\"", "but the vocabulary has not all three");
    text("\"l o\"", "\"lo\"", "a merge that is no pair");
    text("\"<|begin|>\", \"special\"", "\"<|start|>\", \"special\"", "which is no added token");

    // The weights.
    auto file = folder + "/model.safetensors";
    const auto c = read_config(folder + "/config.json");
    const auto good = read_file(file);
    each("model.safetensors", good, good.substr(0, 1000), "the header would have");
    const auto weights = [&](const std::string& from, const std::string& to, const std::string& problem) {
        auto bad = good;
        bad.replace(bad.find(from), from.size(), to);
        each("model.safetensors", good, bad, problem);
    };
    weights("layers.1.mlp.up_proj", "layers.1.mlp.xx_proj", "\"model.layers.1.mlp.up_proj.weight\" is missing");
    write(folder + "/config.json", config_json("40", "48"));
    expect(folder, file, "has shape (40, 24), but by the configuration (48, 24)");
    write(folder + "/config.json", config_json("hidden_layers\": 2", "hidden_layers\": 1"));
    expect(folder, file, "a model of 1 such layers has no tensor \"model.layers.1.");
    write(folder + "/config.json", config_json());

    // llama2.c's.
    const auto path = folder + "/model.bin", pieces = folder + "/tokenizer.bin";
    const auto bin = read_file(path), text_bin = read_file(pieces);
    const auto expect_bin = [&](const std::string& bad, const std::string& problem) {
        write(path, bad);
        expect(path, path, problem);
        write(path, bin);
    };
    expect_bin(bin.substr(0, 20), "ends within the header");
    expect_bin(bin.substr(0, bin.size() - 4), "but the sizes in its header need");
    expect_bin(bin + "    ", "but the sizes in its header need");
    expect_bin(std::string(4, '\xff') + bin.substr(4), "channels are -1");
    write(pieces, text_bin.substr(0, text_bin.size() - 1));
    expect(path, pieces, "ends within the piece");
    write(pieces, text_bin + "x");
    expect(path, pieces, "has more pieces than the model");
    std::filesystem::remove(pieces);
    expect(path, pieces, "cannot be read");
    write(pieces, text_bin);
}

/// The gradient of the loss is what the loss does; some steps bring it down; and what is written is read as it was.
void test_training(const std::string& folder, attn::thread_pool& threads) {
    auto c = character_model();
    c.channels = 32, c.hidden = 48, c.layers = 2, c.heads = 2, c.kv_heads = 1, c.head_channels = 16, c.window = 24;
    c.frequencies = attn::rotary_frequencies::geometric(c.head_channels);
    trainer learner(c, 3, 32, threads);
    std::vector<index_t> texts;
    for (int i = 0; i < 3 * 33; ++i) texts.push_back('a' + static_cast<index_t>(random_bits() % 20));
    learner.differentiate(texts);
    for (const auto& name : learner.weights().names()) { // along its own gradient, a loss grows by that one's square
        const auto value = learner.weights().elements<float>(name), of_value = learner.gradients().elements<float>(name);
        const std::vector<float> gradient(of_value.begin(), of_value.end());
        double square = 0;
        for (const auto g : gradient) square += static_cast<double>(g) * static_cast<double>(g);
        const auto step = 0.01 / std::sqrt(square);
        const auto loss_at = [&](double by) {
            for (std::size_t i = 0; i < gradient.size(); ++i) value[i] += static_cast<float>(by) * gradient[i];
            return learner.differentiate(texts);
        };
        const auto before = loss_at(-step), after = loss_at(2 * step);
        loss_at(-step);
        const auto expected = 2 * step * square;
        check(square > 0 && std::abs(after - before - expected) < 0.02 * expected + 2e-6,
              "the gradient by " + name + ": the loss grows by " + std::to_string(after - before) + ", not " +
                  std::to_string(expected));
    }

    std::string text;
    for (int i = 0; i < 200; ++i) text += "the licence says: ";
    const auto first = learner.differentiate(texts);
    const auto result = train(learner, text, 1, 150, [](index_t, double, double) {});
    check(result.steps == 150 && result.loss < 0.7 * first,
          "after 150 steps the loss is " + std::to_string(result.loss) + ", of " + std::to_string(first));

    write_character_model(folder, c, learner.weights());
    auto of = read_checkpoint(folder);
    check(of.config.window == c.window && of.config.vocabulary == 256 && of.config.frequencies.values == c.frequencies.values &&
              of.config.is_tied,
          "the model that is written is another");
    check(of.text->encode("a\"\\\n\xff ") == std::vector<token>{'a', '"', '\\', '\n', 0xff, ' '}, "bytes are not their own tokens");
    for (const auto& name : learner.weights().names()) {
        const auto& size = learner.weights().size(name);
        const auto a = learner.weights().get<float>(name, size), b = of.weights.get<float>(name, size);
        check(std::equal(a.data(), a.data() + a.shape().size(), b.data()), "the weights that are written are others: " + name);
    }
}

} // namespace

int main(int count, char** arguments) try {
    if (count != 2) {
        std::fprintf(stderr, "usage: example_generate_test PROGRAM\n");
        return 2;
    }
    const auto folder = (std::filesystem::temp_directory_path() / ("attn_generate_" + std::to_string(std::random_device()()))).generic_string();
    attn::thread_pool threads(2);

    write_folder(folder + "/float", config_json(), attn::narrow_format::none);
    write_folder(folder + "/bfloat16", config_json("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true"),
                 attn::narrow_format::bfloat16);
    write_folder(folder + "/window", config_json("\"model_type\": \"llama\"", "\"model_type\": \"mistral\", \"sliding_window\": 10"),
                 attn::narrow_format::half);
    for (const auto* name : {"/float", "/bfloat16", "/window"}) test_model(folder + name, true, threads);

    model_config c{
        .channels = 24, .hidden = 40, .layers = 2, .heads = 4, .kv_heads = 2, .head_channels = 6, .vocabulary = 270, .positions = 310};
    for (const bool is_tied : {true, false}) {
        c.is_tied = is_tied;
        auto weights = random_weights(c, attn::narrow_format::none);
        write_llama2c(folder + "/float", c, weights);
        test_model(folder + "/float/model.bin", false, threads);
    }
    for (const auto* name : {"/float", "/float/model.bin"}) test_program(arguments[1], folder + name, threads);
    test_tokenizers(folder + "/float");
    test_errors(folder + "/float");
    test_training(folder + "/characters", threads);

    std::filesystem::remove_all(folder);
    std::printf(failures ? "%d failures\n" : "generate: all is well\n", failures);
    return failures ? 1 : 0;
} catch (const std::exception& problem) {
    std::printf("FAILED: %s\n", problem.what());
    return 1;
}
