#include "bench_patterns.hpp"

#include "bench_no_prefetch.hpp"
#include "bench_report.hpp"
#include "float_case.hpp"
#include "measure.hpp"
#include "read_bandwidth.hpp"

#include "attn/attention/products.hpp"
#include "attn/attention/sparse_attention.hpp"
#include "attn/layer/windows.hpp"
#include "attn/pattern/block_diagonal.hpp"
#include "attn/pattern/dilated_window.hpp"
#include "attn/pattern/block_sparse.hpp"
#include "attn/pattern/neighborhood.hpp"
#include "attn/pattern/segments.hpp"
#include "attn/pattern/selected.hpp"
#include "attn/pattern/tiles.hpp"
#include "attn/score/additive_bias.hpp"

#include <benchmark/benchmark.h>

#include <cstring>
#include <random>

namespace attn::bench {

using namespace pattern;

namespace {

template <Pattern P>
testing::attention_case pattern_case(std::string name, const P& pattern) {
    return only_float(std::move(name), [pattern](const testing::problem&) { return testing::made{softmax_attention{.pattern = pattern}}; });
}

/// Softmax attention that leaves it to the hardware what comes next.
template <Pattern P>
struct without_prefetch : softmax_attention<P> {
    seen_keys seen;

    template <class Stored = any_storage, Scalar T>
    void forward(const inputs<T>& in, const outputs<T>& out, const execution&) const {
        const auto s = shapes_of(in);
        attend_without_prefetch({seen, s.queries.batch, s.queries.heads, s.keys.heads, s.queries.tokens, s.keys.tokens, s.keys.channels, s.values.channels,
                                 in.queries.rows(0, 0).numbers().data, in.keys.rows(0, 0).numbers().data, in.values.rows(0, 0).numbers().data,
                                 out.values.rows(0, 0).numbers().data});
    }
};
template <Pattern P>
testing::attention_case without_prefetch_case(std::string name, const P& pattern, seen_keys seen) {
    return only_float(std::move(name), [=](const testing::problem&) { return testing::made{without_prefetch<P>{{.pattern = pattern}, seen}}; });
}

std::shared_ptr<tensor<float>> window_bias(const testing::problem& p) {
    auto bias = std::make_shared<tensor<float>>(shape{1, p.heads, p.queries, p.keys});
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    std::generate_n(bias->data(), bias->shape().size(), [&] { return normal(random); });
    return bias;
}

testing::attention_case windows_case() {
    return only_float("windows_7x7", [](const testing::problem& p) {
        const auto bias = window_bias(p);
        return testing::made{softmax_attention{.score = additive_bias<float>{bias->view()}}, bias};
    });
}
testing::attention_case shifted_windows_case() {
    return only_float("windows_7x7_shifted", [](const testing::problem& p) {
        const auto bias = window_bias(p);
        const window_grid grid{.height = 56, .width = 56, .window_height = 7, .window_width = 7, .shift_height = 3, .shift_width = 3};
        return testing::made{softmax_attention{.score = additive_bias<float>{bias->view()}, .pattern = grid.shift_segments()}, bias};
    });
}

/// Every token of a 56 x 56 grid, in tiles of 4 x 4, with its window.
testing::attention_case neighborhood_case(index_t window) {
    return pattern_case("neighborhood_" + std::to_string(window),
                        neighborhood(neighborhood_rule<2>{.grid = {56, 56}, .window = {window, window}, .tile = {4, 4}}));
}
/// 16 blocks of 64 keys for each block of 64 queries, of 16384 tokens, spread over those up to it.
testing::attention_case selected_case() {
    constexpr index_t blocks = 16384 / 64;
    tensor<index_t> table({1, 1, blocks, 16});
    for (index_t u = 0; u < blocks; ++u)
        for (index_t e = 0; e < 16; ++e) table(0, 0, u, e) = u < 16 ? (e <= u ? e : -1) : u - e * (u / 16);
    return pattern_case("selected_16_of_64", causal{} & selected(table, 64));
}

/// So many keys for each query, drawn one by one: of a sequence's queries from those up to each, of fewer from all.
testing::attention_case single_keys_case(index_t count) {
    return only_float("single_keys_" + std::to_string(count), [count](const testing::problem& p) {
        tensor<index_t> table({1, 1, p.queries, count});
        std::mt19937 random(6);
        for (index_t i = 0; i < p.queries; ++i) {
            const auto seen = p.keys - p.queries + i + 1, step = seen / count; // one of as many neighbours
            for (index_t e = 0; e < count; ++e)
                table(0, 0, i, e) = step == 0 ? (e < seen ? e : -1) : e * step + static_cast<index_t>(random()) % step;
        }
        return testing::made{softmax_attention{.pattern = selected(table, 1)}};
    });
}

/// Documents of so many tokens, packed one after the other, causal in each.
testing::attention_case documents_case(index_t tokens) {
    return only_float("documents_" + std::to_string(tokens), [tokens](const testing::problem& p) {
        std::vector<std::int32_t> ids(static_cast<std::size_t>(p.queries));
        for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(static_cast<index_t>(i) / tokens);
        return testing::made{softmax_attention{.pattern = causal{} & segments(ids)}};
    });
}
/// Half of the blocks of a matrix, drawn at random.
testing::attention_case blocks_case(index_t size) {
    return only_float("block_sparse_" + std::to_string(size), [size](const testing::problem& p) {
        const auto blocks = (p.queries + size - 1) / size;
        auto table = std::make_shared<tensor<bool>>(shape{1, 1, blocks, blocks});
        std::mt19937 random(4);
        std::generate_n(table->data(), table->shape().size(), [&] { return random() % 2 == 0; });
        return testing::made{softmax_attention{.pattern = block_sparse{table->view(), size}}, table};
    });
}

/// A mask that is only known pair by pair, looked at once: beside a copy of the mask.
void add_tiles(index_t n) {
    const auto name = "derive/tiles/n:" + std::to_string(n) + "/threads:1";
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
        label(state);
        tensor<bool> mask({1, 1, n, n}), copy(mask.shape());
        std::mt19937 random(5);
        for (index_t i = 0; i < mask.shape().size(); i += 32) {
            const auto bits = random();
            for (index_t k = 0; k < 32; ++k) mask.data()[i + k] = (bits >> k & 1) != 0;
        }
        auto size = static_cast<std::size_t>(mask.shape().size());
        benchmark::DoNotOptimize(size); // or gcc 14 takes it to be larger than the memory, and warns
        const auto bytes = static_cast<double>(size);
        double copying = 0, working = 0;
        for ([[maybe_unused]] auto _ : state) {
            copying += seconds_of([&] { std::memcpy(copy.data(), mask.data(), size); });
            const auto seconds = seconds_of([&] { benchmark::DoNotOptimize(tiles(mask.view())); });
            working += seconds;
            state.SetIterationTime(seconds);
        }
        const auto speed = bytes * static_cast<double>(state.iterations()) / working;
        state.counters["bytes"] = bytes;
        state.counters["bytes_per_second"] = speed;
        state.counters["vs_memcpy"] = copying / working;
    })->UseManualTime();
}

/// The visible keys of all query blocks, found by evaluating the pattern on ranges as the kernel does.
template <Pattern P>
void add_schedule(const std::string& pattern_name, const P& pattern, index_t n) {
    const auto name = "derive/schedule_" + pattern_name + "/n:" + std::to_string(n) + "/threads:1";
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
        label(state);
        const softmax_attention op{.pattern = pattern};
        const shape s{1, 1, n, 64};
        using traits = kernel::query_block_traits<float>;
        const positions where;
        const kernel::visible_keys_of<float, P> visible(pattern, {s, s, s}, where);
        std::vector<std::uint64_t> masks(kernel::visible_span::max_blocks * kernel::softmax_call<float>::block_keys);
        attn::detail::scratch memory(reinterpret_cast<std::byte*>(masks.data()));
        kernel::visible_span span(memory, kernel::softmax_call<float>::block_keys, false);
        for ([[maybe_unused]] auto _ : state) {
            index_t keys = 0;
            for (index_t pass = 0; pass < visible.passes(); ++pass) {
                const auto step = visible.step(0, 0, pass);
                const auto rows = traits::rows_of((n + step - 1) / step);
                for (index_t t = 0; t < tile_count(n, rows, step); ++t) {
                    const kernel::query_block queries{.tokens = tile_at(t, 0, n, rows, step, traits::lane_count)};
                    const kernel::key_blocks blocks(kernel::softmax_call<float>::block_keys, 0, n, queries.tokens);
                    span.forget();
                    for (auto at = blocks.first_block(); span.find(visible, queries, pass, blocks, at, blocks.end_block()); at = span.end())
                        for (const auto& part : span.parts()) keys += part.keys.count;
                }
            }
            benchmark::DoNotOptimize(keys);
        }
        const auto pairs = visited_pairs(op, input_shapes{s, s, s});
        state.counters["useful_share"] = static_cast<double>(pairs.visible) / static_cast<double>(pairs.visited);
    });
}

/// The last `queries` of n tokens beside all of them. One row stands for every query and one for every key, so that memory plays no part, and how
/// time grows with n says what it costs to find the few keys that a narrow pattern shows.
template <Pattern P>
void add_growth(const std::string& pattern_name, index_t queries, index_t n, const P& pattern) {
    const auto name = "sweep/" + pattern_name + "/n:" + std::to_string(n) + "/threads:1";
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
        label(state);
        constexpr index_t head_dim = 16;
        const std::vector<float> row(head_dim, 0.5f);
        const auto rows = [&](index_t count) { return tensor_view<const float>(row.data(), {1, 1, count, head_dim}, {0, 0, 0, 1}); };
        const inputs<float> in{rows(queries), rows(n), rows(n), bottom_right(queries, n)};
        tensor<float> out({1, 1, queries, head_dim});
        sequential here;
        const softmax_attention op{.pattern = pattern};
        workspace memory(workspace_bytes<float>(op, shapes_of(in), here));
        for ([[maybe_unused]] auto _ : state) attend(op, in, outputs<float>{out}, execution(here, memory));
    })->Repetitions(5);
}

const bool added = [] {
    for (index_t n = 1 << 10; n <= 1 << 22; n *= 16) add_growth("step_of_window_128", 1, n, sliding_window(128));
    for (index_t n = 1 << 14; n <= 1 << 20; n *= 8) {
        add_growth("window_32", n, n, sliding_window(32));
        static std::vector<std::vector<std::int32_t>> documents; // what the patterns refer to
        auto& ids = documents.emplace_back(static_cast<std::size_t>(n));
        for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i / 64);
        add_growth("documents_64", n, n, causal{} & segments(ids));
    }
    for (const index_t n : {2048, 8192}) add_tiles(n);
    add_schedule("local_128", local{128}, 65536);
    add_schedule("sparse_transformer_strided", sparse_transformer_strided(256), 65536);
    return true;
}();

} // namespace

const std::vector<testing::attention_case>& pattern_cases() {
    static const std::vector<testing::attention_case> cases{
        pattern_case("local_128", local{128}),
        pattern_case("sliding_window_256", sliding_window(256)),
        pattern_case("strided_64", strided{64}),
        pattern_case("sparse_transformer_strided", sparse_transformer_strided(128)),
        pattern_case("sparse_transformer_symmetric", sparse_transformer_symmetric(128, 128)),
        pattern_case("sparse_transformer_fixed", sparse_transformer_fixed(128, 8)),
        without_prefetch_case("softmax_no_prefetch", dense{}, seen_keys::all),
        without_prefetch_case("softmax_causal_no_prefetch", causal{}, seen_keys::past),
        without_prefetch_case("local_128_no_prefetch", local{128}, seen_keys::within_128),
        windows_case(),
        shifted_windows_case(),
        neighborhood_case(7),
        neighborhood_case(13),
        selected_case(),
        single_keys_case(512),
        single_keys_case(2048),
        documents_case(37),
        documents_case(128),
        documents_case(512),
        pattern_case("block_diagonal_64", block_diagonal{64}),
        blocks_case(64),
        blocks_case(28),
        pattern_case("dilated_window_128_3", dilated_window{128, 3}),
        pattern_case("dilated_window_28_3", dilated_window{28, 3}),
        pattern_case("longformer_128_16", longformer(128, 16)),
        pattern_case("fixed_256", sparse_transformer_fixed(256, 8)),
        only_float("softmax_bf16_products", [](const testing::problem&) { return testing::made{softmax_attention{.products = bf16_products{}}}; }),
    };
    return cases;
}

} // namespace attn::bench
