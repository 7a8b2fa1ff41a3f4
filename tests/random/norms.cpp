#include "bounds.hpp"
#include "draw_layout.hpp"
#include "gradient_checks.hpp"
#include "on_threads.hpp"
#include "others.hpp"
#include "sizes.hpp"
#include "stored.hpp"

#include <attn/norm/dynamic_tanh.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/norm/rep_batch_norm.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/norm/train_backward.hpp>
#include <attn/norm/unit_norm.hpp>
#include <attn/reference/norms.hpp>

#include <cmath>
#include <cstring>
#include <functional>

namespace attn::fuzz {

namespace {

/// A norm, its type hidden.
template <Scalar T>
struct any_norm {
    std::function<tensor<T>(const tensor_view<const T>& x)> normalised;
    std::function<void(const stored_view<const T>& x, const stored_view<T>& out, const execution&)> normalise;
    std::function<std::size_t(const shape&, bool narrow, const execution&)> workspace_bytes;

    template <Norm N>
    any_norm(const N& norm)
        : normalised([norm](const tensor_view<const T>& x) { return attn::normalise(norm, x); }),
          normalise([norm](const stored_view<const T>& x, const stored_view<T>& out, const execution& on) { attn::normalise(norm, x, out, on); }),
          workspace_bytes([norm](const shape& s, bool narrow, const execution& on) {
              if constexpr (std::same_as<T, float>)
                  if (narrow) return attn::workspace_bytes<attn::detail::sixteen_bits>(norm, s, on);
              return attn::workspace_bytes<T>(norm, s, on);
          }) {}
};

/// Tokens that are stored in 16 bits are widened first, and the result is rounded last; it may take their place.
template <std::same_as<float> T>
std::string broken_storage(draw& random, const any_norm<T>& norm, const tensor<T>& x) {
    auto from = draw_stored(random, copy_of(x), draw_row_layout(random)), room = draw_room(random, x.shape(), draw_row_layout(random));
    const auto expected = norm.normalised(from.wide.view());
    auto& to = random.one_in(3) ? from : room;
    const auto threads = random.number(1, 4);
    workspace memory(on_threads(threads, [&](const execution& on) { return norm.workspace_bytes(x.shape(), from.view().is_narrow() || to.view().is_narrow(), on); }));
    testing::fill(memory, std::byte{0xff});
    on_threads(threads, memory, [&](const execution& run) { norm.normalise(from.view(), to.view(), run); });
    const auto problem = from.guards_intact() ? other_numbers(to, expected) : "an input was written to";
    return problem.empty() ? problem : "stored " + testing::name_of(from.format()) + " " + testing::name_of(to.format()) + (&to == &from ? " in place" : "") + ": " + problem;
}

/// A norm on rows in some layout and on some threads: the definition within bounds, the same bits as on contiguous rows on one thread.
template <Scalar T>
std::string broken(draw& random, const any_norm<T>& norm, const tensor<T>& x, const tensor<double>& exact, const tensor<double>& bounds) {
    const auto expected = norm.normalised(x.view());
    for (index_t e = 0; e < x.shape().size(); ++e) {
        const auto a = static_cast<double>(expected.data()[e]), b = exact.data()[e];
        if (!(std::abs(a - b) <= 2 * bounds.data()[e]))
            return joined("element ", e, " is ", a, ", not ", b, " +- ", bounds.data()[e]);
    }
    testing::placed<T> from(x, draw_row_layout(random)), to(x.shape(), draw_row_layout(random));
    static thread_pool pools[] = {thread_pool(1), thread_pool(2), thread_pool(3)};
    auto& pool = random.one_of({&pools[0], &pools[1], &pools[2]})[0];
    workspace memory(norm.workspace_bytes(x.shape(), false, execution(pool)));
    norm.normalise(from.view(), to.view(), execution(pool, memory));
    if (!from.guards_intact() || !to.guards_intact()) return "wrote beside its output";
    if (!testing::same_bits(to.copy(), expected)) return "other bits elsewhere";
    if constexpr (std::same_as<T, float>)
        if (random.one_in(2)) return broken_storage(random, norm, x);
    return {};
}

/// The gradients of every norm: `eta` is also a dynamic norm's alpha.
template <Scalar T>
struct any_gradients : rep_norm_gradients<T> {
    std::span<T> shift = {};
};

/// What a norm's gradients are given and give, with room for what the definition says.
template <Scalar T>
struct gradient_problem {
    const tensor<T>& x;
    tensor<T> given;
    tensor<bounded<T>> bounded_x, bounded_given;
    std::vector<defined_gradient<T>> defined; ///< of x, and of what the norm has

    gradient_problem(draw& random, const tensor<T>& from, const std::vector<const char*>& parameters)
        : x(from), given(filled<T>(from.shape(), [&] { return random.real(-1, 1); })), bounded_x(bounded_copy<T>(x)), bounded_given(bounded_copy<T>(given)) {
        defined.push_back({"input", tensor<bounded<T>>(x.shape()), lies::in_rows});
        for (const auto* name : parameters)
            defined.push_back({name, tensor<bounded<T>>({1, 1, 1, defined.size() < 3 ? x.shape().channels : 1}), lies::in_one_piece}); // weight, bias, numbers
    }
    std::span<bounded<T>> row(std::size_t parameter) {
        auto& of = defined[parameter].exact;
        return {of.data(), static_cast<std::size_t>(of.shape().size())};
    }
    /// call(x, given, wanted) is the kernel's.
    std::string broken(draw& random, const std::function<std::size_t(index_t)>& workspace_bytes,
                       const std::function<void(const tensor_view<const T>&, const tensor_view<const T>&, const any_gradients<T>&, const execution&)>& call) {
        testing::placed<T> other_x(x, draw_row_layout(random)), other_given(given, draw_row_layout(random));
        return broken_gradient<T>(random, defined, workspace_bytes, [&](const std::vector<tensor_view<T>>& wanted, bool elsewhere, const execution& run) {
            const auto row_of = [&](std::size_t at) { return at < wanted.size() ? std::span<T>(wanted[at].data(), static_cast<std::size_t>(wanted[at].shape().size())) : std::span<T>(); };
            any_gradients<T> to;
            to.x = wanted[0], to.weight = row_of(1), to.bias = row_of(2), to.eta = row_of(3), to.shift = row_of(4);
            if (elsewhere) call(other_x.view(), other_given.view(), to, run);
            else call(x.view(), given.view(), to, run);
        });
    }
};

template <Scalar T>
std::string broken_row_gradient(draw& random, const auto& norm, const tensor<T>& x) {
    constexpr bool has_bias = std::same_as<std::remove_cvref_t<decltype(norm)>, layer_norm<T>>;
    gradient_problem<T> p(random, x, has_bias ? std::vector{"weight", "bias"} : std::vector{"weight"});
    const std::vector<bounded<T>> weight(norm.weight.begin(), norm.weight.end());
    reference::row_norm_backward<bounded<T>>(has_bias, p.bounded_x.view(), p.bounded_given.view(), {p.defined[0].exact, p.row(1), has_bias ? p.row(2) : std::span<bounded<T>>()},
                                             weight, norm.eps);
    return p.broken(random, [&](index_t concurrency) { return norm.backward_workspace_bytes(x.shape(), concurrency); },
                    [&](const auto& from, const auto& given, const norm_gradients<T>& wanted, const execution& run) { attn::backward(norm, from, given, wanted, run); });
}

template <Scalar T>
std::string broken_row_gradient(draw& random, const unit_norm<T>& norm, const tensor<T>& x) {
    gradient_problem<T> p(random, x, {});
    reference::unit_norm_backward<bounded<T>>(p.bounded_x.view(), p.bounded_given.view(), p.defined[0].exact.view(), norm.eps);
    return p.broken(random, [&](index_t concurrency) { return norm.backward_workspace_bytes(x.shape(), concurrency); },
                    [&](const auto& from, const auto& given, const any_gradients<T>& wanted, const execution& run) { attn::backward(norm, from, given, {wanted.x}, run); });
}

/// Of dynamic_tanh and dynamic_erf.
template <class N, Scalar T = typename N::scalar>
std::string broken_curve_gradient(draw& random, const N& norm, const tensor<T>& x, double shift) {
    constexpr bool shifts = requires { norm.shift; };
    gradient_problem<T> p(random, x, shifts ? std::vector{"weight", "bias", "alpha", "shift"} : std::vector{"weight", "bias", "alpha"});
    const std::vector<bounded<T>> weight(norm.weight.begin(), norm.weight.end());
    reference::dynamic_curve_backward<bounded<T>>(shifts ? reference::curve::erf : reference::curve::tanh, p.bounded_x.view(), p.bounded_given.view(),
                                                  {{p.defined[0].exact, p.row(1), p.row(2)}, p.row(3).data(), shifts ? p.row(4).data() : nullptr}, norm.alpha, shift, weight);
    return p.broken(random, [&](index_t concurrency) { return norm.backward_workspace_bytes(x.shape(), concurrency); },
                    [&](const auto& from, const auto& given, const any_gradients<T>& wanted, const execution& run) {
                        typename N::gradients to;
                        to.x = wanted.x, to.weight = wanted.weight, to.bias = wanted.bias, to.alpha = wanted.eta;
                        if constexpr (shifts) to.shift = wanted.shift;
                        attn::backward(norm, from, given, to, run);
                    });
}

/// Of a training step, some tokens of which may not count.
template <Scalar T>
std::string broken_training_gradient(draw& random, const rep_batch_norm<T>& norm, const tensor<T>& x) {
    const auto& s = x.shape();
    tensor<bool> mask({s.batch, random.one_in(2) ? s.heads : 1, s.tokens, 1});
    std::generate_n(mask.data(), mask.shape().size(), [&] { return !random.one_in(3); });
    const auto shown = random.one_in(2) ? tensor_view<const bool>(mask) : tensor_view<const bool>();
    const auto repeated = shown.data() ? s.heads / mask.shape().heads : 1;
    const auto count = shown.data() ? repeated * std::count(mask.data(), mask.data() + mask.shape().size(), true) : s.batch * s.heads * s.tokens;
    if (count < 2) return {}; // refused
    gradient_problem<T> p(random, x, {"weight", "bias", "eta"});
    const std::vector<bounded<T>> weight(norm.batch.weight.begin(), norm.batch.weight.end());
    reference::rep_batch_norm_backward<bounded<T>>(p.bounded_x.view(), p.bounded_given.view(), {p.defined[0].exact, p.row(1), p.row(2), p.row(3).data()}, weight, norm.eta,
                                                   norm.batch.eps, shown);
    return p.broken(random, [&](index_t threads) { return on_threads(threads, [&](const execution& on) { return train_backward_workspace_bytes(norm, s, on); }); },
                    [&](const auto& from, const auto& given, const rep_norm_gradients<T>& wanted, const execution& run) {
                        train_backward(norm, from, given, wanted, run, shown);
                    });
}

/// In inference, with running statistics.
template <Scalar T>
std::string broken_inference_gradient(draw& random, const rep_batch_norm<T>& norm, const tensor<T>& x) {
    gradient_problem<T> p(random, x, {"weight", "bias", "eta"});
    const auto bounded_of = [](const auto& numbers) { return std::vector<bounded<T>>(numbers.begin(), numbers.end()); };
    const auto weight = bounded_of(norm.batch.weight), mean = bounded_of(norm.batch.mean), variance = bounded_of(norm.batch.variance);
    reference::rep_batch_norm_backward<bounded<T>>(p.bounded_x.view(), p.bounded_given.view(), {p.defined[0].exact, p.row(1), p.row(2), p.row(3).data()}, weight, norm.eta,
                                                   norm.batch.eps, {}, mean, variance);
    return p.broken(random, [&](index_t concurrency) { return norm.backward_workspace_bytes(x.shape(), concurrency); },
                    [&](const auto& from, const auto& given, const rep_norm_gradients<T>& wanted, const execution& run) { attn::backward(norm, from, given, wanted, run); });
}

/// Norms whose definition's bounds are enough: unit_norm, dynamic_tanh and dynamic_erf.
template <Scalar T>
outcome attempt_bounded(draw& random) {
    const shape s{random.number(0, 3), random.number(1, 3), random.size(100), std::max<index_t>(1, random.size(800))};
    const auto kind = random.number(0, 2);
    const double deviation = random.one_in(4) ? random.real(0.01, 50) : 1;
    const auto x = filled<T>(s, [&] { return deviation * random.real(-1.7, 1.7); });
    const auto numbers = [&] {
        std::vector<T> v(random.one_in(3) ? 0 : static_cast<std::size_t>(s.channels));
        std::ranges::generate(v, [&] { return static_cast<T>(random.real(-2, 2)); });
        return v;
    };
    const auto weight = numbers(), bias = numbers();
    // Half of the rows may be shorter than eps.
    const double alpha = random.real(-2, 2), shift = kind == 2 ? random.real(-1, 1) : 0, eps = random.one_in(3) ? deviation * std::sqrt(static_cast<double>(s.channels)) : 1e-12;
    const auto bounded_x = bounded_copy<T>(x);
    tensor<bounded<T>> defined(s);
    const std::vector<bounded<T>> w(weight.begin(), weight.end()), b(bias.begin(), bias.end());
    if (kind == 0) reference::unit_norm<bounded<T>>(bounded_x.view(), defined.view(), eps);
    else reference::dynamic_curve<bounded<T>>(kind == 1 ? reference::curve::tanh : reference::curve::erf, bounded_x.view(), defined.view(), alpha, shift, w, b);
    tensor<double> exact(s), bounds(s);
    for (index_t e = 0; e < s.size(); ++e) exact.data()[e] = defined.data()[e].value(), bounds.data()[e] = defined.data()[e].error();
    static constexpr const char* names[] = {"unit_norm", "dynamic_tanh", "dynamic_erf"};
    outcome result{joined(names[kind], " ", s, ", deviation ", deviation, ", alpha ", alpha), {}};
    const auto judge = [&](const auto& norm, const auto& of_gradient) {
        result.problem = broken<T>(random, norm, x, exact, bounds);
        if (!result.problem.empty()) return;
        const auto problem = of_gradient(norm);
        if (!problem.empty()) result.problem = "gradient of the " + problem;
    };
    const auto of_curve = [&](const auto& norm) { return broken_curve_gradient(random, norm, x, shift); };
    if (kind == 0) judge(unit_norm<T>{eps}, [&](const auto& norm) { return broken_row_gradient(random, norm, x); });
    if (kind == 1) judge(dynamic_tanh<T>{weight, bias, alpha}, of_curve);
    if (kind == 2) judge(dynamic_erf<T>{weight, bias, alpha, shift}, of_curve);
    return result;
}

template <Scalar T>
outcome attempt(draw& random) {
    if (random.one_in(3)) return attempt_bounded<T>(random);
    const auto kind = random.number(0, 3);
    const shape s{random.number(0, 3), random.number(1, 3), random.size(100), std::max<index_t>(1, random.size(800))};
    const double mean = random.one_in(2) ? random.real(-3, 3) : 0, deviation = random.one_in(4) ? random.real(0.01, 50) : 1;
    auto x = filled<T>(s, [&] { return mean + deviation * random.real(-1.7, 1.7); });
    if (const auto outlying = random.one_in(4) ? random.real(3, 2000) : 0; outlying > 0) // as class tokens are, or a channel
        for (index_t row = 0; s.channels > 0 && row < s.size() / s.channels; ++row)
            for (index_t c = 0; c < s.channels; ++c)
                if (kind >= 2 ? row % 32 == 0 : c == 0) x.data()[row * s.channels + c] += static_cast<T>(outlying);
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
    outcome result{joined(names[kind], " ", s, ", mean ", mean, ", deviation ", deviation), {}};
    if (kind == 0) result.problem = broken<T>(random, layer_norm<T>{weight, bias, eps}, x, exact, bounds);
    if (kind == 1) result.problem = broken<T>(random, rms_norm<T>{weight, eps}, x, exact, bounds);
    const batch_norm<T> batch{.weight = weight, .bias = bias, .mean = means, .variance = variances, .eps = eps};
    if (kind == 2) result.problem = broken<T>(random, batch, x, exact, bounds);
    if (kind == 3) result.problem = broken<T>(random, rep_batch_norm<T>{.batch = batch, .eta = eta}, x, exact, bounds);
    if (!result.problem.empty()) return result;
    const rep_batch_norm<T> rep{.batch = batch, .eta = eta};
    const auto of_gradient = kind == 0          ? broken_row_gradient(random, layer_norm<T>{weight, bias, eps}, x)
                             : kind == 1        ? broken_row_gradient(random, rms_norm<T>{weight, eps}, x)
                             : random.one_in(2) ? broken_training_gradient(random, rep, x)
                                                : broken_inference_gradient(random, rep, x);
    if (!of_gradient.empty()) result.problem = "gradient of the " + of_gradient;
    return result;
}

} // namespace

outcome check_norm(draw& random) {
    return in_drawn_numbers(random, [&]<Scalar T>(std::type_identity<T>) { return attempt<T>(random); });
}

} // namespace attn::fuzz
