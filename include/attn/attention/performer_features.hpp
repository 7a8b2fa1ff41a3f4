// Performer's feature map, for linear attention whose weights are softmax's on average.
#pragma once

#include "../core/output_memory.hpp"
#include "../kernel/gemm/matrix_tile.hpp"
#include "../kernel/linear/vector_features.hpp"
#include "../simd/elementary.hpp"
#include "../simd/wide_sum.hpp"
#include "feature_map.hpp"

#include <cmath>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

template <Scalar T, class U>
class performer_rows;

} // namespace detail

/// Performer's positive random features (FAVOR+), whose weights are softmax's on average: with r directions w (d channels each) and x' = x
/// d^(-1/4),
///     phi(x)_r = (exp(w_r . x' - |x'|^2 / 2 - max) + 1e-4) / sqrt(r)
/// max: of a query the largest w . x' of its own; of keys the largest of all keys of a head that queries see. Where queries see different
/// keys (causal, prefix), a key must not know of others: there 0 stands for it, and what overflows is infinite. To the gradient a maximum
/// is a constant. directions: (1, 1, r, d), see fill_orthogonal_directions. Of linear_attention the scale of the scores is d^(-1/2).
/// Choromanski et al. 2021, "Rethinking Attention with Performers".
template <Scalar U>
struct performer_features {
    tensor_view<const U> directions; ///< w

    index_t features(index_t) const { return directions.shape().tokens; }
    void check(std::string_view operation, index_t channels) const {
        const auto& s = directions.shape();
        detail::check_view(operation, "feature_map.directions", directions);
        if (s.batch != 1 || s.heads != 1 || s.tokens < 1 || s.channels != channels)
            detail::raise(
                shape_error(operation, "feature_map.directions", "have shape ", s, ", but (1, 1, features, ", channels, ") is needed"));
    }
    void check_apart(const output_memory& out) const { out.require_apart("feature_map.directions", directions); }

    /// The largest w . x'.
    template <class S>
    S maximum(std::span<const S> x) const {
        using std::max;
        S largest = product(x, 0);
        for (index_t r = 1; r < directions.shape().tokens; ++r) largest = max(largest, product(x, r));
        return largest;
    }
    /// The features of a query.
    template <class S>
    void operator()(std::span<const S> x, index_t position, std::span<S> to) const {
        (*this)(x, position, maximum(x), to);
    }
    /// The features by such a maximum.
    template <class S>
    void operator()(std::span<const S> x, index_t, const S& maximum, std::span<S> to) const {
        using std::exp;
        for (index_t r = 0; r < directions.shape().tokens; ++r)
            to[static_cast<std::size_t>(r)] =
                (exp(product(x, r) - half_square(x) - maximum) + static_cast<S>(least)) * static_cast<S>(share());
    }
    template <class S>
    void gradient(std::span<const S> x, index_t position, std::span<const S> of_features, std::span<S> to) const {
        gradient(x, position, maximum(x), of_features, to);
    }
    /// The gradient by such a maximum, a constant.
    template <class S>
    void gradient(std::span<const S> x, index_t, const S& maximum, std::span<const S> of_features, std::span<S> to) const {
        using std::exp;
        for (std::size_t c = 0; c < x.size(); ++c) to[c] = S(0);
        for (index_t r = 0; r < directions.shape().tokens; ++r) {
            const S of_exponent =
                of_features[static_cast<std::size_t>(r)] * exp(product(x, r) - half_square(x) - maximum) * static_cast<S>(share());
            for (std::size_t c = 0; c < x.size(); ++c)
                to[c] += of_exponent * (static_cast<S>(scaled(r, static_cast<index_t>(c))) - x[c] * static_cast<S>(1 / root()));
        }
    }

    /// How the kernel makes them.
    template <Scalar T>
    using rows = detail::performer_rows<T, U>;

private:
    template <Scalar T, class V>
    friend class detail::performer_rows;
    static constexpr double least = 1e-4;

    double share() const { return 1 / std::sqrt(static_cast<double>(directions.shape().tokens)); }
    /// sqrt(d): x' has x' . x' = x . x / root.
    double root() const { return std::sqrt(static_cast<double>(directions.shape().channels)); }
    /// w d^(-1/4).
    double scaled(index_t direction, index_t channel) const {
        return static_cast<double>(directions(0, 0, direction, channel)) / std::sqrt(root());
    }
    template <class S>
    S product(std::span<const S> x, index_t direction) const {
        S sum(0);
        for (std::size_t c = 0; c < x.size(); ++c) sum += static_cast<S>(scaled(direction, static_cast<index_t>(c))) * x[c];
        return sum;
    }
    template <class S>
    S half_square(std::span<const S> x) const {
        S sum(0);
        for (const auto& number : x) sum += number * number;
        return sum * static_cast<S>(0.5 / root());
    }
};

/// Deduces performer_features of its directions' scalar type.
template <class W>
performer_features(const W&) -> performer_features<detail::element_t<W>>;

namespace detail {

/// How the kernel makes Performer's features: see kernel::token_map.
template <Scalar T, class U>
class performer_rows {
    using lanes = simd::lanes<T>;

public:
    static constexpr bool has_maxima = true;

    performer_rows(scratch& memory, const performer_features<U>& phi, index_t channels)
        : phi_(phi), channels_(channels), features_(phi.directions.shape().tokens), width_(kernel::linear_state<T>::whole(channels)),
          feature_width_(kernel::linear_state<T>::whole(features_)), by_direction_(memory.take<T>(features_, width_)),
          by_channel_(memory.take<T>(channels, feature_width_)) {}
    /// Lays w d^(-1/4) down both ways.
    void prepare() const {
        std::fill_n(by_direction_, features_ * width_, T{0});
        std::fill_n(by_channel_, channels_ * feature_width_, T{0});
        for (index_t r = 0; r < features_; ++r)
            for (index_t c = 0; c < channels_; ++c)
                by_direction_[r * width_ + c] = by_channel_[c * feature_width_ + r] = static_cast<T>(phi_.scaled(r, c));
    }
    /// Exponents, but for the maxima.
    void begin(const kernel::vector_rows<T>& of, T* maxima) const {
        multiply(of.count, {of.x, of.width, 1}, channels_, {by_channel_, feature_width_, 1}, {of.features, of.feature_width, 1});
        for (index_t r = 0; r < of.count; ++r) {
            simd::wide_sum<T> squares;
            simd::for_each_part<T>(of.width, [&](index_t c, auto part, index_t) {
                const auto x = lanes::load(of.x + r * of.width + c);
                squares.add(part, x, x);
            });
            const lanes half(squares.total() * static_cast<T>(0.5 / phi_.root()));
            T* const row = of.features + r * of.feature_width;
            T largest[lanes::size];
            lanes most(-std::numeric_limits<T>::infinity());
            simd::for_each_register<T>(features_, [&](index_t c, const auto& load, const auto& store) {
                const auto product = load(row + c);
                most = c + lanes::size <= features_ ? max(most, product)
                                                    : select(simd::lane_bits::first(features_ - c), max(most, product), most);
                store(product - half, row + c);
            });
            most.store(largest);
            maxima[r] = *std::max_element(largest, largest + lanes::size);
        }
    }
    void finish(const kernel::vector_rows<T>& of, const T* maxima) const {
        const lanes share(static_cast<T>(phi_.share())), more(static_cast<T>(performer_features<U>::least));
        for (index_t r = 0; r < of.count; ++r) {
            T* const row = of.features + r * of.feature_width;
            simd::for_each_register<T>(features_, [&](index_t c, const auto& load, const auto& store) {
                store((simd::exp(load(row + c) - lanes(maxima[r])) + more) * share, row + c);
            });
            std::fill(row + features_, row + of.feature_width, T{0});
        }
    }
    void gradient(const kernel::vector_rows<T>& of, const T* maxima, T* of_features, T* to) const {
        const lanes share(static_cast<T>(phi_.share()));
        for (index_t r = 0; r < of.count; ++r) { // of the exponents
            T* const row = of_features + r * of.feature_width;
            simd::for_each_register<T>(features_, [&](index_t c, const auto& load, const auto& store) {
                store(load(row + c) * share * simd::exp(load(of.features + r * of.feature_width + c) - lanes(maxima[r])), row + c);
            });
        }
        multiply(of.count, {of_features, of.feature_width, 1}, features_, {by_direction_, width_, 1}, {to, of.width, 1});
        for (index_t r = 0; r < of.count; ++r) {
            simd::wide_sum<T> sum;
            simd::for_each_part<T>(features_, [&](index_t c, auto part, index_t count) {
                sum.add(part, kernel::load_channels<T>(of_features + r * of.feature_width, 1, c, count));
            });
            const lanes factor(-sum.total() * static_cast<T>(1 / phi_.root()));
            for (index_t c = 0; c < of.width; c += lanes::size) {
                T* const at = to + r * of.width + c;
                fma(factor, lanes::load(of.x + r * of.width + c), lanes::load(at)).store(at);
            }
        }
    }

private:
    static void multiply(index_t count, const row_block<const T>& a, index_t depth, const row_block<const T>& b, const row_block<T>& to) {
        kernel::multiply_wide<T>(count, b.row_stride / lanes::size, {a, b, depth, to, nullptr, false}, kernel::no_prefetch());
    }

    const performer_features<U>& phi_;
    index_t channels_, features_, width_, feature_width_;
    T *by_direction_, *by_channel_; ///< w d^(-1/4), rows of whole registers: [features][channels], [channels][features]
};

} // namespace detail

} // namespace attn
