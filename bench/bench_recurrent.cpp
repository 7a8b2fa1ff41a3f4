// A token of recurrent attention after the other: how fast the state, which a cache of the processor holds, is gone through.
//     recurrent_step/<rule>/d:64/h:12/threads:1
#include "bench_report.hpp"
#include "measure.hpp"

#include "attn/cache/recurrent_state.hpp"
#include "random_numbers.hpp"

#include <benchmark/benchmark.h>

namespace attn::bench {

namespace {

/// The tokens of some chunks, and what rules take of each; log decays in (-1, 0), betas in (0, 1).
struct steps {
    static constexpr index_t count = 64;
    shape state;
    tensor<float> q, k, v, log_decay, channel_decay, beta, a;

    steps(index_t heads, index_t d)
        : state{1, heads, d, d}, q(numbers(d, 1, 0)), k(numbers(d, 2, 0)), v(numbers(d, 3, 0)), log_decay(numbers(1, 4, -0.5F)), channel_decay(numbers(d, 5, -0.5F)),
          beta(numbers(1, 6, 0.5F)), a(numbers(d, 7, 0)) {
        for (auto* t : {&k, &a})
            for (index_t e = 0; e < t->shape().size(); ++e) t->data()[e] *= 3 / std::sqrt(static_cast<float>(d));
    }
    tensor_view<const float> of(const tensor<float>& t, index_t step) const { return t.slice({.tokens = {step % count, 1}}); }

private:
    tensor<float> numbers(index_t channels, unsigned seed, float middle) const {
        auto t = testing::random_tensor<float>({1, state.heads, count, channels}, seed, 0.5F);
        for (index_t e = 0; e < t.shape().size(); ++e) t.data()[e] += middle;
        return t;
    }
};

template <class Rule>
void add(const std::string& name, index_t d, Rule rule) {
    constexpr index_t heads = 12;
    const auto full = "recurrent_step/" + name + "/d:" + std::to_string(d) + "/h:" + std::to_string(heads) + "/threads:1";
    benchmark::RegisterBenchmark(full.c_str(), [=](benchmark::State& state) {
        label(state);
        const steps s(heads, d);
        recurrent_state<float> kept(s.state);
        tensor<float> out({1, heads, 1, d});
        const execution run;
        index_t step = 0;
        const auto call = [&] {
            attend(recurrent_attention{.rule = rule(s, step)}, inputs<float>{s.of(s.q, step), s.of(s.k, step), s.of(s.v, step)}, outputs<float>{out}, kept, run);
            ++step;
        };
        for (int n = 0; n < 1000; ++n) call();
        const auto seconds = seconds_of([&] {
            for ([[maybe_unused]] auto _ : state) call();
        });
        const auto bytes = 4.0 * static_cast<double>(s.state.size());
        state.counters["bytes"] = bytes;
        state.counters["bytes_per_second"] = bytes * static_cast<double>(state.iterations()) / seconds;
    });
}

const bool added = [] {
    for (const index_t d : {64, 128}) {
        add("linear", d, [](const steps&, index_t) { return rule::linear<>{}; });
        add("gated", d, [](const steps& s, index_t i) { return rule::gated<>{s.of(s.log_decay, i)}; });
        add("gated_channel", d, [](const steps& s, index_t i) { return rule::gated<>{s.of(s.channel_decay, i)}; });
        add("gated_delta", d, [](const steps& s, index_t i) { return rule::gated_delta<>{s.of(s.log_decay, i), s.of(s.beta, i)}; });
        add("general", d, [](const steps& s, index_t i) { return rule::general<>{s.of(s.channel_decay, i), s.of(s.a, i), s.of(s.a, i)}; });
    }
    return true;
}();

} // namespace

} // namespace attn::bench
