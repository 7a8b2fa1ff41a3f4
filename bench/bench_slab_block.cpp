// Transformer blocks of vision models on one thread, as SLAB compares them: softmax attention with LayerNorm, the same with its norms
// folded away, simplified linear attention folded, focused linear attention with LayerNorm. And the matrix product, which is most of a
// block.
//     slab_block/deit_tiny/b:8/threads:1          a table; time a block
//     matrix_product/1024x1024x1024/threads:1     share of the FMA peak
#include "fma_peak.hpp"
#include "measure.hpp"

#include "attn/attention/focused_linear_attention.hpp"
#include "attn/attention/simplified_linear_attention.hpp"
#include "attn/layer/fold.hpp"
#include "attn/norm/layer_norm.hpp"
#include "attn/norm/rep_batch_norm.hpp"
#include "attn/score/additive_bias.hpp"

#include <benchmark/benchmark.h>

#include <functional>
#include <iostream>
#include <random>

namespace attn::bench {

namespace {

/// "1.06x".
std::string ratio_of(double ratio) { return fixed_text(ratio, 2) + "x"; }

/// Where a block stands in its model. Without windows, attention is over the whole grid.
struct place {
    std::string name;
    index_t side, window, channels, heads;
    int blocks; ///< of that kind in the model

    index_t tokens() const { return side * side; }
    index_t attended() const { return window > 0 ? window * window : tokens(); }
    window_grid grid() const { return {.height = side, .width = side, .window_height = window, .window_width = window}; }
    /// Of the linears and of softmax attention.
    double flops(index_t batch) const {
        return 2.0 * static_cast<double>(batch * tokens()) * static_cast<double>(12 * channels * channels + 2 * attended() * channels);
    }
};

/// Random weights of a block.
struct block_weights {
    const place& at;
    parameters weights, folded;
    std::mt19937 random{5};
    std::vector<double> mean, variance;

    explicit block_weights(const place& p)
        : at(p), mean(static_cast<std::size_t>(p.channels), 0.1), variance(static_cast<std::size_t>(p.channels), 1.3) {
        for (const auto* name : {"q", "k", "v", "out"}) add_linear(name, p.channels, p.channels);
        add_linear("up", 4 * p.channels, p.channels);
        add_linear("down", p.channels, 4 * p.channels);
        add("norm.weight", {p.channels}, 1);
        add("norm.bias", {p.channels}, 1);
        add("dwc.weight", {1, p.channels / p.heads, 5, 5}, 0.2);
        add("dwc.bias", {p.channels / p.heads}, 0.2);
        add("relative_bias", {p.heads, p.attended(), p.attended()}, 1);
    }
    void add(const std::string& name, const parameters::extents& size, double scale) {
        std::normal_distribution<double> normal(0, scale);
        const auto t = weights.add<float>(name, size);
        std::generate_n(t.data(), t.shape().size(), [&] { return static_cast<float>(normal(random)); });
    }
    void add_linear(const std::string& name, index_t outputs, index_t inputs) {
        add(name + ".weight", {outputs, inputs}, 1 / std::sqrt(static_cast<double>(inputs)));
        add(name + ".bias", {outputs}, 0.1);
    }
    depthwise_convolution<float> convolution() {
        const auto d = at.channels / at.heads, side = at.window > 0 ? at.window : at.side;
        return {.weights = weights.get<float>("dwc.weight", {1, d, 5, 5}),
                .bias = weights.get_vector<float>("dwc.bias", d),
                .height = side,
                .width = side};
    }
    layer_norm<float> layer() {
        return {weights.get_vector<float>("norm.weight", at.channels), weights.get_vector<float>("norm.bias", at.channels)};
    }
    rep_batch_norm<float> rep() {
        const auto n = layer();
        return {{n.weight, n.bias, mean, variance}, 0.5};
    }
    template <Attention A>
    multi_head<float, A> heads(const A& attention) {
        const auto linear_of = [&](const char* name) { return weights.get_linear<float>(name, at.channels, at.channels); };
        return {.heads = at.heads,
                .q = linear_of("q"),
                .k = linear_of("k"),
                .v = linear_of("v"),
                .out = linear_of("out"),
                .attention = attention};
    }
    feed_forward<float> mlp() {
        return {.up = weights.get_linear<float>("up", 4 * at.channels, at.channels),
                .down = weights.get_linear<float>("down", at.channels, 4 * at.channels)};
    }
};

using block_call = std::function<void(const tensor<float>&, tensor<float>&, const execution&)>;

/// A block of that norm and attention, in windows if the place has some; folded if asked for.
template <bool folded, Norm N, Attention A>
block_call block_of(block_weights& w, const N& norm, const A& attention) {
    const auto with = [&](const auto& layer) -> block_call {
        using layer_type = std::remove_cvref_t<decltype(layer)>;
        const transformer_block<N, layer_type, feed_forward<float>> block{
            .attention_norm = norm, .attention = layer, .feed_forward_norm = norm, .feed_forward = w.mlp()};
        const auto caller = [](const auto& b) -> block_call {
            return [b](const tensor<float>& x, tensor<float>& out, const execution& run) {
                run.workspace().reserve(b.workspace_bytes(x.shape(), {}, 1));
                forward(b, {.tokens = x}, out.view(), run);
            };
        };
        if constexpr (folded)
            return caller(fold(block, w.folded, std::string(A::name)));
        else
            return caller(block);
    };
    const auto layer = w.heads(attention);
    if (w.at.window > 0) return with(windowed<std::remove_cvref_t<decltype(layer)>>{w.at.grid(), layer});
    return with(layer);
}

/// Seconds of a block, of each of the four kinds: medians of 31 interleaved measurements; and the first's share of the peak.
struct block_times {
    std::array<double, 4> seconds;
    double peak_share;
};
block_times time_blocks(const place& p, index_t batch) {
    block_weights w(p);
    std::array<block_call, 4> calls;
    if (p.window > 0) {
        const additive_bias<float> bias{w.weights.get<float>("relative_bias", {p.heads, p.attended(), p.attended()})};
        const softmax_attention<dense, additive_bias<float>> relative{.score = bias};
        calls[0] = block_of<false>(w, w.layer(), relative);
        calls[1] = block_of<true>(w, w.rep(), relative);
    } else {
        calls[0] = block_of<false>(w, w.layer(), softmax_attention<>{});
        calls[1] = block_of<true>(w, w.rep(), softmax_attention<>{});
    }
    calls[2] = block_of<true>(w, w.rep(), simplified_linear_attention<>{.convolution = w.convolution()});
    calls[3] = block_of<false>(w, w.layer(), focused_linear_attention<>{.convolution = w.convolution()});

    tensor<float> x({batch, 1, p.tokens(), p.channels}), out(x.shape());
    std::normal_distribution<float> normal;
    std::generate_n(x.data(), x.shape().size(), [&] { return normal(w.random); });
    sequential here;
    thread_pool one(1);
    workspace memory;
    const execution run(here, memory);
    std::array<std::vector<double>, 4> times;
    double peak = 0;
    for (int round = 0; round < 31; ++round) {
        peak = std::max(peak, fma_peak<float>(one));
        for (std::size_t c = 0; c < 4; ++c) times[c].push_back(seconds_per_warm_call([&] { calls[c](x, out, run); }, 0.004));
    }
    block_times result{};
    for (std::size_t c = 0; c < 4; ++c) result.seconds[c] = quartiles_of(times[c]).median;
    result.peak_share = p.flops(batch) / result.seconds[0] / peak;
    return result;
}

void add_blocks(const std::string& model, index_t batch, const std::vector<place>& places) {
    const auto name = "slab_block/" + model + "/b:" + std::to_string(batch) + "/threads:1";
    benchmark::RegisterBenchmark(
        name.c_str(),
        [=](benchmark::State& state) {
            for ([[maybe_unused]] auto _ : state) {
                std::vector<std::vector<std::string>> table{
                    {"block", "softmax LN", "of peak", "softmax folded", "", "SLA folded", "", "focused LN", "", "SLA over focused"}};
                std::array<double, 4> all{};
                const auto line = [&](const std::string& what, const std::array<double, 4>& s, const std::string& share) {
                    table.push_back({what, time_text(s[0]), share, time_text(s[1]), ratio_of(s[0] / s[1]), time_text(s[2]),
                                     ratio_of(s[0] / s[2]), time_text(s[3]), ratio_of(s[0] / s[3]), ratio_of(s[3] / s[2])});
                };
                for (const auto& p : places) {
                    const auto t = time_blocks(p, batch);
                    for (std::size_t c = 0; c < 4; ++c) all[c] += p.blocks * t.seconds[c];
                    line(p.name, t.seconds, percent_text(t.peak_share));
                }
                line("all blocks", all, "");
                std::cout << "\n"
                          << model << ", batch " << batch << ", one thread; ratios: of the first column, and of focused over SLA\n"
                          << table_text(table, 1)
                          << "the paper, on a GPU: SLAB-Swin-S 16.2 ms, FLatten-Swin-S 18.6 ms (1.15x); PRepBN for LN alone saves 6 to 16 "
                             "% (1.06x to 1.19x)\n";
            }
        })
        ->Iterations(1)
        ->Repetitions(1);
}

/// y = x W^T, as a linear layer does it.
void add_product(index_t rows, index_t depth, index_t columns) {
    const auto name = "matrix_product/" + std::to_string(rows) + "x" + std::to_string(depth) + "x" + std::to_string(columns) + "/threads:1";
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
        tensor<float> x({1, 1, rows, depth}), w({1, 1, columns, depth}), out({1, 1, rows, columns});
        std::mt19937 random(5);
        std::uniform_real_distribution<float> number(-1, 1);
        for (auto* t : {&x, &w}) std::generate_n(t->data(), t->shape().size(), [&] { return number(random); });
        const linear<float> layer{std::as_const(w).view()};
        thread_pool one(1);
        workspace memory(layer.workspace_bytes(x.shape(), {}, 1));
        const execution run(one, memory);
        const auto call = [&] { forward(layer, {.tokens = x}, out.view(), run); };
        call();
        const auto before = fma_peak<float>(one);
        const auto seconds = seconds_of([&] {
            for ([[maybe_unused]] auto _ : state) call();
        });
        const auto flops = 2.0 * static_cast<double>(rows * depth * columns) * static_cast<double>(state.iterations()) / seconds;
        state.counters["flops"] = flops;
        state.counters["peak"] = flops / std::max(before, fma_peak<float>(one));
        state.counters["useful_share"] = 1;
    });
}

const bool added = [] {
    const std::vector<place> deit{{"DeiT-tiny", 14, 0, 192, 3, 12}};
    for (const index_t batch : {1, 8}) add_blocks("deit_tiny", batch, deit);
    add_blocks("swin_tiny", 1,
               {{"stage 1: 56 x 56, 96", 56, 7, 96, 3, 2},
                {"stage 2: 28 x 28, 192", 28, 7, 192, 6, 2},
                {"stage 3: 14 x 14, 384", 14, 7, 384, 12, 6},
                {"stage 4: 7 x 7, 768", 7, 7, 768, 24, 2}});
    add_product(1024, 1024, 1024);
    add_product(1568, 192, 768);
    add_product(1568, 768, 192);
    return true;
}();

} // namespace

} // namespace attn::bench
