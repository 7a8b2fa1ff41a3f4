// Queries of a sequence, as its cache has keys.
#pragma once

#include "sequence.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Queries at the positions from first_query on, which are rotated where the pool rotates keys before they are quantised, and turned where
/// keys are turned when they are read.
template <Scalar T>
class turned_queries {
public:
    turned_queries(const stored_view<const T>& queries, index_t first_query, const sequence<T>& of)
        : queries_(queries), turns_(of.turns_from(first_query)), of_(of) {}

    /// Whether they are others than those that are given.
    bool are_others() const { return of_.pool().layout().rotates_keys || turns_.turn_rows(); }
    /// Throws argument_error unless the table has the positions of the queries and of the keys.
    void check(std::string_view operation) const {
        check_rows(operation, of_.turns_from(0), of_.size());
        check_rows(operation, turns_, queries_.shape().tokens);
    }
    /// Writes them to a tensor of their shape, whose channels lie side by side.
    void write(const tensor_view<T>& to) const {
        if (of_.pool().layout().rotates_keys) return rotate_rows(queries_, to);
        const auto& q = queries_.shape();
        for (index_t h = 0; h < q.heads; ++h) {
            kernel::copy_rows<T>(queries_.rows(0, h), q.tokens, q.channels, to.row(0, h, 0), q.channels);
            turns_.turn(0, q.tokens, 1, 1, [&](index_t i) { return to.row(0, h, i); });
        }
    }

private:
    void check_rows(std::string_view operation, const kernel::row_turns<T>& turns, index_t rows) const {
        if (!turns.turn_rows() || rows == 0) return;
        const auto check_row = [&](index_t row) {
            turns.for_each_place(row, 1, 1, [&](index_t, index_t place) {
                if (place < 0 || place >= turns.table.positions)
                    detail::raise(argument_error(operation, "q", "has shape ", queries_.shape(),
                                                 ", for which a query or key is turned as at position ", place,
                                                 ", but the pool's rotary has 0 to ", turns.table.positions - 1));
            });
        };
        check_row(0);
        check_row(rows - 1);
    }

    stored_view<const T> queries_;
    kernel::row_turns<T> turns_;
    const sequence<T>& of_;
};

/// f(the pattern, without the keys that a sequence has lost, of those that a call reads).
template <Scalar T, Pattern P>
auto with_kept_keys(const sequence<T>& of, const P& pattern, const auto& f) {
    const auto all = of.evicted();
    const auto lost = std::ranges::find_if(all, [&](const row_range& range) { return range.end() > of.positions().first; });
    return lost == all.end() ? f(pattern) : f(pattern & kept_keys{{lost, all.end()}});
}

} // namespace attn::detail
