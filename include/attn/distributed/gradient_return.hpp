// Gradients of keys and values on their way back to who holds these.
#pragma once

#include "../core/gradients.hpp"
#include "../kernel/projection/token_rows.hpp"
#include "key_stream.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// to += from, tensors of one shape; `from` has its channels side by side.
template <Scalar T>
void add_tensor(const tensor_view<T>& to, const tensor_view<const T>& from) {
    for_each_row(to.shape(), [&](index_t b, index_t h, index_t i) {
        kernel::add_channels(to.row(b, h, i), to.strides().channels, to.shape().channels, from.row(b, h, i));
    });
}
/// Room for a rank's part of the sums of any piece, and for what others send.
template <Scalar T>
struct return_memory {
    /// Parts that a rank keeps: of the piece that it computes with, of the one before, and of those that others hold and have not taken
    /// yet, since they get to them later.
    static constexpr index_t usual_parts = 8;
    std::vector<workspace> parts;
    workspace arrived[2]; ///< from one rank and the next

    /// s: of the keys, or the values, that the rank holds.
    return_memory(const key_plan& plan, index_t rank, index_t ranks, const shape& s) {
        index_t seen = 0, held = 0;
        for (index_t number = 0; number < plan.pieces(); ++number) {
            seen = std::max(seen, plan.seen(number, rank).count);
            for (index_t other = 0; other < ranks; ++other)
                held = std::max(held, common_rows(plan.seen(number, other), plan.held(rank)).count);
        }
        const auto bytes = [&](index_t rows) {
            return static_cast<std::size_t>(product(rows, s.batch, s.heads, s.channels, static_cast<index_t>(sizeof(T))));
        };
        parts.resize(static_cast<std::size_t>(std::min(plan.pieces(), usual_parts)));
        for (auto& memory : parts) memory.reserve(bytes(seen));
        for (auto& memory : arrived) memory.reserve(bytes(held));
    }
};

/// Takes what each rank's queries give to a piece of the keys, or of the values, to the ranks that hold it, which add up what comes in the
/// order of ranks. So the sums do not depend on what arrives first. Token after token, as keys travel.
template <Scalar T, Communicator C>
class gradient_return {
public:
    /// sums: of the rank's own rows, whose shape is s; without memory it does not want them. tag: of these messages, and no others. All
    /// ranks make one.
    gradient_return(C& ranks, const key_plan& plan, const tensor_view<T>& sums, const shape& s, return_memory<T>& memory, index_t tag)
        : ranks_(ranks), plan_(plan), sums_(sums), shape_(s), held_(plan.held(ranks.rank())), memory_(memory), tag_(tag),
          kept_(memory.parts.size()) {
        const auto wants = sums.data() && bytes_of(1) > 0 ? std::byte{1} : std::byte{0}; // a message has at least one byte
        wanted_by_ = all_gather(ranks, std::span(&wants, 1));
        fill_zero(sums);
    }

    /// Where the rank's part for a piece is to be written; none if it is not wanted. Waits, if there is no room, until the oldest part has
    /// been taken. The rank has collected all pieces but this one and the one before.
    tensor_view<T> part(index_t number) {
        if (std::ranges::find(wanted_by_, std::byte{1}) == wanted_by_.end()) return {};
        auto chosen = kept_.end();
        for (auto own = kept_.begin(); own != kept_.end(); ++own)
            if (own->number < number - 1 && is_taken(*own)) chosen = own;
        if (chosen == kept_.end()) {
            chosen = std::ranges::min_element(kept_, std::ranges::less{}, &kept::number);
            finish(*chosen);
        }
        chosen->number = number;
        chosen->sending.clear();
        return view(memory_of(*chosen), plan_.seen(number, ranks_.rank()));
    }
    /// Begins to send the rank's part for a piece, when it has been written.
    void send(index_t number) {
        const auto own = of_piece(number);
        if (own == kept_.end()) return;
        const auto seen = plan_.seen(number, ranks_.rank());
        for (index_t rank = 0; rank < ranks_.size(); ++rank)
            if (const auto rows = common_rows(seen, plan_.held(rank));
                rank != ranks_.rank() && rows.count > 0 && wanted_by_[static_cast<std::size_t>(rank)] == std::byte{1})
                own->sending.push_back(
                    ranks_.send(rank, tag_, memory_of(*own).bytes().subspan(bytes_of(rows.first - seen.first), bytes_of(rows.count))));
    }
    /// Adds what all ranks give to the rank's own rows of a piece; they have sent it, or will before they wait for anything of a piece
    /// behind the next.
    void collect(index_t number) {
        if (wanted_by_[static_cast<std::size_t>(ranks_.rank())] == std::byte{0}) return;
        const auto next_after = [&](index_t rank) { // who gives something
            for (++rank; rank < ranks_.size() && common_rows(plan_.seen(number, rank), held_).count == 0;) ++rank;
            return rank;
        };
        typename C::request receiving[2];
        const auto receive = [&](index_t rank, index_t at) {
            if (rank < ranks_.size() && rank != ranks_.rank())
                receiving[at] = ranks_.receive(
                    rank, tag_, memory_.arrived[at].bytes().first(bytes_of(common_rows(plan_.seen(number, rank), held_).count)));
        };
        auto rank = next_after(-1);
        receive(rank, 0);
        for (index_t at = 0; rank < ranks_.size(); at = 1 - at) {
            const auto next = next_after(rank);
            receive(next, 1 - at);
            ranks_.wait(receiving[at]);
            const auto seen = plan_.seen(number, rank), rows = common_rows(seen, held_);
            const auto given = rank == ranks_.rank()
                                   ? view(memory_of(*of_piece(number)), seen).slice({.tokens = {rows.first - seen.first, rows.count}})
                                   : view(memory_.arrived[at], rows);
            add_tensor<T>(sums_.slice({.tokens = {rows.first - held_.first, rows.count}}), given);
            rank = next;
        }
    }
    /// Waits until all parts have been sent.
    void finish() {
        for (auto& own : kept_) finish(own);
    }

private:
    /// A part that has been written.
    struct kept {
        index_t number = -2;
        std::vector<typename C::request> sending = {};
    };

    auto of_piece(index_t number) { return std::ranges::find(kept_, number, &kept::number); }
    const workspace& memory_of(const kept& own) const { return memory_.parts[static_cast<std::size_t>(&own - kept_.data())]; }
    bool is_taken(kept& own) {
        return std::ranges::all_of(own.sending, [&](auto& message) { return static_cast<bool>(ranks_.test(message)); });
    }
    void finish(kept& own) {
        for (auto& message : own.sending) ranks_.wait(message);
        own.sending.clear();
    }

    std::size_t bytes_of(index_t rows) const {
        const auto& s = shape_;
        return static_cast<std::size_t>(product(rows, s.batch, s.heads, s.channels, static_cast<index_t>(sizeof(T))));
    }
    tensor_view<T> view(const workspace& memory, const row_range& rows) const {
        auto s = shape_;
        s.tokens = rows.count;
        return {reinterpret_cast<T*>(memory.bytes().data()), s, {s.heads * s.channels, s.channels, s.batch * s.heads * s.channels, 1}};
    }

    C& ranks_;
    const key_plan& plan_;
    tensor_view<T> sums_;
    shape shape_;
    std::vector<std::byte> wanted_by_; ///< of each rank, whether
    row_range held_;
    return_memory<T>& memory_;
    index_t tag_;
    std::vector<kept> kept_;
};

/// Sums of numbers over all ranks, in the order of ranks, to all of them. before: memory for as many.
template <Scalar T, Communicator C>
void sum_over_ranks(C& ranks, std::span<T> numbers, std::span<T> before) {
    if (numbers.empty()) return;
    const index_t rank = ranks.rank(), last = ranks.size() - 1;
    if (rank > 0) {
        auto receiving = ranks.receive(rank - 1, 1, std::as_writable_bytes(before));
        ranks.wait(receiving);
        std::transform(before.begin(), before.end(), numbers.begin(), numbers.begin(), std::plus{});
    }
    if (rank < last) {
        auto sending = ranks.send(rank + 1, 1, std::as_bytes(numbers));
        ranks.wait(sending);
    }
    broadcast(ranks, last, std::as_writable_bytes(numbers));
}

} // namespace attn::detail
