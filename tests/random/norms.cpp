#include "bounds.hpp"
#include "layouts.hpp"
#include "others.hpp"

#include <attn/norm/layer_norm.hpp>
#include <attn/norm/rep_batch_norm.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/reference/norms.hpp>

#include <cmath>

namespace attn::fuzz {

namespace {

using testing::layout;

/// A norm on rows in some layout and on some threads: the definition within bounds, the same bits as on contiguous rows on one thread.
template <Scalar T, class N>
std::string broken(draw& random, const N& norm, const tensor<T>& x, const tensor<double>& exact, const tensor<double>& bounds) {
    const auto expected = normalise(norm, x.view());
    for (index_t e = 0; e < x.shape().size(); ++e) {
        const auto a = static_cast<double>(expected.data()[e]), b = exact.data()[e];
        if (!(std::abs(a - b) <= 2 * bounds.data()[e]))
            return "element " + std::to_string(e) + " is " + std::to_string(a) + ", not " + std::to_string(b) + " +- " +
                   std::to_string(bounds.data()[e]);
    }
    static constexpr layout layouts[] = {layout::head_major, layout::token_major, layout::padded_rows, layout::misaligned, layout::pages_apart};
    testing::placed<T> from(x, random.one_of(layouts)), to(x.shape(), random.one_of(layouts));
    static thread_pool pools[] = {thread_pool(1), thread_pool(2), thread_pool(3)};
    auto& pool = random.one_of({&pools[0], &pools[1], &pools[2]})[0];
    workspace memory(norm.workspace_bytes(x.shape(), pool.concurrency()));
    normalise(norm, tensor_view<const T>(from.view()), to.view(), execution(pool, memory));
    if (!from.guards_intact() || !to.guards_intact()) return "wrote beside its output";
    return testing::same_bits(to.copy(), expected) ? std::string() : "other bits elsewhere";
}

template <Scalar T>
outcome attempt(draw& random) {
    const auto kind = random.number(0, 3);
    const shape s{random.number(0, 3), random.number(1, 3), random.size(100), std::max<index_t>(1, random.size(800))};
    const double mean = random.one_in(2) ? random.real(-3, 3) : 0, deviation = random.one_in(4) ? random.real(0.01, 50) : 1;
    const auto x = filled<T>(s, [&] { return mean + deviation * random.real(-1.7, 1.7); });
    const auto numbers = [&]<class U>(U, double low, double high) {
        std::vector<U> v(static_cast<std::size_t>(s.channels));
        std::ranges::generate(v, [&] { return static_cast<U>(random.real(low, high)); });
        return v;
    };
    auto weight = numbers(T{}, -2, 2), bias = numbers(T{}, -2, 2);
    if (random.one_in(3)) weight.clear();
    if (random.one_in(3)) bias.clear();
    const auto means = numbers(0.0, -2, 2), variances = numbers(0.0, 0.01, 4);
    const auto wide_x = reference::widen(x.view());
    const tensor_view<const double> wide = wide_x.view();
    const std::vector<double> w(weight.begin(), weight.end()), b(bias.begin(), bias.end());
    tensor<double> exact(s), bounds(s);
    const double eps = 1e-5, eta = kind == 3 ? random.real(-2, 2) : 0, unit = unit_of<T>, n = static_cast<double>(s.channels);
    if (kind == 0) reference::layer_norm<double>(wide, exact.view(), w, b, eps);
    if (kind == 1) reference::rms_norm<double>(wide, exact.view(), w, eps);
    if (kind >= 2) reference::rep_batch_norm<double>(wide, exact.view(), means, variances, w, b, eta, eps);
    // A mean of n numbers is wrong by n units of their mean magnitude, a variance relatively by n + 4 and by what the mean did to it; what
    // is divided by the root of it, by half of that.
    for (index_t row = 0; s.channels > 0 && row < s.size() / s.channels; ++row) {
        const auto* const of = wide.data() + row * s.channels;
        double sum = 0, magnitudes = 0, variance = 0;
        for (index_t c = 0; c < s.channels; ++c) sum += of[c], magnitudes += std::abs(of[c]);
        for (index_t c = 0; c < s.channels; ++c) variance += (kind == 0 ? of[c] - sum / n : of[c]) * (kind == 0 ? of[c] - sum / n : of[c]);
        const auto root = std::sqrt(variance / n + eps), of_mean = kind == 0 ? (n + 4) * unit * magnitudes / n : 0;
        const auto relative = (n + 8) * unit + of_mean * of_mean / (root * root) + 2 * of_mean / root * 4 * unit;
        for (index_t c = 0; c < s.channels; ++c) {
            const auto at = static_cast<std::size_t>(c);
            const auto factor = w.empty() ? 1 : std::abs(w[at]), added = b.empty() ? 0 : std::abs(b[at]);
            double error = 0;
            if (kind < 2) {
                const auto y = std::abs(kind == 0 ? of[c] - sum / n : of[c]) / root;
                error = factor * (y * (relative + 8 * unit) + of_mean / root + 4 * unit * (std::abs(of[c]) + std::abs(sum / n)) / root);
            } else { // one multiply-add, of a factor and a summand that were made in double
                const auto scale = factor / std::sqrt(variances[at] + eps) + std::abs(eta);
                error = 8 * unit * (scale * std::abs(of[c]) + scale * std::abs(means[at]));
            }
            bounds.data()[row * s.channels + c] = error + 8 * unit * (added + std::abs(exact.data()[row * s.channels + c]));
        }
    }
    static constexpr const char* names[] = {"layer_norm", "rms_norm", "batch_norm", "rep_batch_norm"};
    outcome result{std::string(names[kind]) + " " + to_string(s) + ", mean " + std::to_string(mean) + ", deviation " + std::to_string(deviation), {}};
    if (kind == 0) result.problem = broken(random, layer_norm<T>{weight, bias, eps}, x, exact, bounds);
    if (kind == 1) result.problem = broken(random, rms_norm<T>{weight, eps}, x, exact, bounds);
    const batch_norm<T> batch{.weight = weight, .bias = bias, .mean = means, .variance = variances, .eps = eps};
    if (kind == 2) result.problem = broken(random, batch, x, exact, bounds);
    if (kind == 3) result.problem = broken(random, rep_batch_norm<T>{.batch = batch, .eta = eta}, x, exact, bounds);
    return result;
}

} // namespace

outcome check_norm(draw& random) { return random.one_in(2) ? attempt<float>(random) : attempt<double>(random); }

} // namespace attn::fuzz
