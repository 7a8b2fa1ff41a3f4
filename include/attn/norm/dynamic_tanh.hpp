// Norms without statistics: a bounded function of every number by itself.
#pragma once

#include "../simd/elementary.hpp"
#include "backward.hpp"
#include "rows_in_and_out.hpp"

#include <numbers>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The gradients of a loss with respect to what a dynamic_tanh read: as norm_gradients, and alpha, one number.
template <Scalar T>
struct dynamic_tanh_gradients : norm_gradients<T> {
    std::span<T> alpha = {};
};

/// The gradients of a loss with respect to what a dynamic_erf read: as of a dynamic_tanh, and shift, one number.
template <Scalar T>
struct dynamic_erf_gradients : dynamic_tanh_gradients<T> {
    std::span<T> shift = {};
};

namespace detail {

/// tanh and erf of registers, and their slopes from u and f(u).
struct tanh_function {
    auto operator()(auto u) const { return simd::tanh(u); }
    template <Scalar T>
    simd::lanes<T> slope(simd::lanes<T>, simd::lanes<T> y) const {
        return fma(-y, y, simd::lanes<T>(1));
    }
};
struct erf_function {
    auto operator()(auto u) const { return simd::erf(u); }
    template <Scalar T>
    simd::lanes<T> slope(simd::lanes<T> u, simd::lanes<T>) const {
        return simd::lanes<T>(static_cast<T>(2 * std::numbers::inv_sqrtpi)) * simd::exp(-(u * u));
    }
};

/// weight f(alpha x + shift) + bias of every number x, and its gradients. weight, bias: (channels) each, or empty.
template <class F, Scalar T>
class number_norm {
public:
    number_norm(std::span<const T> weight, std::span<const T> bias, double alpha, double shift)
        : weight_(weight.empty() ? nullptr : weight.data()), bias_(bias.empty() ? nullptr : bias.data()), alpha_(static_cast<T>(alpha)),
          shift_(static_cast<T>(shift)) {}

    void forward(const stored_view<const T>& x, const stored_view<T>& out, const execution& run) const {
        const rows_in_and_out<T> pairs(x, out, run.workspace().bytes().data());
        const auto channels = x.shape().channels;
        with_condition(worth_streaming(x, out), [&](auto streaming) {
            pairs.template for_each_run_in<T>(run, [&](const row_block<const T>& from, const row_block<T>& to, index_t count) {
                for (index_t r = 0; r < count; ++r) write_row<streaming()>(from.address(r), to.address(r), channels);
                if constexpr (streaming()) simd::finish_streaming();
            });
        });
    }

    static std::size_t workspace_bytes(const shape& x) { return bytes_for<layout>(x); }
    /// With u = alpha x + shift and s = d_out weight f'(u):
    ///     d x = alpha s,   d weight = sum over rows of d_out f(u),   d bias = sum over rows of d_out
    ///     d alpha = sum over all numbers of s x,   d shift = sum over all numbers of s
    /// Rows are summed in parts that depend on their number only, parts one after the other, and then channels: so threads change no bit.
    void backward(const tensor_view<const T>& x, const tensor_view<const T>& d_out, const norm_gradients<T>& wanted, std::span<T> of_alpha,
                  std::span<T> of_shift, const execution& run) const {
        const auto& s = x.shape();
        scratch memory(run.workspace().bytes().data());
        const layout own(memory, s);
        const row_parts parts(s);
        run.for_each(parts.count, [&](index_t part, index_t) {
            T* const to = own.sums + sums * part * s.channels;
            std::fill_n(to, sums * s.channels, T{0});
            parts.for_each_row(part, [&](index_t r) {
                const auto [b, h, i] = row_place(s, r);
                add_row(x.row(b, h, i), d_out.row(b, h, i), wanted.x.data() ? wanted.x.row(b, h, i) : nullptr, s.channels, to);
            });
        });
        double of_number[2] = {0, 0};
        for (index_t which = 0; which < sums; ++which)
            for (index_t c = 0; c < s.channels; ++c) {
                double sum = 0;
                for (index_t part = 0; part < parts.count; ++part)
                    sum += static_cast<double>(own.sums[(sums * part + which) * s.channels + c]);
                if (which >= 2) of_number[which - 2] += sum;
                else if (const auto to = which == 0 ? wanted.weight : wanted.bias; !to.empty())
                    to[static_cast<std::size_t>(c)] = static_cast<T>(sum);
            }
        for (auto& number : of_alpha) number = static_cast<T>(of_number[0]);
        for (auto& number : of_shift) number = static_cast<T>(of_number[1]);
    }

private:
    using lanes = simd::lanes<T>;
    static constexpr index_t sums = 4;

    struct layout {
        T* sums; ///< [part][weight, bias, alpha, shift][channels]

        layout(scratch& memory, const shape& x) : sums(memory.take<T>(number_norm::sums * row_parts(x).count, x.channels)) {}
    };

    [[gnu::always_inline]] lanes argument(lanes x) const { return fma(lanes(alpha_), x, lanes(shift_)); }

    template <bool streaming>
    void write_row(const T* x, T* out, index_t channels) const {
        simd::for_each_register<T>(channels, [&](index_t c, const auto& load, const auto& store) {
            auto y = F{}(argument(load(x + c)));
            if (weight_) y = fma(y, load(weight_ + c), bias_ ? load(bias_ + c) : lanes(0));
            else if (bias_) y += load(bias_ + c);
            if constexpr (streaming) c + lanes::size <= channels ? y.store_streaming(out + c) : store(y, out + c);
            else store(y, out + c);
        });
    }
    void add_row(const T* x, const T* d_out, T* of_x, index_t channels, T* to) const {
        const lanes alpha(alpha_), zero(0);
        simd::for_each_register<T>(channels, [&](index_t c, const auto& load, const auto& store) {
            const auto add = [&](index_t which, lanes a, lanes b) {
                T* const at = to + which * channels + c;
                store(fma(a, b, load(at)), at);
            };
            const auto value = load(x + c), given = load(d_out + c), u = argument(value), y = F{}(u), slope = F{}.slope(u, y);
            const auto s = (weight_ ? given * load(weight_ + c) : given) * slope;
            add(0, given, y);
            add(1, given, lanes(1));
            add(2, s, select(slope == zero, zero, value)); // far out the slope is 0, and so is its limit times an infinity
            add(3, s, lanes(1));
            if (of_x) store(alpha * s, of_x + c);
        });
    }

    const T *weight_, *bias_;
    T alpha_, shift_;
};

} // namespace detail

/// Dynamic tanh: a bounded curve in the place of a norm, of every number by itself.
/// For x (batch, heads, tokens, channels):
///     out = weight tanh(alpha x) + bias
/// alpha: one learned number, 1/2 before training. weight, bias: (channels) each, or empty (weight 1, bias 0). The operator refers to them;
/// their owner keeps them. An infinity gives bias +- weight, and a NaN itself; no other number is touched.
/// Time: a tanh a number. Memory: none, or some rows a thread where x or out is stored in 16 bits. See `normalise` for errors; an alpha
/// that is not finite is refused. Zhu et al. 2025, "Transformers without Normalization".
template <Scalar T>
struct dynamic_tanh {
    using scalar = T;
    static constexpr std::string_view name = "dynamic_tanh";
    static constexpr bool moves_statistics = false, adds_bias = true;

    borrowed<const T> weight = {};
    borrowed<const T> bias = {};
    double alpha = 0.5;

    void check(const shape& x) const {
        detail::check_parameter(name, "weight", weight, x);
        detail::check_parameter(name, "bias", bias, x);
        detail::check_number<T>(name, "alpha", alpha);
    }
    void check_apart(const output_memory& out) const {
        out.require_apart("weight", weight);
        out.require_apart("bias", bias);
    }
    std::size_t workspace_bytes(const shape& x, index_t concurrency, bool narrow = false) const {
        return narrow ? detail::rows_in_and_out<T>::narrow_bytes(x, concurrency) : 0;
    }
    void forward(const stored_view<const T>& x, const stored_view<T>& out, const execution& run) const {
        of_numbers().forward(x, out, run);
    }

    using gradients = dynamic_tanh_gradients<T>;
    std::size_t backward_workspace_bytes(const shape& x, index_t) const {
        return detail::number_norm<detail::tanh_function, T>::workspace_bytes(x);
    }
    void backward(const tensor_view<const T>& x, const tensor_view<const T>& d_out, const gradients& wanted, const execution& run) const {
        of_numbers().backward(x, d_out, wanted, wanted.alpha, {}, run);
    }

private:
    detail::number_norm<detail::tanh_function, T> of_numbers() const { return {weight, bias, alpha, 0}; }
};

/// Dynamic erf: a dynamic_tanh of another curve, whose middle may lie elsewhere.
/// For x (batch, heads, tokens, channels), parameters as of dynamic_tanh:
///     out = weight erf(alpha x + shift) + bias
/// shift: one learned number, 0 before training. Chen et al. 2025, "Stronger Normalization-Free Transformers".
template <Scalar T>
struct dynamic_erf {
    using scalar = T;
    static constexpr std::string_view name = "dynamic_erf";
    static constexpr bool moves_statistics = false, adds_bias = true;

    borrowed<const T> weight = {};
    borrowed<const T> bias = {};
    double alpha = 0.5;
    double shift = 0;

    void check(const shape& x) const {
        detail::check_parameter(name, "weight", weight, x);
        detail::check_parameter(name, "bias", bias, x);
        detail::check_number<T>(name, "alpha", alpha);
        detail::check_number<T>(name, "shift", shift);
    }
    void check_apart(const output_memory& out) const {
        out.require_apart("weight", weight);
        out.require_apart("bias", bias);
    }
    std::size_t workspace_bytes(const shape& x, index_t concurrency, bool narrow = false) const {
        return narrow ? detail::rows_in_and_out<T>::narrow_bytes(x, concurrency) : 0;
    }
    void forward(const stored_view<const T>& x, const stored_view<T>& out, const execution& run) const {
        of_numbers().forward(x, out, run);
    }

    using gradients = dynamic_erf_gradients<T>;
    std::size_t backward_workspace_bytes(const shape& x, index_t) const {
        return detail::number_norm<detail::erf_function, T>::workspace_bytes(x);
    }
    void backward(const tensor_view<const T>& x, const tensor_view<const T>& d_out, const gradients& wanted, const execution& run) const {
        of_numbers().backward(x, d_out, wanted, wanted.alpha, wanted.shift, run);
    }

private:
    detail::number_norm<detail::erf_function, T> of_numbers() const { return {weight, bias, alpha, shift}; }
};

/// Deduces a dynamic_tanh of its weight's scalar type.
template <class W, class... Others>
dynamic_tanh(const W&, const Others&...) -> dynamic_tanh<detail::element_t<W>>;
/// Deduces a dynamic_erf of its weight's scalar type.
template <class W, class... Others>
dynamic_erf(const W&, const Others&...) -> dynamic_erf<detail::element_t<W>>;

} // namespace attn
