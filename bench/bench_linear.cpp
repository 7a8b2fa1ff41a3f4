// Linear attentions: shares of the FMA peak with and without the depthwise convolution, time a token from 1k to 1M tokens, and simplified
// linear attention against focused linear attention and our softmax attention at the shapes of vision transformers, with the n from which
// it is faster.
//     linear/<operator>/n:4096/d:64/h:12/threads:1          every head reads and writes the same memory, which stays in a cache
//     linear/<operator>/n:4096/d:64/h:12/memory/threads:1   every head has its own; with q, k, v and out in 16 bits: bf16 or half behind it
#include "bench_report.hpp"
#include "fma_peak.hpp"
#include "measure.hpp"
#include "read_bandwidth.hpp"

#include "attn/attention/focused_linear_attention.hpp"
#include "attn/attention/linear_attention.hpp"
#include "attn/attention/simplified_linear_attention.hpp"
#include "attn/attention/softmax_attention.hpp"
#include "problems.hpp"

#include <Eigen/Core>
#include <benchmark/benchmark.h>

#include <functional>
#include <iostream>

namespace attn::bench {

namespace {

template <Storage S = float>
tensor<S> random_numbers(const shape& s, unsigned seed) {
    const auto numbers = testing::random_tensor<float>(s, seed, 1);
    tensor<S> stored(s);
    std::transform(numbers.data(), numbers.data() + s.size(), stored.data(), [](float x) { return static_cast<S>(x); });
    return stored;
}

/// A batch of heads of n tokens of d channels, on one thread.
template <Storage S = float>
struct tokens {
    shape one, all;
    tensor<S> q, k, v, out;
    tensor<float> weights, bias;
    index_t height = 0, width = 0;
    workspace memory;
    sequential here;

    tokens(index_t batch, index_t heads, index_t n, index_t d, bool in_cache, index_t grid_width = 0)
        : one{1, in_cache ? 1 : heads, n, d}, all{batch, heads, n, d}, q(random_numbers<S>(one, 1)), k(random_numbers<S>(one, 2)),
          v(random_numbers<S>(one, 3)), out(one), weights(random_numbers({1, d, grid_width > 0 ? 5 : 1, 5}, 4)),
          bias(random_numbers({1, 1, 1, d}, 5)), height(grid_width > 0 ? n / grid_width : 0), width(grid_width) {}

    depthwise_convolution<float> convolution() const {
        return {.weights = weights.view(),
                .bias = {bias.data(), static_cast<std::size_t>(bias.shape().channels)},
                .height = height,
                .width = width};
    }
    double convolution_flops() const { return 2.0 * static_cast<double>(weights.shape().tokens * weights.shape().channels * all.size()); }
    double flops() const { return 4.0 * static_cast<double>(all.size() * all.channels); }

    /// The operator on all heads; in cache one head after the other in the same memory.
    template <class Op>
    void attend(const Op& op) {
        const auto call = [&](const shape& s) {
            memory.reserve(attn::workspace_bytes<S>(op, {s, s, s}, here));
            const auto view = [z = strides{0, s.tokens * s.channels, s.channels, 1}, &s](auto& t) { return tensor_view(t.data(), s, z); };
            for (index_t b = 0; b < all.batch; ++b)
                attn::attend(op, inputs<float>{view(q), view(k), view(v)}, outputs<float>{view(out)}, execution(here, memory));
        };
        if (one.heads == all.heads) return call({1, all.heads, all.tokens, all.channels});
        for (index_t h = 0; h < all.heads; ++h) call(one);
    }
};

/// Times a call between two measurements of the peak.
void time_beside_peak(benchmark::State& state, double flops, const std::function<void()>& call) {
    label(state);
    thread_pool one(1);
    call();
    const auto before = fma_peak<float>(one);
    const auto seconds = seconds_of([&] {
        for ([[maybe_unused]] auto _ : state) call();
    });
    const auto reached = flops * static_cast<double>(state.iterations()) / seconds;
    state.counters["flops"] = reached;
    state.counters["peak"] = reached / std::max(before, fma_peak<float>(one));
    state.counters["useful_share"] = 1;
}

template <Storage S = float, class Make>
void add(const std::string& name, index_t heads, index_t n, index_t d, bool in_cache, index_t grid_width, Make make, bool counts_convolution) {
    const auto full = "linear/" + name + "/n:" + std::to_string(n) + "/d:" + std::to_string(d) + "/h:" + std::to_string(heads) +
                      (in_cache ? "" : "/memory") + "/threads:1" + format_suffix(narrow_format_of<S>);
    benchmark::RegisterBenchmark(full.c_str(), [=](benchmark::State& state) {
        const auto t = std::make_shared<tokens<S>>(1, heads, n, d, in_cache, grid_width);
        const auto op = make(*t);
        time_beside_peak(state, t->flops() + (counts_convolution ? t->convolution_flops() : 0), [&] { t->attend(op); });
        const auto bytes = 4.0 * sizeof(S) * static_cast<double>(t->one.size());
        state.counters["bytes"] = bytes;
        state.counters["workspace_bytes"] = static_cast<double>(t->memory.size_bytes());
        if (in_cache) return;
        thread_pool reader(1);
        state.counters["bandwidth"] =
            bytes * state.counters["flops"] / (t->flops() + (counts_convolution ? t->convolution_flops() : 0)) / read_bandwidth(reader);
    });
}

/// One register after the other of channels, the same 5 x 5 kernel, to a buffer of one row: the convolution by itself.
void add_convolution_alone(index_t d) {
    const auto name = "linear/depthwise_5x5/grid:56x56/d:" + std::to_string(d) + "/threads:1";
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
        const tokens<> t(1, 1, 56 * 56, d, true, 56);
        const auto op = t.convolution();
        const auto grid = op.grid(56 * 56);
        workspace memory(std::size_t{1} << 22);
        detail::scratch own(memory.bytes().data());
        kernel::convolution_tile<float> tile(own, grid, d, 56);
        tile.load_weights(kernel::convolution_parameters<float>{grid, op.weights, op.bias}, 0);
        float* const row = own.take<float>(56 * tile.padded());
        time_beside_peak(state, t.convolution_flops(), [&] {
            for (index_t y = 0; y < 56; ++y) tile(row_block<const float>{t.v.data(), d, 1}, 56 * 56, y * 56, 56, row);
        });
    });
}

/// Medians of the time of a call of each operator.
struct versus {
    double softmax, simplified, focused;
};
versus compare(index_t batch, index_t heads, index_t n, index_t d, index_t grid_width) {
    tokens<> t(batch, heads, n, d, false, grid_width);
    const auto softmax = softmax_attention{};
    const simplified_linear_attention<> simplified{.convolution = t.convolution()};
    const focused_linear_attention<> focused{.convolution = t.convolution()};
    std::vector<double> times[3];
    for (int round = 0; round < 7; ++round) {
        times[0].push_back(seconds_per_call([&] { t.attend(softmax); }, 0.002));
        times[1].push_back(seconds_per_call([&] { t.attend(simplified); }, 0.002));
        times[2].push_back(seconds_per_call([&] { t.attend(focused); }, 0.002));
    }
    return {quartiles_of(times[0]).median, quartiles_of(times[1]).median, quartiles_of(times[2]).median};
}

/// The model's own shape; then squares of other sizes, to find from which n on a linear attention is faster.
void add_versus_softmax(const std::string& model, index_t batch, index_t heads, index_t height, index_t width, index_t d) {
    const auto name = "versus_softmax/" + model + "/b:" + std::to_string(batch) + "/n:" + std::to_string(height * width) +
                      "/d:" + std::to_string(d) + "/h:" + std::to_string(heads) + "/threads:1";
    benchmark::RegisterBenchmark(
        name.c_str(),
        [=](benchmark::State& state) {
            for ([[maybe_unused]] auto _ : state) {
                std::vector<std::vector<std::string>> table{{"n", "softmax", "simplified linear", "", "focused linear", ""}};
                index_t crossover = 0, focused_crossover = 0;
                const auto line = [&](index_t h, index_t w, bool is_model) {
                    const auto c = compare(is_model ? batch : 1, heads, h * w, d, w);
                    table.push_back({std::to_string(h * w) + (is_model ? " (" + model + ")" : ""), time_text(c.softmax),
                                     time_text(c.simplified), ratio_text(c.softmax / c.simplified), time_text(c.focused),
                                     ratio_text(c.softmax / c.focused)});
                    if (is_model) return;
                    if (crossover == 0 && c.simplified < c.softmax) crossover = h * w;
                    if (focused_crossover == 0 && c.focused < c.softmax) focused_crossover = h * w;
                };
                line(height, width, true);
                for (const index_t side : {3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 28}) line(side, side, false);
                std::cout << "\n"
                          << table_text(table, 0) << "faster than softmax attention from n = " << crossover << " (simplified), "
                          << focused_crossover << " (focused)\n";
            }
        })
        ->Iterations(1)
        ->Repetitions(1);
}

const bool added = [] {
    const auto without = [](const auto&) { return simplified_linear_attention<>{}; };
    const auto with = [](const auto& t) { return simplified_linear_attention<>{.convolution = t.convolution()}; };
    const auto causally = [](const auto&) { return linear_attention<relu, causal>{}; };
    for (const bool in_cache : {true, false}) {
        add("simplified", 12, 4096, 64, in_cache, 0, without, false);
        add("causal", 12, 4096, 64, in_cache, 0, causally, false);
        for (const auto& [heads, d] : {std::pair<index_t, index_t>{24, 32}, {12, 64}}) {
            add("simplified_5x5", heads, 56 * 56, d, in_cache, 56, with, true);
            if (in_cache) continue;
            add<Eigen::bfloat16>("simplified_5x5", heads, 56 * 56, d, in_cache, 56, with, true);
            add<Eigen::half>("simplified_5x5", heads, 56 * 56, d, in_cache, 56, with, true);
        }
    }
    add("simplified", 12, 512, 64, true, 0, without, false);
    for (const index_t n : {1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20}) add("simplified_1x5", 1, n, 64, false, 0, with, true);
    for (const index_t d : {32, 64}) add_convolution_alone(d);
    add_versus_softmax("deit_tiny", 8, 3, 14, 14, 64);
    add_versus_softmax("swin_tiny_1", 1, 3, 56, 56, 32);
    add_versus_softmax("pvt_tiny_2", 1, 2, 28, 28, 64);
    add_versus_softmax("pvt_tiny_3", 1, 5, 14, 14, 64);
    return true;
}();

} // namespace

} // namespace attn::bench
