// attn_bench: how fast every operator is, as a share of what the machine can do. Google Benchmark's options, --quick, and --goals, which prints
// at the end what we mean to reach.
#include "bench_report.hpp"
#include "fma_peak.hpp"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <iostream>
#include <sstream>
#include <thread>

namespace attn::bench {

namespace {

/// Times the rows one after the other. A row lives from its first repetition to the first of the next row.
class runner {
public:
    explicit runner(int naive_timings) : naive_timings_(naive_timings) {}

    /// One repetition: ours between two measurements of the peak, and naive Eigen beside the first few of them.
    void run(const row& r, benchmark::State& state) {
        if (&r != current_) begin(r);
        if (!accuracy_.right()) {
            state.SkipWithError("the answer is wrong");
            return;
        }
        auto& s = *subject_;
        label(state);
        const auto before = s.peak();
        const auto seconds = seconds_of([&] {
            for ([[maybe_unused]] auto _ : state) s.attend();
        });
        const auto flops = s.useful_flops() * static_cast<double>(state.iterations()) / seconds;
        const auto peak = std::max(before, s.peak());
        // Sweeps are long, and most of their rows have a shorter one that says it.
        const bool wants_naive = s.has_naive() && (r.family != "sweep" || r.problem.queries <= 2048);
        if (wants_naive && std::ssize(naive_) < naive_timings_) naive_.push_back(seconds_per_call([&] { s.naive(); }, 0.01));

        state.counters["flops"] = flops;
        state.counters["peak"] = flops / peak;
        if (!naive_.empty()) state.counters["vs_naive"] = quartiles_of(naive_).median * flops / s.useful_flops();
        state.counters["visited"] = s.visited_flops() / s.useful_flops();
        state.counters["useful_share"] = s.useful_flops() / r.dense_flops();
        state.counters["queries"] = static_cast<double>(r.problem.queries);
        state.counters["bytes"] = s.tensor_bytes();
        if (bandwidth_ > 0) state.counters["bandwidth"] = s.tensor_bytes() * static_cast<double>(state.iterations()) / seconds / bandwidth_;
        state.counters["workspace_bytes"] = s.workspace_bytes();
        state.counters["matrix_bytes"] = s.matrix_bytes();
        state.counters["error"] = accuracy_.error;
        state.counters["checked_queries"] = static_cast<double>(accuracy_.queries);
    }
    bool all_right() const { return all_right_; }

private:
    void begin(const row& r) {
        subject_.reset();
        naive_.clear();
        current_ = &r;
        subject_ = r.make();
        bandwidth_ = subject_->counts_bandwidth() ? subject_->bandwidth() : 0;
        accuracy_ = subject_->check();
        if (accuracy_.right()) return;
        all_right_ = false;
        std::cerr << r.name() << ": WRONG, an error of " << accuracy_.error << " where " << accuracy_.bound << " would pass\n";
    }

    int naive_timings_;
    const row* current_ = nullptr;
    std::unique_ptr<subject> subject_;
    std::vector<double> naive_;
    accuracy accuracy_;
    double bandwidth_ = 0; ///< bytes a second, where memory may bound the row
    bool all_right_ = true;
};

/// Gives Google Benchmark its options, which may go on to read the program's name. False if one of them is not known.
bool initialized(const std::vector<std::string>& given) {
    static std::vector<std::string> arguments;
    arguments = given;
    std::vector<char*> pointers;
    for (auto& argument : arguments) pointers.push_back(argument.data());
    auto count = static_cast<int>(pointers.size());
    pointers.push_back(nullptr);
    benchmark::Initialize(&count, pointers.data());
    return !benchmark::ReportUnrecognizedArguments(count, pointers.data());
}

/// How many rows the options choose, which Google Benchmark says when it lists them. It remembers options until they are given again.
std::size_t row_count(const std::vector<std::string>& arguments) {
    auto listing = arguments;
    for (const char* option : {"--benchmark_list_tests=true", "--benchmark_out="}) listing.emplace_back(option);
    initialized(listing);
    std::ostringstream names;
    benchmark::ConsoleReporter silent;
    silent.SetOutputStream(&names);
    silent.SetErrorStream(&names);
    const auto count = benchmark::RunSpecifiedBenchmarks(&silent);
    initialized(arguments);
    return count;
}

int run(std::vector<std::string> arguments) {
    const bool quick = std::erase(arguments, "--quick") > 0, prints_goals = std::erase(arguments, "--goals") > 0;
    // Before the caller's, so that those count.
    arguments.insert(arguments.begin() + 1,
                     {std::string("--benchmark_repetitions=") + (quick ? "3" : "21"), "--benchmark_min_time=" ATTN_BENCH_SECONDS,
                      "--benchmark_list_tests=false", "--benchmark_out="});
    if (quick)
        arguments.insert(arguments.begin() + 1,
                         "--benchmark_filter=-^(linformer_table|versus_softmax|norm_and_linear|slab_block|compile)/|/memory/|_1x5/");
    if (!initialized(arguments)) return 2;
    benchmark::AddCustomContext("instruction_set", instruction_set());
    benchmark::AddCustomContext("compiler", compiler());
    benchmark::AddCustomContext("hardware_threads", std::to_string(std::thread::hardware_concurrency()));

    runner rows_runner(quick ? 1 : 3);
    const auto rows = all_rows(quick);
    for (const auto& r : rows) {
        auto* const registered =
            benchmark::RegisterBenchmark(r.name().c_str(), [&](benchmark::State& state) { rows_runner.run(r, state); });
        if (r.family == "sweep" || r.family == "crossover") registered->Repetitions(5);
    }
    report printed(row_count(arguments), prints_goals);
    const auto ran = benchmark::RunSpecifiedBenchmarks(&printed);
    printed.print_summary();
    benchmark::Shutdown();
    return ran > 0 && rows_runner.all_right() ? 0 : 1;
}

} // namespace

} // namespace attn::bench

int main(int count, char** arguments) { return attn::bench::run({arguments, arguments + count}); }
