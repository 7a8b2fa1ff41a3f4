// Joins results of softmax attention row by row.
#pragma once

#include "../../core/stored_view.hpp"
#include "../../simd/unfused.hpp"
#include "softmax_state.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The weights e^(x - maximum) of a row, summed. The sum is 0 where nothing was seen.
template <Scalar T>
struct row_weights {
    T maximum, sum;

    static row_weights of(T log_sum_exp) { return {log_sum_exp, log_sum_exp == -std::numeric_limits<T>::infinity() ? T{0} : T{1}}; }
    T log_sum_exp() const { return softmax_merge<T>::log_sum_exp(maximum, sum); }
};

/// One row of so many channels of what merge does, and what its weights are then. What a row that saw nothing holds is not looked at.
template <Scalar T>
row_weights<T> merge_row(const stored_rows<T>& into, const row_weights<T>& known, const stored_rows<const T>& from,
                         const row_weights<T>& added, index_t channels) {
    const softmax_merge<T> merged(known.maximum, known.sum, added.maximum, added.sum);
    const auto number = [](const auto& lanes) {
        T first = 0;
        lanes.store_first(&first, 1);
        return first;
    };
    const T a_share = number(merged.a), b_share = number(merged.b);
    const bool reads_into = known.sum != 0, reads_from = added.sum != 0;
    const auto merged_number = [&](T a, T b) {
        return (reads_into ? simd::unfused(a_share * a) : T{0}) + (reads_from ? simd::unfused(b_share * b) : T{0});
    };
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

} // namespace attn::kernel
