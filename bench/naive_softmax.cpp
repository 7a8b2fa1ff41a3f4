#include "eigen_rows.hpp"
#include "naive_forms.hpp"

#include <cmath>
#include <limits>

namespace attn::bench {

using testing::adjust_row;

namespace {

/// Calls f(batch, head, head of the keys, scores) for the n x m matrix of scaled and adjusted scores of each head.
template <Scalar T>
void for_each_score_matrix(const inputs<T>& in, T scale, const adjust_row<T>& adjust, const auto& f) {
    const auto& q = in.queries.shape();
    const auto group = q.heads / in.keys.shape().heads;
    for (index_t b = 0; b < q.batch; ++b)
        for (index_t h = 0; h < q.heads; ++h) {
            matrix<T> scores = head_of(in.queries.numbers(), b, h) * head_of(in.keys.numbers(), b, h / group).transpose();
            scores *= scale;
            if (adjust)
                for (index_t i = 0; i < scores.rows(); ++i)
                    adjust(b, h, in.positions.first_query[b] + i, in.positions.first_key[b], scores.row(i).data(), scores.cols());
            f(b, h, h / group, scores);
        }
}

} // namespace

template <Scalar T>
void eigen_forms<T>::softmax(const inputs<T>& in, const outputs<T>& out, T scale, const adjust_row<T>& adjust, std::span<const double> sinks) const {
    constexpr auto nothing = -std::numeric_limits<T>::infinity();
    for_each_score_matrix<T>(in, scale, adjust, [&](index_t b, index_t h, index_t g, matrix<T>& scores) {
        const auto sink = sinks.empty() ? nothing : static_cast<T>(sinks[static_cast<std::size_t>(h)]);
        for (index_t i = 0; i < scores.rows(); ++i) {
            auto row = scores.row(i).array();
            const T top = row.size() > 0 ? std::max(sink, row.maxCoeff()) : sink;
            if (top == nothing) {
                row.setZero();
                if (out.log_sum_exp.data()) out.log_sum_exp(b, h, i, 0) = nothing;
                continue;
            }
            exponentiate(row, top);
            const T sum = row.sum() + std::exp(sink - top);
            row /= sum;
            if (out.log_sum_exp.data()) out.log_sum_exp(b, h, i, 0) = top + std::log(sum);
        }
        head_of(out.values.numbers(), b, h) = scores * head_of(in.values.numbers(), b, g);
    });
}

template <Scalar T>
void eigen_forms<T>::pointwise(const inputs<T>& in, const outputs<T>& out, T scale, const adjust_row<T>& weigh) const {
    for_each_score_matrix<T>(in, scale, weigh, [&](index_t b, index_t h, index_t g, const matrix<T>& weights) {
        head_of(out.values.numbers(), b, h) = weights * head_of(in.values.numbers(), b, g);
    });
}

template <Scalar T>
tensor<T> eigen_forms<T>::projection(const tensor_view<const T>& matrix, const tensor_view<const T>& tokens) const {
    const auto& s = tokens.shape();
    tensor<T> projected({s.batch, s.heads, matrix.shape().tokens, s.channels});
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t h = 0; h < s.heads; ++h)
            head_of(projected.view(), b, h) = head_of(matrix, 0, 0).leftCols(s.tokens) * head_of(tokens, b, h);
    return projected;
}

template void eigen_forms<float>::softmax(const inputs<float>&, const outputs<float>&, float, const adjust_row<float>&, std::span<const double>) const;
template void eigen_forms<double>::softmax(const inputs<double>&, const outputs<double>&, double, const adjust_row<double>&, std::span<const double>) const;
template void eigen_forms<float>::pointwise(const inputs<float>&, const outputs<float>&, float, const adjust_row<float>&) const;
template void eigen_forms<double>::pointwise(const inputs<double>&, const outputs<double>&, double, const adjust_row<double>&) const;
template tensor<float> eigen_forms<float>::projection(const tensor_view<const float>&, const tensor_view<const float>&) const;
template tensor<double> eigen_forms<double>::projection(const tensor_view<const double>&, const tensor_view<const double>&) const;

} // namespace attn::bench
