// How a text goes on: the choice of a token, drafts of n-grams, and the loop.
#pragma once

#include "model.hpp"

#include <chrono>
#include <cmath>

namespace generate {

struct continuation {
    index_t tokens = 200;   ///< at most
    double temperature = 0; ///< 0: the token of the highest score
    std::uint64_t seed = 1; ///< of the random numbers
    index_t drafts = 0;     ///< tokens that are guessed at a time, at most
};

/// How long it took, and what the drafts were worth.
struct speed {
    index_t prompt = 0, tokens = 0, calls = 0, drafts = 0, accepted = 0;
    double prompt_seconds = 0, seconds = 0;
};

/// A number of [0, 1) that depends on the seed and the position alone, so that a text is the same in whatever calls its tokens are scored:
/// splitmix64's (Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators").
inline double random_number(std::uint64_t seed, index_t position) {
    auto bits = seed * 0xd1342543de82ef95 + static_cast<std::uint64_t>(position) * 0x9e3779b97f4a7c15;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
    return static_cast<double>((bits ^ bits >> 31) >> 11) * 0x1p-53;
}

/// The token at a position, of the scores for it.
inline index_t choose(std::span<const float> scores, const continuation& how, index_t position) {
    const auto best = std::ranges::max_element(scores);
    if (how.temperature <= 0) return best - scores.begin();
    const auto share = [&](float score) { return std::exp(static_cast<double>(score - *best) / how.temperature); };
    double sum = 0;
    for (const auto score : scores) sum += share(score);
    double left = random_number(how.seed, position) * sum;
    for (std::size_t t = 0; t < scores.size(); ++t)
        if ((left -= share(scores[t])) < 0) return static_cast<index_t>(t);
    return best - scores.begin(); // rounding
}

/// What came next where the last tokens have been before: behind the place that shares most of them, of several the last. So many tokens
/// at most, and fewer than it shares, for a short n-gram tells little. If the text goes in circles, so do they.
inline std::vector<index_t> draft(const std::vector<index_t>& tokens, index_t count) {
    const auto size = std::ssize(tokens);
    const auto at = [&](index_t i) { return tokens[static_cast<std::size_t>(i)]; };
    index_t longest = 1, from = size; // tokens before `from` are those before the end
    for (auto end = size - 1; end > longest && longest <= count; --end) {
        index_t shared = 0;
        while (shared <= count && shared < end && at(end - 1 - shared) == at(size - 1 - shared)) ++shared;
        if (shared > longest) longest = shared, from = end;
    }
    std::vector<index_t> guesses;
    for (index_t i = 0; i < std::min(count, longest - 1); ++i) guesses.push_back(at(from + i % (size - from)));
    return guesses;
}

/// Continues a text, of which the model has read nothing yet: appends to its tokens, and calls say(previous, token) for each. Drafts are
/// scored in one call beside the token before them; the first that is not what is chosen there ends them, and the model forgets it and
/// those behind it. A row of attn's has the same bits whatever else is in the call, so the text is the same with drafts and without.
speed proceed(model& m, std::vector<index_t>& tokens, const std::vector<index_t>& ends, const continuation& how, const auto& say) {
    using clock = std::chrono::steady_clock;
    const auto seconds_since = [](clock::time_point began) { return std::chrono::duration<double>(clock::now() - began).count(); };
    speed s;
    s.prompt = std::ssize(tokens);
    const auto began = clock::now();
    auto scores = m.read(tokens, 1);
    s.prompt_seconds = seconds_since(began);

    const auto generating = clock::now();
    std::vector<index_t> guesses; // what the rows of scores were computed for, but the first
    for (bool is_open = how.tokens > 0; is_open;) {
        bool agrees = true;
        for (index_t row = 0; is_open && agrees; ++row) {
            const auto next =
                choose({scores.view().row(0, 0, row), static_cast<std::size_t>(scores.shape().channels)}, how, std::ssize(tokens));
            if (std::ranges::find(ends, next) != ends.end()) {
                is_open = false;
                break;
            }
            agrees = row < std::ssize(guesses) && guesses[static_cast<std::size_t>(row)] == next;
            s.accepted += agrees;
            say(tokens.back(), next);
            tokens.push_back(next);
            is_open = ++s.tokens < how.tokens;
        }
        if (!is_open) break;
        m.truncate(std::ssize(tokens) - 1);
        guesses = draft(tokens, std::min(how.drafts, how.tokens - s.tokens - 1));
        auto read = guesses;
        read.insert(read.begin(), tokens.back());
        scores = m.read(read, std::ssize(read));
        s.drafts += std::ssize(guesses);
        ++s.calls;
    }
    s.seconds = seconds_since(generating);
    return s;
}

} // namespace generate
