// Which keys travel to whom, and in which order: from the pattern's range arithmetic, the same on every rank.
#pragma once

#include "../kernel/softmax/mainloop.hpp"

#include <bit>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// The rows from `first` to `end`; none if there are none.
constexpr row_range rows_between(index_t first, index_t end) { return end > first ? row_range{first, end - first} : row_range{}; }
constexpr row_range common_rows(const row_range& a, const row_range& b) {
    return rows_between(std::max(a.first, b.first), std::min(a.end(), b.end()));
}
/// The rows from the first row of two ranges to the last.
constexpr row_range spanned_rows(const row_range& a, const row_range& b) {
    if (a.count == 0 || b.count == 0) return a.count == 0 ? b : a;
    return rows_between(std::min(a.first, b.first), std::max(a.end(), b.end()));
}

/// The first row of first .. end - 1 of which none_of(first, end) does not hold; `end` if it holds of all.
index_t first_possible(index_t first, index_t end, const auto& none_of) {
    if (none_of(first, end)) return end;
    if (end - first == 1) return first;
    const auto middle = first + (end - first) / 2;
    const auto found = first_possible(first, middle, none_of);
    return found < middle ? found : first_possible(middle, end, none_of);
}
/// The rows from the first to the last of which none_of does not hold; none if it holds of all.
row_range possible_rows(const row_range& all, const auto& none_of) {
    if (all.count == 0) return {};
    const auto first = first_possible(all.first, all.end(), none_of);
    if (first == all.end()) return {};
    const auto from_end = [&](index_t a, index_t b) { return none_of(-b, -a); };
    return rows_between(first, -first_possible(-all.end(), -first, from_end));
}

/// A number of numbers, which ranks compare to see that they have the same.
class mixed_numbers {
public:
    void mix(std::same_as<index_t> auto... numbers) { ((sum_ = (sum_ ^ static_cast<std::uint64_t>(numbers)) * 0x100000001b3), ...); }
    index_t number() const { return static_cast<index_t>(sum_ >> 1); }

private:
    std::uint64_t sum_ = 0xcbf29ce484222325;
};

/// Rows that each of some ranks holds: those between neighbouring cuts.
struct row_cuts {
    std::vector<index_t> cuts; ///< ranks + 1

    index_t ranks() const { return std::ssize(cuts) - 1; }
    row_range of(index_t rank) const {
        const auto r = static_cast<std::size_t>(rank);
        return {cuts[r], cuts[r + 1] - cuts[r]};
    }
};

/// Keys that are attended to at a time, by all ranks one run after the other: whole spans of the engine, so that they merge to the bits of
/// one call.
struct key_piece {
    index_t pass;   ///< of a union of patterns
    row_range rows; ///< of the keys
};

/// Rows of keys that go from one rank to another.
struct key_transfer {
    index_t owner; ///< who holds them
    index_t from, to;
    index_t hop; ///< 1 where `from` is the owner, 2 where it has them from the owner, and so on
    row_range rows;
};

/// What a call's queries see of its keys, by the pattern's range arithmetic.
struct call_visibility {
    const kernel::visible_keys& visible;
    const shape& queries;
    index_t first_query, first_key; ///< positions of the first rows

    index_t heads() const { return visible.heads_alike() ? std::min<index_t>(1, queries.heads) : queries.heads; }
    /// Whether some queries see none of some keys in the passes first_pass .. end_pass - 1, in any batch entry and head; both are rows, at
    /// least one.
    bool is_none(const row_range& of_queries, const row_range& keys, index_t first_pass, index_t end_pass) const {
        for (index_t b = 0; b < queries.batch; ++b)
            for (index_t h = 0; h < heads(); ++h)
                for (auto pass = first_pass; pass < end_pass; ++pass) {
                    const kernel::query_block block{
                        .batch = b, .first_head = h, .tokens = {first_query + of_queries.first, of_queries.count, 1}};
                    if (!visible.of_box(block, pass, {first_key + keys.first, first_key + keys.end() - 1, 1}).is_none()) return false;
                }
        return true;
    }
};

/// The pieces of a call, and what every rank sees of each.
class key_plan {
public:
    /// Keys of a piece at least, unless there are fewer: so many that they are worth a message.
    static constexpr index_t usual_keys = 4096;

    /// The plan of a call on the whole sequence: of pieces for each pass, or of the same for all passes, where a call takes them in any
    /// order and all passes of one at a time.
    key_plan(const call_visibility& call, const row_cuts& query_cuts, const row_cuts& key_cuts, bool all_passes_at_once = false)
        : key_cuts_(key_cuts) {
        for (index_t rank = 0; rank < query_cuts.ranks(); ++rank) paces_.push_back(pace_of(query_cuts.of(rank).count));
        if (all_passes_at_once) add_pieces(call, query_cuts, 0, call.visible.passes(), 1);
        for (index_t pass = 0; pass < call.visible.passes() && !all_passes_at_once; ++pass) {
            index_t step = 0;
            for (index_t b = 0; b < call.queries.batch; ++b)
                for (index_t h = 0; h < call.heads(); ++h)
                    if (const auto own = call.visible.step(b, h, pass); own > 0) step = step == 0 ? own : common_multiple(step, own);
            if (step > 0) add_pieces(call, query_cuts, pass, pass + 1, step);
        }
    }

    /// All keys in one piece, of which each rank needs some rows.
    key_plan(const row_cuts& key_cuts, const std::vector<row_range>& needed)
        : key_cuts_(key_cuts), pieces_{{0, {0, key_cuts.cuts.back()}}}, seen_(needed) {}

    /// The keys that a rank holds.
    row_range held(index_t rank) const { return key_cuts_.of(rank); }
    index_t pieces() const { return std::ssize(pieces_); }
    const key_piece& piece(index_t number) const { return pieces_[static_cast<std::size_t>(number)]; }
    /// The keys of a piece from the first that a rank's queries see to the last.
    row_range seen(index_t number, index_t rank) const { return seen_[static_cast<std::size_t>(number * key_cuts_.ranks() + rank)]; }
    /// A number that ranks compare to see that they have the same plan.
    index_t fingerprint() const {
        mixed_numbers all;
        for (const auto cut : key_cuts_.cuts) all.mix(cut);
        for (const auto& [pass, rows] : pieces_) all.mix(pass, rows.first, rows.count);
        for (const auto& rows : seen_) all.mix(rows.first, rows.count);
        return all.number();
    }
    /// Calls f(transfer) for the transfers of a piece: each rank receives what it sees and does not hold. What several see goes round from
    /// one to the next, beginning with who holds it, so that none has to send it to all. A round goes at the pace of its slowest rank, who
    /// keeps a piece until the next one takes it: so it ends, and the holder begins another one, before a rank with fewer or more queries,
    /// by an eighth or so; and before one who sees what the one before it does not.
    void for_each_transfer(index_t number, const auto& f) const {
        const auto ranks = key_cuts_.ranks();
        for (index_t owner = 0; owner < ranks; ++owner) {
            const auto held = common_rows(piece(number).rows, key_cuts_.of(owner));
            index_t before = owner, hop = 0; // who received them last, at which hop
            auto of_before = held;
            for (index_t around = 1; around < ranks && held.count > 0; ++around) {
                const auto rank = (owner + around) % ranks;
                const auto rows = common_rows(seen(number, rank), held);
                if (rows.count == 0) continue;
                if (hop > 0 && (common_rows(of_before, rows) != rows || pace(before) != pace(rank))) before = owner, hop = 0;
                f(key_transfer{owner, before, rank, ++hop, rows});
                before = rank, of_before = rows;
            }
        }
    }
    /// Calls f(transfer) for those transfers of a piece that go from a rank or to it.
    void for_each_transfer_of(index_t number, index_t rank, const auto& f) const {
        for_each_transfer(number, [&](const key_transfer& t) {
            if (t.from == rank || t.to == rank) f(t);
        });
    }
    /// Whether a rank sees rows of a piece that it does not hold.
    bool receives(index_t number, index_t rank) const { return common_rows(seen(number, rank), key_cuts_.of(rank)) != seen(number, rank); }
    /// The rows from the first that a rank holds and others see to the last.
    row_range sent(index_t rank) const {
        row_range rows;
        for (index_t number = 0; number < pieces(); ++number)
            for (index_t other = 0; other < key_cuts_.ranks(); ++other)
                if (other != rank) rows = spanned_rows(rows, common_rows(seen(number, other), held(rank)));
        return rows;
    }

private:
    /// The pace of a rank, a number that those of about as many queries share: their first four binary digits, and how many there are.
    index_t pace(index_t rank) const { return paces_.empty() ? 0 : paces_[static_cast<std::size_t>(rank)]; }
    static index_t pace_of(index_t queries) {
        const auto dropped = std::max(0, static_cast<int>(std::bit_width(static_cast<std::uint64_t>(queries))) - 4);
        return 16 * dropped + (queries >> dropped);
    }
    /// Adds the pieces of which some rank sees something, in the passes first_pass .. end_pass - 1.
    void add_pieces(const call_visibility& call, const row_cuts& query_cuts, index_t first_pass, index_t end_pass, index_t step) {
        const auto keys = key_cuts_.cuts.back(), length = piece_length(step);
        for (index_t first = 0; first < keys;) {
            const auto end = std::min(keys, (floor_div(call.first_key + first, length) + 1) * length - call.first_key);
            bool seen = false;
            for (index_t rank = 0; rank < query_cuts.ranks(); ++rank) {
                const auto own = query_cuts.of(rank);
                const auto none_of = [&](index_t from, index_t to) { return call.is_none(own, {from, to - from}, first_pass, end_pass); };
                const auto rows = own.count > 0 ? possible_rows({first, end - first}, none_of) : row_range{};
                seen = seen || rows.count > 0;
                seen_.push_back(rows);
            }
            if (seen) pieces_.push_back({first_pass, {first, end - first}});
            else seen_.resize(seen_.size() - static_cast<std::size_t>(query_cuts.ranks()));
            first = end;
        }
    }
    /// A multiple of the spans of all residue classes.
    static index_t piece_length(index_t step) {
        constexpr auto span = kernel::softmax_call<float>::block_keys * kernel::visible_span::max_blocks;
        if (step > farthest_position / span) return 2 * farthest_position;
        return span * step * std::max<index_t>(1, usual_keys / (span * step));
    }

    row_cuts key_cuts_;
    std::vector<key_piece> pieces_;
    std::vector<row_range> seen_; ///< [pieces][ranks]
    std::vector<index_t> paces_;  ///< of each rank, if they matter
};

} // namespace detail

} // namespace attn
