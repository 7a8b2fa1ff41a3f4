// The definition of the gradients of score functions' parameters: the printed formulas, pair by pair.
#pragma once

#include "../score/additive_bias.hpp"
#include "../score/alibi.hpp"
#include "../score/dual.hpp"
#include "../score/forgetting.hpp"
#include "../score/kerple.hpp"
#include "../score/relative_buckets.hpp"
#include "../score/soft_cap.hpp"
#include "number.hpp"

#include <array>
#include <tuple>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

/// A pair of a query and a key, as the definitions of gradients show it: batch entry, head, positions.
struct scored_pair {
    index_t batch, head, query, key;
};

namespace detail {

template <class T>
void add_at(const tensor_view<T>& to, index_t entry, index_t head, index_t i, index_t c, T gradient) {
    if (to.data()) to(entry, head, i, c) += gradient;
}

/// Adds nothing for a score function without parameters.
template <class T, class S>
void add_parameters(const S&, const no_gradients&, const scored_pair&, T, T) {}

/// score + bias_ij: dbias_ij = dx_ij
template <class T, class U>
void add_parameters(const additive_bias<U>& f, const typename additive_bias<U>::template gradients<T>& wanted, const scored_pair& p, T,
                    T dx) {
    const auto& s = f.bias.shape();
    const attn::detail::table_place at(s, p.batch, p.head);
    add_at(wanted.bias, at.entry, at.head, s.tokens == 1 ? 0 : p.query - f.first_query.repeated(p.batch),
           s.channels == 1 ? 0 : p.key - f.first_key.repeated(p.batch), dx);
}
/// score - slope |i - j|: dslope = sum -dx_ij |i - j|
template <class T>
void add_parameters(const alibi&, const alibi::gradients<T>& wanted, const scored_pair& p, T, T dx) {
    add_at(wanted.slopes, 0, p.head, 0, 0, -dx * static_cast<T>(abs(p.query - p.key)));
}
/// cap tanh(x / cap): dcap = sum dx_ij (tanh(x / cap) - x / cap (1 - tanh(x / cap)^2))
template <class T>
void add_parameters(const soft_cap& f, const soft_cap::gradients<T>& wanted, const scored_pair&, T x, T dx) {
    const T u = x / static_cast<T>(f.cap), t = tanh(u), slope = 1 - t * t;
    add_at(wanted.cap, 0, 0, 0, 0, dx * (slope == 0 ? t : t - u * slope));
}
/// score - r1 log(1 + r2 |i - j|): dr1 = sum -dx_ij log(1 + r2 |i - j|), dr2 = sum -dx_ij r1 |i - j| / (1 + r2 |i - j|)
template <class T>
void add_parameters(const kerple_logarithmic& f, const kerple_logarithmic::gradients<T>& wanted, const scored_pair& p, T, T dx) {
    const auto [r1, r2] = f.at(p.batch, p.head);
    const auto distance = static_cast<T>(abs(p.query - p.key)), grown = 1 + static_cast<T>(r2) * distance;
    add_at(wanted.r1, 0, p.head, 0, 0, -dx * log(grown));
    add_at(wanted.r2, 0, p.head, 0, 0, -dx * static_cast<T>(r1) * distance / grown);
}
/// score - r1 |i - j|^r2: dr1 = sum -dx_ij |i - j|^r2, dr2 = sum -dx_ij r1 |i - j|^r2 log |i - j|, nothing for i = j
template <class T>
void add_parameters(const kerple_power& f, const kerple_power::gradients<T>& wanted, const scored_pair& p, T, T dx) {
    if (p.query == p.key) return;
    const auto [r1, r2] = f.at(p.batch, p.head);
    const auto distance = static_cast<T>(abs(p.query - p.key)), power = pow(distance, static_cast<T>(r2));
    add_at(wanted.r1, 0, p.head, 0, 0, -dx * power);
    add_at(wanted.r2, 0, p.head, 0, 0, -dx * static_cast<T>(r1) * power * log(distance));
}
/// score + table[bucket(j - i)]: dtable_bucket = sum of dx_ij over its pairs
template <class T, class U>
void add_parameters(const relative_buckets<U>& f, const typename relative_buckets<U>::template gradients<T>& wanted, const scored_pair& p,
                    T, T dx) {
    add_at(wanted.table, 0, wanted.table.shape().heads == 1 ? 0 : p.head, 0, f.rule()(p.key - p.query), dx);
}
/// score + c_i - c_j, c_p the sum of log_gates up to p: first dc_p = sum_j dx_pj - sum_i dx_ip
template <class T>
void add_parameters(const forgetting& f, const forgetting::gradients<T>& wanted, const scored_pair& p, T, T dx) {
    const attn::detail::table_place at(wanted.log_gates.shape(), p.batch, p.head);
    add_at(wanted.log_gates, at.entry, at.head, p.query - f.first(), 0, dx);
    add_at(wanted.log_gates, at.entry, at.head, p.key - f.first(), 0, -dx);
}
/// Adds the gradients of a chain: each function passes on what the later ones give back.
template <class T, class... F, class... G>
void add_parameters(const composed_score<F...>& chain, const std::tuple<G...>& wanted, const scored_pair& p, T x, T dx) {
    std::array<T, sizeof...(F)> came_in, slopes;
    [&]<std::size_t... n>(std::index_sequence<n...>) {
        const auto apply = [&](const auto& f, std::size_t number) {
            const auto y = attn::detail::differentiated(score_at(f, p.batch, p.head), x, p.query, p.key);
            came_in[number] = x;
            slopes[number] = y.derivative;
            x = y.value;
        };
        (apply(std::get<n>(chain.functions), n), ...);
        const auto go_back = [&](const auto& f, const auto& of_f, std::size_t number) {
            add_parameters(f, of_f, p, came_in[number], dx);
            dx *= slopes[number];
        };
        (go_back(std::get<sizeof...(n) - 1 - n>(chain.functions), std::get<sizeof...(n) - 1 - n>(wanted), sizeof...(n) - 1 - n), ...);
    }(std::index_sequence_for<F...>());
}

template <class S, class G>
void end_parameters(const S&, const G&) {}
/// dlog_gates_t = sum over p >= t of dc_p; 0 for a gate of 0, behind which the sum begins anew.
template <class T>
void end_parameters(const forgetting& f, const forgetting::gradients<T>& wanted) {
    const auto& to = wanted.log_gates;
    const auto& s = to.shape();
    for (index_t b = 0; to.data() && b < s.batch; ++b)
        for (index_t h = 0; h < s.heads; ++h) {
            T sum = 0;
            for (auto t = s.tokens - 1; t >= 0; --t) to(b, h, t, 0) = sum = f.begins_anew(b, h, t) ? 0 : sum + to(b, h, t, 0);
        }
}
template <class... F, class... G>
void end_parameters(const composed_score<F...>& chain, const std::tuple<G...>& wanted) {
    [&]<std::size_t... n>(std::index_sequence<n...>) {
        (end_parameters(std::get<n>(chain.functions), std::get<n>(wanted)), ...);
    }(std::index_sequence_for<F...>());
}

} // namespace detail

/// The gradients of the parameters of a score function by their formulas, everything in T: with dx_ij the gradient by what the function
/// makes of the scaled product x_ij, which softmax_gradients shows for each pair
/// (talking_heads_gradients, of mixed scores),
///     dparameter = sum over b, h, i, j of dx_ij d score(x_ij, i, j) / d parameter
/// wanted: the gradients, zeros before; a view without memory is not wanted. Call it for each pair, and then `end`.
template <class T, ScoreFunction S, class G>
struct score_parameters {
    const S& score;
    const G& wanted;

    void operator()(index_t b, index_t h, index_t i, index_t j, T x, T dx) const {
        detail::add_parameters(score, wanted, {b, h, i, j}, x, dx);
    }
    /// Writes the sums to the wanted gradients.
    void end() const { detail::end_parameters(score, wanted); }
};

} // namespace attn::reference
