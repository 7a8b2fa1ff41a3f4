#include "measure.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <thread>
#include <utility>

namespace attn::bench {

namespace {

struct unit {
    double size;
    const char* name;
};

/// Three digits of a number in the largest of the units (falling) that it fills.
template <std::size_t N>
std::string in_units(double number, const unit (&units)[N]) {
    const auto* u = std::find_if(units, units + N - 1, [&](const unit& candidate) { return number >= candidate.size; });
    const auto scaled = number / u->size;
    return fixed_text(scaled, scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0) + " " + u->name;
}

} // namespace

bool wait_until_idle() {
    constexpr auto pause = std::chrono::milliseconds(40), longest = std::chrono::milliseconds(1000);
    const auto ticks = [] { // of all processors since the machine began: at work, and in all
        std::ifstream file("/proc/stat");
        std::string cpu;
        std::array<double, 8> of{}; // user, nice, system, idle, waiting for disks, interrupts, the same, and taken by other machines
        file >> cpu;
        for (auto& t : of) file >> t;
        return std::pair(of[0] + of[1] + of[2], std::accumulate(of.begin(), of.end(), 0.0));
    };
    for (auto waited = pause; waited <= longest; waited += pause) {
        const auto before = ticks();
        std::this_thread::sleep_for(pause);
        const auto after = ticks();
        const auto idle_share = 1 - (after.first - before.first) / std::max(after.second - before.second, 1.0);
        if (idle_share > 0.8) return true;
    }
    return false;
}

quartiles quartiles_of(std::vector<double> measurements) {
    std::ranges::sort(measurements);
    const auto at = [&](double share) {
        const auto place = share * static_cast<double>(measurements.size() - 1);
        const auto below = static_cast<std::size_t>(place);
        const auto above = std::min(below + 1, measurements.size() - 1);
        return std::lerp(measurements[below], measurements[above], place - std::floor(place));
    };
    return {at(0.25), at(0.5), at(0.75)};
}

double growth_exponent(const std::vector<double>& n, const std::vector<double>& seconds) {
    const auto count = static_cast<double>(n.size());
    double x_sum = 0, y_sum = 0, xx_sum = 0, xy_sum = 0;
    for (std::size_t i = 0; i < n.size(); ++i) {
        const auto x = std::log(n[i]), y = std::log(seconds[i]);
        x_sum += x, y_sum += y, xx_sum += x * x, xy_sum += x * y;
    }
    return (count * xy_sum - x_sum * y_sum) / (count * xx_sum - x_sum * x_sum);
}

double growth_error(const std::vector<double>& n, const std::vector<double>& seconds, double power) {
    // With r = seconds / n^power the sum of (r / c - 1)^2 is least for c = sum r^2 / sum r.
    double sum = 0, squares = 0;
    for (std::size_t i = 0; i < n.size(); ++i) {
        const auto r = seconds[i] / std::pow(n[i], power);
        sum += r, squares += r * r;
    }
    const auto best = squares / sum;
    double error = 0;
    for (std::size_t i = 0; i < n.size(); ++i) {
        const auto off = seconds[i] / std::pow(n[i], power) / best - 1;
        error += off * off;
    }
    return std::sqrt(error / static_cast<double>(n.size()));
}

std::string fixed_text(double number, int digits) {
    char text[64];
    std::snprintf(text, sizeof text, "%.*f", digits, number);
    return text;
}

std::string time_text(double seconds) {
    static constexpr unit units[] = {{1, "s"}, {1e-3, "ms"}, {1e-6, "us"}, {1e-9, "ns"}};
    return in_units(seconds, units);
}

std::string bytes_text(double bytes) {
    static constexpr unit units[] = {{1e9, "GB"}, {1e6, "MB"}, {1e3, "kB"}};
    return bytes < 1e3 ? fixed_text(bytes, 0) + " B" : in_units(bytes, units);
}

std::string percent_text(double share) { return share > 0 ? fixed_text(100 * share, 0) + " %" : "-"; }

std::string ratio_text(double ratio) { return ratio > 0 ? fixed_text(ratio, ratio < 99.5 ? 1 : 0) + "x" : "-"; }

std::string table_text(const std::vector<std::vector<std::string>>& rows, std::size_t left) {
    std::vector<std::size_t> widths;
    for (const auto& row : rows) {
        widths.resize(std::max(widths.size(), row.size()));
        for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
    }
    std::string text;
    for (std::size_t r = 0; r < rows.size(); ++r) {
        std::string line, rule;
        for (std::size_t c = 0; c < rows[r].size(); ++c) {
            const std::string padding(widths[c] - rows[r][c].size(), ' ');
            line += (c > 0 ? "   " : "") + (c < left ? rows[r][c] + padding : padding + rows[r][c]);
            rule += (c > 0 ? "   " : "") + std::string(widths[c], '-');
        }
        text += line.substr(0, line.find_last_not_of(' ') + 1) + '\n';
        if (r == 0) text += rule + '\n';
    }
    return text;
}

} // namespace attn::bench
