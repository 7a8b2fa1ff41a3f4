// The definition of projected attention and its gradient: softmax attention over the projected rows.
#pragma once

#include "projections.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::reference {

/// Which tokens of a batch entry and a head of keys the first query sees, as they all do.
template <class T, Pattern P>
std::vector<bool> visible_tokens(const inputs<T>& in, const P& pattern, index_t batch, index_t kv_head) {
    const auto own = at(pattern, batch, kv_head * (in.queries.shape().heads / in.keys.shape().heads));
    std::vector<bool> visible;
    for (index_t j = 0; j < in.keys.shape().tokens; ++j)
        visible.push_back(static_cast<bool>(own.visible(in.positions.first_query[batch], in.positions.first_key[batch] + j)));
    return visible;
}

namespace detail {

/// The tokens of one batch entry and head of keys, the numbers of the projected rows that keys and values both have, and these rows.
template <class T>
struct projected_head {
    index_t batch, kv_head;
    tokens<T> keys, values;
    std::vector<std::size_t> rows;
    std::size_t all_rows; ///< with those that either lacks
    std::vector<T> k, v;

    /// What its query heads read: of queries and keys as they are here.
    inputs<T> inputs_of(const stored_view<const T>& queries) const {
        const auto count = std::ssize(rows);
        return {queries, head_major(k.data(), {1, 1, count, keys.channels()}), head_major(v.data(), {1, 1, count, values.channels()})};
    }
};

/// Calls f(projected_head, part of the query heads that read it) for each batch entry and head of keys.
template <class T>
void for_each_projected_head(const inputs<T>& in, const auto& project_keys, const auto& project_values, const Pattern auto& pattern,
                             const auto& f) {
    for (index_t b = 0; b < in.keys.shape().batch; ++b)
        for (index_t g = 0; g < in.keys.shape().heads; ++g) {
            const auto group = in.queries.shape().heads / in.keys.shape().heads;
            const auto visible = visible_tokens(in, pattern, b, g);
            projected_head<T> own{b, g, {in.keys, b, g, visible}, {in.values, b, g, visible}, {}, 0, {}, {}};
            const auto keys = project_keys(own.keys), values = project_values(own.values);
            own.all_rows = keys.size();
            for (std::size_t r = 0; r < keys.size(); ++r) {
                if (!keys[r] || !values[r]) continue;
                own.rows.push_back(r);
                own.k.insert(own.k.end(), keys[r]->begin(), keys[r]->end());
                own.v.insert(own.v.end(), values[r]->begin(), values[r]->end());
            }
            f(std::as_const(own), tensor_part{.batch = {b, 1}, .heads = {g * group, group}});
        }
}

} // namespace detail

/// Linformer: softmax attention over projected keys and values.
///     out[b, h] = softmax(scale * q[b, h] (E k[b, g])^T) (F v[b, g])        g = h / (heads / kv_heads)
/// project_keys(tokens) and project_values(tokens) give the projected rows of one batch entry and head; those that either lacks are left
/// out. The pattern shows a token to all queries or to none, as the first query sees it. Wang et al. 2020, "Linformer: Self-Attention with
/// Linear Complexity".
template <class T, Pattern P = dense>
void linformer(const inputs<T>& in, const outputs<T>& out, const auto& project_keys, const auto& project_values,
               std::optional<double> scale = {}, const P& pattern = {}) {
    if (in.queries.shape().tokens == 0) return;
    detail::for_each_projected_head(in, project_keys, project_values, pattern,
                                    [&](const detail::projected_head<T>& own, const tensor_part& part) {
                                        softmax<T>(own.inputs_of(in.queries.slice(part)), out.slice(part), scale);
                                    });
}

/// The gradient of `linformer`: that of softmax attention over the projected rows, dk' and dv' of them, then
///     of_key_projection(tokens, dk', dk),      of_value_projection(tokens, dv', dv)
/// for each batch entry and head, which add to dk and dv (1, 1, m, channels), zeros before, and to the gradients of their parameters. A row
/// that is left out has no gradient. A view of `wanted` without memory is not wanted.
template <class T, Pattern P = dense>
void linformer_gradients(const inputs<T>& in, const output_gradients<T>& d_out, const input_gradients<T>& wanted, const auto& project_keys,
                         const auto& project_values, const auto& of_key_projection, const auto& of_value_projection,
                         std::optional<double> scale = {}, const P& pattern = {}) {
    const auto find_one = [&](const detail::projected_head<T>& own, const tensor_part& part) {
        const auto projected = own.inputs_of(in.queries.slice(part));
        tensor<T> of_k(projected.keys.shape()), of_v(projected.values.shape());
        softmax_gradients<T>(projected, d_out.slice(part), {wanted.queries.slice(part), of_k, of_v}, {}, scale);
        const auto find = [&](const auto& projection, const tokens<T>& x, const tensor<T>& of_projected, const tensor_view<T>& to) {
            projected_tokens<T> of_rows(own.all_rows);
            auto* next = of_projected.data();
            for (const auto r : own.rows) of_rows[r].emplace(next, next + x.channels()), next += x.channels();
            tensor<T> of_tokens({1, 1, x.count(), x.channels()});
            projection(x, of_rows, of_tokens.view());
            for (index_t j = 0; to.data() && j < x.count(); ++j)
                for (index_t c = 0; c < x.channels(); ++c) to(own.batch, own.kv_head, j, c) = of_tokens(0, 0, j, c);
        };
        find(of_key_projection, own.keys, of_k, wanted.keys);
        find(of_value_projection, own.values, of_v, wanted.values);
    };
    detail::for_each_projected_head(in, project_keys, project_values, pattern, find_one);
}

} // namespace attn::reference
