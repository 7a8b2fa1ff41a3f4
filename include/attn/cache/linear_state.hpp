// The state of causal linear attention, which takes the place of a cache: it grows token by token, and its size stays.
#pragma once

#include "../kernel/linear/order.hpp"
#include "../kernel/linear/span_sums.hpp"
#include "last_rows.hpp"
#include "linear_state_call.hpp"

#include <memory>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What causal linear attention keeps of one sequence, whose tokens stand at the positions 0, 1, 2, ...: S and z, for each kv head, of the
/// keys up to the block of 16 in which the last append began, and the keys and values since; of the first tokens, while they are fewer than
/// 2 d_k d_v / (d_k + d_v), all of them; and of values as many more as a convolution reads. For linear_attention and
/// simplified_linear_attention, with `causal`.
///
///     const linear_attention op{.pattern = causal{}};
///     linear_state<float> state(op, {.kv_heads = 8, .key_channels = 64, .value_channels = 64});
///     state.append(k, v);                  // (1, 8, n, 64) each
///     auto out = attend(op, q, state);     // q: the last tokens' queries
template <Scalar T>
class linear_state {
public:
    /// Its numbers.
    using scalar = T;

    /// The state of no tokens, of an operator, which is copied: what it refers to is not read here. Throws argument_error if that is not
    /// causal throughout, or refers to something of all tokens, or there can be no such state.
    template <class Op>
    linear_state(const Op& op, const state_layout& layout)
        : layout_(checked(op, layout)), keys_(layout.kv_heads, layout.key_channels), values_(layout.kv_heads, layout.value_channels),
          op_(std::make_shared<const Op>(op)), add_keys_(add_keys_of<Op>), convolved_before_(detail::convolved_before(op)) {
        reserve_sums();
        forget();
    }
    /// Takes the tokens of another, which may then only be assigned to, or die.
    linear_state(linear_state&&) noexcept = default;
    linear_state& operator=(linear_state&&) noexcept = default;

    /// How many tokens were appended, and not dropped from the end: the position of the next one.
    index_t size() const { return tokens_; }
    /// What it is given of each token.
    const state_layout& layout() const { return layout_; }

    /// Throws attention_error if keys and values of such shapes could not be appended.
    void check_append(const shape& keys, const shape& values) const {
        check_rows("keys", keys, layout_.key_channels);
        check_rows("values", values, layout_.value_channels);
        if (values.tokens != keys.tokens)
            detail::raise(shape_error("linear_state::append", "values", "have shape ", values, ", but keys have ", keys));
        detail::check_positions("linear_state::append", "keys", tokens_, keys.tokens);
    }
    /// Appends tokens: keys (1, kv_heads, n, d_k) and values (1, kv_heads, n, d_v). Those of earlier calls are summed, as far as later
    /// queries do not meet them one by one: 2 d_k d_v flops a token and head. `run` as in attend. Allocates nothing but a workspace that
    /// has to grow, and other room where a call has more tokens than any before, or far fewer. Throws attention_error, and changes nothing,
    /// if the shapes do not fit.
    void append(const detail::read_stored<T>& keys, const detail::read_stored<T>& values, const detail::call_execution& run = {}) {
        detail::check_view("linear_state::append", "keys", keys);
        detail::check_view("linear_state::append", "values", values);
        check_append(keys.shape(), values.shape());
        const auto count = keys.shape().tokens;
        if (count == 0) return;
        const auto summed = summed_before(tokens_), convolved = std::max(values_.first(), summed - convolved_before_);
        auto of_keys = keys_.room_for(summed, count), of_values = values_.room_for(convolved, count);
        if (summed > sums_.keys) add_keys_(op_.get(), *this, summed, run);
        sums_.keys = summed; // nothing throws from here on
        keys_.drop_before(summed, std::move(of_keys));
        values_.drop_before(convolved, std::move(of_values));
        keys_.append(keys);
        values_.append(values);
        tokens_ += count;
    }

    /// Drops all tokens from position `tokens` on, such as those of a draft: all, or some of the last append. Throws argument_error if
    /// there are fewer, or those before it are in the sums already, which cannot be undone.
    void truncate(index_t tokens) {
        if (tokens < 0 || tokens > tokens_)
            detail::raise(argument_error("linear_state::truncate", "tokens", "are ", tokens, ", but the state has ", tokens_));
        if (tokens == 0) forget();
        else if (!reaches(tokens))
            detail::raise(argument_error("linear_state::truncate", "tokens", "are ", tokens, ", but of ", tokens_, " the first ",
                                         sums_.keys, " are summed: only tokens of the last append can be dropped"));
        keys_.drop_from(tokens);
        values_.drop_from(tokens);
        tokens_ = tokens;
    }

    /// A state of the same tokens, with memory of its own.
    [[nodiscard]] linear_state fork() const {
        linear_state other(*this, forked{});
        std::ranges::copy(memory_.bytes(), other.memory_.bytes().begin());
        return other;
    }

private:
    template <class Op, class Kept>
    friend class detail::kept_call;
    using states = kernel::linear_states<T>;

    struct forked {};
    linear_state(const linear_state& other, forked)
        : layout_(other.layout_), keys_(other.keys_), values_(other.values_), tokens_(other.tokens_), op_(other.op_),
          add_keys_(other.add_keys_), convolved_before_(other.convolved_before_) {
        reserve_sums();
        sums_.keys = other.sums_.keys;
    }
    template <class Op>
    static const state_layout& checked(const Op& op, const state_layout& l) {
        static_assert(detail::require_linear_state<Op, T>());
        detail::check_layout("linear_state", l, sizeof(T));
        detail::check_state_operator("linear_state", op);
        return l;
    }
    void check_rows(const char* what, const shape& rows, index_t channels) const {
        if (const shape wanted{1, layout_.kv_heads, rows.tokens, channels}; rows != wanted)
            detail::raise(shape_error("linear_state::append", what, "have shape ", rows, ", but the state wants ", wanted));
    }

    states take_sums(detail::scratch& memory) const {
        return states::take(memory, layout_.kv_heads, layout_.key_channels, layout_.value_channels);
    }
    void reserve_sums() {
        sums_ = detail::taken_of(memory_, [&](detail::scratch& memory) { return take_sums(memory); });
    }
    /// The sums of no keys.
    void forget() {
        for (index_t head = 0; head < layout_.kv_heads; ++head) sums_.of(head).reset();
        sums_.keys = 0;
    }
    /// How many keys the query at a position meets as a sum.
    index_t summed_before(index_t position) const {
        const causal pattern;
        const inputs<T> in{{nullptr, {1, 1, 1, layout_.key_channels}, {}},
                           {nullptr, {1, 1, position + 1, layout_.key_channels}, {}},
                           {nullptr, {1, 1, position + 1, layout_.value_channels}, {}},
                           {.first_query = position, .first_key = 0}};
        return kernel::linear_order<T, causal>{in, pattern}.absorbed_by(0, 0);
    }
    /// Whether there is what the query at a position meets one by one.
    bool reaches(index_t position) const { return summed_before(position) >= sums_.keys; }
    /// What a call with such queries of the last tokens reads, and which rows of it are there.
    std::pair<inputs<T>, detail::linear_rows<T>> call_of(const stored_view<const T>& queries) const {
        const auto first = tokens_ - queries.shape().tokens;
        return {{queries, keys_.of_sequence(tokens_), values_.of_sequence(tokens_), {.first_query = first, .first_key = 0}},
                {keys_.rows(), keys_.first(), tokens_, first}};
    }
    /// What a call of the last query reads.
    std::pair<inputs<T>, detail::linear_rows<T>> call_of_last() const {
        return call_of({nullptr, {1, layout_.kv_heads, 1, layout_.key_channels}, {}});
    }
    /// Bytes of workspace that add_keys_of wants, in front of the sums.
    template <class Op>
    std::size_t bytes_to_add(const Op& op, index_t concurrency) const {
        const auto [in, rows] = call_of_last();
        return op.workspace_bytes(shapes_of(in), concurrency, &rows);
    }
    /// Adds the keys before one to the sums, as an operator does: in the workspace, so that an executor that throws spoils nothing.
    template <class Op>
    static void add_keys_of(const void* op, const linear_state& to, index_t end, const execution& run) {
        const auto& own = *static_cast<const Op*>(op);
        const auto [in, rows] = to.call_of_last();
        const auto bytes = to.bytes_to_add(own, run.concurrency()), of_sums = to.memory_.size_bytes();
        run.reserve("linear_state::append", "keys", rows.keys.shape(), bytes + of_sums);
        std::byte* const behind = run.workspace().bytes().data() + bytes;
        detail::scratch memory_of_sums(behind);
        const auto sums = to.take_sums(memory_of_sums);
        std::copy_n(to.memory_.bytes().data(), of_sums, behind);
        own.with_kernel(in, rows, run, [&](const auto& kernel, std::byte* memory) {
            run.for_each(to.layout_.kv_heads, [&](index_t head, index_t slice) {
                kernel.add_keys(in, 0, head, to.sums_.keys, end, slice, memory, sums.of(head));
            });
        });
        std::copy_n(behind, of_sums, to.memory_.bytes().data());
    }

    state_layout layout_;
    detail::last_rows<T> keys_, values_;
    index_t tokens_ = 0;
    std::shared_ptr<const void> op_;
    void (*add_keys_)(const void* op, const linear_state& to, index_t end, const execution& run); ///< knows the operator's type
    index_t convolved_before_ = 0;
    workspace memory_;
    states sums_;
};

/// Several sequences' states of one linear attention.
template <Scalar T>
using linear_state_batch = kept_batch<linear_state<T>>;

} // namespace attn
