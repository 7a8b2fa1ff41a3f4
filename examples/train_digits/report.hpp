// What is told of a training: losses, accuracy, the time of an image, and a picture.
#pragma once

#include <attn/core/tensor.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace train_digits {

using attn::index_t, attn::tensor;

struct report {
    std::string name;
    std::vector<double> losses;                  ///< of each epoch
    double accuracy = 0, folded_accuracy = 0;    ///< on images that were not learnt
    double largest_change = 0;                   ///< of a score by folding
    std::function<tensor<float>()> infer, infer_folded; ///< the scores of these images
    std::vector<double> times, folded_times;     ///< of runs, in microseconds an image
};

inline double seconds_since(std::chrono::steady_clock::time_point began) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}
/// Times all networks in turn, so that what else the machine does meets each of them.
inline void measure(std::vector<report>& reports, index_t images) {
    const auto add = [&](const std::function<tensor<float>()>& infer, std::vector<double>& times) {
        const auto began = std::chrono::steady_clock::now();
        if (infer) infer(), times.push_back(1e6 * seconds_since(began) / static_cast<double>(images));
    };
    for (int run = 0; run < 15; ++run)
        for (auto& r : reports) add(r.infer, r.times), add(r.infer_folded, r.folded_times);
}
inline double median(std::vector<double> numbers) {
    const auto middle = numbers.begin() + std::ssize(numbers) / 2;
    std::ranges::nth_element(numbers, middle);
    return *middle;
}

/// The losses as curves, on a logarithmic axis.
inline void draw(const std::string& file, const std::vector<report>& reports) {
    constexpr double left = 60, top = 20, width = 480, height = 260, lowest = 1e-3, highest = 3;
    constexpr std::array colours{"#1b6ca8", "#c0392b", "#2e8b57"};
    std::ofstream svg(file);
    const auto y_of = [&](double loss) { return top + height * std::log(highest / std::clamp(loss, lowest, highest)) / std::log(highest / lowest); };
    svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"720\" height=\"330\" font-family=\"sans-serif\" font-size=\"12\">\n"
        << "<rect width=\"720\" height=\"330\" fill=\"white\"/>\n";
    for (const double loss : {1.0, 0.1, 0.01, 0.001})
        svg << "<path d=\"M" << left << "," << y_of(loss) << "h" << width << "\" stroke=\"#ddd\"/><text x=\"" << left - 8 << "\" y=\"" << y_of(loss) + 4
            << "\" text-anchor=\"end\">" << loss << "</text>\n";
    svg << "<text x=\"" << left + width / 2 << "\" y=\"" << top + height + 30 << "\" text-anchor=\"middle\">epoch (mean training loss)</text>\n";
    for (std::size_t r = 0; r < reports.size(); ++r) {
        const auto& losses = reports[r].losses;
        svg << "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"" << colours[r] << "\" points=\"";
        for (std::size_t e = 0; e < losses.size(); ++e)
            svg << left + width * static_cast<double>(e) / static_cast<double>(std::max<std::size_t>(1, losses.size() - 1)) << "," << y_of(losses[e]) << " ";
        svg << "\"/><text x=\"" << left + width + 10 << "\" y=\"" << y_of(losses.back()) + 4 << "\" fill=\"" << colours[r] << "\">" << reports[r].name << "</text>\n";
    }
    svg << "</svg>\n";
    if (!svg.flush()) throw std::runtime_error(file + " cannot be written");
}

} // namespace train_digits
