#include "bounds.hpp"

#include <cmath>

namespace attn::fuzz {

namespace {

/// What is wrong with the pairs of one row, and what they add to the bounds of all gradients.
class row_gradient_bounds {
public:
    row_gradient_bounds(const gradient_problem& p, const softmax_terms& terms, index_t batch, index_t head, index_t row)
        : p_(p), t_(terms), b_(batch), h_(head), g_(head / (p.in.queries.shape().heads / p.in.keys.shape().heads)), row_(row),
          i_(p.in.positions.first_query[batch] + row) {}

    void add_to(const testing::wanted_gradients<double>& bounds, double rows_of_key) const {
        const auto [shift, shift_error] = find_shift();
        const auto d_k = p_.in.queries.shape().channels, d_v = p_.in.values.shape().channels, m = p_.in.keys.shape().tokens;
        const auto lse = p_.exact.log_sum_exp(b_, h_, row_, 0), lse_error = p_.errors.log_sum_exp(b_, h_, row_, 0);
        // A number that is not finite has no bound, and is not to spoil those of others.
        const auto finite = [](double x) { return std::isfinite(x) ? x : std::numeric_limits<double>::max() / 1e30; };
        for (index_t key = 0; key < m; ++key) {
            const auto j = p_.in.positions.first_key[b_] + key;
            if (!t_.sees(b_, h_, i_, j)) continue;
            const auto x = score(key, j);
            if (x.value == -std::numeric_limits<double>::infinity()) continue;
            const auto below = std::abs(x.value - lse), weight = std::exp(x.value - lse);
            const auto weight_error = weight * std::expm1(x.error + lse_error + t_.unit * (6 * below + 16)) + t_.least;
            const auto [product, product_error] = value_product(key);
            const auto sum = std::abs(product + shift), sum_error = product_error + shift_error + t_.unit * (std::abs(product) + std::abs(shift));
            const auto gradient = weight * sum;
            const auto gradient_error = weight_error * (sum + sum_error) + weight * sum_error + 8 * t_.unit * gradient + t_.least;
            const auto of_score = std::abs(t_.scale) * (gradient_error + t_.unit * (rows_of_key + static_cast<double>(m) + 16) * (gradient + gradient_error));
            for (index_t c = 0; c < d_v; ++c)
                bounds.values(b_, g_, key, c) += finite((weight_error + t_.unit * (rows_of_key + 16) * (weight + weight_error)) *
                                                        std::abs(p_.given.values(b_, h_, row_, c))) + t_.least;
            for (index_t c = 0; c < d_k; ++c) {
                bounds.keys(b_, g_, key, c) += finite(of_score * std::abs(p_.in.queries(b_, h_, row_, c))) + t_.least;
                bounds.queries(b_, h_, row_, c) += finite(of_score * std::abs(p_.in.keys(b_, g_, key, c))) + t_.least;
            }
        }
        if (bounds.parameters.empty()) return;
        const auto sink = t_.sinks[static_cast<std::size_t>(h_)];
        if (sink == -std::numeric_limits<double>::infinity()) return;
        const auto weight = sink == lse ? 1 : std::exp(sink - lse), below = sink == lse ? 0 : std::abs(sink - lse);
        const auto weight_error = weight * std::expm1(lse_error + 2 * t_.unit * std::abs(sink) + t_.unit * (6 * below + 16)) + t_.least;
        bounds.parameters[0](0, h_, 0, 0) += finite(weight_error * (std::abs(shift) + shift_error) + weight * shift_error + 4 * t_.unit * weight * std::abs(shift));
    }

private:
    /// dL - D, D a sum of d_v products with outputs that are wrong themselves.
    rounded find_shift() const {
        const auto d_v = p_.in.values.shape().channels;
        double sum = 0, magnitudes = 0, carried = 0;
        for (index_t c = 0; c < d_v; ++c) {
            const auto given = p_.given.values(b_, h_, row_, c), out = p_.exact.values(b_, h_, row_, c);
            sum += given * out;
            magnitudes += std::abs(given * out);
            carried += std::abs(given) * p_.errors.values(b_, h_, row_, c);
        }
        const auto of_log_sum_exp = p_.given.log_sum_exp(b_, h_, row_, 0);
        return {of_log_sum_exp - sum, static_cast<double>(d_v + 8) * t_.unit * (magnitudes + carried) + carried + 2 * t_.unit * (std::abs(of_log_sum_exp) + std::abs(sum))};
    }
    rounded value_product(index_t key) const {
        const auto d_v = p_.in.values.shape().channels;
        double sum = 0, magnitudes = 0;
        for (index_t c = 0; c < d_v; ++c) {
            const auto term = p_.given.values(b_, h_, row_, c) * p_.in.values(b_, g_, key, c);
            sum += term;
            magnitudes += std::abs(term);
        }
        return {sum, static_cast<double>(d_v + 4) * t_.unit * magnitudes + t_.least};
    }
    rounded score(index_t key, index_t j) const {
        const auto d_k = p_.in.queries.shape().channels;
        double sum = 0, magnitudes = 0;
        for (index_t c = 0; c < d_k; ++c) {
            const auto term = p_.in.queries(b_, h_, row_, c) * p_.in.keys(b_, g_, key, c);
            sum += term;
            magnitudes += std::abs(term);
        }
        const rounded x{t_.scale * sum, t_.exact_scores ? 0 : std::abs(t_.scale) * static_cast<double>(d_k + 4) * t_.unit * magnitudes};
        return t_.score ? t_.score(x, b_, h_, i_, j) : x;
    }

    const gradient_problem& p_;
    const softmax_terms& t_;
    index_t b_, h_, g_, row_, i_;
};

} // namespace

void softmax_gradient_bounds(const gradient_problem& p, const testing::wanted_gradients<double>& bounds, const softmax_terms& terms) {
    auto all = bounds.parameters;
    all.insert(all.end(), {bounds.queries, bounds.keys, bounds.values});
    for (const auto& view : all)
        if (view.data()) std::fill_n(view.data(), view.shape().size(), 0.0);
    const auto& s = p.in.queries.shape();
    const auto rows_of_key = static_cast<double>(s.heads / std::max<index_t>(1, p.in.keys.shape().heads) * s.tokens);
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t h = 0; h < s.heads; ++h)
            for (index_t row = 0; row < s.tokens; ++row) row_gradient_bounds(p, terms, b, h, row).add_to(bounds, rows_of_key);
}

} // namespace attn::fuzz
