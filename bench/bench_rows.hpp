// What is timed: every registered case on the usual sizes, softmax attention on more of them, and the goals for some.
#pragma once

#include "subject.hpp"

namespace attn::bench {

/// One line of the benchmark: a case on a problem, float, double or stored in 16 bits, on some threads.
struct row {
    const testing::attention_case* timed_case;
    testing::problem problem;
    index_t threads = 1;
    std::string family = "attend";
    bool is_double = false;
    double query_factor = 1; ///< large queries make large scores
    narrow_format format = narrow_format::none;

    /// "attend/softmax_causal/n:2048/d:64/h:12/threads:1"; with b: before n: if the batch is not 1, m: and kv: behind n: and h: if keys
    /// are not as many as queries, dk: and dv: for d: if they differ, and behind it q: the factor, f64, bf16 or half.
    std::string name() const;
    std::unique_ptr<subject> make() const;
    /// Flops on all pairs of queries and keys, hidden or not.
    double dense_flops() const;
};

/// "/bf16" or "/half", behind the name of the row of floats; of those nothing.
std::string format_suffix(narrow_format format);

/// All rows, in the order in which they are timed; or those of a short call with a goal, and the shortest of every other case.
std::vector<row> all_rows(bool quick);

/// What a row is meant to reach. With `against`, how many times as fast it is as that row, by flops, or by time where
/// none are counted; else its share of the FMA peak.
struct goal {
    std::string label, row, against;
    double of_512_bits = 0, of_256_bits = 0; ///< for registers of that size; 0 if none is set
    bool counts_all_pairs = false;           ///< whether the goal counts the work on pairs that the mask hides, which no tile can leave out
};

std::vector<goal> all_goals();

/// Rows of a group whose times are given as ratios to those of one of them, as in the table of a paper.
struct comparison {
    std::string group, row, against;
    double paper = 0; ///< how many times as fast as `against` the paper's is; 0 if it does not say
};

std::vector<comparison> all_comparisons();

} // namespace attn::bench
