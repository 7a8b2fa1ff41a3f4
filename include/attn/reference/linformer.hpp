// The definition of projected attention: the projections by their formulas, one row at a time, then softmax attention over them.
#pragma once

#include "number.hpp"
#include "softmax.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

/// The tokens of one batch entry and head: x(j, c), and which are visible.
template <class T>
struct tokens {
    stored_view<const T> x;
    index_t batch, head;
    std::vector<bool> visible;

    /// How many tokens there are.
    index_t count() const { return x.shape().tokens; }
    /// How many channels each token has.
    index_t channels() const { return x.shape().channels; }
    T operator()(index_t j, index_t c) const { return x(batch, head, j, c); }
    /// Whether one of the tokens first to end - 1 is visible.
    bool any_visible(index_t first, index_t end) const {
        for (auto j = first; j < end; ++j)
            if (visible[static_cast<std::size_t>(j)]) return true;
        return false;
    }
    /// Calls f(j) for the visible tokens of first .. end - 1.
    template <class F>
    void for_each_visible(index_t first, index_t end, const F& f) const {
        for (auto j = first; j < end; ++j)
            if (visible[static_cast<std::size_t>(j)]) f(j);
    }
};

/// Projected rows of channels; nothing where no visible token takes part.
template <class T>
using projected_tokens = std::vector<std::optional<std::vector<T>>>;

namespace detail {

/// The row of a parameter's own head, or of the one that serves all.
template <class U>
index_t head_of(const tensor_view<const U>& parameter, index_t head) {
    return parameter.shape().heads == 1 ? 0 : head;
}

/// `count` rows; row r is write(r, numbers) on zeros if range(r) = {first, end} holds a visible token.
template <class T>
projected_tokens<T> project_each(const tokens<T>& x, index_t count, const auto& range, const auto& write) {
    projected_tokens<T> rows(static_cast<std::size_t>(count));
    for (index_t r = 0; r < count; ++r) {
        const auto [first, end] = range(r);
        if (!x.any_visible(first, end)) continue;
        std::vector<T> row(static_cast<std::size_t>(x.channels()), T{0});
        write(r, row);
        rows[static_cast<std::size_t>(r)] = std::move(row);
    }
    return rows;
}

} // namespace detail

/// Row r of `projected`, by every token as it is.
template <class T>
projected_tokens<T> identity_projection(const tokens<T>& x) {
    return detail::project_each(
        x, x.count(), [](index_t r) { return std::pair{r, r + 1}; },
        [&](index_t r, std::vector<T>& row) {
            for (index_t c = 0; c < x.channels(); ++c) row[static_cast<std::size_t>(c)] = x(r, c);
        });
}

/// projected[r, c] = sum over visible j of matrix[r, j] x[j, c] + bias[r]; matrix (1, heads or 1, projected, m or more), bias
/// (1, heads or 1, projected, 1) or without data.
template <class T, class U>
projected_tokens<T> linear_projection(const tokens<T>& x, const tensor_view<const U>& matrix, const tensor_view<const U>& bias) {
    const auto all = [&](index_t) { return std::pair{index_t{0}, x.count()}; };
    return detail::project_each(x, matrix.shape().tokens, all, [&](index_t r, std::vector<T>& row) {
        x.for_each_visible(0, x.count(), [&](index_t j) {
            const auto weight = static_cast<T>(matrix(0, detail::head_of(matrix, x.head), r, j));
            for (index_t c = 0; c < x.channels(); ++c) row[static_cast<std::size_t>(c)] += weight * x(j, c);
        });
        if (bias.data())
            for (auto& number : row) number += static_cast<T>(bias(0, detail::head_of(bias, x.head), r, 0));
    });
}

/// Bin r of a pooling to `projected` rows: tokens floor(r m / projected) .. ceil((r + 1) m / projected) - 1.
inline std::pair<index_t, index_t> pooling_bin(index_t r, index_t tokens, index_t projected) {
    const auto end = (r + 1) * tokens;
    return {r * tokens / projected, end / projected + (end % projected != 0)};
}

/// The mean over the visible tokens of each bin.
template <class T>
projected_tokens<T> mean_pooling(const tokens<T>& x, index_t projected) {
    const auto bin = [&](index_t r) { return pooling_bin(r, x.count(), projected); };
    return detail::project_each(x, projected, bin, [&](index_t r, std::vector<T>& row) {
        T seen = 0;
        x.for_each_visible(bin(r).first, bin(r).second, [&](index_t j) {
            seen += 1;
            for (index_t c = 0; c < x.channels(); ++c) row[static_cast<std::size_t>(c)] += x(j, c);
        });
        for (auto& sum : row) sum /= seen;
    });
}

/// The largest number of each channel over the visible tokens of each bin, NaN if one is.
template <class T>
projected_tokens<T> max_pooling(const tokens<T>& x, index_t projected) {
    const auto bin = [&](index_t r) { return pooling_bin(r, x.count(), projected); };
    return detail::project_each(x, projected, bin, [&](index_t r, std::vector<T>& row) {
        std::ranges::fill(row, -std::numeric_limits<T>::infinity());
        x.for_each_visible(bin(r).first, bin(r).second, [&](index_t j) {
            for (index_t c = 0; c < x.channels(); ++c) {
                auto& largest = row[static_cast<std::size_t>(c)];
                if (x(j, c) > largest || isnan(x(j, c))) largest = x(j, c);
            }
        });
    });
}

/// projected[r, c] = bias[c] + sum over visible taps t of weights[t, c] x[kernel r + t, c]; weights (1, heads or 1, kernel, channels).
template <class T, class U>
projected_tokens<T> channel_convolution(const tokens<T>& x, const tensor_view<const U>& weights, const tensor_view<const U>& bias) {
    const auto kernel = weights.shape().tokens;
    const auto window = [&](index_t r) { return std::pair{r * kernel, (r + 1) * kernel}; };
    return detail::project_each(x, x.count() / kernel, window, [&](index_t r, std::vector<T>& row) {
        for (index_t c = 0; c < x.channels(); ++c) {
            auto& sum = row[static_cast<std::size_t>(c)];
            if (bias.data()) sum = static_cast<T>(bias(0, detail::head_of(bias, x.head), 0, c));
            x.for_each_visible(r * kernel, (r + 1) * kernel, [&](index_t j) {
                sum += static_cast<T>(weights(0, detail::head_of(weights, x.head), j - r * kernel, c)) * x(j, c);
            });
        }
    });
}

/// projected[r, o] = bias[o] + sum over visible taps t and channels c of weights[t, o, c] x[kernel r + t, c]; weights (kernel, heads or
/// 1, channels, channels).
template <class T, class U>
projected_tokens<T> mixing_convolution(const tokens<T>& x, const tensor_view<const U>& weights, const tensor_view<const U>& bias) {
    const auto kernel = weights.shape().batch;
    const auto window = [&](index_t r) { return std::pair{r * kernel, (r + 1) * kernel}; };
    return detail::project_each(x, x.count() / kernel, window, [&](index_t r, std::vector<T>& row) {
        for (index_t o = 0; o < x.channels(); ++o) {
            auto& sum = row[static_cast<std::size_t>(o)];
            if (bias.data()) sum = static_cast<T>(bias(0, detail::head_of(bias, x.head), 0, o));
            x.for_each_visible(r * kernel, (r + 1) * kernel, [&](index_t j) {
                for (index_t c = 0; c < x.channels(); ++c)
                    sum += static_cast<T>(weights(j - r * kernel, detail::head_of(weights, x.head), o, c)) * x(j, c);
            });
        }
    });
}

/// Which tokens of a batch entry and a head of keys the first query sees, as they all do.
template <class T, Pattern P>
std::vector<bool> visible_tokens(const inputs<T>& in, const P& pattern, index_t batch, index_t kv_head) {
    const auto own = at(pattern, batch, kv_head * (in.queries.shape().heads / in.keys.shape().heads));
    std::vector<bool> visible;
    for (index_t j = 0; j < in.keys.shape().tokens; ++j)
        visible.push_back(static_cast<bool>(own.visible(in.positions.first_query[batch], in.positions.first_key[batch] + j)));
    return visible;
}

/// Linformer: softmax attention over projected keys and values.
///     out[b, h] = softmax(scale * q[b, h] (E k[b, g])^T) (F v[b, g])        g = h / (heads / kv_heads)
/// project_keys(tokens) and project_values(tokens) give the projected rows of one batch entry and head; those that either lacks are left
/// out. The pattern shows a token to all queries or to none, as the first query sees it. Wang et al. 2020, "Linformer: Self-Attention with
/// Linear Complexity".
template <class T, Pattern P = dense>
void linformer(const inputs<T>& in, const outputs<T>& out, const auto& project_keys, const auto& project_values,
               std::optional<double> scale = {}, const P& pattern = {}) {
    const auto [batch, heads, n, d_k] = in.queries.shape();
    const auto [kv_batch, kv_heads, m, d_v] = in.values.shape();
    if (n == 0) return;
    for (index_t b = 0; b < batch; ++b)
        for (index_t g = 0; g < kv_heads; ++g) {
            const auto group = heads / kv_heads;
            const auto visible = visible_tokens(in, pattern, b, g);
            const auto keys = project_keys(tokens<T>{in.keys, b, g, visible}), values = project_values(tokens<T>{in.values, b, g, visible});
            std::vector<T> k, v;
            for (std::size_t r = 0; r < keys.size(); ++r) {
                if (!keys[r] || !values[r]) continue;
                k.insert(k.end(), keys[r]->begin(), keys[r]->end());
                v.insert(v.end(), values[r]->begin(), values[r]->end());
            }
            const auto rows = static_cast<index_t>(k.size()) / d_k;
            for (index_t h = g * group; h < (g + 1) * group; ++h) {
                const tensor_part one_head{.batch = {b, 1}, .heads = {h, 1}};
                const inputs<T> projected{in.queries.slice(one_head), head_major<const T>(k.data(), {1, 1, rows, d_k}),
                                          head_major<const T>(v.data(), {1, 1, rows, d_v})};
                softmax<T>(projected, out.slice(one_head), scale);
            }
        }
}

} // namespace attn::reference
