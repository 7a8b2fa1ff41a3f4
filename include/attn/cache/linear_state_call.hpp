// A call of linear attention on what a linear_state keeps.
#pragma once

#include "kept_tokens.hpp"
#include "state_operator.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <Scalar T>
class linear_state;

namespace detail {

template <Scalar T>
inline constexpr bool keeps_sequence<linear_state<T>> = true;

/// A call of linear attention on the last tokens of a state.
template <class Op, Scalar T>
class kept_call<Op, linear_state<T>> {
public:
    kept_call(const Op& op, const stored_view<const T>& queries, const linear_state<T>& of, const outputs<T>& out)
        : op_(op), queries_(queries), of_(of), out_(out) {
        static_assert(require_linear_state<Op, T>());
    }
    /// Throws attention_error unless all fits.
    void check() const {
        const auto& q = queries_.shape();
        check_view(Op::name, "q", queries_);
        if (q.batch != 1) detail::raise(shape_error(Op::name, "q", "has shape ", q, ": a state is of one batch entry"));
        if (q.tokens > of_.size())
            detail::raise(shape_error(Op::name, "q", "has shape ", q, ", but the state has ", of_.size(), " tokens: they are of its last"));
        if (!of_.reaches(of_.size() - q.tokens))
            detail::raise(shape_error(Op::name, "q", "has shape ", q, ", but of ", of_.size(), " tokens the first ", of_.sums_.keys,
                                      " are summed: queries are those of the last append"));
        check_operator(of_.size());
        check_outputs(op_, inputs<T>{queries_, shaped(rows_of_keys(of_.size())), shaped(rows_of_values(of_.size()))}, out_);
    }
    /// Throws attention_error unless the operator attends to the state when that has so many tokens.
    void check_operator(index_t tokens) const {
        const auto& q = queries_.shape();
        if (of_.add_keys_ != &linear_state<T>::template add_keys_of<Op> || convolved_before(op_) > of_.convolved_before_)
            detail::raise(argument_error(Op::name, "state", "was made for another operator"));
        check_state_operator(Op::name, op_);
        // As if there were all queries; shapes only.
        op_.check(inputs<T>{shaped({1, q.heads, tokens, q.channels}), shaped(rows_of_keys(tokens)), shaped(rows_of_values(tokens))});
    }
    static index_t value_channels(const linear_state<T>& of) { return of.layout().value_channels; }
    static index_t work(const linear_state<T>&, index_t queries) { return queries; }
    std::size_t workspace_bytes(index_t concurrency) const { return workspace_bytes(of_.size(), concurrency); }
    /// Bytes of workspace of such a call when the state has so many tokens.
    std::size_t workspace_bytes(index_t tokens, index_t concurrency) const {
        const linear_rows<T> rows{.keys = {}, .queries = tokens};
        return op_.workspace_bytes(input_shapes{queries_.shape(), rows_of_keys(tokens), rows_of_values(tokens)}, concurrency, &rows);
    }
    /// Bytes of workspace that the state needs to append tokens.
    std::size_t append_bytes(index_t concurrency) const {
        return of_.bytes_to_add(*static_cast<const Op*>(of_.op_.get()), concurrency) + of_.memory_.size_bytes();
    }
    /// Computes. All has been checked.
    void run(const execution& on) const {
        if (out_.values.shape().size() == 0) return;
        const auto [in, rows] = of_.call_of(queries_);
        op_.with_kernel(in, rows, on, [&](const auto& kernel, std::byte* memory) { kernel(in, out_, on, memory, &of_.sums_); });
    }

private:
    static stored_view<const T> shaped(const shape& s) {
        static constexpr T nowhere{};
        return tensor_view<const T>(&nowhere, s, {0, 0, 0, 0});
    }
    shape rows_of_keys(index_t tokens) const { return {1, of_.layout().kv_heads, tokens, of_.layout().key_channels}; }
    shape rows_of_values(index_t tokens) const { return {1, of_.layout().kv_heads, tokens, of_.layout().value_channels}; }

    const Op& op_;
    stored_view<const T> queries_;
    const linear_state<T>& of_;
    outputs<T> out_;
};

} // namespace detail

} // namespace attn
