// The tokens that a projection along the sequence reads: rows of channels, some of them hidden.
#pragma once

#include "../tile_loader.hpp"

#include <algorithm>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Tokens first .. end - 1.
struct token_range {
    index_t first, end;
};

/// The tokens of one batch entry and head, rows of channels.
template <Scalar T>
struct token_rows {
    stored_rows<const T> rows;
    index_t count, channels;
    const bool* seen = nullptr; ///< which tokens are visible, a hidden one is not read; null if all are

    bool visible(index_t token) const { return !seen || seen[token]; }
    bool any_visible(const token_range& r) const {
        return seen ? std::find(seen + r.first, seen + r.end, true) != seen + r.end : r.first < r.end;
    }
    index_t count_visible(const token_range& r) const { return seen ? std::count(seen + r.first, seen + r.end, true) : r.end - r.first; }
    T operator()(index_t token, index_t channel) const { return rows(token, channel); }

    /// Calls visit(first, count) for each run of visible tokens of first .. end - 1.
    void for_each_run(index_t first, index_t end, const auto& visit) const {
        if (!seen) return visit(first, end - first);
        while (first < end) {
            const auto* const from = std::find(seen + first, seen + end, true);
            const auto* const to = std::find(from, seen + end, false);
            if (from != to) visit(static_cast<index_t>(from - seen), static_cast<index_t>(to - from));
            first = to - seen;
        }
    }
};

/// A head's projected rows are made by so many at a time, each of which reads all of its tokens.
inline constexpr index_t projected_rows_of_task = 384;

/// How many projected rows the head with most has.
index_t most_rows(const auto& projection, const shape& tokens) {
    index_t most = 0;
    for (index_t h = 0; h < tokens.heads; ++h) most = std::max(most, projection.size(h, tokens.tokens));
    return most;
}

/// One register of the channels of token number `token` from channel c on, `present` of them: the same numbers whatever the layout.
template <Scalar T>
[[gnu::always_inline]] inline simd::lanes<T> load_channels(const token_rows<T>& tokens, index_t token, index_t c, index_t present) {
    using lanes = simd::lanes<T>;
    const auto& rows = tokens.rows;
    if (!rows.is_narrow()) return load_channels<T>(rows.numbers().address(token), rows.channel_stride, c, present);
    if (rows.channel_stride == 1 && present >= lanes::size) {
        lanes result = T{0};
        as_they_lie(rows, [&](const auto& own) { result = load_lanes(own, token, c); });
        return result;
    }
    T numbers[lanes::size] = {};
    for (index_t l = 0; l < std::min<index_t>(present, lanes::size); ++l) numbers[l] = tokens(token, c + l);
    return lanes::load(numbers);
}

/// to[c] = finish(the last of the registers that begin as begin(c) and become add(register, token, x, c) with each visible token of the
/// range), x being the token's channels from c on: one pass over the tokens for each register.
template <Scalar T, class Begin, class Add, class Finish>
void reduce_tokens(const token_rows<T>& tokens, const token_range& range, T* to, const Begin& begin, const Add& add, const Finish& finish) {
    using lanes = simd::lanes<T>;
    for (index_t c = 0; c < tokens.channels; c += lanes::size) {
        const auto present = tokens.channels - c;
        lanes result = begin(c, present);
        for (index_t j = range.first; j < range.end; ++j)
            if (tokens.visible(j)) result = add(result, j, load_channels<T>(tokens, j, c, present), c, present);
        result = finish(result);
        if (present >= lanes::size) result.store(to + c);
        else result.store_first(to + c, present);
    }
}

/// row[c] becomes f(row's register from c on, c, present), a register at a time: the same numbers whatever the layout.
template <Scalar T, class F>
void update_channels(T* row, index_t channel_stride, index_t channels, const F& f) {
    using lanes = simd::lanes<T>;
    for (index_t c = 0; c < channels; c += lanes::size) {
        const auto present = channels - c;
        const lanes result = f(load_channels<T>(row, channel_stride, c, present), c, present);
        if (channel_stride == 1 && present >= lanes::size) {
            result.store(row + c);
        } else if (channel_stride == 1) {
            result.store_first(row + c, present);
        } else {
            T numbers[lanes::size];
            result.store(numbers);
            for (index_t l = 0; l < std::min<index_t>(present, lanes::size); ++l) row[(c + l) * channel_stride] = numbers[l];
        }
    }
}
/// row[c] += added[c].
template <Scalar T>
void add_channels(T* row, index_t channel_stride, index_t channels, const T* added) {
    update_channels(row, channel_stride, channels,
                    [&](auto sum, index_t c, index_t present) { return sum + load_channels<T>(added, 1, c, present); });
}

} // namespace attn::kernel
