// Norms: how fast they are beside a copy of as many bytes, beside Eigen, and beside no norm at all.
//     norm/<norm>/rows:4096/channels:768/threads:1          in a cache that holds input and output, if it does
//     norm/<norm>/rows:4096/channels:768/memory/threads:1   from memory: a different one of many inputs and outputs in every call; with
//                                                           input and output in 16 bits: bf16 or half behind it
//     convolution/causal_silu/rows:4096/...                 the same of a causal convolution of 4 taps with silu, of one token, and of the loops
//                                                           that one writes
#include "bench_report.hpp"
#include "measure.hpp"
#include "read_bandwidth.hpp"

#include "attn/attention/causal_backward.hpp"
#include "attn/norm/backward.hpp"
#include "attn/norm/dynamic_tanh.hpp"
#include "attn/norm/fold.hpp"
#include "attn/norm/layer_norm.hpp"
#include "attn/norm/rep_batch_norm.hpp"
#include "attn/norm/rms_norm.hpp"
#include "attn/norm/unit_norm.hpp"
#include "attn/parallel/thread_pool.hpp"

#include <Eigen/Core>
#include <benchmark/benchmark.h>

#include <cstring>
#include <functional>
#include <random>

namespace attn::bench {

namespace {

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Inputs, outputs and parameters of one size.
template <Storage S = float>
struct norm_problem {
    index_t rows, channels;
    std::vector<tensor<S>> in, out;
    std::vector<float> weight, bias, of_weight = {}, of_bias = {}, taps; ///< taps: four of each channel
    std::vector<double> mean, variance;
    std::size_t at = 0;

    norm_problem(index_t n, index_t d, bool from_memory)
        : rows(n), channels(d), weight(static_cast<std::size_t>(d), 1.25F), bias(static_cast<std::size_t>(d), 0.5F),
          taps(4 * static_cast<std::size_t>(d), 0.25F), mean(static_cast<std::size_t>(d), 0.25), variance(static_cast<std::size_t>(d), 1.5) {
        std::mt19937 random(5);
        std::normal_distribution<float> normal;
        const shape s{.tokens = rows, .channels = channels};
        const auto pairs = from_memory ? std::max<index_t>(2, (index_t{200} << 20) / (2 * index_t{sizeof(S)} * s.size())) : 1;
        for (index_t p = 0; p < pairs; ++p) {
            in.emplace_back(s);
            out.emplace_back(s);
            if (p == 0)
                std::generate_n(in[0].data(), s.size(), [&] { return static_cast<S>(normal(random)); });
            else
                std::copy_n(in[0].data(), s.size(), in.back().data());
        }
    }
    void next() { at = (at + 1) % in.size(); }
    const tensor<S>& x() const { return in[at]; }
    /// The gradient of a loss: another tensor, from memory.
    const tensor<S>& given() const { return in[(at + 1) % in.size()]; }
    tensor<S>& y() { return out[at]; }
    double bytes(int tensors) const { return static_cast<double>(sizeof(S)) * tensors * static_cast<double>(rows * channels); }
};

/// What is timed, and how many tensors of the problem's size it reads or writes.
template <Storage S = float>
struct call {
    std::function<void(norm_problem<S>&, const execution&)> run;
    int tensors = 2;
};

/// A norm, through the front door.
template <Storage S = float, class F>
call<S> ours(F make) {
    return {[make](norm_problem<S>& p, const execution& run) { normalise(make(p), p.x(), p.y(), run); }};
}
/// The gradients of the input, the weight and the bias.
template <class F>
call<> gradient_of(F make) {
    return {[make](norm_problem<>& p, const execution& run) {
                p.of_weight.resize(p.weight.size());
                p.of_bias.resize(p.bias.size());
                backward(make(p), p.x(), p.given(), {p.y(), p.of_weight, p.of_bias}, run);
            },
            3};
}
/// A causal convolution, and its gradient.
template <class F>
causal_convolution<float, F> convolution_of(const auto& p) {
    return {head_major(p.taps.data(), {1, p.channels, 1, 4}), p.bias, {}};
}
template <class F, Storage S = float>
call<S> convolution() {
    return {[](norm_problem<S>& p, const execution& run) { convolve(convolution_of<F>(p), p.x(), p.y(), run); }};
}
/// One token after another, the state handed on.
template <class F>
call<> convolution_by_token() {
    return {[](norm_problem<>& p, const execution& run) {
        tensor<float> state({1, 1, 3, p.channels});
        auto op = convolution_of<F>(p);
        op.first_state = op.last_state = state;
        for (index_t i = 0; i < p.rows; ++i) {
            const tensor_part token{.tokens = {i, 1}};
            convolve(op, p.x().slice(token), p.y().slice(token), run);
        }
    }};
}
call<> convolution_gradient() {
    return {[](norm_problem<>& p, const execution& run) {
                p.of_weight.resize(p.taps.size());
                p.of_bias.resize(p.bias.size());
                backward(convolution_of<silu>(p), p.x(), p.given(),
                         {.x = p.y(), .weights = head_major(p.of_weight.data(), {1, p.channels, 1, 4}), .bias = p.of_bias}, run);
            },
            3};
}
/// The loops that one writes: over tokens, channels and taps.
template <class F>
void plain_convolution(norm_problem<>& p, const execution&) {
    const auto *const x = p.x().data(), *const taps = p.taps.data(), *const bias = p.bias.data();
    auto* const y = p.y().data();
    for (index_t i = 0; i < p.rows; ++i)
        for (index_t c = 0; c < p.channels; ++c) {
            float sum = bias[c];
            for (index_t t = std::max<index_t>(0, 3 - i); t < 4; ++t) sum += taps[4 * c + t] * x[(i - 3 + t) * p.channels + c];
            y[i * p.channels + c] = F{}(sum);
        }
}
constexpr auto layer_norm_of = [](const auto& p) -> layer_norm<float> { return {p.weight, p.bias}; };
constexpr auto rms_norm_of = [](const auto& p) -> rms_norm<float> { return {p.weight}; };
constexpr auto dynamic_tanh_of = [](const auto& p) -> dynamic_tanh<float> { return {p.weight, p.bias}; };
constexpr auto dynamic_erf_of = [](const auto& p) -> dynamic_erf<float> { return {p.weight, p.bias}; };
constexpr auto unit_norm_of = [](const auto&) -> unit_norm<float> { return {}; };
constexpr auto batch_norm_of = [](const auto& p) -> batch_norm<float> { return {p.weight, p.bias, p.mean, p.variance}; };
constexpr auto rep_batch_norm_of = [](const auto& p) -> rep_batch_norm<float> { return {batch_norm_of(p), 0.5}; };

/// The expression that one writes in Eigen.
void eigen_layer_norm(norm_problem<>& p, const execution&) {
    const Eigen::Map<const matrix> x(p.x().data(), p.rows, p.channels);
    Eigen::Map<matrix> y(p.y().data(), p.rows, p.channels);
    const Eigen::Map<const Eigen::ArrayXf> w(p.weight.data(), p.channels), b(p.bias.data(), p.channels);
    for (index_t i = 0; i < p.rows; ++i) {
        const auto row = x.row(i).array();
        const float mean = row.mean(), scale = 1 / std::sqrt((row - mean).square().mean() + 1e-5F);
        y.row(i) = ((row - mean) * scale * w.transpose() + b.transpose()).matrix();
    }
}
void eigen_batch_norm(norm_problem<>& p, const execution&) {
    const Eigen::Map<const matrix> x(p.x().data(), p.rows, p.channels);
    Eigen::Map<matrix> y(p.y().data(), p.rows, p.channels);
    const Eigen::Map<const Eigen::ArrayXf> w(p.weight.data(), p.channels), b(p.bias.data(), p.channels);
    const Eigen::Map<const Eigen::ArrayXd> mean(p.mean.data(), p.channels), variance(p.variance.data(), p.channels);
    const Eigen::ArrayXf scale = w / (variance + 1e-5).sqrt().cast<float>(), offset = b - mean.cast<float>() * scale;
    y.array() = (x.array().rowwise() * scale.transpose()).rowwise() + offset.transpose();
}
template <Storage S>
void copy(norm_problem<S>& p) {
    std::memcpy(p.y().data(), p.x().data(), static_cast<std::size_t>(p.x().shape().size()) * sizeof(S));
}

/// Times the call between copies: `vs_memcpy` is its speed as a multiple of theirs, in bytes.
template <Storage S>
void time_beside_memcpy(benchmark::State& state, index_t rows, index_t channels, bool from_memory, index_t threads, const call<S>& timed) {
    label(state);
    norm_problem<S> p(rows, channels, from_memory);
    thread_pool pool(threads);
    workspace memory(std::size_t{1} << 22);
    const execution run(pool, memory);
    double copying = 0, working = 0;
    for ([[maybe_unused]] auto _ : state) {
        p.next();
        copying += seconds_of([&] { copy(p); });
        p.next();
        const auto seconds = seconds_of([&] { timed.run(p, run); });
        working += seconds;
        state.SetIterationTime(seconds);
    }
    state.counters["bytes_per_second"] = p.bytes(timed.tensors) * static_cast<double>(state.iterations()) / working;
    state.counters["vs_memcpy"] = copying / working * p.bytes(timed.tensors) / p.bytes(2);
    state.counters["bytes"] = p.bytes(timed.tensors);
    if (from_memory) state.counters["bandwidth"] = state.counters["bytes_per_second"] / read_bandwidth(pool);
}

template <Storage S>
void add(const std::string& name, index_t rows, index_t channels, bool from_memory, index_t threads, const call<S>& timed) {
    const auto full = name + "/rows:" + std::to_string(rows) + "/channels:" + std::to_string(channels) +
                      (from_memory ? "/memory" : "") + "/threads:" + std::to_string(threads) + format_suffix(narrow_format_of<S>);
    benchmark::RegisterBenchmark(full.c_str(), [=](benchmark::State& state) {
        time_beside_memcpy(state, rows, channels, from_memory, threads, timed);
    })->UseManualTime();
}

/// A norm and the linear after it, on one thread and with Eigen's product: LN against BN against BN folded into the linear.
void add_before_linear(const std::string& model, index_t rows, index_t channels) {
    enum class form { layer, batch, folded };
    for (const auto& [name, with] :
         {std::pair("layer_norm", form::layer), std::pair("rep_batch_norm", form::batch), std::pair("folded", form::folded)}) {
        const auto full = "norm_and_linear/" + std::string(name) + "/" + model + "/rows:" + std::to_string(rows) +
                          "/channels:" + std::to_string(channels) + "/threads:1";
        benchmark::RegisterBenchmark(full.c_str(), [=, which = with](benchmark::State& state) {
            label(state);
            norm_problem<> p(rows, channels, false);
            matrix weight = matrix::Random(channels, channels), result(rows, channels);
            std::vector<float> bias(static_cast<std::size_t>(channels));
            const linear_view<float> linear{head_major(weight.data(), {.tokens = channels, .channels = channels}), bias};
            if (which == form::folded) fold(rep_batch_norm_of(p), linear, linear);
            const Eigen::Map<const Eigen::RowVectorXf> b(bias.data(), channels);
            sequential here;
            workspace memory(std::size_t{1} << 20);
            const execution run(here, memory);
            for ([[maybe_unused]] auto _ : state) {
                if (which == form::layer) normalise(layer_norm_of(p), p.x(), p.y(), run);
                if (which == form::batch) normalise(rep_batch_norm_of(p), p.x(), p.y(), run);
                const Eigen::Map<const matrix> x(which == form::folded ? p.x().data() : p.y().data(), rows, channels);
                result.noalias() = x * weight.transpose();
                result.rowwise() += b;
                benchmark::DoNotOptimize(result.data());
            }
        });
    }
}

const bool added = [] {
    const auto layer = ours(layer_norm_of), rms = ours(rms_norm_of), batch = ours(batch_norm_of), rep = ours(rep_batch_norm_of);
    for (const bool from_memory : {false, true})
        for (const index_t threads : {1, 2}) {
            add("norm/layer_norm", 4096, 768, from_memory, threads, layer);
            add("norm/rms_norm", 4096, 768, from_memory, threads, rms);
            add("norm/batch_norm", 4096, 768, from_memory, threads, batch);
            add("norm/rep_batch_norm", 4096, 768, from_memory, threads, rep);
            if (threads > 1) continue;
            add("norm/dynamic_tanh", 4096, 768, from_memory, threads, ours(dynamic_tanh_of));
            add("norm/dynamic_erf", 4096, 768, from_memory, threads, ours(dynamic_erf_of));
            add("norm/unit_norm", 4096, 768, from_memory, threads, ours(unit_norm_of));
            add("norm/eigen_layer_norm", 4096, 768, from_memory, threads, call<>{eigen_layer_norm});
            add("norm/eigen_batch_norm", 4096, 768, from_memory, threads, call<>{eigen_batch_norm});
            if (!from_memory) continue;
            add("norm/layer_norm", 4096, 768, from_memory, threads, ours<Eigen::bfloat16>(layer_norm_of));
            add("norm/rms_norm", 4096, 768, from_memory, threads, ours<Eigen::bfloat16>(rms_norm_of));
            add("norm/layer_norm", 4096, 768, from_memory, threads, ours<Eigen::half>(layer_norm_of));
            add("norm/rms_norm", 4096, 768, from_memory, threads, ours<Eigen::half>(rms_norm_of));
        }
    for (const index_t threads : {1, 2}) add("norm/layer_norm_backward", 4096, 768, true, threads, gradient_of(layer_norm_of));
    for (const bool from_memory : {false, true}) {
        add("convolution/causal", 4096, 2048, from_memory, 1, convolution<identity_features>());
        add("convolution/plain", 4096, 2048, from_memory, 1, call<>{plain_convolution<identity_features>});
        add("convolution/causal_silu_by_token", 64, 2048, from_memory, 1, convolution_by_token<silu>());
        for (const index_t threads : {1, 2}) add("convolution/causal_silu", 4096, 2048, from_memory, threads, convolution<silu>());
        add("convolution/causal_silu", 4096, 2048, from_memory, 1, convolution<silu, Eigen::bfloat16>());
        add("convolution/plain_silu", 4096, 2048, from_memory, 1, call<>{plain_convolution<silu>});
        add("convolution/causal_silu_backward", 4096, 2048, from_memory, 1, convolution_gradient());
    }
    add_before_linear("deit_tiny", 8 * 197, 192);
    for (const auto& [tokens, channels] : {std::pair<index_t, index_t>{3136, 96}, {784, 192}, {196, 384}, {49, 768}})
        add_before_linear("swin_tiny", 8 * tokens, channels);
    for (const auto& [tokens, channels] : {std::pair<index_t, index_t>{3136, 64}, {784, 128}, {196, 320}, {49, 512}})
        add_before_linear("pvt_tiny", 8 * tokens, channels);
    return true;
}();

} // namespace

} // namespace attn::bench
