// Attention whose keys come in runs: what ranks go through, and the passes of a union.
#pragma once

#include "../core/inputs.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace kernel {

/// Rows of a result whose keys come in runs of whole spans. Three steps:
/// - they begin as they are made: no row has seen a key;
/// - `add_keys(in, pass)`: takes in one run. `in` has the queries of all rows, and the run's keys and values, at their positions. The
///   passes of the pattern come one after the other, each of its runs in the order of positions; a run of which nothing is seen may be
///   left out;
/// - `finish()`: completes the result and its log_sum_exp, also if no run has come.
/// They have the bits of one call with all keys, wherever these are cut.
template <class R, class T>
concept Resumable = requires(R& rows, const inputs<T>& in, index_t pass) {
    rows.add_keys(in, pass);
    rows.finish();
};

} // namespace kernel

namespace detail {

/// The rows of an operator as a kernel::Resumable: specialised, beside the operator, for each whose keys may come in runs.
/// - `resumable(op, visible, in, out, run)`: begins the rows of out. visible: op's pattern over all keys that are to come. All outlive it.
/// - `workspace_bytes(shapes, concurrency, narrow)`: what the execution's workspace holds from then on. narrow: of a result of 16-bit
///   numbers.
template <class Op, Scalar T>
class resumable;
/// An operator whose keys may come in runs.
template <class Op, class T>
concept HasResumable = requires { resumable<Op, T>::workspace_bytes(input_shapes{}, index_t{1}, false); };

/// The gradient of an operator whose keys may come in runs: specialised likewise.
/// - `resumable_gradient{op}`;
/// - `add_weights(in, saved, sums, run)`: adds the weights of a run of the keys to their sums (batch, heads, n), of the rows whose
///   log_sum_exp does not tell them well enough. When all keys have come, kernel::softmax_gradient_scheduler::to_shares makes shares of
///   these;
/// - `backward(in, saved, d_out, wanted, share, run)`: the gradient of a run of the keys, where share (batch, heads, n) multiplies the
///   weights of each row. No share: the keys are all there are.
template <class Op, Scalar T>
struct resumable_gradient;

} // namespace detail

} // namespace attn
