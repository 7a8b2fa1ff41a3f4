// What the gradient of linear attention is made of, and what it keeps in memory.
#pragma once

#include "../../core/gradients.hpp"
#include "attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What the gradient of a linear attention reads and writes. encoding: is added to the keys; it may have no memory.
template <Scalar T, class F, Pattern P>
struct linear_gradient_call {
    const inputs<T>& in;
    const tensor_view<const T>& d_out;
    const input_gradients<T>& wanted;
    const F& feature_map;
    const P& pattern;
    const tensor_view<const T>& encoding;
    linear_normalisation normalisation;
};

/// What one thread works in. causal: whether queries of one head may see different keys.
template <Scalar T, bool causal>
struct linear_gradient_memory {
    /// Queries of a chunk, where pairs that not all of them see cost most, one key more a query; and keys that are brought to features at a
    /// time.
    static constexpr index_t max_queries = causal ? 16 : 64, max_keys = 64;

    index_t key_width, value_width;         ///< channels in whole registers
    T *sums, *of_sums, *of_sums_transposed; ///< S^T [d_v][d_k], dS [d_k][d_v], dS^T
    T *key_sum, *of_key_sum;                ///< z, dz
    T *queries, *of_queries, *plain;        ///< f, df, and q or k, rows of a chunk
    T *d_out, *keys, *values;               ///< g, e, v
    T *factors, *shares;                    ///< 1 / (f . z + eps) and c of each query
    T *weights, *products;                  ///< f . e and g . v of one query with the keys that are taken one by one
    T *of_keys, *of_values;                 ///< de, dv of all keys

    linear_gradient_memory(detail::scratch& memory, const input_shapes& s)
        : key_width(linear_state<T>::whole(s.keys.channels)), value_width(whole_registers<T>(s.values.channels)) {
        for (T** matrix : {&sums, &of_sums, &of_sums_transposed}) *matrix = memory.take<T>(value_width, key_width);
        for (T** row : {&key_sum, &of_key_sum}) *row = memory.take<T>(key_width);
        for (T** rows : {&queries, &of_queries}) *rows = memory.take<T>(max_queries, key_width);
        for (T** rows : {&plain, &keys}) *rows = memory.take<T>(max_keys, key_width);
        d_out = memory.take<T>(max_queries, value_width);
        values = memory.take<T>(max_keys, value_width);
        for (T** numbers : {&factors, &shares}) *numbers = memory.take<T>(s.queries.tokens);
        for (T** numbers : {&weights, &products}) *numbers = memory.take<T>(s.keys.tokens);
        of_keys = memory.take<T>(s.keys.tokens, key_width);
        of_values = memory.take<T>(s.keys.tokens, value_width);
    }
};

} // namespace attn::kernel
