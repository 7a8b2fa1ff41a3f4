// Ragged batches: sequences of different lengths, one after the other in one tensor of tokens.
#pragma once

#include "../core/borrowed.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A ragged batch: entry e has the tokens starts[e] .. starts[e + 1] - 1 of tensors (1, heads, all tokens, channels). Nothing is padded.
struct ragged {
    borrowed<const index_t> starts;          ///< entries + 1 numbers, of which none is below the one before; 0 first, the tokens of q last
    borrowed<const index_t> key_starts = {}; ///< the same of keys and values, where they are other tokens

    /// How many sequences there are.
    index_t entries() const { return std::max<index_t>(0, std::ssize(starts) - 1); }
    /// The starts of keys and values.
    const borrowed<const index_t>& of_keys() const { return key_starts.empty() ? starts : key_starts; }
    /// The tokens of a sequence, which its queries are of.
    row_range queries(index_t entry) const { return between(starts, entry); }
    /// The tokens of a sequence that its keys and values are of.
    row_range keys(index_t entry) const { return between(of_keys(), entry); }
    /// How much work a sequence is, beside the others: its queries.
    index_t work(index_t entry) const { return queries(entry).count; }

private:
    static row_range between(std::span<const index_t> starts, index_t entry) {
        const auto* const first = starts.data() + entry;
        return {first[0], first[1] - first[0]};
    }
};

namespace detail {

/// Throws shape_error unless the starts cut the tokens of a tensor, of one batch entry, into sequences.
inline void check_starts(std::string_view operation, std::string_view argument, std::span<const index_t> starts, std::string_view of,
                         const auto& tokens) {
    check_view(operation, of, tokens);
    const auto& x = tokens.shape();
    const auto refuse = [&](const auto&... problem) {
        detail::raise(shape_error(operation, argument, problem..., ", for tokens of shape ", x));
    };
    if (x.batch != 1) refuse("cut one batch entry into sequences");
    if (starts.empty() || starts.front() != 0 || starts.back() != x.tokens || !std::ranges::is_sorted(starts))
        refuse("do not rise from 0 to ", x.tokens);
}

/// Throws shape_error unless there are as many sequences of keys, and positions for each or for all.
inline void check_counts(std::string_view operation, const ragged& batch, const positions& where) {
    if (batch.of_keys().size() != batch.starts.size())
        detail::raise(shape_error(operation, "key_starts", "are ", batch.of_keys().size(), ", but starts are ", batch.starts.size()));
    for (const auto* first : {&where.first_query, &where.first_key})
        if (!first->shared() && first->count() != batch.entries())
            detail::raise(shape_error(operation, "positions", "are ", first->count(), ", but there are ", batch.entries(), " sequences"));
}

inline void check_starts_apart(const ragged& batch, const output_memory& out) {
    out.require_apart("starts", batch.starts);
    out.require_apart("key_starts", batch.key_starts);
}

/// The operator for entry e: as it is, but where it has something of every token.
template <Attention A>
decltype(auto) operator_of_entry(const A& op, const ragged& batch, index_t e) {
    if constexpr (requires { op.of_entry(e, e, row_range{}, e); })
        return op.of_entry(e, batch.entries(), batch.keys(e), batch.of_keys().back());
    else return (op);
}
/// Entry e of what a call reads.
template <Scalar T>
inputs<T> inputs_of_entry(const ragged& batch, const inputs<T>& in, index_t e) {
    auto own = in.slice({.tokens = batch.queries(e)}, {.tokens = batch.keys(e)});
    own.positions = in.positions.of_entry(e);
    return own;
}

/// Which sequences of a batch are so much of its work that all threads do one at a time; the others are handed out, one to a thread.
template <class Batch>
class long_entries {
public:
    long_entries(const Batch& batch, index_t concurrency) : batch_(batch) {
        index_t all = 0;
        for (index_t e = 0; e < batch.entries(); ++e) all += batch.work(e);
        limit_ = concurrency > 1 ? all / (2 * concurrency) : all;
    }
    bool contains(index_t e) const { return batch_.work(e) > limit_; }

private:
    const Batch& batch_;
    index_t limit_;
};
/// Calls f(entry, execution) for each: the long ones one after the other with all threads, then the others.
void for_each_entry(const auto& batch, std::size_t bytes_of_a_thread, const execution& run, const auto& f) {
    const long_entries is_long(batch, run.concurrency());
    for (index_t e = 0; e < batch.entries(); ++e)
        if (is_long.contains(e)) f(e, run);
    run.for_each(batch.entries(), [&](index_t e, index_t slice) {
        if (is_long.contains(e)) return;
        sequential here;
        workspace piece(run.workspace().bytes().subspan(static_cast<std::size_t>(slice) * bytes_of_a_thread, bytes_of_a_thread));
        f(e, execution(here, piece));
    });
}
/// The most that bytes(entry, threads) says of the short ones with one thread each, and what all need.
struct ragged_bytes {
    std::size_t of_a_thread = 0, all = 0;

    ragged_bytes(const auto& batch, index_t concurrency, const auto& bytes) {
        const long_entries is_long(batch, concurrency);
        for (index_t e = 0; e < batch.entries(); ++e) {
            if (is_long.contains(e)) all = std::max(all, bytes(e, concurrency));
            else of_a_thread = std::max(of_a_thread, bytes(e, index_t{1}));
        }
        of_a_thread = (of_a_thread + alignment - 1) / alignment * alignment;
        all = std::max(all, bytes_for_threads(concurrency, of_a_thread));
    }
};

template <Storage S, Attention A, Scalar T>
ragged_bytes ragged_bytes_of(const A& op, const ragged& batch, const inputs<T>& in, index_t concurrency) {
    return {batch, concurrency, [&](index_t e, index_t threads) {
                return workspace_bytes_for<S>(operator_of_entry(op, batch, e), shapes_of(inputs_of_entry(batch, in, e)), threads);
            }};
}

template <Attention A, Scalar T>
void check_ragged(const A& op, const ragged& batch, const inputs<T>& in) {
    check_starts(A::name, "starts", batch.starts, "q", in.queries);
    check_starts(A::name, "key_starts", batch.of_keys(), "k", in.keys);
    check_starts(A::name, "key_starts", batch.of_keys(), "v", in.values);
    check_counts(A::name, batch, in.positions);
    for (index_t e = 0; e < batch.entries(); ++e) operator_of_entry(op, batch, e).check(inputs_of_entry(batch, in, e));
}

} // namespace detail

/// Bytes of workspace that a ragged call needs with such an executor or execution, if its result is stored in S. Throws attention_error if
/// the starts do not fit.
template <Storage S, Attention A, Scalar T>
std::size_t workspace_bytes(const A& op, const ragged& batch, const inputs<T>& in, const detail::call_execution& run = {}) {
    detail::check_ragged(op, batch, in);
    return detail::ragged_bytes_of<S>(op, batch, in, run.concurrency()).all;
}

/// Calls an operator on each sequence of a ragged batch: the bits are those of a call for each, whose batch is 1. Patterns and score
/// functions see the positions of its tokens within their sequence, beginning where in.positions says: one number for all, or one for each;
/// what they have for each batch entry they have for entry 0. What recurrent_attention's rule takes of each token lies as the tokens do,
/// and of each sequence it has a state: (sequences, kv_heads, d_k, d_v). Long sequences are computed by all threads, one after the other,
/// short ones one on each. out: (1, heads, all tokens, d_v), log_sum_exp likewise. `run` as in `attend`. Throws attention_error, before
/// anything is read or written, as attend does for any of the sequences.
template <Attention A, Scalar T>
void attend(const A& op, const ragged& batch, const inputs<T>& in, const outputs<T>& out, const detail::call_execution& run = {}) {
    detail::check_ragged(op, batch, in);
    detail::check_outputs(op, in, out);
    detail::check_starts_apart(batch, output_memory(A::name, "out", out.values));
    if (out.log_sum_exp.data()) detail::check_starts_apart(batch, output_memory(A::name, "log_sum_exp", out.log_sum_exp));
    const auto bytes = detail::with_storage(
        out.values, [&]<Storage S>(std::type_identity<S>) { return detail::ragged_bytes_of<S>(op, batch, in, run.concurrency()); });
    run.reserve(A::name, "q", in.queries.shape(), bytes.all);
    detail::for_each_entry(batch, bytes.of_a_thread, run, [&](index_t e, const execution& on) {
        detail::forward_checked(detail::operator_of_entry(op, batch, e), detail::inputs_of_entry(batch, in, e),
                                out.slice({.tokens = batch.queries(e)}), on);
    });
}

/// Attention on a ragged batch, to a new tensor (1, heads, all tokens, d_v): see attend(op, batch, in, out, run).
template <Attention A, Scalar T>
[[nodiscard]] tensor<T> attend(const A& op, const ragged& batch, const inputs<T>& in, const detail::call_execution& run = {}) {
    detail::check_ragged(op, batch, in);
    tensor<T> out(op.output_shape(shapes_of(in)));
    attend(op, batch, in, outputs<T>{out}, run);
    return out;
}

} // namespace attn
