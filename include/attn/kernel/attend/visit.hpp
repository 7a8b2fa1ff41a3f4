// The walk over what is seen: which blocks of keys a tile of queries visits, and what each of its rows sees of them. All kernels of softmax
// attention and of talking heads, and their gradients, take it.
#pragma once

#include "key_reader.hpp"
#include "visible_keys.hpp"

#include <algorithm>
#include <limits>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Calls f(number, full) for those of the numbers from .. end - 1 of which something is seen, in order, found by bisection: box(from, end)
/// tells what is known of some of them together. full: all of it is seen.
void for_each_visible(index_t from, index_t end, const auto& box, const auto& f) {
    if (from >= end) return;
    const visibility seen = box(from, end);
    if (seen.is_none()) return;
    if (end - from > 1 && !seen.is_all()) {
        const auto middle = from + (end - from) / 2;
        for_each_visible(from, middle, box, f);
        for_each_visible(middle, end, box, f);
    } else {
        for (; from < end; ++from) f(from, seen.is_all());
    }
}

/// Calls f(keys) for those of the key blocks from .. end - 1 that some row of some head sees something of, in order. keys.full: all rows
/// see all of it.
void for_each_visible_block(const visible_keys& pattern, const query_block& queries, index_t pass, const key_blocks& blocks, index_t from,
                            index_t end, const auto& f) {
    const auto box = [&](index_t first, index_t last) { return pattern.of_box(queries, pass, blocks.run(first, last).positions()); };
    for_each_visible(from, end, box, [&](index_t block, bool full) {
        auto keys = blocks.run(block, block + 1);
        keys.full = full;
        f(keys);
    });
}

/// The first of the key blocks from .. end - 1 that some row of some head sees something of; `end` if there is none. It is looked for in
/// twice as many blocks each time, and in half as many where something is seen: at once from the guess, if nothing is seen before that.
inline index_t first_visible_block(const visible_keys& pattern, const query_block& queries, index_t pass, const key_blocks& blocks,
                                   index_t from, index_t end, index_t guess = 0) {
    const auto sees_none = [&](index_t first, index_t last) {
        return pattern.of_box(queries, pass, blocks.run(first, last).positions()).is_none();
    };
    if (from < guess && guess < end && sees_none(from, guess)) from = guess;
    for (index_t width = 1; from < end;) {
        const auto last = std::min(from + width, end);
        if (sees_none(from, last)) {
            from = last;
            width *= 2;
        } else if (last - from == 1) {
            return from;
        } else {
            width = (last - from) / 2;
        }
    }
    return end;
}

/// Keys, and what the rows of a query block see of them.
struct visible_run {
    key_run keys;                           ///< from the first that some row sees to the last
    std::uint64_t* rows;                    ///< [count] one bit per row; null if all see all
    index_t count;                          ///< keys
    const std::uint8_t* gathered = nullptr; ///< [count] the numbers of those of the run that are left; null if all are

    /// Forgets what rows see if all rows of the block see all keys that are left.
    void simplify(index_t rows_of_block) {
        const auto all = bit_range(0, rows_of_block);
        if (std::all_of(rows, rows + count, [&](std::uint64_t seen) { return seen == all; })) rows = nullptr;
    }
    /// Leaves out what no row sees, if that is most of the keys: a copy is made of those that are left. numbers: memory for them.
    void gather(index_t rows_of_block, std::uint8_t* numbers) {
        if (!rows) return;
        const auto seen = keys.count - std::count(rows, rows + keys.count, std::uint64_t{0});
        if (4 * seen > keys.count) return;
        count = 0;
        for (index_t j = 0; j < keys.count; ++j) {
            if (rows[j] == 0) continue;
            rows[count] = rows[j];
            numbers[count++] = static_cast<std::uint8_t>(j);
        }
        gathered = numbers;
        simplify(rows_of_block);
    }
    /// Calls f(first, keys) for the runs of keys that are left, `first` of them before these.
    void for_each_run(const auto& f) const {
        if (!gathered) return f(index_t{0}, keys);
        for (index_t first = 0, end; first < count; first = end) {
            for (end = first + 1; end < count && gathered[end] == gathered[end - 1] + 1;) ++end;
            f(first, key_run{keys.first + gathered[first] * keys.step, end - first, keys.step, false});
        }
    }
};

/// The keys of a run from the first that some row sees to the last: none if nothing is seen. bits: [keys] memory for what the rows see.
inline visible_run visible_run_of(const visible_keys& pattern, const query_block& queries, index_t pass, key_run keys,
                                  std::uint64_t* bits) {
    if (keys.full) return {keys, nullptr, keys.count};
    pattern.find(queries, pass, keys, bits);
    while (keys.count > 0 && bits[keys.count - 1] == 0) --keys.count;
    for (; keys.count > 0 && *bits == 0; --keys.count, ++bits) keys.first += keys.step;
    visible_run run{keys, bits, keys.count};
    run.simplify(queries.rows());
    return run;
}

/// What a query block sees of one span of keys, found once for all heads that see the same: a run of keys for each key block that some row
/// sees something of, and one bit per row for each key where not every row sees all.
class visible_span {
public:
    /// Spans of at most max_blocks key blocks.
    static constexpr index_t max_blocks = 8;

    visible_span() = default;
    /// gathers: where few of a block's keys are seen, the others are left out.
    visible_span(detail::scratch& memory, index_t block_keys, bool gathers)
        : block_keys_(block_keys), bits_(memory.take<std::uint64_t>(max_blocks, block_keys)), gathers_(gathers),
          numbers_(memory.take<std::uint8_t>(gathers ? max_blocks : 0, block_keys)) {}

    void forget() { asked_from_ = none; }
    /// The first span of which something is seen, of the key blocks from .. end - 1, unless it is known already. False if there is none.
    bool find(const visible_keys& pattern, const query_block& queries, index_t pass, const key_blocks& blocks, index_t from, index_t end) {
        if (from == asked_from_) return count_ > 0;
        asked_from_ = from;
        count_ = 0;
        while (from < end && count_ == 0) {
            end_ = std::min(end, (floor_div(from, max_blocks) + 1) * max_blocks);
            for_each_visible_block(pattern, queries, pass, blocks, from, end_, [&](const key_run& keys) {
                auto part = visible_run_of(pattern, queries, pass, keys, bits_ + count_ * block_keys_);
                if (gathers_) part.gather(queries.rows(), numbers_ + count_ * block_keys_);
                if (part.count > 0) parts_[count_++] = part;
            });
            if (count_ == 0) from = guess_ = first_visible_block(pattern, queries, pass, blocks, end_, end, guess_);
        }
        if (count_ == 0 || (end_ < end && pattern.of_box(queries, pass, blocks.run(end_, end).positions()).is_none())) end_ = end;
        return count_ > 0;
    }
    /// Where the next span may begin.
    index_t end() const { return end_; }
    std::span<const visible_run> parts() const { return {parts_, static_cast<std::size_t>(count_)}; }
    /// The parts of the span if it is known as the first of the key blocks from `from` on, else none.
    std::span<const visible_run> parts_from(index_t from) const { return from == asked_from_ ? parts() : std::span<const visible_run>{}; }

private:
    static constexpr index_t none = std::numeric_limits<index_t>::min();

    index_t block_keys_ = 0;
    std::uint64_t* bits_ = nullptr;
    bool gathers_ = false;
    std::uint8_t* numbers_ = nullptr;
    index_t asked_from_ = none, end_ = 0, count_ = 0;
    index_t guess_ = 0; // where something was found last: neighbouring query blocks often begin to see at neighbouring key blocks
    visible_run parts_[max_blocks];
};

/// Scores[keys][rows] of hidden keys become -infinity. visible: one bit per row for each key. rows: whole registers, or less than one.
template <Scalar T>
void hide_scores(T* scores, index_t keys, index_t rows, const std::uint64_t* visible) {
    using lanes = simd::lanes<T>;
    const lanes hidden = -std::numeric_limits<T>::infinity();
    const auto all = simd::lane_bits::first(lanes::size).value;
    if (rows < lanes::size) {
        for (index_t j = 0; j < keys; ++j)
            for (index_t row = 0; row < rows; ++row)
                if (!(visible[j] >> row & 1)) scores[j * rows + row] = -std::numeric_limits<T>::infinity();
        return;
    }
    for (index_t j = 0; j < keys; ++j) {
        for (index_t row = 0; row < rows; row += lanes::size) {
            T* const at = scores + j * rows + row;
            const auto seen = visible[j] >> row & all;
            if (seen == all) continue;
            (seen == 0 ? hidden : select(simd::lane_bits{seen}, lanes::load(at), hidden)).store(at);
        }
    }
}

/// The rows, as bits, for which a key counts whose scores[rows] these are: those that are not -infinity. rows: whole registers; or less
/// than one, and bits behind theirs say nothing.
template <Scalar T>
std::uint64_t rows_not_hidden(const T* scores, index_t rows) {
    using lanes = simd::lanes<T>;
    const lanes hidden = -std::numeric_limits<T>::infinity();
    std::uint64_t seen = 0;
    for (index_t row = 0; row < rows; row += lanes::size)
        seen |= (~(lanes::load(scores + row) == hidden).bits().value & bit_range(0, lanes::size)) << row;
    return seen;
}

} // namespace attn::kernel
