// The gradient of recurrent attention over ranks: states go from the first to the last, their gradients back.
#pragma once

#include "../attention/recurrent_backward.hpp"
#include "recurrent_ranks.hpp"
#include "split_chunks.hpp"

#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

template <class Rule, Scalar T>
class rank_gradient<recurrent_attention<Rule>, T> {
    using operation = recurrent_attention<Rule>;
    using differentiate = kernel::recurrent_gradient<T>;
    using advance = kernel::recurrent_attention<T>;

public:
    using wanted_type = recurrent_gradients<T>;

    rank_gradient(const operation& op, const partition& parts, index_t rank, const inputs<T>& in, const wanted_type&)
        : op_(op), parts_(parts), rank_(rank), chunks_(parts.key_cuts(), rank, shapes_of_arrays(op, in)),
          states_(shape{in.keys.shape().batch, in.keys.shape().heads, in.keys.shape().channels, in.values.shape().channels}) {
        for (const auto& rows : {chunks_.plan().whole(rank), chunks_.own()}) {
            if (rows.count == 0) continue;
            auto& own = pieces_.emplace_back(piece{rows, tensor<T>(states_.shape()), workspace()});
            auto keys = in.keys.shape();
            keys.tokens = rows.count;
            own.sums_memory.reserve(
                bytes_taken([&](scratch& memory) { kernel::term_gradients<T>(op.rule.terms(), {}, keys).take(memory); }));
        }
    }

    index_t fingerprint() const {
        mixed_numbers all;
        for (const auto cut : parts_.key_cuts().cuts) all.mix(cut);
        for_each_term(op_.rule, [&](std::string_view argument, const auto& view, bool) {
            all.mix(static_cast<index_t>(argument.size()), view.shape().batch, view.shape().heads, view.shape().channels);
        });
        return all.number();
    }
    static index_t asked(const operation&, const wanted_type&) { return 1; }
    static std::size_t workspace_bytes(const operation& op, const partition& parts, index_t rank, index_t concurrency) {
        const chunk_plan plan(parts.key_cuts());
        auto s = parts.shapes(rank);
        s.queries.tokens = s.keys.tokens = s.values.tokens = std::max(plan.whole(rank).count, plan.split(rank).count);
        const auto terms = op.rule.terms();
        const auto to_differentiate = differentiate::worker_bytes(s, terms, concurrency);
        s.queries.heads = 0;
        return std::max(to_differentiate, advance::workspace_bytes(s, terms, concurrency, false));
    }

    template <Communicator C>
    void run(C& ranks, const inputs<T>& in, const saved_outputs<T>&, const output_gradients<T>& d_out, const wanted_type& wanted,
             const execution& run) {
        const auto terms = op_.rule.terms();
        const token_arrays<const T> read{in.queries.numbers(), in.keys.numbers(), in.values.numbers(), terms.log_decay,
                                         terms.beta,           terms.erase,       terms.read,          d_out.values};
        const token_arrays<T> to{wanted.queries, wanted.keys, wanted.values, wanted.log_decay, wanted.beta, wanted.a, wanted.b};
        const auto held = parts_.keys(rank_);
        chunks_.collect(ranks, read);
        for (auto& own : pieces_) {
            const bool is_split = own.rows == chunks_.own();
            const row_range rows{own.rows.first - held.first, own.rows.count};
            own.begin(is_split ? chunks_.read() : of_tokens(read, rows), is_split ? chunks_.written() : of_tokens(to, rows), states_);
        }
        std::exception_ptr failure;
        if (takes_part(parts_, rank_)) {
            failure = hand_on(ranks, run);
            hand_back(ranks, wanted, run, failure);
        }
        for (auto& own : pieces_) own.sums->sum();
        chunks_.give_back(ranks, to);
        if (failure) std::rethrow_exception(failure);
    }

private:
    /// Tokens whose gradients one call of the kernel computes.
    struct piece {
        row_range rows;
        tensor<T> state;       ///< that they begin with, of each batch entry and kv head
        workspace sums_memory; ///< for what shares a term
        token_arrays<const T> read = {};
        kernel::recurrent_terms<T> terms = {};
        recurrent_gradients<T> wanted = {};
        std::optional<kernel::term_gradients<T>> sums = {};

        inputs<T> in() const { return {read[0], read[1], read[2]}; }
        /// of_states: gradients, of the states behind the tokens and then of those before them.
        void begin(const token_arrays<const T>& from, const token_arrays<T>& to, const tensor_view<T>& of_states) {
            read = from;
            terms = {.log_decay = from[3], .beta = from[4], .erase = from[5], .read = from[6]};
            wanted = {{to[0], to[1], to[2]}, to[3], to[4], to[5], to[6], of_states, of_states};
            sums.emplace(terms, wanted, from[1].shape());
            scratch memory(sums_memory.bytes().data());
            sums->take(memory);
        }
    };

    static std::array<shape, 8> shapes_of_arrays(const operation& op, const inputs<T>& in) {
        const auto terms = op.rule.terms();
        return {in.queries.shape(), in.keys.shape(),     in.values.shape(),  terms.log_decay.shape(),
                terms.beta.shape(), terms.erase.shape(), terms.read.shape(), op.output_shape(shapes_of(in))};
    }
    index_t heads() const { return states_.shape().batch * states_.shape().heads; }
    double scale() const { return op_.scale_for(states_.shape().tokens); }
    std::span<std::byte> bytes_of(tensor<T>& states, index_t head) {
        const auto each = static_cast<std::size_t>(states.shape().tokens * states.shape().channels);
        return std::as_writable_bytes(std::span(states.data() + static_cast<std::size_t>(head) * each, each));
    }
    /// The states that the first piece begins with, those behind it, and so on to those that go on to the next rank.
    tensor<T>& states_at(std::size_t number) { return number < pieces_.size() ? pieces_[number].state : states_; }

    /// Each rank takes the states before its tokens, and gives those behind them to the next, some heads at a time.
    std::exception_ptr hand_on(Communicator auto& ranks, const execution& run) {
        const auto before = taking_part_beside(parts_, rank_, -1), next = taking_part_beside(parts_, rank_, 1);
        const bool is_last = next == parts_.ranks();
        if (before < 0 && op_.first_state.data()) copy_numbers<T>(op_.first_state, states_at(0));
        const auto relayed = [&](index_t head) {
            return relayed_bytes{before, is_last ? -1 : next, bytes_of(states_at(0), head), bytes_of(states_, head)};
        };
        return relay(ranks, heads(), run.concurrency(), relayed, [&](index_t first, index_t end) {
            for (std::size_t n = 0; n + (is_last ? 1 : 0) < pieces_.size(); ++n) {
                const auto in = pieces_[n].in().slice({.heads = {0, 0}}, {});
                advance(in, {}, pieces_[n].terms, scale())({{}, pieces_[n].state, states_at(n + 1)}, {first, end - first}, run,
                                                           run.workspace().bytes().data());
            }
        });
    }
    /// Each rank takes the gradients of the states behind its tokens, and gives those of the states before them to the rank before. Who has
    /// failed still passes on what others wait for.
    void hand_back(Communicator auto& ranks, const wanted_type& wanted, const execution& run, std::exception_ptr& failure) {
        const auto before = taking_part_beside(parts_, rank_, -1), next = taking_part_beside(parts_, rank_, 1);
        const bool is_last = next == parts_.ranks();
        if (is_last && wanted.d_last_state.data()) copy_numbers<T>(wanted.d_last_state, states_);
        else if (is_last) fill_zero(states_.view());
        const auto relayed = [&](index_t head) {
            return relayed_bytes{is_last ? -1 : next, before, bytes_of(states_, head), bytes_of(states_, head)}; // in place
        };
        const auto later = relay(ranks, heads(), run.concurrency(), relayed, [&](index_t first, index_t end) {
            for (auto n = failure ? 0 : pieces_.size(); n > 0; --n) {
                const auto& own = pieces_[n - 1];
                differentiate(own.in(), own.read[7], own.terms, own.state, own.wanted, scale())(own.sums->own(), {first, end - first}, run,
                                                                                                run.workspace().bytes().data());
            }
        });
        if (!failure) failure = later;
        if (before < 0 && wanted.first_state.data()) copy_numbers<T>(states_, wanted.first_state);
    }

    const operation& op_;
    const partition& parts_;
    index_t rank_;
    split_chunks<T> chunks_;
    tensor<T> states_;          ///< behind the rank's tokens, of each batch entry and kv head; then the gradients of states
    std::vector<piece> pieces_; ///< in the order of tokens
};

} // namespace attn::detail
