// A call over ranks beside the same call on one machine, and that they have the same bits.
#pragma once

#include "answers.hpp"
#include "communicator_checks.hpp"

#include <attn/distributed/sequence_parallel.hpp>
#include <attn/parallel/thread_pool.hpp>

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

/// Throws if numbers differ in a bit.
template <Scalar T>
void require_same(const stored_view<const T>& ours, const stored_view<const T>& expected, const char* promise) {
    bool all_same = true;
    detail::for_each_number(expected.shape(), [&](index_t batch, index_t h, index_t i, index_t c) {
        const T x = ours(batch, h, i, c), y = expected(batch, h, i, c);
        all_same &= same_bits(x, y);
    });
    require(all_same, promise);
}

/// On one rank of so many threads: its rows of the call, next to those of the whole one. Every rank has all inputs, but gives the call its own.
template <Scalar T, Communicator C>
void check_rank(const auto& op, C& ranks, const partition& parts, const inputs<T>& all, const outputs<T>& whole, index_t threads) {
    const auto q = parts.queries(ranks.rank()), k = parts.keys(ranks.rank());
    const rank_rows<T> own_queries(all.queries, q), own_keys(all.keys, k), own_values(all.values, k);
    const inputs<T> own{own_queries.view, own_keys.view, own_values.view};
    const stored_view<const T> expected = whole.values.slice({.tokens = q});
    auto own_op = op;
    if constexpr (requires { op.convolution_input; })
        if (op.convolution_input.data()) own_op.convolution_input = tokens_of<T>(op.convolution_input, q);
    const sequence_parallel over{own_op, parts};
    thread_pool pool(threads);
    constexpr auto promise = "the rows have the bits of the whole call's";
    if constexpr (std::same_as<T, float>) {
        if (expected.is_narrow()) {
            tensor<Eigen::bfloat16> values(expected.shape());
            attend(over, ranks, own, outputs<T>{values}, pool);
            return require_same<T>(values, expected, promise);
        }
    }
    if (!whole.log_sum_exp.data()) {
        const auto values = attend(over, ranks, own, pool);
        return require_same<T>(values, expected, promise);
    }
    tensor<T> values(expected.shape()), log_sum_exp(log_sum_exp_shape(op, shapes_of(own)));
    workspace memory(workspace_bytes<T>(over, ranks.rank(), pool));
    attend(over, ranks, own, outputs<T>{values, log_sum_exp}, execution(pool, memory));
    require_same<T>(values, expected, promise);
    require_same<T>(log_sum_exp, whole.log_sum_exp.slice({.tokens = q}), "log_sum_exp has the bits of the whole call's");
}

} // namespace attn::testing
