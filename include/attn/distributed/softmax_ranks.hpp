// Softmax attention over ranks: keys and values travel.
#pragma once

#include "../attention/softmax_attention.hpp"
#include "key_stream.hpp"
#include "sequence_parallel.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

template <Pattern P, ScoreFunction S, Products R, Scalar T>
struct rank_call<softmax_attention<P, S, R>, T> {
    using operation = softmax_attention<P, S, R>;

    rank_call(const operation& op, const partition& parts, index_t rank, const inputs<T>& in)
        : op_(op), parts_(parts), where_(parts.positions()), visible_(op.pattern, parts.shapes(), where_),
          plan_(visible_, parts.shapes().queries, where_.first_query[0], where_.first_key[0], parts.query_cuts(), parts.key_cuts()),
          memory_(plan_, rank, in) {}

    static void check(const operation& op, const partition& parts, index_t, const inputs<T>& in) { check_with_all_keys(op, parts, in); }

    index_t fingerprint() const { return plan_.fingerprint(); }
    template <Storage U>
    static std::size_t workspace_bytes(const operation& op, const partition& parts, index_t rank, index_t concurrency) {
        return op.template run_workspace_bytes<T>(parts.shapes(rank), concurrency, Narrow<U>);
    }

    template <Communicator C>
    void run(C& ranks, const inputs<T>& in, const outputs<T>& out, const execution& run) {
        key_stream<T, C> stream(ranks, plan_, in, parts_.keys(ranks.rank()), memory_);
        std::exception_ptr failure;
        const auto here = this_thread();
        const auto progress = [&](index_t) {
            if (this_thread() == here) stream.progress();
        };
        const function_ref between(progress);
        bool is_first = true;
        const auto add = [&](index_t number, const row_range& rows, const stored_view<const T>& keys, const stored_view<const T>& values) {
            const auto pass = plan_.piece(number).pass;
            if (is_first && pass > 0) add_none(in, out, run, is_first);
            const inputs<T> part{in.queries, keys, values, {in.positions.first_query, where_.first_key[0] + rows.first}};
            op_.add_keys(visible_, pass, std::exchange(is_first, false), part, out, &between, run);
        };
        stream.run([&](auto&&... piece) { // who has failed still passes on what others wait for
            if (!failure) failure = failure_of([&] { add(piece...); });
        });
        if (failure) std::rethrow_exception(failure);
        if (is_first) add_none(in, out, run, is_first);
    }

private:
    /// Begins the rows of all heads, of which not every one takes part in every pass.
    void add_none(const inputs<T>& in, const outputs<T>& out, const execution& run, bool& is_first) const {
        op_.add_keys(visible_, 0, std::exchange(is_first, false), in.slice({}, no_tokens), out, nullptr, run);
    }

    const operation& op_;
    const partition& parts_;
    positions where_;
    kernel::visible_keys_of<T, P> visible_;
    key_plan plan_;
    stream_memory<T> memory_;
};

} // namespace attn::detail
