// The walk over what is seen: which blocks of keys a tile of queries visits, and what each of its rows sees of them. All kernels of softmax
// attention and of talking heads, and their gradients, take it.
#pragma once

#include "key_reader.hpp"
#include "visible_keys.hpp"

#include <algorithm>
#include <limits>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Calls f(number, full) for those of the numbers from .. end - 1 of which something is seen, in order, found by bisection: box(from, end)
/// tells what is known of some of them together. full: all of it is seen.
template <class Box, class F>
void for_each_visible(index_t from, index_t end, const Box& box, const F& f) {
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
template <class F>
void for_each_visible_block(const visible_keys& pattern, const query_block& queries, index_t pass, const key_blocks& blocks, index_t from,
                            index_t end, const F& f) {
    const auto box = [&](index_t first, index_t last) { return pattern.of_box(queries, pass, blocks.run(first, last).positions()); };
    for_each_visible(from, end, box, [&](index_t block, bool full) {
        auto keys = blocks.run(block, block + 1);
        keys.full = full;
        f(keys);
    });
}

/// The first of the key blocks from .. end - 1 that some row of some head sees something of, found by bisection; `end` if there is none.
inline index_t first_visible_block(const visible_keys& pattern, const query_block& queries, index_t pass, const key_blocks& blocks,
                                   index_t from, index_t end) {
    if (from >= end || pattern.of_box(queries, pass, blocks.run(from, end).positions()).is_none()) return end;
    if (end - from == 1) return from;
    const auto middle = from + (end - from) / 2, found = first_visible_block(pattern, queries, pass, blocks, from, middle);
    return found < middle ? found : first_visible_block(pattern, queries, pass, blocks, middle, end);
}

/// Keys, and what the rows of a query block see of them.
struct visible_run {
    key_run keys;
    const std::uint64_t* rows; ///< [keys] one bit per row; null if all see all
};

/// The keys of a run from the first that some row sees to the last: none if nothing is seen. bits: [keys] memory for what the rows see.
inline visible_run visible_run_of(const visible_keys& pattern, const query_block& queries, index_t pass, key_run keys,
                                  std::uint64_t* bits) {
    if (keys.full) return {keys, nullptr};
    pattern.find(queries, pass, keys, bits);
    while (keys.count > 0 && bits[keys.count - 1] == 0) --keys.count;
    for (; keys.count > 0 && *bits == 0; --keys.count, ++bits) keys.first += keys.step;
    return {keys, bits};
}

/// What the rows of the heads of a query block see of a run: visible [heads, or 1 if they see the same][block_keys], and `seen` of any of
/// them, [block_keys]. How many keys there are up to the last that any row sees.
inline index_t find_visible_heads(const visible_keys& pattern, const query_block& queries, const key_run& keys, bool heads_alike,
                                  index_t block_keys, std::uint64_t* visible, std::uint64_t* seen) {
    auto head = queries;
    head.heads = 1;
    std::fill_n(seen, keys.count, 0);
    for (index_t h = 0; h < (heads_alike ? std::min<index_t>(1, queries.heads) : queries.heads); ++h, visible += block_keys) {
        head.first_head = queries.first_head + h;
        if (keys.full) std::fill_n(visible, keys.count, bit_range(0, queries.tokens.count));
        else pattern.find(head, visible_keys::whole, keys, visible);
        for (index_t j = 0; j < keys.count; ++j) seen[j] |= visible[j];
    }
    auto count = keys.count;
    while (count > 0 && seen[count - 1] == 0) --count;
    return count;
}

/// Scores[keys][rows] of hidden keys become -infinity. visible: one bit per row for each key. rows: whole registers.
template <Scalar T>
void hide_scores(T* scores, index_t keys, index_t rows, const std::uint64_t* visible) {
    using lanes = simd::lanes<T>;
    const lanes hidden = -std::numeric_limits<T>::infinity();
    const auto all = simd::lane_bits::first(lanes::size).value;
    for (index_t j = 0; j < keys; ++j) {
        for (index_t row = 0; row < rows; row += lanes::size) {
            T* const at = scores + j * rows + row;
            const auto seen = visible[j] >> row & all;
            if (seen == all) continue;
            (seen == 0 ? hidden : select(simd::lane_bits{seen}, lanes::load(at), hidden)).store(at);
        }
    }
}

/// The rows, as bits, for which a key counts whose scores[rows] these are: those that are not -infinity. rows: whole registers.
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
