// Key blocks: where their rows can be read, and how many keys they hold.
#pragma once

#include "../../core/workspace.hpp"
#include "../../pattern/schedule.hpp"
#include "../tile_loader.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Keys are taken in blocks whose borders are absolute: of a residue class modulo `step`, key number floor((j - residue) / step) is in block
/// number / block_keys. So what a row sees of a block does not depend on where a call, a query block or a cache begins.
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

/// The rows of one head, keys or values, a block at a time: as they lie, or copied where the micro-kernel could not read them so, or slowly; 16-bit numbers become T.
/// A few copies are kept: the query blocks of a residue class follow each other, and rows of a stride lie in few sets of the caches.
template <Scalar T, class Arch>
class block_reader {
public:
    /// pads: rows are read in whole registers.
    block_reader(detail::scratch& memory, index_t block_keys, index_t channels, bool pads)
        : block_keys_(block_keys), channels_(channels), padded_(whole_registers<T, Arch>(channels)), pads_(pads && padded_ != channels),
          copies_(memory.take<T>(slots * block_keys, padded_)) {}

    /// Another head: row 0 stands at first_key.
    void begin(const stored_rows<const T>& rows, index_t first_key) {
        rows_ = rows;
        first_key_ = first_key;
    }
    /// The rows of a run of at most a block.
    row_block<const T> read(const key_run& keys) {
        const auto own = rows_.from(keys.first - first_key_, keys.step);
        if (!pads_ && readable_in_place(own)) return {own.numbers(), own.row_stride, own.channel_stride};
        auto& copied = copied_[next_];
        for (index_t slot = 0; slot < slots; ++slot)
            if (copied_[slot].from == own.data && copied_[slot].row_stride == own.row_stride && copied_[slot].count == keys.count)
                return {copies_ + slot * block_keys_ * padded_, padded_, 1};
        copied = {own.data, own.row_stride, keys.count};
        T* const to = copies_ + next_ * block_keys_ * padded_;
        copy_rows<T, Arch>(own, keys.count, channels_, to, padded_);
        next_ = (next_ + 1) % slots;
        return {to, padded_, 1};
    }

private:
    static constexpr index_t slots = 3;
    struct copy {
        const std::byte* from = nullptr;
        index_t row_stride = 0, count = 0;
    };

    index_t block_keys_, channels_, padded_;
    bool pads_;
    T* copies_;
    stored_rows<const T> rows_{};
    index_t first_key_ = 0, next_ = 0;
    copy copied_[slots];
};

} // namespace attn::kernel
