// How long the compiler takes for a file that includes attn and nothing else, beside one of what attn stands on.
//     compile/<header>
#include "bench_report.hpp"
#include "measure.hpp"

#include <benchmark/benchmark.h>

#include <cstdlib>

namespace attn::bench {

namespace {

/// Compiles a file of these lines, as this program was compiled. False if that fails.
bool compiles(const std::string& lines) {
    const auto command = "printf '" + lines + "' | " ATTN_BENCH_COMPILE " -x c++ -c -o /dev/null - 2>/dev/null";
    return std::system(command.c_str()) == 0;
}

/// Times both by turns: `times_the_base` is how many times as long the header takes.
void time_beside_base(benchmark::State& state, const std::string& header) {
    label(state);
    bool works = true;
    double base = 0, whole = 0;
    for ([[maybe_unused]] auto _ : state) {
        base += seconds_of([&] { works = works && compiles("#include <Eigen/Core>\\n#include <xsimd/xsimd.hpp>\\n"); });
        const auto seconds = seconds_of([&] { works = works && compiles("#include <attn/" + header + ">\\n"); });
        whole += seconds;
        state.SetIterationTime(seconds);
    }
    if (!works) return state.SkipWithError("the compiler of this program is not there any more");
    state.counters["times_the_base"] = whole / base;
}

const bool added = [] {
    for (const std::string header : {"attn.hpp", "attention/softmax_attention.hpp", "layer/transformer_block.hpp"})
        benchmark::RegisterBenchmark(("compile/" + header).c_str(), [header](benchmark::State& state) { time_beside_base(state, header); })
            ->UseManualTime()
            ->Repetitions(3);
    return true;
}();

} // namespace

} // namespace attn::bench
