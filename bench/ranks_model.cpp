// attn_ranks_model: what softmax attention over 1 to 1,024 ranks may be expected to take. A model, not a measurement: the pairs, pieces and transfers are
// those that attn computes and sends, but their times follow from how many pairs a second this machine computes, and from a bandwidth and a latency
// that are given. Each rank is a machine like this one, and takes its pieces as key_stream does: what it computes overlaps what is under way, and it waits
// for what has not come. No rank is done before the bandwidth has let all its bytes pass.
#include "measure.hpp"

#include "attn/attention/sparse_attention.hpp"
#include "attn/distributed/sequence_parallel.hpp"
#include "attn/parallel/thread_pool.hpp"
#include "attn/pattern/segments.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <iostream>
#include <optional>
#include <random>

namespace attn::bench {

namespace {

using namespace pattern;

struct options {
    index_t tokens = 1'048'576, heads = 32, channels = 64, ranks = 1'024;
    double gigabytes = 12.5;  ///< a second, that a rank sends, and as many that it receives
    double microseconds = 10; ///< until the first byte of a message arrives
    double pairs = 0;         ///< a second, of one rank; 0: as this machine computes them
    std::string file;

    shape each() const { return {1, heads, tokens, channels}; }
    input_shapes shapes() const { return {each(), each(), each()}; }
};

/// Lengths between 256 and 32,768 tokens, any factor as likely: the document of each token.
std::vector<std::int32_t> documents(index_t n) {
    std::mt19937 random(1);
    std::vector<std::int32_t> ids;
    for (std::int32_t document = 0; std::ssize(ids) < n; ++document) {
        const auto length = static_cast<std::size_t>(256 * std::exp2(7.0 * static_cast<double>(random()) / 4294967296.0));
        ids.resize(std::min(ids.size() + length, static_cast<std::size_t>(n)), document);
    }
    return ids;
}

/// Visible pairs that this machine computes in a second, by all its threads: two heads of 16,384 tokens.
template <Pattern P>
double measured_pairs(const P& pattern, index_t channels) {
    const shape s{1, 2, 16'384, channels};
    tensor<float> q(s), k(s), v(s), out(s);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (auto* t : {&q, &k, &v}) std::generate_n(t->data(), s.size(), [&] { return normal(random); });
    const softmax_attention op{.pattern = pattern};
    thread_pool threads;
    workspace memory(workspace_bytes<float>(op, {s, s, s}, threads));
    std::vector<double> seconds;
    for (int i = 0; i < 7; ++i) seconds.push_back(seconds_of([&] { attend(op, inputs<float>{q, k, v}, outputs<float>{out}, execution(threads, memory)); }));
    return static_cast<double>(visited_pairs(op, {s, s, s}).visible) / quartiles_of(seconds).median;
}

/// Visible pairs of a piece for some queries, of one head.
template <Pattern P>
index_t pairs_of(const P& pattern, index_t n, const row_range& queries, const detail::key_piece& piece) {
    constexpr index_t size = 16;
    index_t pairs = 0, number = 0;
    for_each_pass(at(pattern, 0, 0), 0, n, 0, n, [&](const auto& pass, index_t step) {
        if (number++ != piece.pass) return;
        for (index_t t = 0; t < tile_count(queries.count, size, step); ++t) {
            const auto rows = tile_at(t, queries.first, queries.count, size, step, 0);
            for_each_run(pass, rows, piece.rows.first, piece.rows.count, size, [&](const key_run& run) {
                if (run.full) return void(pairs += rows.count * run.count);
                for (index_t i = 0; i < rows.count; ++i)
                    for (index_t j = 0; j < run.count; ++j) pairs += bool(pass.visible(rows.first + i * step, run.first + j * step));
            });
        }
    });
    return pairs;
}

/// Seconds until the last rank is done. A piece is received from when its rank begins with the one before on, and passed on as it comes; own rows wait for
/// nothing else, but those of a piece that go to several ranks take as long as if all left at once.
template <Pattern P>
double modelled_seconds(const P& pattern, const partition& parts, const options& how, double pairs_per_second) {
    const auto n = how.tokens, ranks = parts.ranks();
    const auto each = static_cast<std::size_t>(ranks);
    const auto s = parts.shapes();
    const auto where = parts.positions();
    const kernel::visible_keys_of<float, P> visible(pattern, s, where);
    const detail::key_plan plan({visible, s.queries, 0, 0}, parts.query_cuts(), parts.key_cuts());
    const auto latency = 1e-6 * how.microseconds, seconds_per_key = static_cast<double>(2 * how.heads * how.channels) * sizeof(float) / (1e9 * how.gigabytes);

    struct rank_times {
        double began = 0, ended = 0; ///< the piece before
        double passed_on = 0;        ///< what others had from it of that
    };
    std::vector<rank_times> all(each);
    for (index_t number = 0; number < plan.pieces(); ++number) {
        std::vector<double> arrived(each), passed_on(each), rounds(each);
        plan.for_each_transfer(number, [&](const detail::key_transfer& t) { rounds[static_cast<std::size_t>(t.from)] += t.hop == 1 ? 1 : 0; });
        double came = 0; // where it is passed on from
        plan.for_each_transfer(number, [&](const detail::key_transfer& t) {
            const auto from = static_cast<std::size_t>(t.from), to = static_cast<std::size_t>(t.to);
            const auto at_once = t.hop == 1 ? rounds[from] : 1;
            came = std::max(t.hop == 1 ? 0.0 : came, all[to].began) + at_once * static_cast<double>(t.rows.count) * seconds_per_key + latency;
            arrived[to] = std::max(arrived[to], came);
            if (t.hop > 1) passed_on[from] = std::max(passed_on[from], came);
        });
        for (index_t rank = 0; rank < ranks; ++rank) {
            const auto r = static_cast<std::size_t>(rank);
            auto& own = all[r];
            if (plan.seen(number, rank).count == 0) continue;
            own.began = std::max({own.ended, arrived[r], own.passed_on});
            own.ended = own.began + static_cast<double>(how.heads * pairs_of(pattern, n, parts.queries(rank), plan.piece(number))) / pairs_per_second;
            own.passed_on = passed_on[r];
        }
    }
    double seconds = 0;
    for (const auto& own : all) seconds = std::max({seconds, own.ended, own.passed_on});
    return seconds + (ranks > 1 ? 2 * std::ceil(std::log2(ranks)) * latency : 0); // they agree before and after
}

template <Pattern P>
void add(const std::string& name, const P& pattern, const options& how, std::ofstream& file) {
    const auto speed = how.pairs > 0 ? how.pairs : measured_pairs(pattern, how.channels);
    std::vector<std::vector<std::string>> table{{"ranks", "pairs, most over mean", "sent at most", "received", "computing", "transfer", "modelled", "speed-up",
                                                 "efficiency", "partition made in"}};
    double alone = 0;
    for (index_t ranks = 1; ranks <= how.ranks; ranks *= 2) {
        std::optional<partition> parts;
        const auto making = seconds_of([&] { parts.emplace(pattern, how.shapes(), ranks); });
        index_t pairs = 0, most = 0, sent = 0, received = 0;
        for (index_t r = 0; r < ranks; ++r) {
            pairs += parts->pairs(r);
            most = std::max(most, parts->pairs(r));
            sent = std::max(sent, parts->bytes_sent(r));
            received = std::max(received, parts->bytes_received(r));
        }
        const auto imbalance = static_cast<double>(most * ranks) / static_cast<double>(pairs);
        const auto computing = static_cast<double>(most) / speed, transfer = static_cast<double>(std::max(sent, received)) / (1e9 * how.gigabytes);
        const auto seconds = std::max(transfer, modelled_seconds(pattern, *parts, how, speed));
        if (ranks == 1) alone = seconds;
        const auto faster = alone / seconds;
        table.push_back({std::to_string(ranks), fixed_text(imbalance, 3), bytes_text(static_cast<double>(sent)), bytes_text(static_cast<double>(received)),
                         time_text(computing), time_text(transfer), time_text(seconds), fixed_text(faster, 1), percent_text(faster / static_cast<double>(ranks)),
                         time_text(making)});
        if (file.is_open())
            file << name << ',' << ranks << ',' << imbalance << ',' << sent << ',' << received << ',' << computing << ',' << transfer << ','
                 << seconds << ',' << faster << '\n';
    }
    std::cout << '\n' << name << ", a rank computes " << fixed_text(speed / 1e9, 2) << " billion pairs a second\n\n" << table_text(table, 0) << std::flush;
}

/// False if it is none that there is.
bool take(options& how, std::string_view argument) {
    const auto number = [&](std::string_view name, auto& value) {
        if (!argument.starts_with(name) || !argument.substr(name.size()).starts_with('=')) return false;
        const auto text = argument.substr(name.size() + 1);
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        return error == std::errc{} && end == text.data() + text.size() && value > 0;
    };
    if (!argument.starts_with("--") && how.file.empty()) return how.file = argument, true;
    return number("--tokens", how.tokens) || number("--heads", how.heads) || number("--channels", how.channels) || number("--ranks", how.ranks) ||
           number("--gigabytes", how.gigabytes) || number("--microseconds", how.microseconds) || number("--pairs", how.pairs);
}

int run(const std::vector<std::string>& arguments) {
    options how;
    if (!std::ranges::all_of(arguments, [&](const auto& argument) { return take(how, argument); })) {
        std::cerr << "usage: attn_ranks_model [--tokens=N] [--heads=N] [--channels=N] [--ranks=N] [--gigabytes=X] [--microseconds=X] [--pairs=X] [ranks.csv]\n";
        return 2;
    }
    std::ofstream file;
    if (!how.file.empty()) {
        file.open(how.file);
        if (!file) return std::cerr << how.file << ": cannot be written\n", 1;
        file << "pattern,ranks,imbalance,bytes_sent,bytes_received,computing,transfer,seconds,speed_up\n";
    }
    std::cout << "A model, not a measurement: softmax attention of " << how.tokens << " tokens, " << how.heads << " heads of " << how.channels
              << " channels, in float. A rank is a machine like this one\nthat sends and receives " << how.gigabytes << " GB/s, a message after " << how.microseconds
              << " us; pieces of keys travel while those before are computed with.\n";
    add("dense", dense{}, how, file);
    add("causal", causal{}, how, file);
    add("causal window of 1024", causal{} & local{1024}, how, file);
    const auto ids = documents(std::max<index_t>(how.tokens, 16'384));
    add("causal in packed documents", causal{} & segments(ids), how, file);
    add("Sparse Transformer (stride 128)", sparse_transformer_strided(128), how, file);
    return 0;
}

} // namespace

} // namespace attn::bench

int main(int count, char** arguments) {
    try {
        return attn::bench::run({arguments + 1, arguments + count});
    } catch (const std::exception& error) { return std::cerr << error.what() << '\n', 1; }
}
