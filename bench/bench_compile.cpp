// How long the compiler takes for a file that includes attn, and makes a call or none, beside one of what attn stands on; and how much code the
// call is.
//     compile/<header>          as this program was compiled
//     compile/<call>/O0, O2     without optimisation, and with
#include "bench_report.hpp"
#include "measure.hpp"

#include <benchmark/benchmark.h>

#include <cstdlib>
#include <fstream>

namespace attn::bench {

namespace {

const std::string base = "#include <Eigen/Core>\n#include <xsimd/xsimd.hpp>\n";

/// Compiles a file of these lines, with options beside those of this program. False if that fails.
bool compiles(const std::string& lines, const std::string& options) {
    const auto command = "printf '" + lines + "' | " ATTN_BENCH_COMPILE " " + options + " -x c++ -c - 2>/dev/null";
    return std::system(command.c_str()) == 0;
}

/// Times a file beside the base by turns: `times_the_base` is how many times as long it takes.
void time_beside_base(benchmark::State& state, const std::string& lines, const std::string& options) {
    label(state);
    bool works = true;
    double of_base = 0, whole = 0;
    for ([[maybe_unused]] auto _ : state) {
        of_base += seconds_of([&] { works = works && compiles(base, options + " -o /dev/null"); });
        const auto seconds = seconds_of([&] { works = works && compiles(lines, options + " -o /dev/null"); });
        whole += seconds;
        state.SetIterationTime(seconds);
    }
    if (!works) return state.SkipWithError("the compiler of this program is not there any more");
    state.counters["times_the_base"] = whole / of_base;
}

/// Bytes of an object, names for the linker and all.
double object_bytes(const std::string& lines, const std::string& options) {
    const auto path = ATTN_BENCH_FOLDER "/call.o";
    if (!compiles(lines, options + " -o " + path)) return 0;
    std::ifstream object(path, std::ios::binary | std::ios::ate);
    return static_cast<double>(object.tellg());
}

void add(const std::string& name, const std::string& lines, const std::string& options, bool is_call) {
    const auto run = [=](benchmark::State& state) {
        time_beside_base(state, lines, options);
        if (is_call) state.counters["object_bytes"] = object_bytes(lines, options);
    };
    benchmark::RegisterBenchmark(("compile/" + name).c_str(), run)->UseManualTime()->Repetitions(3);
}

const bool added = [] {
    for (const std::string header : {"attn.hpp", "attention/softmax_attention.hpp", "layer/transformer_block.hpp"})
        add(header, "#include <attn/" + header + ">\n", "", false);
    const auto on_tensors = [](const std::string& body) { return "using x = const attn::tensor<float>&; void f(x q, attn::tensor<float>& out) { " + body + " }\n"; };
    const auto causal = "#include <attn/attention/softmax_attention.hpp>\n#include <attn/pattern/causal.hpp>\n" +
                        on_tensors("attn::attend(attn::softmax_attention{.pattern = attn::causal{}}, q, q, q, out);");
    const auto norm = "#include <attn/norm/layer_norm.hpp>\n" + on_tensors("attn::normalise(attn::layer_norm<float>{}, q, out);");
    for (const std::string level : {"O0", "O2"}) {
        add("causal/" + level, causal, "-" + level, true);
        add("layer_norm/" + level, norm, "-" + level, true);
    }
    return true;
}();

} // namespace

} // namespace attn::bench
