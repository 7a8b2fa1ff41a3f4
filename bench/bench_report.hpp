// What the benchmark prints: a line for each row as it is done, and at the end comparisons.
#pragma once

#include "bench_rows.hpp"
#include "measure.hpp"

#include <benchmark/benchmark.h>

#include <chrono>
#include <map>

namespace attn::bench {

/// Says in a row of the output file what it ran with; how many threads says its name.
void label(benchmark::State& state);

/// Prints medians over the repetitions of a row, and to stderr how far it is. What lies in the output file (--benchmark_out) is Google
/// Benchmark's own.
class report final : public benchmark::BenchmarkReporter {
public:
    /// prints_goals: at the end, what was reached of what we mean to reach.
    report(std::size_t rows, bool prints_goals) : rows_(rows), prints_goals_(prints_goals) {}

    bool ReportContext(const Context& context) override;
    void ReportRuns(const std::vector<Run>& runs) override;

    /// The comparisons whose rows were timed, how the times of the sweeps grow, goals if they are asked for, and a warning if other
    /// programs took much of the processor.
    void print_summary() const;

private:
    struct result {
        quartiles seconds, share, flops;
        double useful_share = 0;
    };
    void print_goals() const;
    void print_comparisons() const;
    void print_crossover() const;
    void print_growth() const;

    void print_progress();
    void print_row(const std::string& name, std::map<std::string, std::vector<double>>& values);

    std::size_t rows_, done_ = 0;
    bool prints_goals_;
    std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now(), told_ = began_;
    std::map<std::string, result> results_;
    bool has_table_heading_ = false;
    std::vector<double> idle_; ///< of each row on one thread, the share of its time in which it did not run
};

} // namespace attn::bench
