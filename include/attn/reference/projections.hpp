// The definitions of the projections of Linformer, one row at a time, and their gradients.
#pragma once

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
    void for_each_visible(index_t first, index_t end, const auto& f) const {
        for (auto j = first; j < end; ++j)
            if (visible[static_cast<std::size_t>(j)]) f(j);
    }
};

/// Projected rows of channels; nothing where no visible token takes part.
template <class T>
using projected_tokens = std::vector<std::optional<std::vector<T>>>;

namespace detail {

/// The row of a parameter's own head, or of the one that serves all.
index_t head_of(const auto& parameter, index_t head) { return parameter.shape().heads == 1 ? 0 : head; }

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
/// Calls f(r, gradient of row r) for the rows that are there.
template <class T>
void for_each_row(const projected_tokens<T>& d_out, const auto& f) {
    for (std::size_t r = 0; r < d_out.size(); ++r)
        if (d_out[r]) f(static_cast<index_t>(r), [&row = *d_out[r]](index_t c) { return row[static_cast<std::size_t>(c)]; });
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

/// The gradients of linear_projection, from the gradients g of the rows that it gives, over the visible j. Here and below of_x is (1, 1, m,
/// channels); what has no memory is left out.
///     dx[j, c] += matrix[r, j] g[r, c],      dmatrix[r, j] += sum_c g[r, c] x[j, c],      dbias[r] += sum_c g[r, c]
template <class T, class U>
void linear_projection_gradients(const tokens<T>& x, const projected_tokens<T>& d_out, const tensor_view<T>& of_x,
                                 const tensor_view<const U>& matrix, const tensor_view<T>& of_matrix, const tensor_view<T>& of_bias) {
    const auto head = detail::head_of(matrix, x.head);
    detail::for_each_row(d_out, [&](index_t r, const auto& g) {
        x.for_each_visible(0, x.count(), [&](index_t j) {
            for (index_t c = 0; c < x.channels(); ++c) {
                of_x(0, 0, j, c) += static_cast<T>(matrix(0, head, r, j)) * g(c);
                if (of_matrix.data()) of_matrix(0, head, r, j) += g(c) * x(j, c);
            }
        });
        for (index_t c = 0; of_bias.data() && c < x.channels(); ++c) of_bias(0, detail::head_of(of_bias, x.head), r, 0) += g(c);
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

/// The gradient of mean_pooling: dx[j, c] += g[r, c] / (visible tokens of bin r) for the visible j of bin r.
template <class T>
void mean_pooling_gradients(const tokens<T>& x, const projected_tokens<T>& d_out, const tensor_view<T>& of_x) {
    detail::for_each_row(d_out, [&](index_t r, const auto& g) {
        const auto [first, end] = pooling_bin(r, x.count(), std::ssize(d_out));
        T seen = 0;
        x.for_each_visible(first, end, [&](index_t) { seen += 1; });
        x.for_each_visible(first, end, [&](index_t j) {
            for (index_t c = 0; c < x.channels(); ++c) of_x(0, 0, j, c) += g(c) / seen;
        });
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

/// The gradient of max_pooling: dx[j, c] += g[r, c] for the visible j of bin r whose number is the largest, of equal ones the first, of NaN
/// the last.
template <class T>
void max_pooling_gradients(const tokens<T>& x, const projected_tokens<T>& d_out, const tensor_view<T>& of_x) {
    detail::for_each_row(d_out, [&](index_t r, const auto& g) {
        const auto [first, end] = pooling_bin(r, x.count(), std::ssize(d_out));
        for (index_t c = 0; c < x.channels(); ++c) {
            T largest = -std::numeric_limits<T>::infinity();
            index_t taken = -1;
            x.for_each_visible(first, end, [&](index_t j) {
                if (x(j, c) > largest || isnan(x(j, c))) largest = x(j, c), taken = j;
            });
            if (taken >= 0) of_x(0, 0, taken, c) += g(c);
        }
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

/// The gradients of channel_convolution, with j = kernel r + t visible:
///     dx[j, c] += weights[t, c] g[r, c],      dweights[t, c] += g[r, c] x[j, c],      dbias[c] += g[r, c]
template <class T, class U>
void channel_convolution_gradients(const tokens<T>& x, const projected_tokens<T>& d_out, const tensor_view<T>& of_x,
                                   const tensor_view<const U>& weights, const tensor_view<T>& of_weights, const tensor_view<T>& of_bias) {
    const auto kernel = weights.shape().tokens, head = detail::head_of(weights, x.head);
    detail::for_each_row(d_out, [&](index_t r, const auto& g) {
        for (index_t c = 0; c < x.channels(); ++c) {
            x.for_each_visible(r * kernel, (r + 1) * kernel, [&](index_t j) {
                of_x(0, 0, j, c) += static_cast<T>(weights(0, head, j - r * kernel, c)) * g(c);
                if (of_weights.data()) of_weights(0, head, j - r * kernel, c) += g(c) * x(j, c);
            });
            if (of_bias.data()) of_bias(0, detail::head_of(of_bias, x.head), 0, c) += g(c);
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

/// The gradients of mixing_convolution, with j = kernel r + t visible:
///     dx[j, c] += sum_o weights[t, o, c] g[r, o],      dweights[t, o, c] += g[r, o] x[j, c],      dbias[o] += g[r, o]
template <class T, class U>
void mixing_convolution_gradients(const tokens<T>& x, const projected_tokens<T>& d_out, const tensor_view<T>& of_x,
                                  const tensor_view<const U>& weights, const tensor_view<T>& of_weights, const tensor_view<T>& of_bias) {
    const auto kernel = weights.shape().batch, head = detail::head_of(weights, x.head);
    detail::for_each_row(d_out, [&](index_t r, const auto& g) {
        for (index_t o = 0; o < x.channels(); ++o) {
            x.for_each_visible(r * kernel, (r + 1) * kernel, [&](index_t j) {
                for (index_t c = 0; c < x.channels(); ++c) {
                    of_x(0, 0, j, c) += static_cast<T>(weights(j - r * kernel, head, o, c)) * g(o);
                    if (of_weights.data()) of_weights(j - r * kernel, head, o, c) += g(o) * x(j, c);
                }
            });
            if (of_bias.data()) of_bias(0, detail::head_of(of_bias, x.head), 0, o) += g(o);
        }
    });
}

} // namespace attn::reference
