// The grid of the Linformer paper (Wang et al. 2020, Table 3): how many times the time and the memory of standard attention Linformer
// needs.
//     linformer_table/n:4096/k:256/d:64/threads:1      one head, learned projections of keys and of values
// Standard attention is naive Eigen, as in the paper, which holds n x n scores, from 1.2 GB of them on in blocks of rows; and our own
// streaming kernel.
#include "bench_report.hpp"
#include "measure.hpp"
#include "naive_forms.hpp"

#include "attn/attention/linformer_attention.hpp"
#include "attn/attention/random_projection.hpp"
#include "attn/attention/softmax_attention.hpp"
#include "attn/parallel/thread_pool.hpp"

#include <benchmark/benchmark.h>

#include <cmath>
#include <map>
#include <random>

namespace attn::bench {

namespace {

constexpr index_t channels = 64;

struct paper_row {
    index_t n;
    double time[5], memory[5]; ///< for k = 128, 256, 512, 1024, 2048; 0 where the paper has none
};
constexpr paper_row paper[] = {
    {512, {1.5, 1.3}, {1.7, 1.5}},
    {1024, {1.7, 1.6, 1.3}, {3.0, 2.9, 1.8}},
    {2048, {2.6, 2.4, 2.1, 1.3}, {6.1, 5.6, 3.6, 2.0}},
    {4096, {3.4, 3.2, 2.8, 2.2, 1.3}, {14, 13, 8.3, 4.3, 2.3}},
    {8192, {5.5, 5.0, 4.4, 3.5, 2.1}, {28, 26, 17, 8.5, 4.5}},
    {16384, {8.6, 7.8, 7.0, 5.6, 3.3}, {56, 48, 32, 16, 8}},
    {32768, {13, 12, 11, 8.8, 5.0}, {56, 48, 36, 18, 16}},
    {65536, {20, 18, 16, 14, 7.9}, {60, 52, 40, 20, 18}},
};

tensor<float> normal_numbers(const shape& s, unsigned seed) {
    tensor<float> t(s);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::generate_n(t.data(), s.size(), [&] { return normal(random); });
    return t;
}

/// Inputs of one length, and the time of standard attention on them.
struct standard {
    tensor<float> queries, keys, values, out;
    double naive_seconds = 0, streaming_seconds = 0;
    index_t block_rows;

    explicit standard(index_t n)
        : queries(normal_numbers({1, 1, n, channels}, 1)), keys(normal_numbers(queries.shape(), 2)),
          values(normal_numbers(queries.shape(), 3)), out(queries.shape()), block_rows(std::min(n, 300'000'000 / n)) {
        const auto few = [n](const auto& call) { // one call of a long one
            std::vector<double> seconds;
            for (int i = 0; i < (n > 8192 ? 1 : 5); ++i) seconds.push_back(seconds_per_call(call, 0.01));
            return quartiles_of(seconds).median;
        };
        naive_seconds = few([&] { attend_naively(); });
        thread_pool one(1);
        const softmax_attention<> op;
        workspace memory(workspace_bytes<float>(op, shapes_of(in()), one));
        streaming_seconds = few([&] { attend(op, in(), {out}, execution(one, memory)); });
    }
    inputs<float> in() const { return {queries, keys, values}; }
    bool in_blocks() const { return block_rows < queries.shape().tokens; }
    /// Of inputs and output.
    double tensor_bytes() const { return 4.0 * 4 * static_cast<double>(queries.shape().size()); }

private:
    void attend_naively() {
        const auto n = queries.shape().tokens;
        for (index_t first = 0; first < n; first += block_rows) {
            const tensor_part rows{.tokens = {first, std::min(block_rows, n - first)}};
            eigen_forms<float>().softmax(in().slice(rows, {}), outputs<float>{out}.slice(rows), 1 / std::sqrt(float{channels}), {}, {});
        }
    }
};

const standard& standard_of(index_t n) {
    static std::map<index_t, standard> all;
    auto found = all.find(n);
    if (found == all.end()) {
        all.clear(); // of rows in order only the last length is needed
        found = all.try_emplace(n, n).first;
    }
    return found->second;
}

void time_linformer(benchmark::State& state, index_t n, index_t k, double paper_time, double paper_memory) {
    label(state);
    const auto& other = standard_of(n);
    tensor<float> e({1, 1, k, n}), f(e.shape()), out(other.queries.shape());
    fill_random_projection(e.view(), 1);
    fill_random_projection(f.view(), 2);
    using linear = linear_projection<float>;
    const linformer_attention<linear, linear> op{.key_projection = {e.view()}, .value_projection = {f.view()}};
    thread_pool one(1);
    workspace memory(workspace_bytes<float>(op, shapes_of(other.in()), one));
    const execution run(one, memory);
    attend(op, other.in(), outputs<float>{out}, run);
    double seconds = 0;
    for ([[maybe_unused]] auto _ : state) {
        const auto once = seconds_of([&] { attend(op, other.in(), outputs<float>{out}, run); });
        seconds += once;
        state.SetIterationTime(once);
    }
    seconds /= static_cast<double>(state.iterations());
    const auto size = static_cast<double>(n);
    const auto held = other.tensor_bytes() + 2 * 4.0 * static_cast<double>(e.shape().size()) + static_cast<double>(memory.size_bytes());
    state.counters["token_seconds"] = seconds / size;
    state.counters["vs_naive"] = other.naive_seconds / seconds;
    state.counters["vs_streaming"] = other.streaming_seconds / seconds;
    state.counters["paper_time"] = paper_time;
    state.counters["memory_vs_naive"] = (other.tensor_bytes() + 4 * size * size) / held;
    state.counters["memory_vs_streaming"] = other.tensor_bytes() / held;
    state.counters["paper_memory"] = paper_memory;
    state.counters["in_blocks"] = other.in_blocks();
}

const bool added = [] {
    for (const auto& row : paper)
        for (int c = 0; c < 5; ++c) {
            const index_t k = index_t{128} << c;
            if (row.time[c] == 0) continue;
            const auto name =
                "linformer_table/n:" + std::to_string(row.n) + "/k:" + std::to_string(k) + "/d:" + std::to_string(channels) + "/threads:1";
            benchmark::RegisterBenchmark(
                name.c_str(), [&row, c, k](benchmark::State& state) { time_linformer(state, row.n, k, row.time[c], row.memory[c]); })
                ->UseManualTime()
                ->Repetitions(5);
        }
    return true;
}();

} // namespace

} // namespace attn::bench
