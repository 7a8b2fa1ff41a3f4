// The definition of talking-heads attention and its gradient: the printed formulas, one query at a time.
#pragma once

#include "pairs.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

namespace detail {

/// to[row, x] = sum_column matrix[row, column] from[column, x] + bias[row], of `count` numbers a head; a copy without a matrix.
template <class T>
std::vector<T> mixed_heads(const tensor_view<const double>& matrix, std::span<const double> bias, const std::vector<T>& from,
                           index_t count) {
    if (!matrix.data()) return from;
    std::vector<T> to(static_cast<std::size_t>(matrix.shape().tokens * count));
    for (index_t row = 0; row < matrix.shape().tokens; ++row)
        for (index_t x = 0; x < count; ++x) {
            T sum = bias.empty() ? T{0} : static_cast<T>(bias[static_cast<std::size_t>(row)]);
            for (index_t column = 0; column < matrix.shape().channels; ++column)
                sum += static_cast<T>(matrix(0, 0, row, column)) * from[static_cast<std::size_t>(column * count + x)];
            to[static_cast<std::size_t>(row * count + x)] = sum;
        }
    return to;
}

/// A row of all heads. Numbers of heads and keys are [head][key].
template <class T>
struct talking_row {
    index_t batch, row, keys;
    std::vector<T> logits = {}, mixed = {};    ///< L, and what a score function makes J of
    std::vector<T> weights = {}, slopes = {};  ///< P and the score function's slopes
    std::vector<bool> seen = {}, seen_by = {}; ///< which keys any head sees, and each
    std::vector<T> largest = {}, of_sink = {}, denominator = {};

    auto at(auto& all, index_t head, index_t key) const -> decltype(all[0]) { return all[static_cast<std::size_t>(head * keys + key)]; }
    bool sees(index_t head, index_t key) const { return at(seen_by, head, key); }
    bool any_sees(index_t key) const { return at(seen, 0, key); }
    /// The sum of a channel of the values of the keys that any head sees, by the weights of a head.
    T sum(const std::vector<T>& of_keys, index_t head, const stored_view<const T>& values, index_t value_head, index_t channel) const {
        return sum_over<T>(
            keys, [&](index_t key) { return any_sees(key) ? at(of_keys, head, key) * values(batch, value_head, key, channel) : T{0}; });
    }
};

/// Calls f(talking_row) for each row.
template <class T>
void for_each_talking_row(const inputs<T>& in, const tensor_view<const double>& logits_mix, std::span<const double> logits_bias,
                          const std::optional<double>& scale, const auto& scores, const visible_pairs& pattern,
                          std::span<const double> sinks, const auto& f) {
    const auto [batch, query_heads, n, d_k] = in.queries.shape();
    const auto heads = logits_mix.data() ? logits_mix.shape().tokens : query_heads, m = in.values.shape().tokens;
    const auto factor = scale_of(in, scale);
    constexpr auto nothing = -std::numeric_limits<T>::infinity();
    for (index_t b = 0; b < batch; ++b)
        for (index_t row = 0; row < n; ++row) {
            talking_row<T> own{.batch = b, .row = row, .keys = m};
            for (index_t a = 0; a < query_heads; ++a)
                for (index_t key = 0; key < m; ++key)
                    own.logits.push_back(scaled_product(in, factor, b, a, a / (query_heads / in.keys.shape().heads), row, key));
            own.weights = own.mixed = mixed_heads(logits_mix, logits_bias, own.logits, m);
            own.slopes.resize(own.weights.size());
            own.seen_by.resize(own.weights.size());
            own.seen.resize(static_cast<std::size_t>(m));
            for (index_t c = 0; c < heads; ++c) {
                const auto score = scores(b, c);
                const auto visible = pattern(b, c);
                const T sink = sink_of<T>(sinks, c);
                T largest = sink;
                bool sees_any = false;
                for (index_t key = 0; key < m; ++key) {
                    const auto i = in.positions.first_query[b] + row, j = in.positions.first_key[b] + key;
                    T& x = own.at(own.weights, c, key);
                    const auto scored = visible(i, j) ? score(x, i, j) : dual<T>(nothing, T{0});
                    x = scored.value;
                    own.at(own.slopes, c, key) = scored.derivative;
                    if (x != nothing) sees_any = own.at(own.seen_by, c, key) = own.at(own.seen, 0, key) = true;
                    largest = max(largest, x);
                }
                T denominator = sink_share(sink, largest);
                own.of_sink.push_back(denominator);
                for (index_t key = 0; key < m; ++key) {
                    T& x = own.at(own.weights, c, key);
                    denominator += x = x == nothing ? 0 : exp(x - largest);
                }
                // A row that sees nothing has weights 0, whatever the sink is. NaN in another reaches all keys, and so the whole row.
                for (index_t key = 0; sees_any && key < m; ++key) own.at(own.weights, c, key) /= denominator;
                own.largest.push_back(largest);
                own.denominator.push_back(denominator);
            }
            f(std::as_const(own));
        }
}

} // namespace detail

/// Talking-heads attention by its formula, everything in T: with double the reference, with float the textbook that kernels are judged
/// against.
///     L[b,a,i,j] = scale * sum_x q[b,a,i,x] k[b,a',j,x]                          a in h_k, a' = a / (h_k / kv_heads of k)
///     J[b,c,i,j] = score(sum_a logits_mix[c,a] L[b,a,i,j] + logits_bias[c], i, j)   c in h
///     P[b,c,i,:] = softmax over the keys that the pattern shows to query i in head c and whose J is not -infinity, with sinks[c]
///     W[b,e,i,j] = sum_c weights_mix[e,c] P[b,c,i,j] + weights_bias[e]           e in h_v; for keys seen in any head c, others are left
///     out out[b,e,i,:] = sum_j W[b,e,i,j] v[b,e',j,:],      log_sum_exp[b,c,i] = log of the denominator of P[b,c,i,:]
/// logits_mix: (1, 1, h, h_k), weights_mix: (1, 1, h_v, h), each without memory for no mixing, which leaves its bias out.
/// Shapes, pattern and score function are taken as checked. scale: 1 / sqrt(d_k) if not given. Sinks and biases: none, or one per head.
/// Time O(n m (h_k d_k + h_v d_v + h (h_k + h_v))), memory O(m (h_k + h + h_v)).
/// Shazeer et al. 2020, "Talking-Heads Attention".
template <class T>
void talking_heads(const inputs<T>& in, const outputs<T>& out, tensor_view<const double> logits_mix, std::span<const double> logits_bias,
                   tensor_view<const double> weights_mix, std::span<const double> weights_bias, std::optional<double> scale = {},
                   const detail::pair_scores<T, false>& score = identity_score{}, const detail::visible_pairs& pattern = dense{},
                   std::span<const double> sinks = {}) {
    const auto [batch, value_heads, m, d_v] = in.values.shape();
    detail::for_each_talking_row<T>(in, logits_mix, logits_bias, scale, score, pattern, sinks, [&](const detail::talking_row<T>& r) {
        for (std::size_t c = 0; out.log_sum_exp.data() && c < r.largest.size(); ++c)
            out.log_sum_exp(r.batch, static_cast<index_t>(c), r.row, 0) = r.largest[c] + log(r.denominator[c]);
        const auto weights = detail::mixed_heads(weights_mix, weights_bias, r.weights, m);
        for (index_t e = 0; e < out.values.shape().heads; ++e)
            for (index_t x = 0; x < d_v; ++x)
                out.values(r.batch, e, r.row, x) = r.sum(weights, e, in.values, e / (out.values.shape().heads / value_heads), x);
    });
}

/// The gradient of talking-heads attention by its formulas, everything in T: L, P and W as `talking_heads` computes them; then, with given
/// gradients dO of out and dZ of log_sum_exp (0 without memory),
///     dW[e,i,j] = sum_x dO[e,i,x] v[e,j,x]                       dP[c,i,j] = sum_e weights_mix[e,c] dW[e,i,j]
///     D[c,i]    = sum_j P[c,i,j] dP[c,i,j]                       dX[c,i,j] = P[c,i,j] (dP[c,i,j] - D[c,i] + dZ[c,i]) score'
///     dL[a,i,j] = sum_c logits_mix[c,a] dX[c,i,j]
///     dv[j] = sum_i W[i,j] dO[i],        dq[i] = scale sum_j dL[i,j] k[j],        dk[j] = scale sum_i dL[i,j] q[i]
///     d weights_mix[e,c] = sum_ij dW[e,i,j] P[c,i,j],            d weights_bias[e] = sum_ij dW[e,i,j]
///     d logits_mix[c,a]  = sum_ij dX[c,i,j] L[a,i,j],            d logits_bias[c]  = sum_ij dX[c,i,j]
///     d sinks[c] = sum_i exp(sinks[c]) / Z[c,i] (dZ[c,i] - D[c,i])     with Z the denominator of P
/// with D[c,i] = sum_x dO[c,i,x] out[c,i,x], the same number, where weights are not mixed,
/// over the pairs that any mixed head sees, where those that a head does not see have P and dX 0; dk and dv are summed over the heads that
/// share them, those of parameters over the batch. score' is the derivative of the score function by the mixed score. A view without memory
/// is not wanted. of_score(b, c, i, j, x, dx) is called for each pair that a mixed head sees, with positions, the mixed score x and the
/// gradient by what the score function makes of it, P (dP - D + dZ): what gradients of its parameters are made of. Shapes, pattern and
/// score function are taken as checked. Time and memory: some times those of `talking_heads`.
template <class T>
void talking_heads_gradients(const inputs<T>& in, const output_gradients<T>& d_out, const mixed_head_gradients<T>& wanted,
                             tensor_view<const double> logits_mix, std::span<const double> logits_bias,
                             tensor_view<const double> weights_mix, std::span<const double> weights_bias, std::optional<double> scale = {},
                             const detail::pair_scores<T, true>& score = identity_score{}, const detail::visible_pairs& pattern = dense{},
                             std::span<const double> sinks = {}, const detail::pair_gradients<T>& of_score = {}) {
    const auto [batch, value_heads, m, d_v] = in.values.shape();
    const auto query_heads = in.queries.shape().heads, d_k = in.queries.shape().channels, out_heads = d_out.values.shape().heads;
    const auto factor = detail::scale_of(in, scale);
    for (const auto* view : {&wanted.queries, &wanted.keys, &wanted.values, &wanted.logits_mix, &wanted.logits_bias, &wanted.weights_mix,
                             &wanted.weights_bias, &wanted.sinks})
        attn::detail::fill_zero(*view);

    detail::for_each_talking_row<T>(in, logits_mix, logits_bias, scale, score, pattern, sinks, [&](const detail::talking_row<T>& r) {
        const index_t b = r.batch, row = r.row, heads = std::ssize(r.of_sink);
        // d matrix[row, column] and d bias[row] grow by what one pair gives them.
        const auto add_to_mixing = [&](const tensor_view<T>& mix, const tensor_view<T>& bias, index_t to, T gradient,
                                       const std::vector<T>& from, index_t key) {
            for (index_t column = 0; mix.data() && column < mix.shape().channels; ++column)
                mix(0, 0, to, column) += gradient * r.at(from, column, key);
            if (bias.data()) bias(0, to, 0, 0) += gradient;
        };
        const auto mixed = detail::mixed_heads(weights_mix, weights_bias, r.weights, m);
        std::vector<T> of_mixed(static_cast<std::size_t>(out_heads * m));
        for (index_t e = 0; e < out_heads; ++e)
            for (index_t key = 0; key < m; ++key) {
                if (!r.any_sees(key)) continue;
                const auto kv = e / (out_heads / value_heads);
                const auto product =
                    detail::sum_over<T>(d_v, [&](index_t x) { return d_out.values(b, e, row, x) * in.values(b, kv, key, x); });
                r.at(of_mixed, e, key) = product;
                for (index_t x = 0; wanted.values.data() && x < d_v; ++x)
                    wanted.values(b, kv, key, x) += r.at(mixed, e, key) * d_out.values(b, e, row, x);
                add_to_mixing(wanted.weights_mix, wanted.weights_bias, e, product, r.weights, key);
            }
        auto of_weights = detail::mixed_heads(weights_mix.transposed(), {}, of_mixed, m);
        for (index_t c = 0; c < heads; ++c) {
            T shift = d_out.log_sum_exp.data() ? d_out.log_sum_exp(b, c, row, 0) : T{0}; // dZ - D
            for (index_t key = 0; weights_mix.data() && key < m; ++key)
                if (r.sees(c, key)) shift -= r.at(r.weights, c, key) * r.at(of_weights, c, key);
            for (index_t x = 0; !weights_mix.data() && x < d_v; ++x)
                shift -= d_out.values(b, c, row, x) * r.sum(r.weights, c, in.values, c / (heads / value_heads), x);
            const auto at = static_cast<std::size_t>(c);
            if (wanted.sinks.data() && detail::sink_of<T>(sinks, c) != -std::numeric_limits<T>::infinity())
                wanted.sinks(0, c, 0, 0) += (r.of_sink[at] == 0 ? 0 : r.of_sink[at] / r.denominator[at]) * shift;
            for (index_t key = 0; key < m; ++key) {
                T& x = r.at(of_weights, c, key);
                x = r.sees(c, key) ? r.at(r.weights, c, key) * (x + shift) : 0; // by the score; then by the mixed one
                if (of_score && r.sees(c, key))
                    of_score(b, c, in.positions.first_query[b] + row, in.positions.first_key[b] + key, r.at(r.mixed, c, key), x);
                if (r.sees(c, key)) x *= r.at(r.slopes, c, key);
                if (r.any_sees(key)) add_to_mixing(wanted.logits_mix, wanted.logits_bias, c, x, r.logits, key);
            }
        }
        const auto of_logits = detail::mixed_heads(logits_mix.transposed(), {}, of_weights, m);
        for (index_t a = 0; a < query_heads; ++a)
            for (index_t key = 0; key < m; ++key) {
                if (!r.any_sees(key)) continue;
                const auto kv = a / (query_heads / in.keys.shape().heads);
                const T of_product = factor * r.at(of_logits, a, key);
                for (index_t x = 0; wanted.queries.data() && x < d_k; ++x)
                    wanted.queries(b, a, row, x) += of_product * in.keys(b, kv, key, x);
                for (index_t x = 0; wanted.keys.data() && x < d_k; ++x) wanted.keys(b, kv, key, x) += of_product * in.queries(b, a, row, x);
            }
    });
}

} // namespace attn::reference
