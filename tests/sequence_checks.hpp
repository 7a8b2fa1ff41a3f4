// A call over ranks beside the same call on one machine, and that they have the same bits.
#pragma once

#include "answers.hpp"
#include "communicator_checks.hpp"

#include <attn/distributed/sequence_parallel.hpp>

namespace attn::testing {

/// 1 to 7 ranks, and cuts that leave some without queries, keys or both.
template <Scalar T>
std::vector<partition> partitions(const auto& pattern, const inputs<T>& in, const std::vector<index_t>& ranks = {1, 2, 3, 4, 5, 6, 7}) {
    std::vector<partition> all;
    const auto s = shapes_of(in);
    const auto n = s.queries.tokens, m = s.keys.tokens;
    for (const auto count : ranks) all.emplace_back(pattern, s, count, in.positions);
    all.emplace_back(pattern, s, std::vector<index_t>{0, 0, n / 3, n / 3, n}, std::vector<index_t>{0, m / 2, m / 2, m, m}, in.positions);
    all.emplace_back(pattern, s, std::vector<index_t>{0, n, n}, std::vector<index_t>{0, 0, m}, in.positions);
    return all;
}

/// Some rows, in memory of their own where a tensor can hold them: so that a sanitizer sees what is read beside them.
template <Scalar T>
struct rank_rows {
    tensor<T> memory;
    stored_view<const T> view;

    rank_rows(const stored_view<const T>& all, const row_range& rows) : view(all.slice({.tokens = rows})) {
        if (all.is_narrow() || all.strides() != head_major(static_cast<const T*>(nullptr), all.shape()).strides()) return;
        memory = tensor<T>(view.shape());
        const auto& s = view.shape();
        for (index_t b = 0; b < s.batch; ++b)
            for (index_t h = 0; h < s.heads; ++h)
                for (index_t i = 0; i < s.tokens; ++i)
                    for (index_t c = 0; c < s.channels; ++c) memory(b, h, i, c) = view(b, h, i, c);
        view = memory.view();
    }
};

/// On one rank: its rows of the call, next to those of the whole one. Every rank has all inputs, but gives the call its own.
template <Scalar T, Communicator C>
void check_rank(const auto& op, C& ranks, const partition& parts, const inputs<T>& all, const outputs<T>& whole, auto& executor) {
    const auto rank = ranks.rank();
    const auto q = parts.queries(rank), k = parts.keys(rank);
    const rank_rows<T> own_queries(all.queries, q), own_keys(all.keys, k), own_values(all.values, k);
    const inputs<T> own{own_queries.view, own_keys.view, own_values.view};
    const auto expected = whole.values.slice({.tokens = q});
    const auto same_rows = [](const auto& a, const auto& b) {
        const auto& s = a.shape();
        for (index_t batch = 0; batch < s.batch; ++batch)
            for (index_t h = 0; h < s.heads; ++h)
                for (index_t i = 0; i < s.tokens; ++i)
                    for (index_t c = 0; c < s.channels; ++c) {
                        const T x = a(batch, h, i, c), y = b(batch, h, i, c);
                        if (!same_bits(x, y)) return false;
                    }
        return true;
    };
    auto own_op = op;
    if constexpr (requires { op.convolution_input; })
        if (op.convolution_input.data()) own_op.convolution_input = op.convolution_input.slice({.tokens = q});
    const sequence_parallel over{own_op, parts};
    if constexpr (std::same_as<T, float>) {
        if (expected.is_narrow()) {
            tensor<Eigen::bfloat16> values(expected.shape());
            attend(over, ranks, own, outputs<T>{values}, executor);
            return require(same_rows(stored_view<const T>(values), expected), "the rows have the bits of the whole call's");
        }
    }
    if (!whole.log_sum_exp.data()) {
        const auto rows = attend(over, ranks, own, executor);
        require(same_rows(rows.view(), expected), "the rows have the bits of the whole call's");
        return;
    }
    tensor<T> values(expected.shape()), log_sum_exp(log_sum_exp_shape(op, shapes_of(own)));
    workspace memory(workspace_bytes<T>(over, rank, executor));
    attend(over, ranks, own, outputs<T>{values, log_sum_exp}, execution(executor, memory));
    require(same_rows(values.view(), expected), "the rows have the bits of the whole call's");
    require(same_rows(log_sum_exp.view(), whole.log_sum_exp.slice({.tokens = q})), "log_sum_exp has the bits of the whole call's");
}

} // namespace attn::testing
