// Calling an operator in tests, and comparing what it gives.
#pragma once

#include "problems.hpp"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

namespace attn::testing {

/// Fills memory that must not be touched, or must be overwritten: a NaN that no arithmetic makes.
template <class T>
inline constexpr T guard = [] {
    if constexpr (sizeof(T) == 2)
        return std::bit_cast<T>(static_cast<unsigned short>(0x7fa5)); // as bfloat16 and as half
    else if constexpr (sizeof(T) == 4)
        return std::bit_cast<T>(0x7fc5a5a5u);
    else
        return std::bit_cast<T>(0x7ff85a5a5a5a5a5aull);
}();

/// The distance of 1 to the next number, in which errors are counted.
template <Scalar T>
inline constexpr auto epsilon = static_cast<double>(std::numeric_limits<T>::epsilon());

/// Memory of these bytes; all ones are a NaN in either precision. By memset: loops over bytes are what unoptimised tests would spend their time on.
inline void fill(workspace& memory, std::byte with) {
    const auto bytes = memory.bytes();
    if (!bytes.empty()) std::memset(bytes.data(), std::to_integer<int>(with), bytes.size());
}

template <class T>
bool same_bits(const T& a, const T& b) {
    return std::memcmp(&a, &b, sizeof(T)) == 0;
}
template <class T>
bool same_bits(const tensor<T>& a, const tensor<T>& b) {
    const auto count = static_cast<std::size_t>(a.shape().size());
    return a.shape() == b.shape() && (count == 0 || std::memcmp(a.data(), b.data(), count * sizeof(T)) == 0);
}

/// Some of the tokens, as a rank has them: without tokens there is no memory either.
template <Scalar T>
tensor_view<const T> tokens_of(const tensor_view<const T>& all, const row_range& rows) {
    const auto some = all.slice({.tokens = rows});
    return rows.count > 0 ? some : head_major<const T>(nullptr, some.shape());
}

/// Some tokens of a tensor.
template <class T>
tensor<T> rows_of(const tensor<T>& all, index_t first, index_t count) {
    const auto& s = all.shape();
    tensor<T> rows({s.batch, s.heads, count, s.channels});
    for (index_t head = 0; head < s.batch * s.heads; ++head)
        std::copy_n(all.data() + (head * s.tokens + first) * s.channels, count * s.channels, rows.data() + head * count * s.channels);
    return rows;
}

/// A result; log_sum_exp is empty where it was not asked for.
template <Scalar T>
struct answer {
    tensor<T> values, log_sum_exp;

    outputs<T> out() { return {values, log_sum_exp}; }
};

template <Scalar T>
bool same_bits(const answer<T>& a, const answer<T>& b) {
    return same_bits(a.values, b.values) && same_bits(a.log_sum_exp, b.log_sum_exp);
}

/// Room for a result, all guards. Rows: the shape of its log_sum_exp.
template <Scalar T>
answer<T> no_answer(const shape& s, const shape& rows) {
    answer<T> result{tensor<T>(s), tensor<T>(rows)};
    std::fill_n(result.values.data(), s.size(), guard<T>);
    std::fill_n(result.log_sum_exp.data(), rows.size(), guard<T>);
    return result;
}
template <Scalar T>
answer<T> no_answer(const shape& s, bool with_log_sum_exp) {
    auto result = no_answer<T>(s, shape{s.batch, s.heads, with_log_sum_exp ? s.tokens : 0, 1});
    if (!with_log_sum_exp) result.log_sum_exp = {};
    return result;
}
/// Room for what an operator makes of inputs of such shapes.
template <Scalar T, Scalar U>
answer<T> no_answer(const instance<U>& op, const input_shapes& s, bool with_log_sum_exp) {
    return with_log_sum_exp ? no_answer<T>(op.output_shape(s), op.log_sum_exp_shape(s)) : no_answer<T>(op.output_shape(s), false);
}

template <Scalar T, Executor E>
answer<T> attend(const instance<T>& op, const inputs<T>& in, bool with_log_sum_exp, E& executor) {
    auto result = no_answer<T>(op, shapes_of(in), with_log_sum_exp);
    workspace memory(op.workspace_bytes(shapes_of(in), executor.concurrency()));
    op.attend(in, result.out(), execution(executor, memory));
    return result;
}
template <Scalar T>
answer<T> attend(const instance<T>& op, const inputs<T>& in, bool with_log_sum_exp) {
    sequential here;
    return attend(op, in, with_log_sum_exp, here);
}

/// The definition's result in double, on inputs that are widened exactly.
template <Scalar T>
answer<double> reference_of(const instance<T>& op, const inputs<T>& in, bool with_log_sum_exp) {
    auto result = no_answer<double>(op, shapes_of(in), with_log_sum_exp);
    const auto q = reference::widen(in.queries), k = reference::widen(in.keys), v = reference::widen(in.values);
    op.reference({q, k, v, in.positions}, result.out());
    return result;
}

/// The largest |a - b|; NaN where exactly one of two numbers is, or infinity against a finite one, is an infinite error.
template <Scalar T>
double largest_error(const tensor<T>& ours, const tensor<double>& exact) {
    constexpr auto infinity = std::numeric_limits<double>::infinity();
    if (ours.shape() != exact.shape()) return infinity;
    double worst = 0;
    for (index_t e = 0; e < exact.shape().size(); ++e) {
        const auto a = static_cast<double>(ours.data()[e]), b = exact.data()[e];
        if (a == b || (std::isnan(a) && std::isnan(b))) continue;
        const auto error = std::abs(a - b);
        worst = error <= infinity ? std::max(worst, error) : infinity;
    }
    return worst;
}

/// The largest |x| among finite numbers.
inline double largest_magnitude(const tensor<double>& t) {
    double largest = 0;
    for (index_t e = 0; e < t.shape().size(); ++e)
        if (std::isfinite(t.data()[e])) largest = std::max(largest, std::abs(t.data()[e]));
    return largest;
}

/// How wrong a result may be: the one place that says so.
///     values       2 max|plain - exact| + 4 epsilon max(sum |A| |v|), plain being the textbook formula in the same precision. The sum
///                  is taken from the definition on |v|: exact if A has no negative entry; else smaller, and the bound stricter.
///     log_sum_exp  2 max|plain - exact| + 4 epsilon max(1, |log_sum_exp|): an absolute error of a logarithm is a relative one of its sum.
/// In double the definition itself rounds, just as the textbook formula does, and counts a third time. How much is seen in float, where
/// it is the same multiple of epsilon, but another draw of roundings: the largest of three is taken, of the same numbers a little smaller
/// each time, and twice that.
struct error_bounds {
    double values, log_sum_exp;

    template <Scalar T>
    error_bounds(const attention_case& c, const problem& p, const given<T>& in, const answer<double>& exact) {
        const auto op = c.make<T>(p);
        const auto [plain_error, plain_log_error] = plain_errors(c, p, in, exact);
        auto v = reference::widen(in.values.view());
        std::ranges::transform(v.data(), v.data() + v.shape().size(), v.data(), [](double x) { return std::abs(x); });
        const auto q = reference::widen(in.queries.view()), k = reference::widen(in.keys.view());
        auto sums = no_answer<double>(exact.values.shape(), false);
        op->reference({q, k, v, in.positions}, sums.out());
        constexpr double times = std::same_as<T, double> ? 6 : 2;
        values = epsilon<T> * (times * plain_error + 4 * largest_magnitude(sums.values));
        log_sum_exp = epsilon<T> * (times * plain_log_error + 4 * std::max(1.0, largest_magnitude(exact.log_sum_exp)));
    }

private:
    /// Of the values and of log_sum_exp, as multiples of epsilon.
    template <Scalar T>
    static std::array<double, 2> plain_errors(const attention_case& c, const problem& p, const given<T>& in, const answer<double>& exact_of_in) {
        const auto op = c.make_float(p);
        std::array<double, 2> worst{};
        const auto compare = [&](const inputs<float>& narrow, const answer<double>& exact) {
            auto plain = no_answer<float>(*op, shapes_of(narrow), c.has_log_sum_exp);
            op->plain(narrow, plain.out());
            worst[0] = std::max(worst[0], largest_error(plain.values, exact.values) / epsilon<float>);
            worst[1] = std::max(worst[1], largest_error(plain.log_sum_exp, exact.log_sum_exp) / epsilon<float>);
        };
        if constexpr (std::same_as<T, float>) {
            compare(in, exact_of_in);
        } else {
            for (const T factor : {T(1.0), T(0.97), T(0.94)}) {
                const given<float> narrow{narrowed(in.queries, factor), narrowed(in.keys, factor), narrowed(in.values, factor), in.positions};
                compare(narrow, reference_of(*op, inputs<float>(narrow), c.has_log_sum_exp));
            }
        }
        return worst;
    }
    template <Scalar T>
    static tensor<float> narrowed(const tensor<T>& from, T factor) {
        tensor<float> to(from.shape());
        std::transform(from.data(), from.data() + from.shape().size(), to.data(), [&](T x) { return static_cast<float>(factor * x); });
        return to;
    }
};

} // namespace attn::testing
