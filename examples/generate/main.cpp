// A text is continued by a model of the LLaMA kind: `cmake/run generate MODEL "prompt"`; see `usage`.
#include "continuation.hpp"
#include "training.hpp"

#include <charconv>
#include <thread>

namespace {

using namespace generate;

constexpr const char* usage = R"(usage: generate MODEL PROMPT [OPTION...]
       generate --train=TEXTS MODEL [--minutes=5]

MODEL is a folder of config.json, tokenizer.json (byte-level BPE) and model.safetensors, or an index of several, whose model_type is llama
or mistral; or llama2.c's file, such as stories15M.bin, beside its tokenizer.bin. --train makes such a folder, of a model of characters
that learns the texts in another.

  --tokens=200      how many, at most
  --temperature=0   0: always the likeliest token; else at random, by exp(score / temperature)
  --seed=1          of the random numbers
  --drafts=4        tokens that are guessed at a time, by what came before where the text was as it is now; the text stays the same
  --cache=float     what keys and values are stored in: float, bfloat16, half, int8 or int4
  --threads=N       as many as the machine has
)";

struct arguments {
    std::vector<std::string> words;
    std::string texts; ///< to be learnt
    continuation how{.drafts = 4};
    double minutes = 5;
    attn::cache_format format = attn::cache_format::full;
    index_t threads = std::max<index_t>(1, std::thread::hardware_concurrency());
};

struct usage_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// A number of an option, between two others.
template <class T>
void read_number(const std::string& option, std::string_view text, T least, T most, T& to) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), to);
    if (error != std::errc() || end != text.data() + text.size() || !(to >= least && to <= most))
        throw usage_error(option + ": no number that is possible here");
}

arguments read_arguments(int count, char** given) {
    arguments all;
    for (int i = 1; i < count; ++i) {
        const std::string argument = given[i];
        if (!argument.starts_with("--")) {
            all.words.push_back(argument);
            continue;
        }
        const auto equals = std::min(argument.find('='), argument.size());
        const auto name = argument.substr(2, equals - 2), value = argument.substr(std::min(equals + 1, argument.size()));
        constexpr index_t many = 1 << 24;
        if (name == "help") {
            std::fputs(usage, stdout);
            std::exit(0);
        }
        if (name == "tokens") read_number<index_t>(argument, value, 0, many, all.how.tokens);
        else if (name == "temperature") read_number(argument, value, 0.0, 1e6, all.how.temperature);
        else if (name == "seed") read_number<std::uint64_t>(argument, value, 0, UINT64_MAX, all.how.seed);
        else if (name == "drafts") read_number<index_t>(argument, value, 0, 1024, all.how.drafts);
        else if (name == "threads") read_number<index_t>(argument, value, 1, 1024, all.threads);
        else if (name == "minutes") read_number(argument, value, 0.001, 1e6, all.minutes);
        else if (name == "train" && !value.empty()) all.texts = value;
        else if (name == "cache") {
            constexpr std::array<std::pair<std::string_view, attn::cache_format>, 5> formats{{{"float", attn::cache_format::full},
                                                                                              {"bfloat16", attn::cache_format::bfloat16},
                                                                                              {"half", attn::cache_format::half},
                                                                                              {"int8", attn::cache_format::int8},
                                                                                              {"int4", attn::cache_format::int4}}};
            const auto found = std::ranges::find(formats, std::string_view(value), &std::pair<std::string_view, attn::cache_format>::first);
            if (found == formats.end()) throw usage_error(argument + ": no format of a cache");
            all.format = found->second;
        } else throw usage_error(argument + ": no such option");
    }
    if (all.words.size() != (all.texts.empty() ? 2 : 1))
        throw usage_error(all.texts.empty() ? "a model and a prompt are needed" : "one model is made");
    return all;
}

void make_character_model(const arguments& a) {
    attn::thread_pool threads(a.threads);
    const auto c = character_model();
    const auto text = read_texts(a.texts);
    trainer learner(c, 4, 256, threads);
    const auto result = train(learner, text, a.minutes, std::numeric_limits<index_t>::max(), [](index_t step, double loss, double left) {
        std::fprintf(stderr, "\rstep %td: loss %.3f nats a character, %.1f minutes left  ", step, loss, left);
    });
    write_character_model(a.words[0], c, learner.weights());
    std::fprintf(stderr, "\n%td characters of %s learnt in %td steps to a loss of %.3f; the model is in %s\n", std::ssize(text),
                 a.texts.c_str(), result.steps, result.loss, a.words[0].c_str());
}

void continue_text(const arguments& a) {
    auto of = read_checkpoint(a.words[0]);
    auto tokens = of.text->encode(a.words[1]);
    if (tokens.empty()) throw usage_error("the prompt is empty, and no token begins every text");
    if (const auto largest = std::ranges::max(tokens); largest >= of.config.vocabulary)
        throw file_error(a.words[0] + ": the tokenizer has a token " + std::to_string(largest) + ", but the model " +
                         std::to_string(of.config.vocabulary));
    auto how = a.how;
    const auto room = of.config.positions - std::ssize(tokens);
    if (room < 0)
        throw usage_error("the prompt has " + std::to_string(tokens.size()) + " tokens, but the model reads " +
                          std::to_string(of.config.positions));
    how.tokens = std::min(how.tokens, room);

    attn::thread_pool threads(a.threads);
    model m(of.config, of.weights, std::ssize(tokens) + how.tokens, a.format, threads);
    std::fputs(a.words[1].c_str(), stdout);
    const auto s = proceed(m, tokens, of.config.ends, how, [&](token previous, token next) {
        const auto bytes = of.text->decode(previous, next);
        std::fwrite(bytes.data(), 1, bytes.size(), stdout);
        std::fflush(stdout);
    });
    std::puts("");
    std::fflush(stdout);
    const auto a_second = [](index_t count, double seconds) { return seconds > 0 ? static_cast<double>(count) / seconds : 0; };
    std::fprintf(stderr, "%td tokens of prompt: %.0f a second; %td of text: %.1f a second", s.prompt, a_second(s.prompt, s.prompt_seconds),
                 s.tokens, a_second(s.tokens, s.seconds));
    if (how.drafts > 0) std::fprintf(stderr, "; %td of %td drafts were right, in %td calls", s.accepted, s.drafts, s.calls);
    std::fprintf(stderr, "\n");
}

} // namespace

int main(int count, char** given) try {
    const auto a = read_arguments(count, given);
    if (a.texts.empty()) continue_text(a);
    else make_character_model(a);
} catch (const usage_error& problem) {
    std::fprintf(stderr, "generate: %s\n%s", problem.what(), usage);
    return 2;
} catch (const std::exception& problem) {
    std::fprintf(stderr, "generate: %s\n", problem.what());
    return 1;
}
