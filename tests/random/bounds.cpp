#include "bounds.hpp"

#include <cmath>

namespace attn::fuzz {

namespace {

constexpr double nothing = -std::numeric_limits<double>::infinity();

double entry(std::span<const double> numbers, index_t at, double otherwise) {
    return numbers.empty() ? otherwise : numbers[static_cast<std::size_t>(at)];
}

/// The bounds of one query position of one batch entry, in all heads.
class row_bounds {
public:
    row_bounds(const inputs<double>& in, const softmax_terms& terms, index_t batch, index_t row)
        : in_(in), t_(terms), b_(batch), row_(row), i_(in.positions.first_query[batch] + row), m_(in.keys.shape().tokens) {}

    void write(const outputs<double>& bounds) {
        const auto query_heads = in_.queries.shape().heads, heads = t_.logits_mix.data() ? t_.logits_mix.shape().tokens : query_heads;
        for (index_t a = 0; a < query_heads; ++a) product(a);
        seen_.assign(size(m_), false);
        for (index_t c = 0; c < heads; ++c) softmax(c, bounds);
        const auto [batch, out_heads, n, d_v] = bounds.values.shape();
        for (index_t e = 0; e < out_heads; ++e) values(e, heads, out_heads, bounds);
    }

private:
    static std::size_t size(index_t n) { return static_cast<std::size_t>(n); }

    /// L[a, :]: a chain of d_k multiply-adds, the scale and perhaps log2(e) come to d_k + 4 roundings.
    void product(index_t a) {
        const auto d_k = in_.queries.shape().channels, g = a / (in_.queries.shape().heads / in_.keys.shape().heads);
        for (index_t key = 0; key < m_; ++key) {
            double sum = 0, magnitudes = 0, carried = 0;
            for (index_t x = 0; x < d_k; ++x) {
                const auto q = in_.queries(b_, a, row_, x), k = in_.keys(b_, g, key, x);
                sum += q * k;
                magnitudes += std::abs(q * k);
                if (t_.key_error) carried += std::abs(q) * (*t_.key_error)(b_, g, key, x);
                if (t_.operand_unit > 0) carried += (2 + t_.operand_unit) * t_.operand_unit * std::abs(q * k);
            }
            const auto rounding = t_.exact_scores ? 0 : static_cast<double>(d_k + 4) * t_.unit * magnitudes;
            logits_.push_back({t_.scale * sum, std::abs(t_.scale) * (rounding + carried)});
        }
    }
    rounded mixed(index_t c, index_t key) const {
        if (!t_.logits_mix.data()) return logits_[size(c * m_ + key)];
        const auto heads = t_.logits_mix.shape().channels;
        const auto bias = entry(t_.logits_bias, c, 0);
        rounded sum{bias, 0};
        double magnitudes = std::abs(bias);
        for (index_t a = 0; a < heads; ++a) {
            const auto& from = logits_[size(a * m_ + key)];
            const auto weight = t_.logits_mix(0, 0, c, a);
            sum.value += weight * from.value;
            sum.error += std::abs(weight) * from.error;
            magnitudes += std::abs(weight * from.value);
        }
        sum.error += static_cast<double>(heads + 6) * t_.unit * magnitudes;
        return sum;
    }
    /// P[c, :] with the relative error of each. A weight exp(x - M) is wrong by what x is, by what the difference to the maximum and the
    /// factors of later maxima round (they add up to M - x), and by a few units; a sum of m terms by m units more, and a quarter for what
    /// blocks of keys multiply it with.
    void softmax(index_t c, const outputs<double>& bounds) {
        std::vector<rounded> x(size(m_));
        const auto sink = entry(t_.sinks, c, nothing);
        const auto sees = t_.sees(b_, c);
        double top = sink, terms = 0;
        for (index_t key = 0; key < m_; ++key) {
            const auto j = in_.positions.first_key[b_] + key;
            x[size(key)] = {nothing, 0};
            if (!sees(i_, j)) continue;
            x[size(key)] = t_.score ? t_.score(mixed(c, key), b_, c, i_, j) : mixed(c, key);
            if (x[size(key)].value == nothing) continue;
            seen_[size(key)] = true;
            ++terms;
            top = std::max(top, x[size(key)].value);
        }
        // More than 100 is anything.
        const auto error_at = [&](const rounded& s) { return std::min(100.0, s.error + 4 * t_.unit * std::abs(s.value - top) + 8 * t_.unit + t_.operand_unit); };
        const rounded sink_score{sink, 2 * t_.unit * std::abs(sink)};
        double sum = 0, errors = 0;
        const auto add = [&](const rounded& s) {
            const auto weight = s.value == nothing ? 0 : std::exp(s.value - top);
            if (weight == 0) return; // whose error may be as large as numbers are
            sum += weight;
            errors += weight * (t_.operand_unit > 0 ? std::expm1(error_at(s)) : error_at(s)); // of rounded operands, more than its first order
        };
        add(sink_score);
        for (const auto& s : x) add(s);
        const auto roundings = t_.unit * (1.25 * terms + 32);
        const auto of_sum = sum == 0 ? 0 : errors / sum + roundings;
        for (const auto& s : x) {
            const auto p = s.value == nothing || sum == 0 ? 0 : std::exp(s.value - top) / sum;
            weights_.push_back({p, p == 0 ? 0 : p * std::expm1(error_at(s) + of_sum) + t_.least});
        }
        if (bounds.log_sum_exp.data()) {
            const auto lse = top + std::log(sum);
            bounds.log_sum_exp(b_, c, row_, 0) = of_sum + 8 * t_.unit * (std::abs(lse) + 1) + 8 * t_.unit * std::abs(top);
        }
    }
    rounded weight(index_t e, index_t heads, index_t key) const {
        if (!t_.weights_mix.data()) return weights_[size(e * m_ + key)];
        const auto bias = entry(t_.weights_bias, e, 0);
        rounded sum{bias, 0};
        double magnitudes = std::abs(bias);
        for (index_t c = 0; c < heads; ++c) {
            const auto& from = weights_[size(c * m_ + key)];
            const auto factor = t_.weights_mix(0, 0, e, c);
            sum.value += factor * from.value;
            sum.error += std::abs(factor) * from.error;
            magnitudes += std::abs(factor * from.value);
        }
        sum.error += static_cast<double>(heads + 8) * t_.unit * magnitudes;
        return sum;
    }
    void values(index_t e, index_t heads, index_t out_heads, const outputs<double>& bounds) const {
        const auto d_v = bounds.values.shape().channels, g = e / (out_heads / in_.values.shape().heads);
        std::vector<double> errors(size(d_v)), magnitudes(size(d_v));
        double terms = 0;
        for (index_t key = 0; key < m_; ++key) {
            if (!seen_[size(key)]) continue;
            ++terms;
            const auto w = weight(e, heads, key);
            for (index_t x = 0; x < d_v; ++x) {
                const auto v = std::abs(in_.values(b_, g, key, x)), carried = (t_.value_error ? (*t_.value_error)(b_, g, key, x) : 0) + t_.operand_unit * v;
                errors[size(x)] += w.error * v + (std::abs(w.value) + w.error) * carried;
                magnitudes[size(x)] += (std::abs(w.value) + w.error) * v;
            }
        }
        for (index_t x = 0; x < d_v; ++x)
            bounds.values(b_, e, row_, x) = errors[size(x)] + t_.unit * (1.25 * terms + 32) * magnitudes[size(x)] + t_.least;
    }

    const inputs<double>& in_;
    const softmax_terms& t_;
    index_t b_, row_, i_, m_;
    std::vector<rounded> logits_, weights_;
    std::vector<bool> seen_;
};

} // namespace

void softmax_bounds(const inputs<double>& in, const outputs<double>& bounds, const softmax_terms& terms) {
    for (index_t b = 0; b < in.queries.shape().batch; ++b)
        for (index_t row = 0; row < in.queries.shape().tokens; ++row) row_bounds(in, terms, b, row).write(bounds);
}

} // namespace attn::fuzz
