// attn_demo: every operator over the words of a text file. A table of what each costs, and a picture of what each looks at.
#include "demo_caches.hpp"
#include "demo_picture.hpp"
#include "demo_words.hpp"
#include "fma_peak.hpp"
#include "measure.hpp"
#include "subject.hpp"

#include <cstdio>
#include <fstream>
#include <iostream>
#include <optional>
#include <unistd.h>

namespace attn::bench {

namespace {

constexpr index_t heads = 4, channels = 64, max_words = 4096, words_in_picture = 32;

constexpr const char* usage = "usage: attn_demo [--picture FILE.svg] [TEXT FILE]\n";

struct options {
    std::string text = ATTN_DEMO_TEXT;
    std::string picture = ATTN_DEMO_PICTURE;
};

/// Nothing if the arguments make no sense.
std::optional<options> parsed(const std::vector<std::string>& arguments) {
    options o;
    bool has_text = false;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        if (arguments[i] == "--picture") {
            if (++i == arguments.size()) return {};
            o.picture = arguments[i];
        } else if (has_text || arguments[i].starts_with("--")) {
            return {};
        } else {
            o.text = arguments[i];
            has_text = true;
        }
    }
    return o;
}

testing::problem problem_of(index_t words, index_t value_dim) {
    return {.heads = heads, .kv_heads = heads, .queries = words, .keys = words, .key_dim = channels, .value_dim = value_dim};
}

std::string words_text(index_t count) { return std::to_string(count) + (count == 1 ? " word" : " words"); }

/// A line on stderr for each operator: written over on a terminal, elsewhere only if the text is long.
void show_progress(const std::string& text, index_t words) {
    static const bool is_terminal = isatty(STDERR_FILENO) != 0;
    if (is_terminal) std::fprintf(stderr, "\r\033[K%s", text.c_str());
    else if (words > 1000 && !text.empty()) std::fprintf(stderr, "%s\n", text.c_str());
}

struct timing {
    double seconds, naive_seconds, share_of_peak;
};

/// Medians over rounds of ours, naive Eigen and the peak, one after the other, so that what else the machine does meets them all.
timing timed(subject& s) {
    constexpr int max_rounds = 7;
    constexpr double enough = 1.5, enough_naive = 0.5;
    std::vector<double> ours, naive, shares;
    double spent = 0, spent_naive = 0;
    while (ours.size() < max_rounds && (ours.size() < 3 || spent < enough)) {
        const auto before = s.peak();
        spent += seconds_of([&] { ours.push_back(seconds_per_call([&] { s.attend(); }, 0.005)); });
        shares.push_back(s.useful_flops() / ours.back() / std::max(before, s.peak()));
        if (spent_naive < enough_naive) spent_naive += seconds_of([&] { naive.push_back(seconds_per_call([&] { s.naive(); }, 0.005)); });
    }
    return {quartiles_of(ours).median, quartiles_of(naive).median, quartiles_of(shares).median};
}

/// max |x|
double largest_of(const tensor<float>& x) {
    float largest = 0;
    for (index_t e = 0; e < x.shape().size(); ++e) largest = std::max(largest, std::abs(x.data()[e]));
    return static_cast<double>(largest);
}

struct table {
    std::vector<std::vector<std::string>> rows = {
        {"operator", "operations of a head", "time", "naive Eigen", "speed-up", "of peak", "workspace", "n x n", "max |error|"}};
    index_t queries_checked = 0;
    bool all_right = true;
};

table run_all(std::shared_ptr<const tensors<float>> words) {
    table t;
    const auto p = problem_of(words->queries.shape().tokens, channels);
    const auto& cases = testing::all_cases();
    for (std::size_t i = 0; i < cases.size(); ++i) {
        const auto& c = cases[i];
        if (!c.supports(p)) {
            t.rows.push_back({c.name, c.cost, "not for this size"});
            continue;
        }
        show_progress(c.name + " (" + std::to_string(i + 1) + " of " + std::to_string(cases.size()) + ")", p.queries);
        const auto s = make_subject<float>(c, p, words, 1);
        const auto found = s->check();
        const auto time = timed(*s);
        char error[32];
        std::snprintf(error, sizeof error, "%.1e%s", found.error, found.right() ? "" : " WRONG");
        t.rows.push_back({c.name, c.cost, time_text(time.seconds), time_text(time.naive_seconds), ratio_text(time.naive_seconds / time.seconds),
                          percent_text(time.share_of_peak), bytes_text(s->workspace_bytes()), bytes_text(s->matrix_bytes()), error});
        t.queries_checked = t.queries_checked == 0 ? found.queries : std::min(t.queries_checked, found.queries);
        t.all_right = t.all_right && found.right();
    }
    show_progress("", p.queries);
    return t;
}

/// The attention matrix is what comes of the unit vectors as values. Heads are averaged.
std::vector<picture_panel> panels_of(const std::vector<std::string>& words) {
    const auto n = std::ssize(words);
    const auto p = problem_of(n, n);
    const auto x = embed(words, heads, channels);
    tensor<float> identity({1, heads, n, n});
    for (index_t h = 0; h < heads; ++h)
        for (index_t i = 0; i < n; ++i) identity(0, h, i, i) = 1;
    std::vector<picture_panel> panels;
    for (const auto& c : testing::all_cases()) {
        if (!c.supports(p)) continue;
        const auto instance = c.make<float>(p);
        tensor<float> matrices(instance->output_shape(p.shapes()));
        sequential here;
        workspace memory(instance->workspace_bytes(p.shapes(), 1));
        instance->attend({x, x, identity}, {matrices}, execution(here, memory));
        tensor<float> mean({1, 1, n, n});
        for (index_t h = 0; h < heads; ++h)
            for (index_t i = 0; i < n; ++i)
                for (index_t j = 0; j < n; ++j) mean(0, 0, i, j) += matrices(0, h, i, j) / static_cast<float>(heads);
        panels.push_back({c.name, c.cost, std::move(mean)});
    }
    return panels;
}

int run(const options& o) {
    const auto text = read_words(o.text, max_words);
    std::ofstream picture(o.picture);
    if (!picture) throw unusable_file(o.picture + ": the picture cannot be written there");

    const auto count = std::ssize(text.words);
    const auto n = std::to_string(count);
    thread_pool one(1);
    std::cout << o.text << ": " << (text.is_all ? "" : "the first ") << words_text(count) << " as vectors, n = m = " << n << ", " << heads << " heads, d_k = d_v = "
              << channels << ", float\n"
              << "one thread, " << instruction_set() << ", " << compiler() << ", FMA peak " << fixed_text(fma_peak<float>(one) / 1e9, 0) << " Gflop/s\n\n"
              << std::flush;
    const auto words = std::make_shared<const tensors<float>>(
        tensors<float>{embed(text.words, heads, channels), embed(text.words, heads, channels), embed(text.words, heads, channels)});
    const auto result = run_all(words);
    std::cout << table_text(result.rows, 2) << "\nspeed-up: over naive Eigen on the same input, which holds the n x n scores of a head"
              << "\nmax |error|: the largest difference of a number of the result from the reference in double, absolute, over "
              << (result.queries_checked < count ? std::to_string(result.queries_checked) + " of the " + n : "all")
              << " queries\n             (the largest of the values is " << fixed_text(largest_of(words->values), 1) << ")\n";

    std::cout << "\nthe words one by one:\n\n" << table_text(cache_table(words->queries), 1) << '\n';

    const auto shown = std::min<index_t>(words_in_picture, count);
    const auto first_words = "the first " + words_text(shown);
    const std::vector<std::string> first(text.words.begin(), text.words.begin() + shown);
    write_picture(picture, "What the words of " + valid_utf8(o.text.substr(o.text.find_last_of('/') + 1)) + " look at",
                  "The attention matrix of every operator over " + first_words + ", mean of " + std::to_string(heads) + " heads.", first,
                  panels_of(first));
    if (!picture.flush()) throw unusable_file(o.picture + ": the picture cannot be written there");
    std::cout << "picture of the attention matrices over " << first_words << ": " << o.picture << '\n';
    if (!result.all_right) std::cerr << "attn_demo: an answer is WRONG, see the table\n";
    return result.all_right ? 0 : 1;
}

} // namespace

} // namespace attn::bench

int main(int count, char** arguments) {
    const std::vector<std::string> given(arguments + 1, arguments + count);
    if (given.size() == 1 && (given[0] == "--help" || given[0] == "-h")) {
        std::cout << attn::bench::usage;
        return 0;
    }
    const auto options = attn::bench::parsed(given);
    if (!options) {
        std::cerr << attn::bench::usage;
        return 2;
    }
    try {
        return attn::bench::run(*options);
    } catch (const attn::bench::unusable_file& problem) {
        std::cerr << "attn_demo: " << problem.what() << '\n';
        return 2;
    }
}
