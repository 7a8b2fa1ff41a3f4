// Joins results of softmax attention over disjoint sets of keys.
#pragma once

#include "../kernel/softmax/softmax_state.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Merges the result of one set of keys into that of another: with log-sum-exps a and b, and l = ln(e^a + e^b), each row becomes
///     into = into e^(a - l) + from e^(b - l),   log_sum_exp = l
/// which is attention over both sets, if no key is in both. A sink belongs to one of them only. Rows that saw nothing add nothing.
/// Both need their log_sum_exp. Throws shape_error, before anything is written, if shapes differ, a log_sum_exp is missing, or `into` overlaps
/// `from` or itself.
template <Scalar T>
void merge(const outputs<T>& into, const outputs<T>& from) {
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
    for (index b = 0; b < s.batch; ++b)
        for (index h = 0; h < s.heads; ++h)
            for (index i = 0; i < s.tokens; ++i) {
                const auto saw = [](T log_sum_exp) { return log_sum_exp == -std::numeric_limits<T>::infinity() ? T{0} : T{1}; };
                const T into_log = into.log_sum_exp(b, h, i, 0), from_log = from.log_sum_exp(b, h, i, 0);
                const kernel::softmax_merge<T, simd::native> merged(into_log, saw(into_log), from_log, saw(from_log));
                const auto number = [](const auto& lanes) {
                    T first = 0;
                    lanes.store_first(&first, 1);
                    return first;
                };
                const T a_share = number(merged.a), b_share = number(merged.b);
                for (index c = 0; c < s.channels; ++c)
                    into.values(b, h, i, c) = a_share * into.values(b, h, i, c) + b_share * from.values(b, h, i, c);
                into.log_sum_exp(b, h, i, 0) = merged.log_sum_exp(number(merged.maximum), number(merged.sum));
            }
}

} // namespace attn
