// Attention to what a cache holds.
#pragma once

#include "../attention/resumable.hpp"
#include "kept_tokens.hpp"
#include "turned_queries.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Several sequences of keys and values.
template <Scalar T>
using sequence_batch = kept_batch<sequence<T>>;

namespace detail {

/// An operator that knows keys in pages: one of the kernels of softmax attention.
template <class Op, class T>
concept KnowsPages = Attention<Op> && HasResumable<Op, T>;

template <Scalar T>
inline constexpr bool keeps_sequence<sequence<T>> = true;

/// A call of attention to a sequence.
template <class Op, Scalar T>
class kept_call<Op, sequence<T>> {
public:
    /// Queries of the sequence's last tokens.
    kept_call(const Op& op, const stored_view<const T>& queries, const sequence<T>& of, const outputs<T>& out)
        : kept_call(op, queries, of.size() - queries.shape().tokens, of, out) {}
    /// Queries at the positions from first_query on, of whatever tokens.
    kept_call(const Op& op, const stored_view<const T>& queries, index_t first_query, const sequence<T>& of, const outputs<T>& out)
        : op_(op), of_(of), out_(out), queries_(queries, first_query, of) {
        static_assert(KnowsPages<Op, T>, "attn: this operator cannot attend to a cache: softmax, sparse and pointwise attention can");
        const auto& l = of.pool().layout();
        const auto keys = of.positions();
        const shape of_keys{1, l.kv_heads, keys.count, l.key_channels}, of_values{1, l.kv_heads, keys.count, l.value_channels};
        // Shapes only: where the rows lie, the pages say.
        in_ = {queries, {&nowhere, of_keys, {0, 0, 0, 0}}, {&nowhere, of_values, {0, 0, 0, 0}}};
        in_.positions = {.first_query = first_query, .first_key = keys.first};
    }
    /// Throws attention_error unless all fits, and the queries are of tokens of the sequence.
    void check() const {
        const auto& q = in_.queries.shape();
        check_view(Op::name, "q", in_.queries);
        if (q.tokens > of_.size())
            detail::raise(
                shape_error(Op::name, "q", "has shape ", q, ", but the sequence has ", of_.size(), " tokens: they are of its last"));
        check_any();
    }
    /// Throws attention_error unless all fits, of whatever tokens the queries are.
    void check_any() const {
        const auto& q = in_.queries.shape();
        check_view(Op::name, "q", in_.queries);
        if (q.batch != 1) detail::raise(shape_error(Op::name, "q", "has shape ", q, ": a sequence is one batch entry"));
        op_.check(in_);
        check_outputs(op_, in_, out_);
        queries_.check(Op::name);
    }
    static index_t value_channels(const sequence<T>& of) { return of.pool().layout().value_channels; }
    static index_t work(const sequence<T>& of, index_t queries) { return product(queries, of.positions().count); }
    std::size_t workspace_bytes(index_t concurrency) const {
        return bytes_taken([&](scratch& memory) { return take_queries(memory, concurrency); });
    }
    /// Computes. All has been checked.
    void run(const execution& on) const {
        if (out_.values.shape().size() == 0 && out_.log_sum_exp.shape().size() == 0) return;
        auto in = in_;
        if (queries_.are_others()) {
            scratch memory(on.workspace().bytes().data());
            const auto turned = take_queries(memory, on.concurrency());
            queries_.write(turned);
            in.queries = turned;
        }
        const auto pages = of_.view();
        with_kept_keys(of_, op_.pattern,
                       [&](const auto& pattern) { forward_by_softmax_kernel<kernel::paged_storage>(op_, pattern, in, out_, on, &pages); });
    }

private:
    using scheduler = typename Op::template scheduler<T, kernel::paged_storage>;
    static constexpr T nowhere{};

    /// The queries as a cache has keys, behind the memory of what computes.
    tensor_view<T> take_queries(scratch& memory, index_t concurrency) const {
        const auto& q = in_.queries.shape();
        memory.take<std::byte>(
            scheduler::workspace_bytes(shapes_of(in_), max_passes<decltype(op_.pattern)> > 1, concurrency, out_.values.is_narrow()));
        return head_major(queries_.are_others() ? memory.take<T>(q.size()) : nullptr, q);
    }

    const Op& op_;
    const sequence<T>& of_;
    inputs<T> in_;
    outputs<T> out_;
    turned_queries<T> queries_;
};

} // namespace detail

} // namespace attn
