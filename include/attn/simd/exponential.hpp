// exp, tanh and erf of registers, and what elementary functions are made of.
#pragma once

#include "lanes.hpp"

#include <limits>
#include <numbers>

namespace attn::inline ATTN_INSTRUCTION_SET::simd {

namespace detail {

template <Scalar T>
using integer_of = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
/// The bits of a register's numbers, as the compiler's own vector: so that no version of xsimd has a say in them.
template <Scalar T>
using bit_vector = typename vector_of<integer_of<T>, lanes<T>::size>::type;
template <Scalar T>
[[gnu::always_inline]] inline auto bits_of(lanes<T> x) {
    return std::bit_cast<bit_vector<T>>(x.value);
}
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> number_of(bit_vector<T> bits) {
    return lanes<T>(std::bit_cast<typename lanes<T>::batch>(bits));
}
/// The mask of all lanes of AVX-512: without a mask gcc 12 warns in its own header.
template <Scalar T>
inline constexpr auto all_lanes = static_cast<typename xsimd::batch_bool<T>::register_type>(~0u);

template <Scalar T>
inline constexpr int mantissa_bits = std::numeric_limits<T>::digits - 1;
template <Scalar T>
inline constexpr auto mantissa_mask = static_cast<integer_of<T>>((integer_of<T>{1} << mantissa_bits<T>)-1);
/// From here on all numbers are whole.
template <Scalar T>
inline constexpr T first_whole = static_cast<T>(mantissa_mask<T>) + 1;
template <Scalar T>
inline constexpr auto one_bits = std::bit_cast<integer_of<T>>(T{1});
template <Scalar T>
inline constexpr T infinity = std::numeric_limits<T>::infinity();

/// |magnitude| with the sign of the other.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> with_sign_of(lanes<T> magnitude, lanes<T> other) {
    constexpr auto sign = integer_of<T>{1} << (sizeof(T) * 8 - 1);
    return number_of<T>((bits_of(magnitude) & ~sign) | (bits_of(other) & sign));
}

/// c0 + c1 x + c2 x^2 + ... by Horner's rule.
template <Scalar T, std::size_t N>
[[gnu::always_inline]] inline lanes<T> polynomial(const std::array<T, N>& c, lanes<T> x) {
    lanes<T> sum = c[N - 1];
#pragma GCC unroll 16
    for (std::size_t k = 1; k < N; ++k) sum = fma(sum, x, lanes<T>(c[N - 1 - k]));
    return sum;
}

/// A number rounded to an integer, and 2 to its power. Adding 1.5 * 2^mantissa_bits rounds, and leaves the integer in the low bits.
template <Scalar T>
struct rounded_lanes {
    lanes<T> shifted;
    static constexpr T magic = first_whole<T> * T{1.5};

    lanes<T> value() const { return shifted - lanes<T>(magic); }
    /// 2 to its power, which must be normal.
    lanes<T> power() const { return number_of<T>(one_bits<T> + (bits_of(shifted) << mantissa_bits<T>)); }
};

/// What a product lost when it was rounded: a b - product.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> lost_by(lanes<T> product, lanes<T> a, lanes<T> b) {
    if constexpr (fuses) {
        return fma(a, b, -product);
    } else { // Dekker: halves, whose products are exact
        const auto half = [](lanes<T> x) {
            const auto high = x * lanes<T>(static_cast<T>((integer_of<T>{1} << (mantissa_bits<T> / 2 + 1)) + 1));
            return high - (high - x);
        };
        const auto a1 = half(a), a2 = a - a1, b1 = half(b), b2 = b - b1;
        return ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2;
    }
}

/// ln 2 as a number whose product with an exponent is exact, and what that lacks of it.
template <Scalar T>
inline constexpr std::array<T, 2> ln2 =
    sizeof(T) == 4 ? std::array<T, 2>{T(0x1.62ep-1), T(0x1.0bfbe8p-15)} : std::array<T, 2>{T(0x1.62e42fefa4p-1), T(-0x1.8432a1b0e2634p-43)};

/// e^r - 1 on [-ln 2 / 2, ln 2 / 2], with a small relative error: r + r^2 (1/2 + r Q(r)), Q minimax: 8e-10 for floats, 7e-19 for doubles.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> expm1_small(lanes<T> r) {
    constexpr auto q = [] {
        if constexpr (sizeof(T) == 4)
            return std::array<T, 6>{0.5f, 0.1666666716f, 0.04166648164f, 0.008333281614f, 0.001393339597f, 0.0001990981837f};
        else
            return std::array<T, 11>{0.5,
                                     0.166666666666666768,
                                     0.0416666666666666921,
                                     0.00833333333332161169,
                                     0.00138888888888700915,
                                     0.00019841269886227458,
                                     2.48015873562435594e-5,
                                     2.75572440664613151e-6,
                                     2.75572454503782249e-7,
                                     2.51090985232852798e-8,
                                     2.09238029612867258e-9};
    }();
    return fma(r * r, polynomial(q, r), r);
}

/// x = k ln 2 + r: what exp and tanh begin with.
template <Scalar T>
struct exp_argument {
    rounded_lanes<T> k;
    lanes<T> r;

    explicit exp_argument(lanes<T> x) : k{fma(x, lanes<T>(std::numbers::log2e_v<T>), lanes<T>(rounded_lanes<T>::magic))} {
        const auto minus_k = -k.value();
        r = fma(minus_k, lanes<T>(ln2<T>[1]), fma(minus_k, lanes<T>(ln2<T>[0]), x));
    }
};

/// 2^k x for |k| up to twice the largest exponent, rounded once where it is subnormal.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> scaled(rounded_lanes<T> k, lanes<T> x) {
#if defined(__AVX512F__)
    using batch = typename lanes<T>::batch;
    if constexpr (sizeof(T) == 4) return batch(_mm512_maskz_scalef_ps(all_lanes<T>, x.value, k.value().value));
    else return batch(_mm512_maskz_scalef_pd(all_lanes<T>, x.value, k.value().value));
#else
    // By half of k, rounded down, which is exact, and by the rest. Exponents are counted modulo their field and the sign, which is cleared.
    constexpr auto exponent_mask = std::bit_cast<integer_of<T>>(infinity<T>);
    const auto exponent = bits_of(k.shifted) << mantissa_bits<T>;
    const auto half = exponent_mask & ((exponent >> 1) + one_bits<T>), rest = exponent + 2 * one_bits<T> - half;
    return x * number_of<T>(half) * number_of<T>(rest);
#endif
}

/// x in [lowest, highest]; a NaN stays.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> kept_within(lanes<T> x, T lowest, T highest) {
    return min_or_second(lanes<T>(highest), max_or_second(lanes<T>(lowest), x));
}

/// Where e^x is neither 0 nor infinite, and a little further.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> kept_for_exp(lanes<T> x) {
    return kept_within<T>(x, sizeof(T) == 4 ? T(-104) : T(-746), sizeof(T) == 4 ? T(89) : T(710));
}

} // namespace detail

/// e^x, at most 1 unit in the last place off.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> exp(lanes<T> x) {
    const detail::exp_argument<T> a(detail::kept_for_exp(x));
    return detail::scaled(a.k, lanes<T>(T{1}) + detail::expm1_small(a.r));
}

/// The hyperbolic tangent: (e^2|x| - 1) / (e^2|x| + 1) with the sign of x.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> tanh(lanes<T> x) {
    using lanes = simd::lanes<T>;
    const auto twice = abs(x) * lanes(T{2});
    const lanes limit = sizeof(T) == 4 ? T(20) : T(40); // where the result is 1
    const detail::exp_argument<T> a(min_or_second(limit, twice));
    const auto power = a.k.power();
    const auto expm1 = fma(power, detail::expm1_small(a.r), power - lanes(T{1}));
    return detail::with_sign_of(expm1 / (expm1 + lanes(T{2})), x);
}

/// The error function: near 0 an odd polynomial, elsewhere 1 - e^(-x^2) P((|x| - a) / (|x| + a)), both minimax.
template <Scalar T>
[[gnu::always_inline]] inline lanes<T> erf(lanes<T> x) {
    using lanes = simd::lanes<T>;
    constexpr auto inner = [] {
        if constexpr (sizeof(T) == 4)
            return std::array<T, 7>{0.1283791661f,   -0.3761263192f,    0.1128366366f, -0.02685770579f,
                                    0.005196951795f, -0.0008097700775f, 8.18508197e-5f};
        else
            return std::array<T, 13>{0.128379167095512586,   -0.376126389031837483,    0.112837916709548569,    -0.0268661706450728961,
                                     0.00522397762478087491, -0.000854832697874263292, 0.000120553310369137938, -1.49255935071906613e-5,
                                     1.64609728211846718e-6, -1.63500252600550955e-7,  1.46578800519936594e-8,  -1.1365666624567702e-9,
                                     5.94526264075395473e-11};
    }();
    constexpr auto outer = [] {
        if constexpr (sizeof(T) == 4)
            return std::array<T, 6>{0.2553956807f, -0.4271858633f, 0.2416565418f, -0.07899460196f, 0.003701833077f, 0.007178603671f};
        else
            return std::array<T, 13>{0.179001151181389928,     -0.326233560043170501,  0.245603801707640235,   -0.150115936545998363,
                                     0.0716658374703773027,    -0.0243924895040408957, 0.00426923624176165847, 0.000708321725762307711,
                                     -0.000594951830316515552, 5.03125847666014087e-5, 7.173988621248931e-5,   -6.35888018180675252e-6,
                                     -6.55389980940102065e-6};
    }();
    const lanes centre = sizeof(T) == 4 ? T(2) : T(3), border = sizeof(T) == 4 ? T(0.95) : T(1);
    const auto size = detail::kept_within<T>(abs(x), T(0), sizeof(T) == 4 ? T(4) : T(6)); // 1 beyond
    const auto square = size * size;
    const auto below = fma(size, detail::polynomial(inner, square), size);
    const auto complement = exp(-square) * detail::polynomial(outer, (size - centre) / (size + centre));
    return detail::with_sign_of(select(size < border, below, lanes(T{1}) - complement), x);
}

} // namespace attn::simd
