// Recurrent attention over ranks: the state goes from one to the next, wherever the sequence is cut.
#pragma once

#include "../attention/recurrent_attention.hpp"
#include "communicator.hpp"
#include "rank_call.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Whether a rank takes part in what goes from one to the next: those with tokens do, or all, if none has any.
inline bool takes_part(const partition& parts, index_t rank) { return parts.keys(rank).count > 0 || parts.shapes().keys.tokens == 0; }
/// The next rank that does, in a direction; -1, or as many as there are ranks, if there is none.
inline index_t taking_part_beside(const partition& parts, index_t rank, index_t direction) {
    for (rank += direction; rank >= 0 && rank < parts.ranks() && !takes_part(parts, rank);) rank += direction;
    return rank;
}

template <class Rule, Scalar T>
class rank_call<recurrent_attention<Rule>, T> {
    using operation = recurrent_attention<Rule>;
    using state = kernel::recurrent_state<T>;

public:
    rank_call(const operation& op, const partition& parts, index_t rank, const inputs<T>& in)
        : op_(op), parts_(parts), rank_(rank), sizes_(op.rule.terms().sizes(shapes_of(in))) {
        bytes_of_state_ = bytes_taken([&](scratch& memory) { return state::take(memory, sizes_); });
        states_.resize(static_cast<std::size_t>(in.keys.shape().batch * in.keys.shape().heads));
        taken_of(memory_, [&](scratch& memory) {
            for (auto& own : states_) own = state::take(memory, sizes_);
        });
    }

    /// Checks a rank's part as a call of its own: what the rule takes of each token is a rank's as its keys are.
    static void check(const operation& op, const partition& parts, index_t, const inputs<T>& in) {
        if (parts.query_cuts().cuts != parts.key_cuts().cuts)
            detail::raise(
                argument_error(operation::name, "partition", "cuts queries and keys at different tokens, but they are of the same ones"));
        op.check(in);
    }
    index_t fingerprint() const {
        mixed_numbers all;
        for (const auto cut : parts_.key_cuts().cuts) all.mix(cut);
        all.mix(static_cast<index_t>(sizes_.by_channel), static_cast<index_t>(sizes_.decays), static_cast<index_t>(sizes_.erases));
        return all.number();
    }
    template <Storage S>
    static std::size_t workspace_bytes(const operation& op, const partition& parts, index_t rank, index_t concurrency) {
        return kernel::recurrent_attention<T>::workspace_bytes(parts.shapes(rank), op.rule.terms(), concurrency, true);
    }

    /// The first rank with tokens begins with the first state, the last one has the last state.
    void run(Communicator auto& ranks, const inputs<T>& in, const outputs<T>& out, const execution& run) {
        const auto own = parts_.keys(rank_);
        if (!takes_part(parts_, rank_)) return;
        const auto before = taking_part_beside(parts_, rank_, -1), next = taking_part_beside(parts_, rank_, 1);
        const kernel::recurrent_attention<T> kernel(in, out.values, op_.rule.terms(), op_.scale_for(in.keys.shape().channels));
        const bool is_last = next == parts_.ranks();
        for (index_t number = 0; number < std::ssize(states_); ++number) {
            auto& head = states_[static_cast<std::size_t>(number)];
            if (before < 0) head.begin(op_.first_state, number / in.keys.shape().heads, number % in.keys.shape().heads);
            else head.count = own.first % kernel::recurrent_chunk;
        }
        const auto piece = [&](index_t number) { return relayed_bytes{before, is_last ? -1 : next, bytes_of(number), bytes_of(number)}; };
        const auto failure = relay(ranks, std::ssize(states_), run.concurrency(), piece, [&](index_t first, index_t end) {
            kernel({.kept = states_}, {first, end - first}, run, run.workspace().bytes().data());
        });
        if (failure) std::rethrow_exception(failure);
        if (is_last) write_last_state(in);
    }

private:
    std::span<std::byte> bytes_of(index_t number) const {
        return memory_.bytes().subspan(static_cast<std::size_t>(number) * bytes_of_state_, bytes_of_state_);
    }
    void write_last_state(const inputs<T>& in) {
        const auto& last = op_.last_state;
        if (!last.data()) return;
        workspace spare(state::bytes_to_close(sizes_));
        for (index_t number = 0; number < std::ssize(states_); ++number)
            states_[static_cast<std::size_t>(number)].end(last, number / in.keys.shape().heads, number % in.keys.shape().heads,
                                                          reinterpret_cast<T*>(spare.bytes().data()), kernel::no_prefetch());
    }

    const operation& op_;
    const partition& parts_;
    index_t rank_;
    kernel::recurrent_sizes sizes_;
    std::size_t bytes_of_state_ = 0;
    workspace memory_;
    std::vector<state> states_; ///< of each batch entry and kv head
};

} // namespace attn::detail
