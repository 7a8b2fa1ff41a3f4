// The states of several heads, and how threads make them: in spans of keys that are added in their order.
#pragma once

#include "../../core/inputs.hpp"
#include "../../parallel/executor.hpp"
#include "state.hpp"

#include <algorithm>
#include <limits>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Sums of several heads, one after the other.
template <Scalar T>
struct linear_states {
    linear_state<T> first;
    index_t distance = 0; ///< between them, in numbers
    /// Of how many keys they are, from a head's first on, where its first row takes more.
    index_t keys = std::numeric_limits<index_t>::max();

    static linear_states take(detail::scratch& memory, index_t count, index_t key_channels, index_t value_channels) {
        const auto before = memory.used_bytes();
        const auto first = linear_state<T>::take(memory, key_channels, value_channels);
        const auto distance = static_cast<index_t>((memory.used_bytes() - before) / sizeof(T));
        for (index_t n = 1; n < count; ++n) linear_state<T>::take(memory, key_channels, value_channels);
        return {first, distance};
    }
    linear_state<T> of(index_t number) const {
        auto state = first;
        state.sums += number * distance;
        state.key_sum += number * distance;
        return state;
    }
    /// The numbers of one, and the padding behind them.
    std::span<T> numbers(index_t number) const { return {of(number).sums, static_cast<std::size_t>(distance)}; }
};

/// Sums of some heads at once. Keys are summed in spans that begin at absolute multiples of a constant, and these are added in their order:
/// threads share the spans of one head, and the result is the same however many of them are summed beside each other.
template <Scalar T>
class span_sums {
public:
    using state_type = linear_state<T>;
    static constexpr index_t span = 2048;

    span_sums(detail::scratch& memory, const input_shapes& s, index_t concurrency)
        : slots_(slot_count(s, concurrency)), heads_(heads_at_once(s, concurrency)),
          sums_(linear_states<T>::take(memory, heads_ * slots_, s.keys.channels, s.values.channels)) {}

    /// How many heads there is room for.
    index_t heads() const { return heads_; }
    /// The sum of a head, once it is made.
    state_type of(index_t head) const { return slot(head, 0); }

    /// Makes the sums of `heads` heads. spans(head): how many there are; push(head, span, slice, state) takes the keys of one of them in.
    void make(index_t heads, const execution& run, const auto& spans, const auto& push) const {
        index_t last = 0;
        for (index_t head = 0; head < heads; ++head) last = std::max<index_t>(last, spans(head));
        for (index_t first = 0, count = 0; first < last; first += count) {
            const index_t begun = first > 0; // slot 0 holds the sum of the spans before
            count = std::min(slots_ - begun, last - first);
            run.for_each(heads * count, [&](index_t task, index_t slice) {
                const auto head = task / count, number = task % count;
                if (first + number >= spans(head)) return;
                const auto state = slot(head, begun + number);
                state.reset();
                push(head, first + number, slice, state);
            });
            if (begun + count == 1) continue;
            run.for_each(heads, [&](index_t head, index_t) {
                const auto present = std::min(count, spans(head) - first);
                for (index_t s = 1; s < begun + present; ++s) of(head).merge(slot(head, s));
            });
        }
    }

private:
    /// The most sums of one head that are made beside each other.
    static constexpr index_t max_slots = 8;

    static index_t slot_count(const input_shapes& s, index_t concurrency) {
        const auto max_spans = (std::max<index_t>(s.keys.tokens, 1) + span - 2) / span + 1; // wherever they begin
        return std::min(max_spans, concurrency == 1 ? 2 : max_slots);
    }
    static index_t heads_at_once(const input_shapes& s, index_t concurrency) {
        const auto wanted = concurrency == 1 ? 1 : std::max<index_t>(1, max_slots * concurrency / slot_count(s, concurrency));
        return std::min(wanted, s.keys.batch * s.keys.heads);
    }
    state_type slot(index_t head, index_t number) const { return sums_.of(head * slots_ + number); }

    index_t slots_, heads_;
    linear_states<T> sums_;
};

} // namespace attn::kernel
