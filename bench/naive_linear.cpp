#include "eigen_rows.hpp"
#include "naive_forms.hpp"

namespace attn::bench {

using testing::map_numbers, testing::sees_key;

namespace {

template <Scalar T>
using column = Eigen::Matrix<T, Eigen::Dynamic, 1>;

} // namespace

template <Scalar T>
void eigen_forms<T>::linear(const inputs<T>& in, const outputs<T>& out, const map_numbers<T>& phi, const sees_key& sees, T eps) const {
    const auto& q = in.queries.shape();
    const auto group = q.heads / std::max<index_t>(1, in.keys.shape().heads);
    for (index_t b = 0; b < q.batch; ++b)
        for (index_t h = 0; h < q.heads; ++h) {
            matrix<T> queries = head_of(in.queries.numbers(), b, h), keys = head_of(in.keys.numbers(), b, h / group);
            phi(queries.data(), queries.size());
            phi(keys.data(), keys.size());
            const auto values = head_of(in.values.numbers(), b, h / group);
            auto result = head_of(out.values.numbers(), b, h);
            column<T> sums;
            if (sees) {
                matrix<T> weights = queries * keys.transpose();
                for (index_t i = 0; i < weights.rows(); ++i)
                    for (index_t j = 0; j < weights.cols(); ++j)
                        if (!sees(b, i, j)) weights(i, j) = 0;
                sums = weights.rowwise().sum();
                result = weights * values;
            } else {
                const matrix<T> state = keys.transpose() * values;
                const column<T> key_sum = keys.colwise().sum().transpose();
                sums = queries * key_sum;
                result = queries * state;
            }
            if (eps >= 0) result.array().colwise() /= sums.array() + eps;
        }
}

template <Scalar T>
void eigen_forms<T>::add_convolution(const tensor_view<const T>& in, const tensor_view<T>& out, const reference::grid& grid,
                                     const tensor_view<const T>& weights, std::span<const T> bias) const {
    const auto& s = out.shape();
    const auto& w = weights.shape();
    const auto group = s.heads / std::max<index_t>(1, in.shape().heads);
    for (index_t h = 0; h < s.heads; ++h) {
        matrix<T> taps(w.tokens * w.channels, s.channels);
        for (index_t tap = 0; tap < taps.rows(); ++tap)
            for (index_t c = 0; c < s.channels; ++c) taps(tap, c) = weights(w.batch == 1 ? 0 : h, c, tap / w.channels, tap % w.channels);
        for (index_t b = 0; b < s.batch; ++b) {
            const auto from = head_of(in, b, h / group);
            auto to = head_of(out, b, h);
            for (index_t t = 0; t < s.tokens; ++t) {
                if (!bias.empty()) {
                    const T* const own = bias.data() + (std::ssize(bias) > s.channels ? h * s.channels : 0);
                    to.row(t) += Eigen::Map<const matrix<T>>(own, 1, s.channels);
                }
                for (index_t ky = 0; ky < w.tokens; ++ky)
                    for (index_t kx = 0; kx < w.channels; ++kx) {
                        const auto y = t / grid.width - grid.top + ky, x = t % grid.width - grid.left + kx;
                        if (y < 0 || y >= grid.height || x < 0 || x >= grid.width) continue;
                        to.row(t).array() += taps.row(ky * w.channels + kx).array() * from.row(y * grid.width + x).array();
                    }
            }
        }
    }
}

template void eigen_forms<float>::linear(const inputs<float>&, const outputs<float>&, const map_numbers<float>&, const sees_key&, float) const;
template void eigen_forms<double>::linear(const inputs<double>&, const outputs<double>&, const map_numbers<double>&, const sees_key&, double) const;
template void eigen_forms<float>::add_convolution(const tensor_view<const float>&, const tensor_view<float>&, const reference::grid&,
                                                  const tensor_view<const float>&, std::span<const float>) const;
template void eigen_forms<double>::add_convolution(const tensor_view<const double>&, const tensor_view<double>&, const reference::grid&,
                                                   const tensor_view<const double>&, std::span<const double>) const;

} // namespace attn::bench
