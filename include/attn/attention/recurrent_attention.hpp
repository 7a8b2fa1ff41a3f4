// Recurrent attention: linear attention whose state decays, forgets and is corrected.
#pragma once

#include "backward.hpp"
#include "recurrent_checks.hpp"
#include "recurrent_rule.hpp"

#include <cmath>
#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Recurrent attention: queries read a state that takes one token after the other, by a rule that says how it decays and is corrected.
/// For q (batch, heads, n, d_k), k (batch, kv_heads, n, d_k), v (batch, kv_heads, n, d_v); query head h reads the state of kv head h /
/// (heads / kv_heads), a matrix S (d_k, d_v):
///     out_i = scale q_i^T S_i
/// after token i, where S_i comes from S_(i-1), k_i and v_i by the rule: rule::linear, gated, delta, gated_delta or general. The first
/// state is zero or given; the last may be asked for. What q and k go through before (SiLU, unit_norm, a causal convolution) is the
/// model's.
///     recurrent_attention{.rule = rule::gated_delta{.log_decay = g, .beta = beta}}
///
/// Computed in chunks of 16 tokens: inside one by products of pairs, the delta rules by a triangular solve; decays are products of numbers
/// in 0 .. 1 only, so that no length and no decay overflows. Time: 4 d_k d_v flops a token and head, 6 with a delta rule, and some
/// 16 (d_k + d_v) for the pairs. Heads of keys are computed beside each other. A row of the result depends on the tokens up to its own, bit
/// by bit: not on executor, threads, strides or the rest of the batch. Of a sequence in pieces that begin at multiples of 16 tokens, the
/// last state of each handed on as the first of the next, the bits are those of the whole; a recurrent_state has them wherever it is cut.
/// Positions are not used: tokens of q and of k are the same ones.
template <class Rule = rule::linear<>>
struct recurrent_attention {
    static constexpr std::string_view name = "recurrent_attention";
    static constexpr attention_traits traits{.has_log_sum_exp = false, .writes_beside_values = true};
    using scalar = typename Rule::scalar;

    Rule rule = {};
    std::optional<double> scale = {};           ///< 1 / sqrt(d_k) if not given
    tensor_view<const scalar> first_state = {}; ///< (batch, kv_heads, d_k, d_v), or none: zero
    tensor_view<scalar> last_state = {};        ///< (batch, kv_heads, d_k, d_v), is written, or none; it may be the first

    template <Scalar T>
    void check(const inputs<T>& in) const {
        static_assert(std::same_as<T, scalar>,
                      "attn: decays, betas and states have the scalar type of the tokens: for double, views of double");
        check_inputs(name, in);
        if (scale) detail::check_number<T>(name, "scale", *scale);
        const auto s = shapes_of(in);
        detail::check_recurrent_tokens(name, in);
        detail::check_recurrent_terms(name, rule, s);
        detail::check_recurrent_states(name, in, rule, first_state, last_state);
    }
    void check_apart(const output_memory& out) const {
        detail::for_each_term(rule, [&](std::string_view argument, const auto& view, bool) { out.require_apart(argument, view); });
        out.require_apart("first_state", first_state);
        out.require_apart("last_state", last_state);
    }
    shape output_shape(const input_shapes& s) const { return {s.queries.batch, s.queries.heads, s.queries.tokens, s.values.channels}; }
    template <Scalar T>
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const {
        return kernel::recurrent_attention<scalar>::workspace_bytes(s, rule.terms(), concurrency, false);
    }
    template <Scalar T>
    void forward(const inputs<T>& in, const outputs<T>& out, const execution& run) const {
        kernel::recurrent_attention<T>(in, out.values, rule.terms(), scale_for(in.keys.shape().channels))(
            {{}, first_state, last_state}, run, run.workspace().bytes().data());
    }

    /// The gradients of the inputs, of what the rule takes of each token, and of the first state: see recurrent_backward.hpp.
    template <Scalar T>
    using gradients = recurrent_gradients<T>;
    template <Scalar T>
    void check_gradients(const inputs<T>& in, const gradients<T>& wanted, const auto& check) const {
        detail::check_recurrent_gradients(name, in, rule, first_state, wanted, check);
    }
    template <Scalar T>
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        static_assert(detail::HasBackward<recurrent_attention, T>,
                      "attn: the gradient of recurrent attention has an include of its own: attn/attention/recurrent_backward.hpp");
        return detail::backward_of<recurrent_attention, T>::workspace_bytes(*this, s, concurrency);
    }
    template <Scalar T>
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const gradients<T>& wanted,
                  const execution& run) const {
        detail::backward_of<recurrent_attention, T>::run(*this, in, saved, d_out, wanted, run);
    }

    /// The operator for one sequence of a ragged batch, of whose tokens the rule has its numbers and of whose sequences the states are.
    recurrent_attention of_entry(index_t entry, index_t entries, const row_range& tokens, index_t all) const {
        return detail::recurrent_entry(*this, entry, entries, tokens, all);
    }

    /// The scale of keys of so many channels.
    double scale_for(index_t key_channels) const { return scale.value_or(1 / std::sqrt(static_cast<double>(key_channels))); }
};

} // namespace attn
