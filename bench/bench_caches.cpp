// A step of decoding beside a cache of keys and values: how fast their bytes, as they are stored, are read.
//     cache/step/<format>/heads:32/kv:8/keys:32768/d:128/threads:1   one query; full is timed beside Eigen's products of the same matrices, the
//                                                                    others beside full. Of short caches another one in every call
//     cache/window_1024/at:1000000/threads:1                         behind so many tokens, of which those that no query sees are released
//     cache/small/heads:8/keys:101/d:8/threads:1                     beside plain loops, compiled with -Ofast
//     cache/append/<format>/kv:8/d:128/threads:1                     one token
#include "bench_report.hpp"
#include "eigen_rows.hpp"
#include "measure.hpp"
#include "plain_step.hpp"
#include "read_bandwidth.hpp"

#include "attn/attention/sparse_attention.hpp"
#include "attn/cache/attend.hpp"
#include "attn/parallel/thread_pool.hpp"
#include "attn/pattern/causal.hpp"

#include <benchmark/benchmark.h>

#include <optional>

namespace attn::bench {

namespace {

constexpr std::pair<const char*, cache_format> formats[] = {{"full", cache_format::full},
                                                            {"bfloat16", cache_format::bfloat16},
                                                            {"half", cache_format::half},
                                                            {"int8", cache_format::int8},
                                                            {"int4", cache_format::int4}};

struct step {
    index_t heads, kv_heads, keys, head_dim;

    std::string name() const {
        return "heads:" + std::to_string(heads) + "/kv:" + std::to_string(kv_heads) + "/keys:" + std::to_string(keys) +
               "/d:" + std::to_string(head_dim);
    }
    shape rows() const { return {.heads = kv_heads, .tokens = keys, .channels = head_dim}; }
    shape query() const { return {.heads = heads, .tokens = 1, .channels = head_dim}; }
};

/// Caches of so many keys each, together more than a cache of the processor holds.
class filled_caches {
public:
    filled_caches(const step& s, cache_format format)
        : pool_({.kv_heads = s.kv_heads, .key_channels = s.head_dim, .value_channels = s.head_dim, .format = format},
                count(s) * ((s.keys + 127) / 128)) {
        const auto k = tensor<float>::random(s.rows(), 1), v = tensor<float>::random(s.rows(), 2);
        for (index_t i = 0; i < count(s); ++i) {
            all_.emplace_back(pool_);
            all_.back().append(k, v);
        }
    }
    const sequence<float>& next() { return all_[at_++ % all_.size()]; }
    /// Bytes of what a step reads.
    double bytes(const step& s) const {
        return static_cast<double>(pool_bytes<float>(pool_.layout(), 1)) * static_cast<double>(s.keys) / 128;
    }
    static index_t count(const step& s) { return std::max<index_t>(1, 32768 / s.keys); }

private:
    key_value_pool<float> pool_;
    std::vector<sequence<float>> all_;
    std::size_t at_ = 0;
};

/// The step by Eigen, of keys and values as tensors; some, that memory is read.
class eigen_step {
public:
    explicit eigen_step(const step& s) {
        for (index_t i = 0; i < filled_caches::count(s); ++i) {
            keys_.push_back(tensor<float>::random(s.rows(), 1));
            values_.push_back(tensor<float>::random(s.rows(), 2));
        }
    }
    void run(const tensor_view<const float>& q, const tensor_view<float>& out) {
        const auto &k = keys_[at_ % keys_.size()], &v = values_[at_++ % keys_.size()];
        const auto kv_heads = k.shape().heads, group = q.shape().heads / kv_heads, d = q.shape().channels;
        for (index_t h = 0; h < kv_heads; ++h) {
            const Eigen::Map<const matrix<float>> queries(q.row(0, h * group, 0), group, d);
            Eigen::Map<matrix<float>> result(out.row(0, h * group, 0), group, d);
            scores_.noalias() = queries * head_of(k.view(), 0, h).transpose();
            scores_ *= 1 / std::sqrt(static_cast<float>(d));
            scores_ = (scores_.colwise() - scores_.rowwise().maxCoeff()).array().exp().matrix();
            result.noalias() = scores_ * head_of(v.view(), 0, h);
            result.array().colwise() /= scores_.rowwise().sum().array();
        }
    }

private:
    std::vector<tensor<float>> keys_, values_;
    std::size_t at_ = 0;
    matrix<float> scores_;
};

/// What a step reads, and what the one beside it does.
struct step_memory {
    step_memory(const step& s, cache_format format) : caches(s, format) {
        if (format == cache_format::full) eigen.emplace(s);
        else full.emplace(s, cache_format::full);
    }
    filled_caches caches;
    std::optional<filled_caches> full;
    std::optional<eigen_step> eigen;
};
/// The memory of a row: its first repetition fills it, which takes longer than to time it, and that of the next step gives it back.
step_memory& memory_of(const std::string& row, const step& s, cache_format format) {
    static std::string of;
    static std::optional<step_memory> memory;
    if (of != row) {
        memory.reset();
        memory.emplace(s, format);
        of = row;
    }
    return *memory;
}

/// Times a call between calls of another.
struct alternating {
    double working = 0, beside = 0;

    void run(benchmark::State& state, const auto& call, const auto& other) {
        label(state);
        for ([[maybe_unused]] auto _ : state) {
            beside += seconds_of(other);
            const auto seconds = seconds_of(call);
            working += seconds;
            state.SetIterationTime(seconds);
        }
    }
};

void add_step(const step& s, const std::string& format_name, cache_format format, index_t threads) {
    const auto name = "cache/step/" + format_name + "/" + s.name() + "/threads:" + std::to_string(threads);
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
        thread_pool pool(threads);
        const execution run(pool);
        const auto q = tensor<float>::random(s.query(), 3);
        tensor<float> out(s.query());
        const softmax_attention op{.pattern = causal{}};
        auto& [caches, full, eigen] = memory_of(name, s, format);
        const auto attend_to = [&](filled_caches& to) { attend(op, q, to.next(), outputs<float>{out}, run); };
        alternating times;
        if (eigen) {
            times.run(state, [&] { attend_to(caches); }, [&] { eigen->run(q.view(), out.view()); });
            if (threads == 1) state.counters["vs_eigen"] = times.beside / times.working;
        } else {
            times.run(state, [&] { attend_to(caches); }, [&] { attend_to(*full); });
            state.counters["vs_full"] = times.beside / times.working;
        }
        state.counters["bytes"] = caches.bytes(s);
        state.counters["bytes_per_second"] = caches.bytes(s) * static_cast<double>(state.iterations()) / times.working;
        state.counters["bandwidth"] = state.counters["bytes_per_second"] / read_bandwidth(pool);
    })->UseManualTime();
}

void add_window(index_t position) {
    const auto name = "cache/window_1024/at:" + std::to_string(position) + "/threads:1";
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
        label(state);
        const step s{8, 2, 1000, 128};
        const auto rows = tensor<float>::random(s.rows(), 1), q = tensor<float>::random(s.query(), 3);
        key_value_pool<float> pool({.kv_heads = 2, .key_channels = 128, .value_channels = 128}, 20);
        sequence<float> tokens(pool);
        const softmax_attention op{.pattern = sliding_window(1024)};
        while (tokens.size() < position) {
            tokens.append(rows, rows);
            tokens.release(op.pattern);
        }
        tensor<float> out(s.query());
        const execution run;
        for ([[maybe_unused]] auto _ : state) attend(op, q, tokens, outputs<float>{out}, run);
    });
}

void add_small() {
    const step s{8, 8, 101, 8};
    benchmark::RegisterBenchmark(("cache/small/" + s.name() + "/threads:1").c_str(), [=](benchmark::State& state) {
        const auto k = tensor<float>::random(s.rows(), 1), v = tensor<float>::random(s.rows(), 2), q = tensor<float>::random(s.query(), 3);
        key_value_pool<float> pool({.kv_heads = s.kv_heads, .key_channels = s.head_dim, .value_channels = s.head_dim}, 1);
        sequence<float> tokens(pool);
        tokens.append(k, v);
        tensor<float> out(s.query()), plain(s.query());
        std::vector<float> scores(static_cast<std::size_t>(s.keys));
        const softmax_attention op{.pattern = causal{}};
        const execution run;
        constexpr int calls = 100; // one is too short for the clock
        alternating times;
        times.run(
            state,
            [&] {
                for (int i = 0; i < calls; ++i) attend(op, q, tokens, outputs<float>{out}, run);
            },
            [&] {
                for (int i = 0; i < calls; ++i) {
                    plain_step(q.data(), k.data(), v.data(), s.heads, s.keys, s.head_dim, scores.data(), plain.data());
                    benchmark::DoNotOptimize(plain.data());
                }
            });
        state.counters["vs_plain"] = times.beside / times.working;
        state.counters["calls"] = calls;
    })->UseManualTime();
}

void add_append(const std::string& format_name, cache_format format) {
    benchmark::RegisterBenchmark(("cache/append/" + format_name + "/kv:8/d:128/threads:1").c_str(), [=](benchmark::State& state) {
        label(state);
        const step s{8, 8, 1, 128};
        const auto k = tensor<float>::random(s.rows(), 1), v = tensor<float>::random(s.rows(), 2);
        key_value_pool<float> pool({.kv_heads = 8, .key_channels = 128, .value_channels = 128, .format = format}, 1);
        sequence<float> tokens(pool);
        for ([[maybe_unused]] auto _ : state) {
            if (tokens.size() == 128) tokens.truncate(0);
            tokens.append(k, v);
        }
    });
}

const bool added = [] {
    for (const auto& [name, format] : formats) {
        for (const index_t threads : {1, 2}) add_step({32, 8, 32768, 128}, name, format, threads);
        add_step({8, 8, 32768, 128}, name, format, 1);
        add_step({32, 8, 4096, 128}, name, format, 1);
        add_append(name, format);
    }
    for (const index_t position : {2000, 1000000}) add_window(position);
    add_small();
    return true;
}();

} // namespace

} // namespace attn::bench
