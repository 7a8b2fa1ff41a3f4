#include "bench_report.hpp"

#include "fma_peak.hpp"

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <set>

namespace attn::bench {

namespace {

constexpr int name_width = 66;

void print_cells(const std::string& name, const std::vector<std::string>& cells) {
    std::cout << std::left << std::setw(name_width) << name << std::right;
    for (const auto& cell : cells) std::cout << std::setw(11) << cell;
    std::cout << std::endl;
}

/// Medians of a row that tell what bounds it.
struct row_facts {
    double share, bandwidth, idle, visited, queries;
};
/// Why a row has less than half of the peak, and of the bandwidth, if that is known: two spaces and words.
std::string why_slow(const row_facts& row) {
    constexpr double half = 0.5, much_idle = 0.03, many_hidden = 1.3, few_queries = 32;
    if (row.share >= half || row.bandwidth >= half) return "";
    if (row.idle > much_idle) return "  busy: other programs ran";
    if (row.queries < few_queries) return "  few queries";
    return row.visited > many_hidden ? "  computes hidden pairs" : "";
}
/// What to say of a program that does without instructions which this processor has.
std::string build_note() {
#if defined(__x86_64__) && defined(__GNUC__)
    const int bits = __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") ? 512 : __builtin_cpu_supports("avx2") ? 256 : 128;
    if (bits > register_bits()) return "built for registers of " + std::to_string(register_bits()) + " bits, where this processor has " + std::to_string(bits) +
                                       ": -march=native would be faster, and shares are of the lower peak\n";
#endif
    return "";
}

} // namespace

void label(benchmark::State& state) { state.SetLabel(instruction_set() + ", " + compiler()); }

bool report::ReportContext(const Context& context) {
    const auto& cpu = context.cpu_info;
    std::cout << instruction_set() << ", " << compiler() << ", " << cpu.num_cpus << " processors at "
              << fixed_text(cpu.cycles_per_second / 1e9, 1) << " GHz";
    if (!cpu.load_avg.empty()) std::cout << ", load before " << fixed_text(cpu.load_avg.front(), 1);
    std::cout << '\n' << build_note()
        << "medians over repetitions; spread: between the quarters of them below and above\n"
        << "of peak: share of the FMA peak measured beside each, of the work on visible pairs; visited: pairs that are computed over visible "
           "ones;\nof memory: share of the bandwidth of reading, more than all of it from a "
           "cache;\nvs naive: Eigen with n x n scores; n x n: those of one head\n\n";
    print_cells("row", {"time", "spread", "Gflop/s", "of peak", "visited", "of memory", "vs naive", "workspace", "n x n", "  why slow"});
    return true;
}

void report::ReportRuns(const std::vector<Run>& runs) {
    std::map<std::string, std::vector<double>> values;
    std::string name;
    for (const auto& run : runs) {
        if (run.run_type != Run::RT_Iteration) continue;
        name = run.run_name.function_name;
        const auto calls = static_cast<double>(run.iterations);
        if (run.real_accumulated_time <= 0 || calls <= 0) continue; // stopped by an error
        values["seconds"].push_back(run.real_accumulated_time / calls);
        values["idle"].push_back(1 - run.cpu_accumulated_time / run.real_accumulated_time);
        for (const auto& [counter, value] : run.counters) values[counter].push_back(value);
    }
    if (name.empty()) return;
    print_row(name, values);
    ++done_;
    print_progress();
}

void report::print_progress() {
    const auto now = std::chrono::steady_clock::now();
    const bool is_last = done_ == rows_;
    if (!is_last && now - told_ < std::chrono::seconds(10)) return;
    told_ = now;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - began_).count();
    std::cerr << "[" << done_ << " of " << rows_ << " rows, " << seconds / 60 << " min " << seconds % 60 << " s]" << std::endl;
}

void report::print_row(const std::string& name, std::map<std::string, std::vector<double>>& values) {
    if (!values.contains("seconds")) return print_cells(name, {"FAILED"});
    const auto median = [&](const std::string& counter) { return values.contains(counter) ? quartiles_of(values[counter]).median : 0; };
    if (values.contains("paper_time")) { // beside standard attention, and what the paper says
        const auto ratio = [&](const char* counter) { return ratio_text(median(counter)); };
        if (!std::exchange(has_table_heading_, true)) {
            std::cout << "\ntimes and memory of standard attention over Linformer's: naive Eigen, the paper, our streaming kernel (blocks: "
                         "naive Eigen in blocks of rows,\n"
                         "its memory that of n x n); memory: q, k, v, out, the projections and what is held besides\n\n";
            print_cells("row", {"time", "a token", "naive", "paper", "streaming", "memory", "paper", "streaming"});
        }
        return print_cells(name, {time_text(quartiles_of(values["seconds"]).median), time_text(median("token_seconds")), ratio("vs_naive"),
                                  ratio("paper_time"), ratio("vs_streaming"), ratio("memory_vs_naive"), ratio("paper_memory"),
                                  ratio("memory_vs_streaming"), median("in_blocks") > 0 ? "blocks" : ""});
    }
    if (values.contains("times_the_base")) // compiling
        return print_cells(name, {time_text(quartiles_of(values["seconds"]).median), percent_text(quartiles_of(values["seconds"]).spread()),
                                  fixed_text(median("times_the_base"), 2) + "x", " of Eigen/Core + xsimd",
                                  values.contains("object_bytes") ? ", object of " + fixed_text(median("object_bytes") / 1e3, 0) + " kB" : ""});
    if (!values.contains("peak") && !values.contains("bytes_per_second")) {
        results_[name].seconds = quartiles_of(values["seconds"]);
        if (values.contains("vs_plain"))
            return print_cells(name, {time_text(results_[name].seconds.median / median("calls")), ratio_text(median("vs_plain")), "of loops"});
        return print_cells(name, {time_text(results_[name].seconds.median)});
    }
    if (!values.contains("peak")) { // bound by memory: beside a copy of the same bytes
        const auto seconds = quartiles_of(values["seconds"]);
        results_[name].seconds = seconds;
        std::vector<std::string> cells{time_text(seconds.median), percent_text(seconds.spread()),
                                       fixed_text(median("bytes_per_second") / 1e9, 1) + " GB/s"};
        for (const auto& [counter, text] : {std::pair("vs_memcpy", "of memcpy"), std::pair("vs_eigen", "of Eigen"), std::pair("vs_full", "of full")})
            if (values.contains(counter)) cells.insert(cells.end(), {ratio_text(median(counter)), text});
        if (values.contains("bandwidth")) cells.insert(cells.end(), {percent_text(median("bandwidth")), "of memory"});
        return print_cells(name, cells);
    }
    const auto& r = results_[name] = {quartiles_of(values["seconds"]), quartiles_of(values["peak"]), quartiles_of(values["flops"]),
                                      median("useful_share")};
    const bool tells_idle = name.find("/threads:1") != std::string::npos && !name.starts_with("ranks/");
    if (tells_idle) idle_.push_back(median("idle"));
    print_cells(name, {time_text(r.seconds.median), percent_text(r.seconds.spread()), fixed_text(r.flops.median / 1e9, 1),
                       percent_text(r.share.median), ratio_text(median("visited")), percent_text(median("bandwidth")), ratio_text(median("vs_naive")),
                       bytes_text(median("workspace_bytes")), bytes_text(median("matrix_bytes")),
                       why_slow({.share = r.share.median, .bandwidth = median("bandwidth"), .idle = tells_idle ? median("idle") : 0,
                                 .visited = median("visited"), .queries = median("queries")})});
}

void report::print_summary() const {
    print_comparisons();
    print_crossover();
    print_growth();
    if (prints_goals_) print_goals();
    if (idle_.empty()) return;
    const auto idle = quartiles_of(idle_);
    if (idle.high > 0.03)
        std::cout << "\nWARNING: other programs took " << percent_text(idle.high)
                  << " and more of the time of a quarter of the rows. These figures are too low.\n";
}

void report::print_comparisons() const {
    std::string group;
    std::vector<std::vector<std::string>> table;
    const auto finish = [&] {
        if (table.size() > 1) std::cout << "\n" << group << "\n\n" << table_text(table, 1);
        table = {{"row", "time", "times as fast", "by its flops", "the paper's", "beside"}};
    };
    for (const auto& c : all_comparisons()) {
        if (c.group == "crossover") continue; // as a table of n
        if (c.group != group) finish();
        group = c.group;
        const auto found = results_.find(c.row), other = results_.find(c.against);
        if (found == results_.end() || other == results_.end()) continue;
        const auto &r = found->second, &base = other->second;
        const auto flops = [](const result& x) { return x.flops.median * x.seconds.median; };
        const auto text = [](double ratio) { return ratio > 0 ? fixed_text(ratio, 2) + "x" : "-"; };
        table.push_back({c.row, time_text(r.seconds.median), text(base.seconds.median / r.seconds.median), text(flops(base) / flops(r)),
                         text(c.paper), c.row == c.against ? "itself" : c.against});
    }
    finish();
}

void report::print_crossover() const {
    std::map<std::string, std::map<int, double>> ratios; // of each operator, by n
    std::set<int> sizes;
    for (const auto& c : all_comparisons()) {
        const auto found = results_.find(c.row), other = results_.find(c.against);
        if (c.group != "crossover" || found == results_.end() || other == results_.end()) continue;
        const auto begin = c.row.find('/') + 1, at = c.row.find("/n:");
        const auto n = std::stoi(c.row.substr(at + 3));
        ratios[c.row.substr(begin, at - begin)][n] = other->second.seconds.median / found->second.seconds.median;
        sizes.insert(n);
    }
    if (ratios.empty()) return;
    std::vector<std::vector<std::string>> table{{"operator", "pays from"}};
    for (const auto n : sizes) table[0].push_back("n " + std::to_string(n));
    for (const auto& [name, by_n] : ratios) {
        // The first n from which on it is always faster.
        const auto last_slower = std::ranges::find_if(by_n.rbegin(), by_n.rend(), [](const auto& entry) { return entry.second <= 1; });
        const auto first = last_slower.base();
        table.push_back({name, first == by_n.end() ? "-" : "n = " + std::to_string(first->first)});
        for (const auto n : sizes) table.back().push_back(by_n.contains(n) ? fixed_text(by_n.at(n), 2) + "x" : "-");
    }
    std::cout << "\nwhich operator when: times as fast as softmax attention, causal where the operator is\n\n" << table_text(table, 1);
}

void report::print_growth() const {
    struct sweep {
        std::vector<double> n, seconds;
    };
    std::map<std::string, sweep> sweeps;
    for (const auto& [name, r] : results_) {
        const auto at = name.find("/n:");
        if (!name.starts_with("sweep/") || at == std::string::npos) continue;
        auto& s = sweeps[name.substr(6, at - 6)];
        s.n.push_back(std::stod(name.substr(at + 3)));
        s.seconds.push_back(r.seconds.median);
    }
    std::vector<std::vector<std::string>> table = {{"operator", "n", "exponent", "off c n", "off c n sqrt n", "off c n^2"}};
    for (const auto& [name, s] : sweeps) {
        if (s.n.size() < 2) continue;
        const auto [first, last] = std::ranges::minmax(s.n);
        std::vector<std::string> line = {name, fixed_text(first, 0) + " to " + fixed_text(last, 0),
                                         fixed_text(growth_exponent(s.n, s.seconds), 2)};
        for (const double power : {1.0, 1.5, 2.0}) line.push_back(fixed_text(100 * growth_error(s.n, s.seconds, power), 0) + " %");
        table.push_back(line);
    }
    if (table.size() > 1)
        std::cout << "\nhow time grows with n: the exponent that fits best, and how far times are from the best c of each law (root of the "
                     "mean square)\n\n"
                  << table_text(table, 2);
}

void report::print_goals() const {
    std::vector<std::vector<std::string>> table = {{"goal", "meant", "reached", "middle half", ""}};
    const auto speed = [](const result& r) { return r.flops.median > 0 ? r.flops.median : 1 / r.seconds.median; };
    for (const auto& g : all_goals()) {
        const auto found = results_.find(g.row), other = results_.find(g.against);
        if (found == results_.end() || (!g.against.empty() && other == results_.end())) continue;
        const auto meant = register_bits() == 512 ? g.of_512_bits : register_bits() == 256 ? g.of_256_bits : 0;
        const auto& r = found->second;
        const auto counted = g.counts_all_pairs ? 1 / r.useful_share : 1;
        const auto reached = g.against.empty() ? counted * r.share.median : speed(r) / speed(other->second);
        const auto text = [&](double x) {
            return x == 0 ? "-" : g.against.empty() ? fixed_text(100 * x, 1) + " %" : fixed_text(x, 2) + "x";
        };
        table.push_back(
            {g.label, text(meant), text(reached),
             g.against.empty() ? fixed_text(100 * counted * r.share.low, 1) + " to " + fixed_text(100 * counted * r.share.high, 1) : "",
             meant == 0         ? ""
             : reached >= meant ? "yes"
                                : "no"});
    }
    if (table.size() > 1)
        std::cout << "\nshares of the FMA peak, " << instruction_set() << ", " << compiler() << "\n\n" << table_text(table, 1);
}

} // namespace attn::bench
