#include "measure.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

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
