// Key blocks: where their rows can be read, and how many keys they hold.
#pragma once

#include "../../core/workspace.hpp"
#include "../../pattern/schedule.hpp"
#include "../tile_loader.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Keys are taken in blocks whose borders are absolute: of a residue class modulo `step`, key number floor((j - residue) / step) is in
/// block number / block_keys. So what a row sees of a block does not depend on where a call, a query block or a cache begins.
struct key_blocks {
    index_t block_keys;
    index_t first_key, keys; ///< of the call
    index_t step, residue;

    key_blocks(index_t keys_of_block, index_t first, index_t count, const query_tile& tokens)
        : block_keys(keys_of_block), first_key(first), keys(count), step(tokens.step), residue(floor_mod(tokens.first, tokens.step)) {}

    /// Blocks first_block() .. end_block() - 1 hold the keys of the call: at least one each.
    index_t first_block() const { return floor_div(number_from(first_key), block_keys); }
    index_t end_block() const {
        const auto end = number_from(first_key + keys);
        return end > number_from(first_key) ? floor_div(end - 1, block_keys) + 1 : first_block();
    }
    /// The keys of the call in blocks from .. to - 1.
    key_run run(index_t from, index_t to) const {
        const auto first = std::max(from * block_keys, number_from(first_key));
        const auto end = std::min(to * block_keys, number_from(first_key + keys));
        return {residue + first * step, std::max<index_t>(0, end - first), step, false};
    }

private:
    /// The number of the first key of the class at or after a position.
    index_t number_from(index_t position) const { return -floor_div(residue - position, step); }
};

/// Keys that are not in a run, but in the operand of its first one: operands hold keys of the same numbers in every run.
template <class E>
index_t keys_before(const key_run& keys) {
    if constexpr (simd::terms_of<E> == 1) return 0;
    else return floor_mod(floor_div(keys.first, keys.step), simd::terms_of<E>);
}

/// Rows first, first + step, ... of a head that lies in one tensor.
template <class Rows>
Rows rows_in_place(const Rows& head, index_t first, index_t, index_t step) {
    return head.from(first).every(step);
}
/// Asks for them, in time.
template <class Rows>
void add_coming(auto& ahead, const Rows& head, index_t first, index_t count, index_t step, index_t channels) {
    ahead.add(rows_in_place(head, first, count, step), count, channels);
}
/// Whether some rows of a head are no rows of a stride, but copied to be that.
template <class Head>
inline constexpr bool gathers = false;
/// How the rows of a head are found where tensors are stored so.
template <class Stored, class T>
struct head_rows {
    using type = typename Stored::template rows<const T>;
    static constexpr bool are_paged = false;
    static constexpr index_t few_rows = std::max<index_t>(1, simd::lanes<T>::size / 4); ///< rows that are few: see score_stage
};
/// Keys and values in the pages of a cache, whose rows are another kind: see pages.hpp.
template <class T>
struct sequence_pages;

/// The rows of one head, keys or values, a block at a time: as they lie, or copied where the micro-kernel could not read them so, or
/// slowly; 16-bit numbers become T, or what Rows makes of them. A few copies are kept: the query blocks of a residue class follow each
/// other, and rows of a stride lie in few sets of the caches.
/// Head: how they lie, in one tensor or in pages.
template <Scalar T, class Rows = number_rows<T>, class Head = stored_rows<const T>>
class block_reader {
public:
    using operand = typename Rows::operand;
    static constexpr bool is_paged = gathers<Head>; ///< rows may lie in columns
    using rows_type = decltype(rows_in_place(std::declval<const Head&>(), 0, 0, 0));

    /// pads: rows are read in whole registers.
    block_reader(detail::scratch& memory, index_t block_keys, index_t channels, bool pads)
        : block_keys_(block_keys), channels_(channels), padded_(Rows::width(channels)), pads_(pads && padded_ != channels),
          copies_(memory.take<operand>(slot_count, Rows::rows(block_keys), padded_)),
          gathered_(memory.take<std::byte>(gathers<Head> ? block_keys : 0, channels, static_cast<index_t>(sizeof(T)))),
          row_(memory.take<std::byte>(gathers<Head> ? 2 * channels + 2 : 0, static_cast<index_t>(sizeof(T)))) {}

    /// Goes on to another head, whose row 0 stands at first_key.
    void begin(const Head& rows, index_t first_key) {
        rows_ = rows;
        first_key_ = first_key;
    }
    /// Whether rows of 16 bits can be read as they are stored: whole registers of numbers side by side.
    bool can_widen(const rows_type& own) const { return std::same_as<operand, T> && !pads_ && own.is_narrow() && own.channel_stride == 1; }
    /// The rows of a run as they are stored, or in memory of the reader's.
    rows_type stored(const key_run& keys) {
        const auto first = keys.first - first_key_;
        const auto own = rows_in_place(rows_, first, keys.count, keys.step);
        if constexpr (gathers<Head>) {
            if (own.data) return own;
            const copy wanted{rows_, first, keys.step, keys.count, 0};
            if (gathered_run_ == wanted) return gathered_copy_;
            gathered_run_ = wanted;
            return gathered_copy_ = gathered_rows(rows_, first, keys.count, keys.step, gathered_, row_);
        }
        return own;
    }
    /// The rows of a run of at most a block. before: of the first operand, rows that are not in the run.
    row_block<const operand> read(const key_run& keys, index_t before = 0) {
        const auto own = stored(keys);
        if constexpr (!Rows::are_copies)
            if (!pads_ && readable_in_place(own)) return own.numbers();
        const auto* const copied =
            copy_once(keys, before, [&](operand* to) { Rows::copy(own, keys.count, before, channels_, to, padded_); });
        return {copied, padded_, 1};
    }
    /// The rows of the runs of a part (visible_run), one after the other.
    row_block<const operand> gather(const auto& part) {
        operand* const to = copy_of(next_);
        copied_[std::exchange(next_, (next_ + 1) % slot_count)] = {};
        part.for_each_run(
            [&](index_t first, const key_run& keys) { Rows::copy(stored(keys), keys.count, 0, channels_, to + first * padded_, padded_); });
        return {to, padded_, 1};
    }
    /// The keys of a run as a cache keeps them, if they lie so; those that are turned, as numbers in memory of the reader's.
    auto columns(const key_run& keys) {
        auto found = columns_in_place(rows_, keys, first_key_, coming_);
        if (found && rows_.turns)
            found = found->of_numbers(copy_once(keys, 0, [&](operand* to) {
                found->read(keys.count, to);
                turn_columns(rows_, keys, first_key_, found->first, to);
            }));
        return found;
    }
    /// Their numbers.
    auto read(const key_run& keys, const auto& columns) {
        if (const auto own = columns.numbers(); own.blocks) return own;
        return columns.numbers(copy_once(keys, 0, [&](operand* to) { columns.read(keys.count, to); }));
    }
    /// f(values of a run), if they can be read as a cache keeps them.
    bool stream(const key_run& keys, const auto& f) const { return stream_rows(rows_, keys, first_key_, coming_, f); }
    /// What columns and streams ask for beside themselves: rows of a head.
    void expect(const Head& head, index_t first, index_t count, index_t step) { coming_ = head.in_one_page(first, count, step); }
    void expect_nothing() { coming_ = nullptr; }

private:
    static constexpr index_t slot_count = 3;
    operand* copy_of(index_t slot) const { return copies_ + slot * Rows::rows(block_keys_) * padded_; }

    struct copy {
        Head head{};
        index_t first = 0, step = 0, count = 0, before = 0;
        bool operator==(const copy&) const = default;
    };
    /// A copy that make(to) has made of a run, now or before.
    const operand* copy_once(const key_run& keys, index_t before, const auto& make) {
        const copy wanted{rows_, keys.first - first_key_, keys.step, keys.count, before};
        for (index_t slot = 0; slot < slot_count; ++slot)
            if (copied_[slot] == wanted) return copy_of(slot);
        copied_[next_] = wanted;
        operand* const to = copy_of(next_);
        make(to);
        next_ = (next_ + 1) % slot_count;
        return to;
    }

    index_t block_keys_, channels_, padded_;
    bool pads_;
    operand* copies_;
    std::byte *gathered_, *row_;        ///< memory for a run that is copied, and for one row of it as it is stored
    const std::byte* coming_ = nullptr; ///< where what is read next lies
    Head rows_{};
    index_t first_key_ = 0, next_ = 0;
    copy copied_[slot_count], gathered_run_;
    rows_type gathered_copy_{};
};

} // namespace attn::kernel
