// The definition of linear attention with feature maps of whole vectors, and its gradient, a token at a time.
#pragma once

#include "linear_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

namespace detail {

/// A map of whole vectors on queries or keys (batch, heads, n, d). maxima: of a map that subtracts them, one for each batch entry and head
/// of keys, or none, for queries, each of which has its own.
template <class T, class F>
struct vectors_of {
    const F& phi;
    const stored_view<const T>& x;
    const per_batch& first;
    const tensor<T>* maxima = nullptr;

    std::vector<T> vector(index_t b, index_t h, index_t i) const {
        std::vector<T> v(static_cast<std::size_t>(x.shape().channels));
        for (std::size_t c = 0; c < v.size(); ++c) v[c] = x(b, h, i, static_cast<index_t>(c));
        return v;
    }
    tensor<T> features() const {
        const auto [batch, heads, n, d] = x.shape();
        tensor<T> result({batch, heads, n, phi.features(d)});
        attn::detail::for_each_row(x.shape(), [&](index_t b, index_t h, index_t i) {
            const auto v = vector(b, h, i);
            const std::span<T> to(result.view().row(b, h, i), static_cast<std::size_t>(result.shape().channels));
            if constexpr (requires { phi.maximum(std::span<const T>(v)); })
                if (maxima) return phi(std::span<const T>(v), first[b] + i, (*maxima)(b, h, 0, 0), to);
            phi(std::span<const T>(v), first[b] + i, to);
        });
        return result;
    }
    /// The gradient of x, of tokens that take part.
    tensor<T> gradients(const tensor<T>& of_features, const tensor<char>& takes_part) const {
        tensor<T> result(x.shape());
        attn::detail::for_each_row(x.shape(), [&](index_t b, index_t h, index_t i) {
            if (!takes_part(b, h, i, 0)) return;
            const auto v = vector(b, h, i);
            const auto features = static_cast<std::size_t>(of_features.shape().channels);
            const std::span<const T> given(of_features.view().row(b, h, i), features);
            const std::span<T> to(result.view().row(b, h, i), v.size());
            if constexpr (requires { phi.maximum(std::span<const T>(v)); })
                if (maxima) return phi.gradient(std::span<const T>(v), first[b] + i, (*maxima)(b, h, 0, 0), given, to);
            phi.gradient(std::span<const T>(v), first[b] + i, given, to);
        });
        return result;
    }
};

/// The maxima of the keys of each batch entry and head that the first query sees; 0 where queries see different keys.
template <class T, class F>
tensor<T> maxima_of_keys(const inputs<T>& in, const F& phi, const visible_pairs& pattern, bool causal) {
    const auto [batch, heads, m, d] = in.keys.shape();
    tensor<T> maxima({batch, heads, 1, 1});
    if constexpr (requires(std::span<const T> v) { phi.maximum(v); }) {
        const vectors_of<T, F> keys{phi, in.keys, in.positions.first_key};
        if (!causal)
            attn::detail::for_each_row(maxima.shape(), [&](index_t b, index_t h, index_t) {
                const auto visible = pattern(b, h);
                maxima(b, h, 0, 0) = -std::numeric_limits<T>::infinity();
                for (index_t j = 0; j < m; ++j)
                    if (visible(in.positions.first_query[b], in.positions.first_key[b] + j))
                        maxima(b, h, 0, 0) = max(maxima(b, h, 0, 0), phi.maximum(std::span<const T>(keys.vector(b, h, j))));
            });
    }
    return maxima;
}

} // namespace detail

/// Linear attention with a map of whole vectors, as linear_attention is defined. causal: queries may see different keys.
template <class T, class F>
void vector_linear_attention(const inputs<T>& in, const outputs<T>& out, const F& phi, const detail::visible_pairs& pattern, bool causal,
                             bool normalise, double eps, double scale) {
    const auto maxima = detail::maxima_of_keys(in, phi, pattern, causal);
    const auto f = detail::vectors_of<T, F>{phi, in.queries, in.positions.first_query}.features(),
               e = detail::vectors_of<T, F>{phi, in.keys, in.positions.first_key, &maxima}.features();
    detail::attend_to_features(in, f, e, out, pattern, normalise, eps, scale);
}

/// The gradient of linear attention with a map of whole vectors, whose maxima are constants: dq_i is what the map's gradient makes of sum_j
/// dA_ij phi(k_j).
template <class T, class F>
void vector_linear_gradients(const inputs<T>& in, const tensor_view<const T>& d_out, const input_gradients<T>& wanted, const F& phi,
                             const detail::visible_pairs& pattern, bool causal, bool normalise, double eps, double scale) {
    const auto maxima = detail::maxima_of_keys(in, phi, pattern, causal);
    const detail::vectors_of<T, F> queries{phi, in.queries, in.positions.first_query}, keys{phi, in.keys, in.positions.first_key, &maxima};
    const auto f = queries.features(), e = keys.features();
    const detail::feature_gradients<T> of(in, f, e, d_out, pattern, normalise, eps, scale);
    of.write(wanted.queries, of.sees, queries.gradients(of.of_f, of.sees));
    of.write(wanted.keys, of.is_seen, keys.gradients(of.of_e, of.is_seen));
    of.write(wanted.values, of.is_seen, of.of_values);
}

} // namespace attn::reference
