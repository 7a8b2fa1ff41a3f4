// The state of recurrent attention, which takes the place of a cache: its size stays while the context grows.
#pragma once

#include "../attention/recurrent_attention.hpp"

#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

template <class Rule, Scalar T>
class recurrent_call;

} // namespace detail

/// What recurrent attention keeps of the sequences of a batch: of each kv head a state S (d_k, d_v), and what the tokens since the last
/// multiple of 16 left, from which the next tokens go on. A sequence has the bits of one call, however it is cut.
///
///     recurrent_state<float> state({1, kv_heads, d_k, d_v});
///     auto out = attend(recurrent_attention{.rule = rule::gated{g}}, q, k, v, state);     // of one token or of many
///
/// Memory: 4 (d_k + 16) d_v bytes and a little for each batch entry and head.
template <Scalar T>
class recurrent_state {
public:
    /// The state of no tokens, of a shape (batch, kv_heads, d_k, d_v). Throws shape_error if there can be none.
    explicit recurrent_state(const attn::shape& shape) : shape_(shape) {
        detail::check_shape<T>("recurrent_state", "shape", shape);
        if (shape.channels > 0 && shape.tokens == 0)
            detail::raise(shape_error("recurrent_state", "shape", "is ", shape, ": keys need at least one channel"));
        reserve();
        for (auto& head : heads_) head.begin({}, 0, 0);
    }
    /// A state that begins with S (batch, kv_heads, d_k, d_v), such as the last_state of a call.
    explicit recurrent_state(const detail::read_view<T>& first) : recurrent_state(first.shape()) {
        detail::check_view("recurrent_state", "first", first);
        for_each_head([&](kernel::recurrent_state<T>& head, index_t b, index_t h) { head.begin(first, b, h); });
    }
    /// Takes the tokens of another, which may then only be assigned to, or die.
    recurrent_state(recurrent_state&&) noexcept = default;
    recurrent_state& operator=(recurrent_state&&) noexcept = default;

    /// (batch, kv_heads, d_k, d_v).
    const attn::shape& shape() const { return shape_; }
    /// How many tokens it has taken.
    index_t size() const { return tokens_; }
    /// Throws argument_error if a call that threw has left it.
    void check_whole() const {
        if (tokens_ < 0)
            detail::raise(argument_error("recurrent_state", "state", "was left by a call that threw: only its death is defined"));
    }

    /// Takes tokens that nobody queries, such as those of a prompt, by the operator's rule: keys (batch, kv_heads, n, d_k) and values
    /// (batch, kv_heads, n, d_v). As attend(op, in, out, state, run), but without queries.
    template <class Rule>
    void append(const recurrent_attention<Rule>& op, const detail::read_stored<T>& keys, const detail::read_stored<T>& values,
                const detail::call_execution& run = {}) {
        const auto& k = keys.shape();
        const stored_view<const T> none(static_cast<const T*>(nullptr), {k.batch, 0, k.tokens, k.channels}, {});
        const inputs<T> in{none, keys, values};
        op.check(in);
        detail::recurrent_call<Rule, T>(op, in)(*this, {}, run);
    }
    /// S, after the tokens so far: of every batch entry and kv head.
    [[nodiscard]] tensor<T> sums() const {
        auto copy = fork();
        tensor<T> result(shape_);
        workspace memory(kernel::recurrent_state<T>::bytes_to_close(sizes()));
        copy.for_each_head([&](kernel::recurrent_state<T>& head, index_t b, index_t h) {
            head.end(result, b, h, reinterpret_cast<T*>(memory.bytes().data()), kernel::no_prefetch());
        });
        return result;
    }
    /// A state of the same tokens, with memory of its own: of a prompt that several sequences go on with, or before a draft.
    [[nodiscard]] recurrent_state fork() const {
        check_whole();
        recurrent_state other(shape_, forked{});
        std::ranges::copy(memory_.bytes(), other.memory_.bytes().begin());
        for (std::size_t n = 0; n < heads_.size(); ++n) {
            other.heads_[n].sizes = heads_[n].sizes;
            other.heads_[n].count = heads_[n].count;
        }
        other.tokens_ = tokens_;
        return other;
    }

private:
    template <class Rule, Scalar U>
    friend class detail::recurrent_call;

    struct forked {};
    recurrent_state(const attn::shape& shape, forked) : shape_(shape) { reserve(); }

    /// What any rule may want.
    kernel::recurrent_sizes sizes() const { return {shape_.tokens, shape_.channels, false, false, true}; }
    void reserve() {
        heads_.resize(static_cast<std::size_t>(shape_.batch * shape_.heads));
        detail::taken_of(memory_, [&](detail::scratch& memory) {
            for (auto& head : heads_) head = kernel::recurrent_state<T>::take(memory, sizes());
        });
    }
    void for_each_head(const auto& f) {
        for (index_t b = 0; b < shape_.batch; ++b)
            for (index_t h = 0; h < shape_.heads; ++h) f(heads_[static_cast<std::size_t>(b * shape_.heads + h)], b, h);
    }

    attn::shape shape_;
    index_t tokens_ = 0; ///< -1 while a call changes it
    workspace memory_;
    std::vector<kernel::recurrent_state<T>> heads_;
};

namespace detail {

/// A call of recurrent attention that goes on from a state; the operator has checked its inputs.
template <class Rule, Scalar T>
class recurrent_call {
public:
    recurrent_call(const recurrent_attention<Rule>& op, const inputs<T>& in) : op_(op), in_(in) {}

    /// Throws attention_error unless all fits; else computes.
    void operator()(recurrent_state<T>& state, const outputs<T>& out, const execution& on) const {
        if (in_.queries.shape().heads > 0) check_outputs(op_, in_, out);
        check(state);
        on.reserve(op_.name, "k", in_.keys.shape(), workspace_bytes(op_, shapes_of(in_), on.concurrency()));
        run(state, out, on);
    }
    /// Throws attention_error unless the state can take the tokens.
    void check(const recurrent_state<T>& state) const {
        const auto s = shapes_of(in_);
        state.check_whole();
        if (const shape wanted{s.keys.batch, s.keys.heads, s.keys.channels, s.values.channels}; state.shape() != wanted)
            detail::raise(shape_error(op_.name, "state", "has shape ", state.shape(), ", but k of shape ", s.keys, " and v want ", wanted));
        if (op_.first_state.data() || op_.last_state.data())
            detail::raise(argument_error(op_.name, op_.first_state.data() ? "first_state" : "last_state",
                                         "is given, but a call that goes on from a state has its own"));
        check_positions(op_.name, "state", state.size(), s.keys.tokens);
        if (state.size() > 0 && !state.heads_.empty() && state.heads_[0].sizes != op_.rule.terms().sizes(s))
            detail::raise(argument_error(op_.name, "rule", "is another than that of the tokens that the state has taken"));
    }
    static std::size_t workspace_bytes(const recurrent_attention<Rule>& op, const input_shapes& s, index_t concurrency) {
        return kernel::recurrent_attention<T>::workspace_bytes(s, op.rule.terms(), concurrency, true);
    }
    /// Computes. All has been checked.
    void run(recurrent_state<T>& state, const outputs<T>& out, const execution& on) const {
        const auto s = shapes_of(in_);
        if (s.keys.tokens == 0) return;
        const auto terms = op_.rule.terms();
        for (auto& head : state.heads_) head.sizes = terms.sizes(s);
        const auto tokens = std::exchange(state.tokens_, -1);
        const kernel::recurrent_attention<T> kernel(in_, out.values, terms, op_.scale_for(s.keys.channels));
        kernel({.kept = state.heads_}, on, on.workspace().bytes().data());
        state.tokens_ = tokens + s.keys.tokens;
    }

private:
    const recurrent_attention<Rule>& op_;
    inputs<T> in_;
};

} // namespace detail

/// Recurrent attention of the tokens that come next, which the state takes: of q (batch, heads, n, d_k), k (batch, kv_heads, n, d_k) and v
/// (batch, kv_heads, n, d_v), with the operator's rule, whose numbers are of these tokens. Time of one token: S is read once, and read and
/// written every 16 tokens. `run` as in attend(op, in, out, run). Throws attention_error, and changes nothing, as that does, and if the
/// state has another shape, or its tokens came by a rule of another kind. If an executor throws, the state is lost.
template <class Rule, Scalar T>
void attend(const recurrent_attention<Rule>& op, const inputs<T>& in, const std::type_identity_t<outputs<T>>& out,
            recurrent_state<T>& state, const detail::call_execution& run = {}) {
    op.check(in);
    detail::recurrent_call<Rule, T>(op, in)(state, out, run);
}

/// Recurrent attention of the tokens that come next to a new tensor: see attend(op, in, out, state, run).
template <class Rule, Scalar T>
[[nodiscard]] tensor<T> attend(const recurrent_attention<Rule>& op, const detail::read_stored<T>& q, const detail::read_stored<T>& k,
                               const detail::read_stored<T>& v, recurrent_state<T>& state, const detail::call_execution& run = {}) {
    const inputs<T> in{q, k, v};
    op.check(in);
    tensor<T> out(op.output_shape(shapes_of(in)));
    detail::recurrent_call<Rule, T>(op, in)(state, outputs<T>{out}, run);
    return out;
}

} // namespace attn
