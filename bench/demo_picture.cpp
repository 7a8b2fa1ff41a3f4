#include "demo_picture.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <ostream>

namespace attn::bench {

namespace {

// In pixels, at the picture's own size.
constexpr int cell = 10, panel_gap = 26, title_room = 40, margin = 28, heading_room = 62, legend_room = 96;
constexpr index_t longest_label = 12;

/// Steps of a colour ramp.
constexpr int steps = 16;

std::string escaped(std::string_view text) {
    std::string result;
    for (const char c : text) {
        if (c == '&') result += "&amp;";
        else if (c == '<') result += "&lt;";
        else if (c == '>') result += "&gt;";
        else if (c == '"') result += "&quot;";
        else if (static_cast<unsigned char>(c) < ' ') result += ' ';
        else result += c;
    }
    return result;
}

bool begins_character(char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }

/// A word of at most longest_label characters.
std::string label(std::string_view word) {
    index_t characters = 0;
    for (std::size_t i = 0; i < word.size(); ++i) {
        characters += begins_character(word[i]);
        if (characters > longest_label) return escaped(word.substr(0, i)) + "…";
    }
    return escaped(word);
}

/// A colour of lightness, chroma and hue (degrees) in OKLCH, in which equal distances look equal, as "#rrggbb" (Ottosson 2020).
std::string oklch(double lightness, double chroma, double hue) {
    const auto a = chroma * std::cos(hue * std::numbers::pi / 180), b = chroma * std::sin(hue * std::numbers::pi / 180);
    const auto cubed = [](double x) { return x * x * x; };
    const auto l = cubed(lightness + 0.3963377774 * a + 0.2158037573 * b);
    const auto m = cubed(lightness - 0.1055613458 * a - 0.0638541728 * b);
    const auto s = cubed(lightness - 0.0894841775 * a - 1.2914855480 * b);
    const auto byte = [](double linear) {
        const auto light = std::clamp(linear, 0.0, 1.0);
        return static_cast<unsigned>(std::lround(255 * (light <= 0.0031308 ? 12.92 * light : 1.055 * std::pow(light, 1 / 2.4) - 0.055)));
    };
    char text[8];
    std::snprintf(text, sizeof text, "#%02x%02x%02x", byte(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
                  byte(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s), byte(-0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s));
    return text;
}

/// The colours of the steps: from just off the ground to far from it, on a light ground or a dark one.
std::string ramp_styles(bool dark) {
    std::string styles;
    for (const auto& [name, hue] : {std::pair{'p', 255.0}, std::pair{'n', 40.0}})
        for (int step = 0; step < steps; ++step) {
            const auto t = static_cast<double>(step) / (steps - 1);
            const auto lightness = dark ? std::lerp(0.34, 0.93, t) : std::lerp(0.93, 0.30, t);
            const auto chroma = 0.02 + 0.12 * std::sin(std::numbers::pi * (0.1 + 0.75 * t));
            styles += std::string(".") + name + std::to_string(step) + "{fill:" + oklch(lightness, chroma, hue) + "}";
        }
    return styles;
}

/// The step of a weight: by the root of its size, 1 and more being the last.
int step_of_weight(double weight) { return std::min(steps - 1, static_cast<int>(steps * std::sqrt(std::abs(weight)))); }

/// All cells of one colour are one path, neighbours in a row joined: a tenth of the size of rectangles.
void write_cells(std::ostream& out, const tensor<float>& weights) {
    std::array<std::string, 2 * steps> paths;
    const auto n = weights.shape().tokens, m = weights.shape().channels;
    const auto colour = [&](index_t i, index_t j) {
        const auto w = static_cast<double>(weights(0, 0, i, j));
        return w == 0 || std::isnan(w) ? -1 : step_of_weight(w) + (w < 0 ? steps : 0);
    };
    for (index_t i = 0; i < n; ++i)
        for (index_t j = 0, end; j < m; j = end) {
            const auto c = colour(i, j);
            for (end = j + 1; end < m && colour(i, end) == c;) ++end;
            const auto width = std::to_string(end - j);
            if (c < 0) continue;
            auto& path = paths[static_cast<std::size_t>(c)];
            path.append("M").append(std::to_string(j)).append(" ").append(std::to_string(i)); // appended to: gcc 12 warns wrongly of a "M" + string
            path.append("h").append(width).append("v1h-").append(width).append("z");
        }
    for (int c = 0; c < 2 * steps; ++c) {
        const auto& path = paths[static_cast<std::size_t>(c)];
        if (!path.empty()) out << "<path class=\"" << (c < steps ? 'p' : 'n') << c % steps << "\" d=\"" << path << "\"/>\n";
    }
}

/// Room for the longest of the labels.
int label_room_of(const std::vector<std::string>& words) {
    index_t longest = 4;
    for (const auto& word : words) longest = std::max(longest, static_cast<index_t>(std::ranges::count_if(word, begins_character)));
    return 14 + static_cast<int>(5.2 * static_cast<double>(std::min(longest, longest_label + 1)));
}

void write_panel(std::ostream& out, const picture_panel& panel, const std::vector<std::string>& words, int label_room) {
    const auto side = std::ssize(words) * cell;
    out << "<text class=\"t\" x=\"" << label_room << "\" y=\"12\">" << escaped(panel.title) << "</text>\n"
        << "<text class=\"s\" x=\"" << label_room << "\" y=\"27\">" << escaped(panel.subtitle) << "</text>\n"
        << "<g transform=\"translate(" << label_room << ' ' << title_room + label_room << ")\">\n"
        << "<rect class=\"h\" width=\"" << side << "\" height=\"" << side << "\"/>\n"
        << "<g class=\"c\" transform=\"scale(" << cell << ")\">\n";
    write_cells(out, panel.weights);
    out << "</g>\n<g class=\"w\">\n";
    for (std::size_t i = 0; i < words.size(); ++i) {
        const auto middle = static_cast<int>(i) * cell + cell / 2 + 3;
        out << "<text class=\"r\" x=\"-4\" y=\"" << middle << "\">" << label(words[i]) << "</text>"
            << "<text transform=\"translate(" << middle << " -4) rotate(-90)\">" << label(words[i]) << "</text>\n";
    }
    out << "</g>\n</g>\n";
}

void write_legend(std::ostream& out) {
    constexpr int width = 16;
    out << "<g class=\"c\">\n";
    for (int step = 0; step < steps; ++step)
        out << "<rect class=\"p" << step << "\" x=\"" << step * width << "\" width=\"" << width << "\" height=\"12\"/>";
    out << "\n</g>\n<g class=\"s\">\n";
    for (const auto& [weight, text] : {std::pair{0.0, "0"}, std::pair{0.0625, "1/16"}, std::pair{0.25, "1/4"}, std::pair{1.0, "1"}})
        out << "<text text-anchor=\"middle\" x=\"" << std::lround(std::sqrt(weight) * steps * width) << "\" y=\"26\">" << text << "</text>";
    out << "\n<text x=\"" << (steps + 1) * width << "\" y=\"10\">blue: the weight of a word; rows look at columns</text>\n</g>\n"
        << "<g class=\"c\">\n";
    for (int step = 0; step < steps; ++step)
        out << "<rect class=\"n" << step << "\" x=\"" << step * width << "\" y=\"32\" width=\"" << width << "\" height=\"12\"/>";
    out << "\n</g>\n<g class=\"s\">\n<text x=\"" << (steps + 1) * width << "\" y=\"42\">red: a negative weight, of the same size</text>\n"
        << "<rect class=\"h\" y=\"50\" width=\"" << width << "\" height=\"12\"/>"
        << "<text x=\"" << width + 6 << "\" y=\"60\">no weight: hidden, or zero</text>\n</g>\n";
}

} // namespace

void write_picture(std::ostream& out, const std::string& title, const std::string& subtitle, const std::vector<std::string>& words,
                   const std::vector<picture_panel>& panels) {
    const auto columns = std::max(1, static_cast<int>(std::ceil(std::sqrt(static_cast<double>(panels.size())))));
    const auto rows = (static_cast<int>(panels.size()) + columns - 1) / columns;
    const auto side = static_cast<int>(words.size()) * cell, label_room = label_room_of(words);
    const auto panel_width = std::max(side, 240) + label_room + panel_gap, panel_height = side + label_room + title_room + panel_gap;
    const auto width = std::max(columns * panel_width, 480) + 2 * margin, height = rows * panel_height + heading_room + legend_room + 2 * margin;
    out << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << width << ' ' << height << "\" width=\"" << width << "\" height=\"" << height
        << "\" role=\"img\">\n<title>" << escaped(title) << "</title>\n<style>\n"
        << "text{font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#1f2328}"
        << ".b{fill:#ffffff}.h{fill:#eceef1}.c{shape-rendering:crispEdges}.big{font-size:22px;font-weight:600}"
        << ".t{font-size:14px;font-weight:600}.s,.s text{font-size:11px;fill:#59636e}.w text{font-size:8.5px}.r{text-anchor:end}\n"
        << ramp_styles(false) << "\n@media (prefers-color-scheme: dark){text{fill:#e6edf3}.b{fill:#0d1117}.h{fill:#1a2028}.s,.s text{fill:#9198a1}\n"
        << ramp_styles(true) << "}\n</style>\n<rect class=\"b\" width=\"" << width << "\" height=\"" << height << "\"/>\n"
        << "<text class=\"big\" x=\"" << margin << "\" y=\"" << margin + 18 << "\">" << escaped(title) << "</text>\n"
        << "<text class=\"s\" x=\"" << margin << "\" y=\"" << margin + 38 << "\">" << escaped(subtitle) << "</text>\n";
    for (std::size_t p = 0; p < panels.size(); ++p) {
        const auto column = static_cast<int>(p) % columns, row = static_cast<int>(p) / columns;
        out << "<g transform=\"translate(" << margin + column * panel_width << ' ' << margin + heading_room + row * panel_height << ")\">\n";
        write_panel(out, panels[p], words, label_room);
        out << "</g>\n";
    }
    out << "<g transform=\"translate(" << margin + label_room << ' ' << height - margin - 64 << ")\">\n";
    write_legend(out);
    out << "</g>\n</svg>\n";
}

} // namespace attn::bench
