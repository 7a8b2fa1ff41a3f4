// The definition of recurrent attention: its state, token by token.
#pragma once

#include "../core/gradients.hpp"
#include "../core/inputs.hpp"
#include "number.hpp"

#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

/// What a rule of recurrent attention takes of each token and kv head, as recurrent_attention's members of these names; none without
/// memory. beta makes it a delta rule; a and b the general rule.
template <class T>
struct recurrent_terms {
    tensor_view<const T> log_decay = {}, beta = {}, a = {}, b = {};

    /// A number of one of them, whose batch, heads and channels may be 1 for all.
    static T at(const tensor_view<const T>& of, index_t batch, index_t head, index_t token, index_t channel) {
        const auto& s = of.shape();
        return of(s.batch == 1 ? 0 : batch, s.heads == 1 ? 0 : head, token, s.channels == 1 ? 0 : channel);
    }
};

/// Takes a token into a state [d_k][d_v] of one batch entry and kv head, everything in T, with E = e^log_decay and y = (E S)^T k, or S^T b
/// before it decays:
///     S = E S + k v^T,      S = E S + beta k (v - y)^T,      S = E S - a y^T + k v^T
template <class T>
void recurrent_step(const recurrent_terms<T>& terms, const inputs<T>& in, index_t batch, index_t head, index_t token,
                    std::vector<T>& state) {
    const auto d_k = in.keys.shape().channels, d_v = in.values.shape().channels;
    const auto s = [&](index_t c, index_t n) -> T& { return state[static_cast<std::size_t>(c * d_v + n)]; };
    std::vector<T> y(static_cast<std::size_t>(d_v), T{0});
    const auto read = [&](const auto& by) {
        for (index_t c = 0; c < d_k; ++c) {
            const T factor = by(c);
            for (index_t n = 0; n < d_v; ++n) y[static_cast<std::size_t>(n)] += factor * s(c, n);
        }
    };
    const auto term = [&](const tensor_view<const T>& of, index_t c) { return recurrent_terms<T>::at(of, batch, head, token, c); };
    if (terms.b.data()) read([&](index_t c) { return term(terms.b, c); });
    for (index_t c = 0; terms.log_decay.data() && c < d_k; ++c) {
        const T decay = exp(term(terms.log_decay, c));
        for (index_t n = 0; n < d_v; ++n) s(c, n) = decay * s(c, n);
    }
    if (terms.beta.data()) read([&](index_t c) { return static_cast<T>(in.keys(batch, head, token, c)); });
    const T beta = terms.beta.data() ? term(terms.beta, 0) : T{0};
    for (index_t c = 0; c < d_k; ++c) {
        const T key = in.keys(batch, head, token, c), a = terms.b.data() ? term(terms.a, c) : T{0};
        for (index_t n = 0; n < d_v; ++n) {
            const T value = in.values(batch, head, token, n), own = y[static_cast<std::size_t>(n)];
            if (terms.b.data()) s(c, n) = s(c, n) - a * own + key * value;
            else s(c, n) += terms.beta.data() ? beta * key * (value - own) : key * value;
        }
    }
}

/// out_i = scale q_i^T S_i of the state after each token, everything in T; the first state is zero or given, the last is written if it has
/// memory. Shapes as in recurrent_attention, taken as checked. Time O(n d_k d_v) a head, and as much for each query head.
template <class T>
void recurrent_attention(const recurrent_terms<T>& terms, double scale, const inputs<T>& in, const outputs<T>& out,
                         const tensor_view<const T>& first_state = {}, const tensor_view<T>& last_state = {}) {
    const auto [batch, heads, n, d_k] = in.queries.shape();
    const auto kv_heads = in.keys.shape().heads, d_v = in.values.shape().channels;
    for (index_t b = 0; b < batch; ++b)
        for (index_t g = 0; g < kv_heads; ++g) {
            std::vector<T> state(static_cast<std::size_t>(d_k * d_v), T{0});
            const auto s = [&](index_t c, index_t m) -> T& { return state[static_cast<std::size_t>(c * d_v + m)]; };
            for (index_t c = 0; first_state.data() && c < d_k; ++c)
                for (index_t m = 0; m < d_v; ++m) s(c, m) = first_state(b, g, c, m);
            for (index_t i = 0; i < n; ++i) {
                recurrent_step(terms, in, b, g, i, state);
                for (auto h = g * (heads / kv_heads); h < (g + 1) * (heads / kv_heads); ++h)
                    for (index_t m = 0; m < d_v; ++m)
                        out.values(b, h, i, m) =
                            static_cast<T>(scale) * detail::sum_over<T>(d_k, [&](index_t c) { return in.queries(b, h, i, c) * s(c, m); });
            }
            for (index_t c = 0; last_state.data() && c < d_k; ++c)
                for (index_t m = 0; m < d_v; ++m) last_state(b, g, c, m) = s(c, m);
        }
}

namespace detail {

/// Adds to a number of a gradient that has memory; its batch, heads and channels may be 1, for all.
template <class T>
void add_to_shared(const tensor_view<T>& to, index_t batch, index_t head, index_t token, index_t channel, const T& x) {
    if (!to.data()) return;
    const auto& s = to.shape();
    to(s.batch == 1 ? 0 : batch, s.heads == 1 ? 0 : head, token, s.channels == 1 ? 0 : channel) += x;
}

} // namespace detail

/// The gradient of recurrent attention by its formulas, token by token from the last, everything in T. With G the gradient of the state
/// after a token, which begins as the given gradient of the last state, and dO' = scale dO:
///     G += q dO'^T,   dq = S dO',   dk = G v,   dv = G^T k,   and before the token: G = E G,   dg = sum of (E S) G
/// A delta rule, with R = E S, y = R^T k and w = G^T k, has d_beta = w . (v - y), dv = beta w, dy = -beta w, dk = beta G (v - y) + R dy,
/// and R's gradient G + k dy^T; the general rule da = -G y, dy = -G^T a, db = S dy, and before the token G = E G + b dy^T. A view without
/// memory is not wanted. Shapes are taken as checked. Memory: all states of a head.
template <class T>
void recurrent_gradients_of(const recurrent_terms<T>& terms, double scale, const inputs<T>& in, const tensor_view<const T>& d_out,
                            const recurrent_gradients<T>& wanted, const tensor_view<const T>& first_state = {}) {
    const auto [batch, heads, n, d_k] = in.queries.shape();
    const auto kv_heads = in.keys.shape().heads, d_v = in.values.shape().channels;
    for (const auto* view : {&wanted.queries, &wanted.keys, &wanted.values, &wanted.log_decay, &wanted.beta, &wanted.a, &wanted.b})
        attn::detail::fill_zero(*view);
    const auto at = [&](index_t c, index_t m) { return static_cast<std::size_t>(c * d_v + m); };
    for (index_t b = 0; b < batch; ++b)
        for (index_t g = 0; g < kv_heads; ++g) {
            std::vector<std::vector<T>> states(1, std::vector<T>(static_cast<std::size_t>(d_k * d_v), T{0}));
            std::vector<T> given(states[0]); // G
            for (index_t c = 0; c < d_k; ++c)
                for (index_t m = 0; m < d_v; ++m) {
                    if (first_state.data()) states[0][at(c, m)] = first_state(b, g, c, m);
                    if (wanted.d_last_state.data()) given[at(c, m)] = wanted.d_last_state(b, g, c, m);
                }
            for (index_t i = 0; i < n; ++i) {
                states.push_back(states.back());
                recurrent_step(terms, in, b, g, i, states.back());
            }
            for (auto i = n - 1; i >= 0; --i) {
                const auto &after = states[static_cast<std::size_t>(i + 1)], &before = states[static_cast<std::size_t>(i)];
                const auto term = [&](const tensor_view<const T>& of, index_t c) { return recurrent_terms<T>::at(of, b, g, i, c); };
                const auto key = [&](index_t c) { return static_cast<T>(in.keys(b, g, i, c)); };
                const auto value = [&](index_t m) { return static_cast<T>(in.values(b, g, i, m)); };
                const auto decay = [&](index_t c) { return terms.log_decay.data() ? exp(term(terms.log_decay, c)) : T{1}; };
                const bool corrects = terms.beta.data() != nullptr, erases = terms.b.data() != nullptr;
                for (auto h = g * (heads / kv_heads); h < (g + 1) * (heads / kv_heads); ++h)
                    for (index_t c = 0; c < d_k; ++c)
                        for (index_t m = 0; m < d_v; ++m) {
                            const T d = static_cast<T>(scale) * d_out(b, h, i, m);
                            given[at(c, m)] += static_cast<T>(in.queries(b, h, i, c)) * d;
                            if (wanted.queries.data()) wanted.queries(b, h, i, c) += after[at(c, m)] * d;
                        }
                std::vector<T> decayed(before), y(static_cast<std::size_t>(d_v), T{0}), dy(y);
                for (index_t c = 0; c < d_k; ++c)
                    for (index_t m = 0; m < d_v; ++m) decayed[at(c, m)] = decay(c) * before[at(c, m)];
                for (index_t m = 0; m < d_v; ++m) {
                    const auto own = static_cast<std::size_t>(m);
                    T of_value = 0, of_removed = 0;
                    for (index_t c = 0; c < d_k; ++c) {
                        of_value += given[at(c, m)] * key(c);
                        if (corrects) y[own] += decayed[at(c, m)] * key(c);
                        if (!erases) continue;
                        y[own] += before[at(c, m)] * term(terms.b, c);
                        of_removed += given[at(c, m)] * term(terms.a, c);
                    }
                    if (corrects) {
                        detail::add_to_shared(wanted.beta, b, g, i, 0, of_value * (value(m) - y[own]));
                        of_value = term(terms.beta, 0) * of_value;
                        of_removed = of_value;
                    }
                    dy[own] = -of_removed;
                    if (wanted.values.data()) wanted.values(b, g, i, m) = of_value;
                }
                for (index_t c = 0; c < d_k; ++c)
                    for (index_t m = 0; m < d_v; ++m) {
                        const auto own = static_cast<std::size_t>(m);
                        T& s = given[at(c, m)];
                        if (wanted.keys.data())
                            wanted.keys(b, g, i, c) +=
                                corrects ? term(terms.beta, 0) * s * (value(m) - y[own]) + decayed[at(c, m)] * dy[own] : s * value(m);
                        if (erases) {
                            detail::add_to_shared<T>(wanted.a, b, g, i, c, -s * y[own]);
                            detail::add_to_shared<T>(wanted.b, b, g, i, c, before[at(c, m)] * dy[own]);
                        }
                        if (corrects) s += key(c) * dy[own];
                        detail::add_to_shared<T>(wanted.log_decay, b, g, i, c, s * decayed[at(c, m)]);
                        s = decay(c) * s;
                        if (erases) s += term(terms.b, c) * dy[own];
                    }
            }
            for (index_t c = 0; wanted.first_state.data() && c < d_k; ++c)
                for (index_t m = 0; m < d_v; ++m) wanted.first_state(b, g, c, m) = given[at(c, m)];
        }
}

} // namespace attn::reference
