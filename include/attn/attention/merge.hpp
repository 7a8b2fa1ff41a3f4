// Joins results of softmax attention over disjoint sets of keys.
#pragma once

#include "../kernel/softmax/softmax_state.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// The weights e^(x - maximum) of a row, summed. The sum is 0 where nothing was seen.
template <Scalar T>
struct row_weights {
    T maximum, sum;

    static row_weights of(T log_sum_exp) { return {log_sum_exp, log_sum_exp == -std::numeric_limits<T>::infinity() ? T{0} : T{1}}; }
    T log_sum_exp() const { return kernel::softmax_merge<T>::log_sum_exp(maximum, sum); }
};

/// One row of so many channels of what merge does, and what its weights are then. What a row that saw nothing holds is not looked at.
template <Scalar T>
row_weights<T> merge_row(const stored_rows<T>& into, const row_weights<T>& known, const stored_rows<const T>& from,
                         const row_weights<T>& added, index_t channels) {
    const kernel::softmax_merge<T> merged(known.maximum, known.sum, added.maximum, added.sum);
    const auto number = [](const auto& lanes) {
        T first = 0;
        lanes.store_first(&first, 1);
        return first;
    };
    const T a_share = number(merged.a), b_share = number(merged.b);
    const bool reads_into = known.sum != 0, reads_from = added.sum != 0;
    const auto merged_number = [&](T a, T b) { return (reads_into ? a_share * a : T{0}) + (reads_from ? b_share * b : T{0}); };
    if (into.is_narrow() || from.is_narrow()) {
        for (index_t c = 0; c < channels; ++c) into.set(0, c, merged_number(into(0, c), from(0, c)));
    } else {
        T* const to = into.numbers().data;
        const T* const other = from.numbers().data;
        for (index_t c = 0; c < channels; ++c)
            to[c * into.channel_stride] = merged_number(to[c * into.channel_stride], other[c * from.channel_stride]);
    }
    return {number(merged.maximum), number(merged.sum)};
}

} // namespace detail

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
        throw shape_error(name, "log_sum_exp",
                          "has shapes " + to_string(into.log_sum_exp.shape()) + " and " + to_string(from.log_sum_exp.shape()) +
                              ", but both must have " + to_string(rows));
    detail::check_view(name, "into.log_sum_exp", into.log_sum_exp);
    detail::check_view(name, "from.log_sum_exp", from.log_sum_exp);
    const auto &into_log = into.log_sum_exp, &from_log = from.log_sum_exp;
    if (overlap(into.values, from.values) || overlap(into_log, from_log) || overlap(into.values, from_log) ||
        overlap(into_log, from.values) || overlap(into.values, into_log))
        throw shape_error(name, "into", "overlaps from");
    detail::check_writable(name, "into", into.values);
    detail::check_writable(name, "into", into_log);
    constexpr index_t rows_of_a_task = 64;
    const auto parts = (s.tokens + rows_of_a_task - 1) / rows_of_a_task;
    run.for_each(s.batch * s.heads * parts, [&](index_t task, index_t) {
        const auto b = task / parts / s.heads, h = task / parts % s.heads, first = task % parts * rows_of_a_task;
        using weights = detail::row_weights<T>;
        for (index_t i = first; i < std::min(s.tokens, first + rows_of_a_task); ++i) {
            auto& log = into.log_sum_exp(b, h, i, 0);
            log = detail::merge_row<T>(into.values.rows(b, h, i), weights::of(log), stored_view<const T>(from.values).rows(b, h, i),
                                       weights::of(from.log_sum_exp(b, h, i, 0)), s.channels)
                      .log_sum_exp();
        }
    });
}

} // namespace attn
