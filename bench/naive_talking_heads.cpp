#include "eigen_rows.hpp"
#include "naive_forms.hpp"

#include <cmath>
#include <limits>

namespace attn::bench {

using testing::adjust_row, testing::naive_mixings;

namespace {

template <Scalar T>
void mix(matrix<T>& heads, const tensor_view<const double>& mixing, std::span<const double> bias) {
    if (!mixing.data()) return;
    heads = (rows_of(mixing, 0, 0, 0, mixing.shape().tokens).template cast<T>() * heads).eval();
    for (std::size_t row = 0; row < bias.size(); ++row) heads.row(static_cast<index_t>(row)).array() += static_cast<T>(bias[row]);
}

template <Scalar T>
void naive_piece(const inputs<T>& in, const outputs<T>& out, T scale, const naive_mixings& mixings, const adjust_row<T>& adjust,
                 index_t b, index_t first, index_t count) {
    constexpr auto nothing = -std::numeric_limits<T>::infinity();
    const auto m = in.keys.shape().tokens, query_heads = in.queries.shape().heads, value_heads = out.values.shape().heads;
    const auto scores_of = [&](matrix<T>& heads, index_t c) { return Eigen::Map<matrix<T>>(heads.row(c).data(), count, m); };
    matrix<T> heads(query_heads, count * m);
    for (index_t a = 0; a < query_heads; ++a)
        scores_of(heads, a) = scale * (rows_of(in.queries.numbers(), b, a, first, count) *
                                       rows_of(in.keys.numbers(), b, a / (query_heads / in.keys.shape().heads), 0, m).transpose());
    mix(heads, mixings.logits_mix, mixings.logits_bias);
    Eigen::Array<bool, 1, Eigen::Dynamic> seen;
    if (!mixings.weights_bias.empty()) seen = Eigen::Array<bool, 1, Eigen::Dynamic>::Constant(count * m, !adjust);
    for (index_t c = 0; c < heads.rows(); ++c) {
        auto scores = scores_of(heads, c);
        const auto sink = mixings.sinks.empty() ? nothing : static_cast<T>(mixings.sinks[static_cast<std::size_t>(c)]);
        for (index_t i = 0; i < count; ++i) {
            auto row = scores.row(i).array();
            if (adjust) adjust(b, c, in.positions.first_query[b] + first + i, in.positions.first_key[b], scores.row(i).data(), m);
            if (adjust && seen.size() > 0) seen.segment(i * m, m) = seen.segment(i * m, m) || row != nothing;
            const T top = m > 0 ? std::max(sink, row.maxCoeff()) : sink;
            T sum = 0;
            if (top != nothing) {
                exponentiate(row, top);
                sum = row.sum() + std::exp(sink - top);
                row /= sum;
            } else {
                row.setZero();
            }
            if (out.log_sum_exp.data()) out.log_sum_exp(b, c, first + i, 0) = sum == 0 ? top : top + std::log(sum);
        }
    }
    mix(heads, mixings.weights_mix, mixings.weights_bias);
    for (index_t e = 0; e < value_heads; ++e) {
        if (seen.size() > 0) heads.row(e).array() *= seen.template cast<T>();
        rows_of(out.values.numbers(), b, e, first, count) =
            scores_of(heads, e) * rows_of(in.values.numbers(), b, e / (value_heads / in.values.shape().heads), 0, m);
    }
}

} // namespace

template <Scalar T>
void eigen_forms<T>::talking_heads(const inputs<T>& in, const outputs<T>& out, T scale, const naive_mixings& mixings, const adjust_row<T>& adjust) const {
    const auto& q = in.queries.shape();
    constexpr index_t max_numbers = index_t{1} << 28;
    const auto max_queries =
        std::max<index_t>(1, max_numbers / std::max<index_t>(1, in.keys.shape().tokens * std::max(q.heads, out.values.shape().heads)));
    for (index_t b = 0; b < q.batch; ++b)
        for (index_t first = 0; first < q.tokens; first += max_queries)
            naive_piece(in, out, scale, mixings, adjust, b, first, std::min(max_queries, q.tokens - first));
}

template void eigen_forms<float>::talking_heads(const inputs<float>&, const outputs<float>&, float, const naive_mixings&, const adjust_row<float>&) const;
template void eigen_forms<double>::talking_heads(const inputs<double>&, const outputs<double>&, double, const naive_mixings&, const adjust_row<double>&) const;

} // namespace attn::bench
