// What a query block sees of a span of keys.
#pragma once

#include "visit.hpp"

#include <limits>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What a query block sees of one span of keys, found once for all heads that see the same: a run of keys for each key block that some row
/// sees something of, and one bit per row for each key where not every row sees all.
class visible_span {
public:
    /// Spans of at most max_blocks key blocks.
    static constexpr index_t max_blocks = 8;

    visible_span() = default;
    visible_span(detail::scratch& memory, index_t block_keys)
        : block_keys_(block_keys), bits_(memory.take<std::uint64_t>(max_blocks, block_keys)) {}

    void forget() { asked_from_ = none; }
    /// The first span of which something is seen, of the key blocks from .. end - 1, unless it is known already. False if there is none.
    bool find(const visible_keys& pattern, const query_block& queries, index_t pass, const key_blocks& blocks, index_t from, index_t end) {
        if (from == asked_from_) return count_ > 0;
        asked_from_ = from;
        count_ = 0;
        while (from < end && count_ == 0) {
            end_ = std::min(end, (floor_div(from, max_blocks) + 1) * max_blocks);
            for_each_visible_block(pattern, queries, pass, blocks, from, end_, [&](const key_run& keys) {
                const auto part = visible_run_of(pattern, queries, pass, keys, bits_ + count_ * block_keys_);
                if (part.keys.count > 0) parts_[count_++] = part;
            });
            from = count_ > 0 ? end_ : first_visible_block(pattern, queries, pass, blocks, end_, end);
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
    index_t asked_from_ = none, end_ = 0, count_ = 0;
    visible_run parts_[max_blocks];
};

} // namespace attn::kernel
