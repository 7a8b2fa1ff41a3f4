// Joins results of softmax attention over disjoint sets of keys.
#pragma once

#include "../kernel/attend/merge_row.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Merges the result of one set of keys into that of another: with log-sum-exps a and b, and l = ln(e^a + e^b), each row becomes
///     into = into e^(a - l) + from e^(b - l),   log_sum_exp = l
/// which is attention over both sets, if no key is in both. A sink belongs to one of them only. Rows that saw nothing add nothing, whatever
/// they hold. Both need their log_sum_exp. Throws shape_error, before anything is written, if shapes differ, a log_sum_exp is missing, or
/// `into` overlaps `from` or itself.
/// The result is the same, bit by bit, for every executor and number of threads.
template <Scalar T>
void merge(const outputs<T>& into, const outputs<T>& from, const detail::call_execution& run = {}) {
    constexpr std::string_view name = "merge";
    const auto& s = into.values.shape();
    const shape rows{s.batch, s.heads, s.tokens, 1};
    detail::check_view(name, "into", into.values);
    detail::check_view(name, "from", from.values);
    if (from.values.shape() != s) detail::refuse(name, "from", from.values.shape(), "into", s, "the shapes differ");
    if (into.log_sum_exp.shape() != rows || from.log_sum_exp.shape() != rows)
        detail::raise(shape_error(name, "log_sum_exp", "has shapes ", into.log_sum_exp.shape(), " and ", from.log_sum_exp.shape(),
                                  ", but both must have ", rows));
    detail::check_view(name, "into.log_sum_exp", into.log_sum_exp);
    detail::check_view(name, "from.log_sum_exp", from.log_sum_exp);
    const auto &into_log = into.log_sum_exp, &from_log = from.log_sum_exp;
    if (overlap(into.values, from.values) || overlap(into_log, from_log) || overlap(into.values, from_log) ||
        overlap(into_log, from.values) || overlap(into.values, into_log))
        detail::raise(shape_error(name, "into", "overlaps from"));
    detail::check_writable(name, "into", into.values);
    detail::check_writable(name, "into", into_log);
    constexpr index_t rows_of_a_task = 64;
    const auto parts = (s.tokens + rows_of_a_task - 1) / rows_of_a_task;
    run.for_each(s.batch * s.heads * parts, [&](index_t task, index_t) {
        const auto b = task / parts / s.heads, h = task / parts % s.heads, first = task % parts * rows_of_a_task;
        using weights = kernel::row_weights<T>;
        for (index_t i = first; i < std::min(s.tokens, first + rows_of_a_task); ++i) {
            auto& log = into.log_sum_exp(b, h, i, 0);
            log = kernel::merge_row<T>(into.values.rows(b, h, i), weights::of(log), stored_view<const T>(from.values).rows(b, h, i),
                                       weights::of(from.log_sum_exp(b, h, i, 0)), s.channels)
                      .log_sum_exp();
        }
    });
}

} // namespace attn
