// cosFormer's features, by which linear attention weighs a key less the farther it is.
#pragma once

#include "../kernel/linear/vector_features.hpp"
#include "../simd/elementary.hpp"
#include "feature_map.hpp"

#include <numbers>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

template <Scalar T>
class cosformer_rows;

} // namespace detail

/// cosFormer's features: of each channel two, so that the weight of a key falls with its distance,
///     phi(x)_c = relu(x_c) cos(pi i / 2 M),   phi(x)_(d + c) = relu(x_c) sin(pi i / 2 M),      c < d channels, i the position
///     phi(q_i) . phi(k_j) = relu(q_i) . relu(k_j) cos(pi (i - j) / 2 M)
/// M: the length, at least that of the sequence; farther apart weights are negative. Qin et al. 2022, "cosFormer: Rethinking Softmax in
/// Attention".
struct cosformer_features {
    index_t length = 1; ///< M

    index_t features(index_t channels) const { return 2 * channels; }
    void check(std::string_view operation, index_t) const {
        if (length < 1 || length > index_t{1} << 48)
            detail::raise(argument_error(operation, "feature_map.length", "is ", length, ", but must be at least 1 and at most 2^48"));
    }
    template <class S>
    void operator()(std::span<const S> x, index_t position, std::span<S> to) const {
        const auto [cosine, sine] = turn(position);
        for (std::size_t c = 0; c < x.size(); ++c) {
            to[c] = relu{}(x[c]) * static_cast<S>(cosine);
            to[c + x.size()] = relu{}(x[c]) * static_cast<S>(sine);
        }
    }
    template <class S>
    void gradient(std::span<const S> x, index_t position, std::span<const S> of_features, std::span<S> to) const {
        const auto [cosine, sine] = turn(position);
        for (std::size_t c = 0; c < x.size(); ++c)
            to[c] = relu{}.derivative(x[c]) * (static_cast<S>(cosine) * of_features[c] + static_cast<S>(sine) * of_features[c + x.size()]);
    }

    /// How the kernel makes them.
    template <Scalar T>
    using rows = detail::cosformer_rows<T>;

private:
    template <Scalar T>
    friend class detail::cosformer_rows;
    struct cosine_and_sine {
        double cosine, sine;
    };
    /// Of pi i / 2 M.
    cosine_and_sine turn(index_t position) const {
        const auto angle = static_cast<double>(position % (4 * length)) * (std::numbers::pi / 2 / static_cast<double>(length));
        return {simd::cos(angle), simd::sin(angle)};
    }
};

namespace detail {

/// How the kernel makes cosFormer's features: see kernel::token_map.
template <Scalar T>
class cosformer_rows {
    using lanes = simd::lanes<T>;

public:
    static constexpr bool has_maxima = false;

    cosformer_rows(scratch&, const cosformer_features& phi, index_t channels) : phi_(phi), channels_(channels) {}
    void prepare() const {}
    void begin(const kernel::vector_rows<T>& of, T*) const {
        each(of, [&](index_t r, lanes cosine, lanes sine) {
            const T* const x = of.x + r * of.width;
            T* const to = of.features + r * of.feature_width;
            std::fill(to + 2 * channels_, to + of.feature_width, T{0});
            simd::for_each_register<T>(channels_, [&](index_t c, const auto& load, const auto& store) {
                const auto y = relu{}(load(x + c));
                store(y * cosine, to + c);
                store(y * sine, to + channels_ + c);
            });
        });
    }
    void gradient(const kernel::vector_rows<T>& of, const T*, T* of_features, T* to) const {
        each(of, [&](index_t r, lanes cosine, lanes sine) {
            const T *const x = of.x + r * of.width, *const given = of_features + r * of.feature_width;
            simd::for_each_register<T>(channels_, [&](index_t c, const auto& load, const auto& store) {
                const auto sum = fma(cosine, load(given + c), sine * load(given + channels_ + c));
                store(relu{}.derivative(load(x + c)) * sum, to + r * of.width + c);
            });
        });
    }

private:
    void each(const kernel::vector_rows<T>& of, const auto& f) const {
        for (index_t r = 0; r < of.count; ++r) {
            const auto [cosine, sine] = phi_.turn(of.position + r);
            f(r, lanes(static_cast<T>(cosine)), lanes(static_cast<T>(sine)));
        }
    }
    const cosformer_features& phi_;
    index_t channels_;
};

} // namespace detail

} // namespace attn
