// Time, and what to make of many times.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace attn::bench {

/// Seconds that a call takes, by the clock on the wall.
template <class F>
double seconds_of(F&& call) {
    const auto began = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

/// Seconds that one call takes on average, over as many calls as fill `at_least` seconds.
template <class F>
double seconds_per_call(F&& call, double at_least) {
    double total = 0;
    int calls = 0;
    for (int more = 1; total < at_least || calls == 0; more *= 2) {
        total += seconds_of([&] {
            for (int i = 0; i < more; ++i) call();
        });
        calls += more;
    }
    return total / calls;
}

/// The same without the first call, unless that one is long: what ran before it left caches that are cold.
template <class F>
double seconds_per_warm_call(F&& call, double at_least) {
    const auto first = seconds_of(call);
    return first >= at_least ? first : seconds_per_call(call, at_least);
}

/// Waits until this machine's processors idle, for a second at most, and says whether they do. The threads of some programs spin for a while after
/// their work, on the processor that the second thread of whoever is timed next needs: that took up to 1.6 times as long.
bool wait_until_idle();

/// The middle of some measurements, and the quarters of them below and above: half of all lie between.
struct quartiles {
    double low = 0, median = 0, high = 0;

    /// How far apart the quarters are, as a share of the median.
    double spread() const { return median > 0 ? (high - low) / median : 0; }
};

/// Quartiles of at least one measurement.
quartiles quartiles_of(std::vector<double> measurements);

/// p of the c n^p that fits the times best, both by their logarithms. At least two different n.
double growth_exponent(const std::vector<double>& n, const std::vector<double>& seconds);
/// How far the times are from the best c n^power: the root of the mean square of seconds / (c n^power) - 1.
double growth_error(const std::vector<double>& n, const std::vector<double>& seconds, double power);

/// "12.3 ms", with the unit that suits.
std::string time_text(double seconds);
/// "64.0 MB", with the unit that suits.
std::string bytes_text(double bytes);
/// "87 %", or "-" of nothing.
std::string percent_text(double share);
/// "3.4x", or "-" of nothing.
std::string ratio_text(double ratio);
/// The number with so many digits after the point.
std::string fixed_text(double number, int digits);

/// Rows of text as a table of aligned columns: the first row is its heading; the first `left` columns are flush left, numbers follow.
std::string table_text(const std::vector<std::vector<std::string>>& rows, std::size_t left);

} // namespace attn::bench
