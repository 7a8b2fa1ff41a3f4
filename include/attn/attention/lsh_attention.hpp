// LSH attention, the Reformer's: softmax attention of every token to those that hash into its bucket.
#pragma once

#include "../kernel/lsh/attention.hpp"
#include "../pattern/causal.hpp"
#include "backward.hpp"
#include "lsh_buckets.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What LSH attention takes as a pattern, of which the choice is made at run time: dense{} or causal{}.
struct lsh_pattern {
    bool is_causal = false; ///< whether a token sees earlier ones only

    /// All tokens.
    constexpr lsh_pattern(pattern::dense = {}) {}
    /// Earlier tokens.
    constexpr lsh_pattern(pattern::causal) : is_causal(true) {}
    /// Whether query i sees key j, if they meet.
    constexpr bool visible(index_t i, index_t j) const { return !is_causal || j <= i; }
};

/// LSH attention: softmax attention of every token to those that a locality-sensitive hash finds similar.
/// For q (batch, heads, n, d_k), which are the keys too (k must be the same view), v (batch, heads, n, d_v), and in every round the
/// rotations R (d_k, buckets / 2):
/// 1. every token has a bucket, argmax [q R, -q R] (lsh_buckets); tokens are sorted by bucket, then by position, and cut into chunks
/// 2. a token sees those of its bucket in its chunk and in the one before; of causal{} earlier ones only; not itself
///
/// Over the rounds, then:
///     out_i = sum over rounds and seen j of exp(x_ij) v_j / sum of exp(x_ij)      x_ij = scale * q_i . q_j / |q_j|
/// so that a pair which meets in several rounds counts in each. A token that meets no other in any round gives its own value; then
/// log_sum_exp, else the logarithm of the denominator, is x_ii + ln(rounds). (The originals give a token's score with itself a penalty of
/// 5e4 or 1e5, which is that.) A vector of zeros, which has no length, stays a key of zeros.
///
/// n may be any number; the last chunk may be shorter. Positions are the same for q and k. A NaN in q reaches, by its token's place among
/// the sorted, what others see.
/// Time: at most rounds n (4 chunk (d_k + d_v) + d_k buckets) flops a head. Memory: the workspace, four numbers a token for some heads at a
/// time, and for every thread about 2 (chunk + 384) (d_k + d_v) numbers, or 64 for each bucket if these are more. The result does not
/// depend on executor, threads, strides or the rest of the batch, bit by bit. Unlike other operators' rows, those of two calls that share
/// some tokens need not have the same bits.
/// Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer".
template <Scalar T = float>
struct lsh_attention {
    static constexpr std::string_view name = "lsh_attention";
    static constexpr attention_traits traits{.has_narrow_workspace = true, .keys_are_queries = true};

    tensor_view<const T> rotations;    ///< (rounds, heads or 1, d_k, buckets / 2), as fill_random_projection makes them
    std::optional<index_t> chunk = {}; ///< tokens in a chunk: 2 n / buckets, rounded up, if not given
    lsh_pattern pattern = {};          ///< dense{}, or causal{}: only earlier tokens
    std::optional<double> scale = {};  ///< 1 / sqrt(d_k) if not given

    template <Scalar S>
    void check(const inputs<S>& in) const {
        static_assert(std::same_as<S, T>, "attn: rotations must have the tokens' scalar type, of 16-bit ones float");
        check_inputs(name, in);
        const auto &q = in.queries, &k = in.keys;
        if (k.shape() != q.shape() || k.data() != q.data() || k.strides() != q.strides() || k.format() != q.format())
            detail::raise(shape_error(name, "k", "of shape ", k.shape(), " must be the same view as q of shape ", q.shape(),
                                      ": a token's key is its query over its length"));
        const auto& where = in.positions;
        const bool shared = where.first_query.shared() && where.first_key.shared();
        for (index_t b = 0; b < (shared ? std::min<index_t>(q.shape().batch, 1) : q.shape().batch); ++b)
            if (where.first_query[b] != where.first_key[b])
                detail::raise(argument_error(name, "positions", "of queries and keys differ, which are the same tokens"));
        detail::check_rotations(name, rotations, q.shape());
        if (chunk && *chunk < 1) detail::raise(argument_error(name, "chunk", "is ", *chunk, ", but 1 at least is needed"));
        if (scale) detail::check_number<S>(name, "scale", *scale);
    }
    void check_apart(const output_memory& out) const { out.require_apart("rotations", rotations); }
    shape output_shape(const input_shapes& s) const { return {s.queries.batch, s.queries.heads, s.queries.tokens, s.values.channels}; }
    template <Scalar S>
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const {
        return bytes(s, concurrency, false);
    }
    /// Bytes of workspace for a result of 16-bit numbers, whose rounds are rounded when the last has been added.
    template <Scalar S>
    std::size_t narrow_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        return bytes(s, concurrency, true);
    }
    template <Scalar S>
    void forward(const inputs<S>& in, const outputs<S>& out, const execution& run) const {
        const auto s = shapes_of(in);
        if (s.queries.batch * s.queries.heads * s.queries.tokens == 0) return;
        detail::scratch memory(run.workspace().bytes().data());
        const work w(memory, *this, s, run.concurrency(), out.values.is_narrow());
        for (index_t b = 0; b < s.queries.batch; ++b)
            for (index_t h = 0; h < s.queries.heads; h += w.heads)
                w.attend_some(*this, in, out, run, b, h, std::min(w.heads, s.queries.heads - h));
    }

    /// The gradients of the tokens and the values: wanted.queries is all of the tokens', as queries and as keys, for both are one tensor;
    /// wanted.keys is refused. Buckets are taken as constants, as they are almost everywhere, so the rotations have none; nor has a vector
    /// of zeros as a key. The hash is computed again. See lsh_backward.hpp.
    template <Scalar S>
    using gradients = input_gradients<S>;
    template <Scalar S>
    void check_gradients(const inputs<S>&, const gradients<S>& wanted, const auto&) const {
        if (wanted.keys.data())
            detail::raise(argument_error(name, "wanted.keys", "is asked for, but keys are q: wanted.queries has all of its gradient"));
    }
    template <Scalar S>
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        static_assert(detail::HasBackward<lsh_attention, S>,
                      "attn: the gradient of LSH attention has an include of its own: attn/attention/lsh_backward.hpp");
        return detail::backward_of<lsh_attention, S>::workspace_bytes(*this, s, concurrency);
    }
    template <Scalar S>
    void backward(const inputs<S>& in, const saved_outputs<S>& saved, const output_gradients<S>& d_out, const gradients<S>& wanted,
                  const execution& run) const {
        detail::backward_of<lsh_attention, S>::run(*this, in, saved, d_out, wanted, run);
    }

    /// Tokens in a chunk of n: as given, or 2 n / buckets rounded up. There are rotations.
    index_t chunk_of(index_t n) const {
        const auto half = rotations.shape().channels;
        return chunk.value_or(std::max<index_t>(1, (n + half - 1) / half));
    }

private:
    using work = kernel::lsh_work<T, lsh_attention>;

    std::size_t bytes(const input_shapes& s, index_t concurrency, bool narrow) const {
        detail::check_rotations(name, rotations, s.queries);
        return detail::bytes_for<work>(*this, s, concurrency, narrow);
    }
};

/// Deduces lsh_attention of the scalar type of its rotations.
template <TensorLike R, class... Others>
lsh_attention(const R&, const Others&...) -> lsh_attention<detail::scalar_t<R>>;

} // namespace attn
