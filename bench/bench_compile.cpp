// How long the compiler takes for a file that includes attn, and makes a call or none, beside one of what attn stands on; and how much code the
// call is.
//     compile/<header>          as this program was compiled
//     compile/<call>/O0, O2     without optimisation, and with, by gcc and by clang where there are both
#include "bench_report.hpp"
#include "measure.hpp"

#include <benchmark/benchmark.h>

#include <cstdlib>
#include <filesystem>

namespace attn::bench {

namespace {

const std::string base = "#include <Eigen/Core>\n#include <xsimd/xsimd.hpp>\n";

const std::string object = ATTN_BENCH_FOLDER "/compiled.o";

/// The compiler of this program, and the other one if there is one.
const struct {
    std::string name, path;
} compilers[] = {ATTN_BENCH_COMPILERS};

/// Compiles a file of these lines to the object, by a compiler with options beside those of this program. False if that fails.
bool compiles(const std::string& lines, const std::string& compiler) {
    const auto command = "printf '" + lines + "' | " + compiler + " -x c++ -c -o '" + object + "' - 2>/dev/null";
    return std::system(command.c_str()) == 0;
}

/// Times a file beside the base by turns: `times_the_base` is how many times as long it takes; `object_bytes`, of a call, is what it becomes,
/// names for the linker and all.
void time_beside_base(benchmark::State& state, const std::string& lines, const std::string& compiler, bool is_call) {
    label(state);
    bool works = true;
    double of_base = 0, whole = 0;
    for ([[maybe_unused]] auto _ : state) {
        of_base += seconds_of([&] { works = works && compiles(base, compiler); });
        const auto seconds = seconds_of([&] { works = works && compiles(lines, compiler); });
        whole += seconds;
        state.SetIterationTime(seconds);
    }
    if (!works) return state.SkipWithError("a compiler that was there is not there any more");
    state.counters["times_the_base"] = whole / of_base;
    if (is_call) state.counters["object_bytes"] = static_cast<double>(std::filesystem::file_size(object));
}

void add(const std::string& name, const std::string& lines, const std::string& path, const std::string& options, bool is_call) {
    const auto compiler = "'" + path + "' " ATTN_BENCH_COMPILE " " + options;
    benchmark::RegisterBenchmark(("compile/" + name).c_str(), [=](benchmark::State& state) { time_beside_base(state, lines, compiler, is_call); })
        ->UseManualTime()
        ->Repetitions(3);
}

const bool added = [] {
    for (const std::string header : {"attn.hpp", "attention/softmax_attention.hpp", "layer/transformer_block.hpp"})
        add(header, "#include <attn/" + header + ">\n", compilers[0].path, "", false);
    const auto on_tensors = [](const std::string& body) { return "using x = const attn::tensor<float>&; void f(x q, attn::tensor<float>& out) { " + body + " }\n"; };
    const auto causal = "#include <attn/attention/softmax_attention.hpp>\n#include <attn/pattern/causal.hpp>\n" +
                        on_tensors("attn::attend(attn::softmax_attention{.pattern = attn::causal{}}, q, q, q, out);");
    const auto norm = "#include <attn/norm/layer_norm.hpp>\n" + on_tensors("attn::normalise(attn::layer_norm<float>{}, q, out);");
    for (const auto& [name, path] : compilers)
        for (const std::string level : {"O0", "O2"}) {
            add("causal/" + level + "/" + name, causal, path, "-" + level, true);
            add("layer_norm/" + level + "/" + name, norm, path, "-" + level, true);
        }
    return true;
}();

} // namespace

} // namespace attn::bench
