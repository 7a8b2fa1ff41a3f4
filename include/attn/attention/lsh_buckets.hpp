// Locality-sensitive hashing of tokens: those that point the same way fall into the same bucket.
#pragma once

#include "../core/tensor.hpp"
#include "../kernel/lsh/bucket_hash.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// Throws shape_error unless the rotations (rounds, heads or 1, channels, at least 1) suit tokens of that shape.
template <Scalar T>
void check_rotations(std::string_view operation, const tensor_view<const T>& rotations, const shape& tokens) {
    check_view(operation, "rotations", rotations);
    const auto& r = rotations.shape();
    if (r.batch < 1 || (r.heads != 1 && r.heads != tokens.heads) || r.tokens != tokens.channels || r.channels < 1)
        detail::raise(shape_error(operation, "rotations", "have shape ", r, ", but tokens of shape ", tokens,
                                  " need (rounds, heads or 1, channels of a token, buckets / 2)"));
}

} // namespace detail

/// Locality-sensitive hashing: the bucket of every token in every round, (batch, heads, n, rounds).
///     bucket(x) = argmax [x R, -x R]        the first of equal ones; a product that is NaN is never chosen, and if all are, 0
/// for tokens (batch, heads, n, d) and rotations R (rounds, heads or 1, d, buckets / 2), normal numbers of any scale:
/// fill_random_projection makes them. Two vectors meet in a bucket the more likely the smaller their angle. The products are rounded as the
/// scalar type rounds, so that a vector halfway between two buckets may fall into either. Tokens may be stored in 16 bits, and are hashed
/// as floats. n d buckets flops a round and head. Throws shape_error if the rotations do not suit the tokens.
/// Andoni et al. 2015, "Practical and Optimal LSH for Angular Distance".
template <StoredTensor X, TensorLike R>
[[nodiscard]] tensor<index_t> lsh_buckets(const X& x, const R& rotations) {
    using T = detail::computed_t<X>;
    static_assert(std::same_as<T, detail::scalar_t<R>>, "attn: rotations must have the tokens' scalar type, of 16-bit ones float");
    const stored_view<const T> tokens = x;
    const tensor_view<const T> turns = rotations;
    const auto& s = tokens.shape();
    detail::check_view("lsh_buckets", "tokens", tokens);
    detail::check_rotations("lsh_buckets", turns, s);
    using hash = kernel::bucket_hash<T>;
    tensor<index_t> buckets({s.batch, s.heads, s.tokens, turns.shape().batch});
    workspace memory(hash::task_bytes(s.channels, turns.shape().channels));
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t h = 0; h < s.heads; ++h)
            for (index_t round = 0; round < turns.shape().batch; ++round)
                for (index_t i = 0; i < s.tokens; i += hash::rows_of_task)
                    hash(turns, round, h)(tokens.rows(b, h, i), std::min(s.tokens - i, hash::rows_of_task), &buckets(b, h, i, round),
                                          buckets.shape().channels, detail::scratch(memory.bytes().data()));
    return buckets;
}

} // namespace attn
