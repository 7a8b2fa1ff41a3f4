// Joins results of softmax attention over disjoint sets of keys.
#pragma once

#include "../kernel/softmax/softmax_state.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// One row of what merge does: so many channels, into_stride and from_stride apart.
template <Scalar T>
void merge_row(T* into, index_t into_stride, T& into_log, const T* from, index_t from_stride, T from_log, index_t channels) {
    const auto saw = [](T log_sum_exp) { return log_sum_exp == -std::numeric_limits<T>::infinity() ? T{0} : T{1}; };
    const kernel::softmax_merge<T, simd::native> merged(into_log, saw(into_log), from_log, saw(from_log));
    const auto number = [](const auto& lanes) {
        T first = 0;
        lanes.store_first(&first, 1);
        return first;
    };
    const T a_share = number(merged.a), b_share = number(merged.b);
    for (index_t c = 0; c < channels; ++c) into[c * into_stride] = a_share * into[c * into_stride] + b_share * from[c * from_stride];
    into_log = merged.log_sum_exp(number(merged.maximum), number(merged.sum));
}

} // namespace detail

/// Merges the result of one set of keys into that of another: with log-sum-exps a and b, and l = ln(e^a + e^b), each row becomes
///     into = into e^(a - l) + from e^(b - l),   log_sum_exp = l
/// which is attention over both sets, if no key is in both. A sink belongs to one of them only. Rows that saw nothing add nothing.
/// Both need their log_sum_exp. Throws shape_error, before anything is written, if shapes differ, a log_sum_exp is missing, or `into` overlaps
/// `from` or itself.
/// The result is the same, bit by bit, for every executor and number of threads.
template <Scalar T>
void merge(const outputs<T>& into, const outputs<T>& from, const execution& run) {
    constexpr std::string_view name = "merge";
    const auto& s = into.values.shape();
    const shape rows{s.batch, s.heads, s.tokens, 1};
    detail::check_view(name, "into", into.values);
    detail::check_view(name, "from", from.values);
    if (from.values.shape() != s) detail::refuse(name, "from", from.values.shape(), "into", s, "the shapes differ");
    if (into.log_sum_exp.shape() != rows || from.log_sum_exp.shape() != rows)
        throw shape_error(name, "log_sum_exp", "has shapes " + to_string(into.log_sum_exp.shape()) + " and " + to_string(from.log_sum_exp.shape()) +
                                                   ", but both must have " + to_string(rows));
    detail::check_view(name, "into.log_sum_exp", into.log_sum_exp);
    detail::check_view(name, "from.log_sum_exp", from.log_sum_exp);
    if (overlap(into.values, from.values) || overlap(into.log_sum_exp, from.log_sum_exp) || overlap(into.values, from.log_sum_exp) ||
        overlap(into.log_sum_exp, from.values) || overlap(into.values, into.log_sum_exp))
        throw shape_error(name, "into", "overlaps from");
    if (overlaps_itself(into.values) || overlaps_itself(into.log_sum_exp))
        throw shape_error(name, "into", "of shape " + to_string(s) + " has strides by which its elements overlap");
    constexpr index_t rows_of_a_task = 64;
    const auto parts = (s.tokens + rows_of_a_task - 1) / rows_of_a_task;
    run.for_each(s.batch * s.heads * parts, [&](index_t task, index_t) {
        const auto b = task / parts / s.heads, h = task / parts % s.heads, first = task % parts * rows_of_a_task;
        for (index_t i = first; i < std::min(s.tokens, first + rows_of_a_task); ++i)
            detail::merge_row(into.values.row(b, h, i), into.values.strides().channels, into.log_sum_exp(b, h, i, 0), from.values.row(b, h, i),
                              from.values.strides().channels, from.log_sum_exp(b, h, i, 0), s.channels);
    });
}

/// The same.
template <Scalar T, ExecutorArgument E = sequential>
void merge(const outputs<T>& into, const outputs<T>& from, E&& executor = {}) {
    workspace none;
    merge(into, from, execution(executor, none));
}

} // namespace attn
