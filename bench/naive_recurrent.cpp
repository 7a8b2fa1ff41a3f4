#include "eigen_rows.hpp"
#include "naive_forms.hpp"

namespace attn::bench {

template <Scalar T>
void eigen_forms<T>::recurrent(const inputs<T>& in, const outputs<T>& out, const reference::recurrent_terms<T>& terms, T scale,
                               const tensor_view<const T>& first_state) const {
    using row = Eigen::Matrix<T, 1, Eigen::Dynamic>;
    const auto& k = in.keys.shape();
    const auto group = in.queries.shape().heads / std::max<index_t>(1, k.heads), d_v = in.values.shape().channels;
    // What a token has of a term, for each channel of keys or for all of them.
    const auto of = [](const tensor_view<const T>& t, index_t b, index_t g) {
        return head_of(t, t.shape().batch == 1 ? 0 : b, t.shape().heads == 1 ? 0 : g);
    };
    for (index_t b = 0; b < k.batch; ++b)
        for (index_t g = 0; g < k.heads; ++g) {
            matrix<T> state = matrix<T>::Zero(k.channels, d_v);
            if (first_state.data()) state = head_of(first_state, b, g);
            const auto keys = head_of(in.keys.numbers(), b, g), values = head_of(in.values.numbers(), b, g);
            row read(d_v);
            for (index_t i = 0; i < k.tokens; ++i) {
                if (terms.b.data()) read.noalias() = of(terms.b, b, g).row(i) * state;
                if (terms.log_decay.data()) {
                    const auto logs = of(terms.log_decay, b, g).row(i);
                    if (logs.size() == 1) state *= std::exp(logs[0]);
                    else state.array().colwise() *= logs.array().exp().transpose();
                }
                if (terms.b.data()) state.noalias() -= of(terms.a, b, g).row(i).transpose() * read;
                if (terms.beta.data()) {
                    read.noalias() = keys.row(i) * state;
                    read = of(terms.beta, b, g)(i, 0) * (values.row(i) - read);
                    state.noalias() += keys.row(i).transpose() * read;
                } else {
                    state.noalias() += keys.row(i).transpose() * values.row(i);
                }
                for (index_t h = g * group; h < (g + 1) * group; ++h) {
                    auto result = head_of(out.values.numbers(), b, h);
                    read.noalias() = head_of(in.queries.numbers(), b, h).row(i) * state;
                    result.row(i) = scale * read;
                }
            }
        }
}

template void eigen_forms<float>::recurrent(const inputs<float>&, const outputs<float>&, const reference::recurrent_terms<float>&, float,
                                            const tensor_view<const float>&) const;
template void eigen_forms<double>::recurrent(const inputs<double>&, const outputs<double>&, const reference::recurrent_terms<double>&, double,
                                             const tensor_view<const double>&) const;

} // namespace attn::bench
