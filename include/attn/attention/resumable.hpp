// Attention whose keys come in runs: what ranks go through.
#pragma once

#include "softmax_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// An operator whose keys may come in runs: one of the kernels of softmax attention (see softmax_call_of).
template <class Op, class T>
concept HasResumable = requires(const Op& op) {
    op.score_chain();
    typename Op::template scheduler<T>;
};

/// Rows of an operator's result whose keys come in runs of whole spans. Three steps:
/// - they begin as they are made: no row has seen a key. visible: op's pattern over all keys that are to come. All arguments outlive them;
/// - `add_keys(in, pass)`: takes in one run. `in` has the queries of all rows, and the run's keys and values, at their positions. The
///   passes of the pattern come one after the other, each of its runs in the order of positions; a run of which nothing is seen may be
///   left out;
/// - `finish()`: completes the result and its log_sum_exp, also if no run has come.
/// They have the bits of one call with all keys, wherever these are cut.
template <class Op, Scalar T>
class resumable {
    using chain_type = std::remove_cvref_t<decltype(std::declval<const Op&>().score_chain())>;
    using rows_type = typename Op::template scheduler<T>;

public:
    /// What the execution's workspace holds from then on. narrow: of a result of 16-bit numbers.
    static std::size_t workspace_bytes(const input_shapes& s, index_t concurrency, bool narrow) {
        return rows_type::workspace_bytes(s, true, concurrency, narrow);
    }
    resumable(const Op& op, const kernel::visible_keys& visible, const inputs<T>& in, const outputs<T>& out, const execution& run)
        : chain_(op.score_chain()), adjustment_(chain_), rows_(softmax_call_of(op, in, out, visible, adjustment_), run) {}
    void add_keys(const inputs<T>& in, index_t pass) { rows_.add_keys(in, pass); }
    void finish() { rows_.finish(); }

private:
    chain_type chain_;
    kernel::score_adjustment_of<T, chain_type> adjustment_;
    rows_type rows_;
};

} // namespace attn::detail
