// Keys or values of a sequence's last tokens, side by side.
#pragma once

#include "../core/tensor.hpp"
#include "../kernel/tile_loader.hpp"

#include <algorithm>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Rows of keys or values of a sequence's last tokens.
template <Scalar T>
class last_rows {
public:
    last_rows(index_t heads, index_t channels) : numbers_({1, heads, least_room, channels}) {}
    last_rows(const last_rows& other) : numbers_(other.numbers_.shape()), first_(other.first_), count_(other.count_) {
        std::copy_n(other.numbers_.data(), numbers_.shape().size(), numbers_.data());
    }
    last_rows(last_rows&&) noexcept = default;
    last_rows& operator=(last_rows&&) noexcept = default;

    /// The token of the first row.
    index_t first() const { return first_; }
    /// The rows that are there.
    stored_view<const T> rows() const { return numbers_.slice({.tokens = {0, count_}}); }
    /// As many rows as the sequence has tokens, of which only those may be read that are there.
    stored_view<const T> of_sequence(index_t tokens) const { return numbers_.slice({.tokens = {-first_, tokens}}); }

    /// Memory for the rows from one on and so many more; none if there is room where they are.
    tensor<T> room_for(index_t first, index_t more) const {
        const auto [batch, heads, room, channels] = numbers_.shape();
        const auto wanted = std::max(first_ + count_ - first + more, least_room);
        if (wanted > room) return tensor<T>({batch, heads, std::max(wanted, 2 * room), channels});
        return wanted < room / 8 ? tensor<T>({batch, heads, wanted, channels}) : tensor<T>();
    }
    /// Drops the rows before one. room: of room_for, where the others move to.
    void drop_before(index_t first, tensor<T> room) {
        const auto &from = numbers_.shape(), &to = room.data() ? room.shape() : from;
        const auto dropped = first - first_, left = count_ - dropped;
        if (!room.data() && dropped == 0) return;
        T* const begin = room.data() ? room.data() : numbers_.data();
        for (index_t head = 0; head < from.heads; ++head)
            std::copy_n(numbers_.data() + (head * from.tokens + dropped) * from.channels, left * from.channels,
                        begin + head * to.tokens * to.channels);
        if (room.data()) numbers_ = std::move(room);
        first_ = first;
        count_ = left;
    }
    /// Adds rows, for which there is room.
    void append(const stored_view<const T>& more) {
        const auto& s = numbers_.shape();
        for (index_t head = 0; head < s.heads; ++head)
            kernel::copy_rows<T>(more.rows(0, head), more.shape().tokens, s.channels, numbers_.view().row(0, head, count_), s.channels);
        count_ += more.shape().tokens;
    }
    /// Drops the rows from a token on.
    void drop_from(index_t token) { count_ = std::max<index_t>(0, token - first_), first_ = std::min(first_, token); }

private:
    static constexpr index_t least_room = 64;

    tensor<T> numbers_;
    index_t first_ = 0, count_ = 0;
};

} // namespace attn::detail
