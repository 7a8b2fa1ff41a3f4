// Simplified linear attention: relu features and a depthwise convolution.
#pragma once

#include "../kernel/linear/attention.hpp"
#include "backward.hpp"
#include "feature_map.hpp"
#include "local_arguments.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Simplified linear attention (SLA): linear attention with relu features, and a depthwise convolution of the values.
/// For q (batch, heads, n, d_k), k (batch, kv_heads, m, d_k), v (batch, kv_heads, m, d_v), without a scale:
///     out_i = relu(q_i) S / (relu(q_i) . z + eps) + DWC(v)_i,      S = sum_j relu(k_j)^T v_j,      z = sum_j relu(k_j)
/// over the keys j that query i sees. DWC is the depthwise convolution over the grid of tokens of v, which then has n of them; it may read
/// another tensor of n tokens. A positional encoding may be added to k before the relu. A query orthogonal to all its keys gives the
/// convolution alone. Patterns are those of linear_attention. Values that no query may see (past a length) count as outside the grid; with
/// a causal pattern the convolution must be causal too.
///
/// Time: 4 d_k d_v + 2 d_v kernel_height kernel_width flops a token, O(n). Memory: the workspace, some 200 kB a thread at d = 64.
/// A row of the result depends on its query, the keys that it sees and where they lie, and what the convolution reads around it, bit by
/// bit: not on the number of queries in the call, executor, threads, strides or the rest of the batch.
/// U, the scalar type of its arrays, is that of the tokens.
/// Guo et al. 2024, "SLAB: Efficient Transformers with Simplified Linear Attention and Progressive Re-parameterized Batch Normalization".
template <class P = dense, Scalar U = float>
struct simplified_linear_attention {
    static_assert(detail::require_pattern<P>());
    static constexpr std::string_view name = "simplified_linear_attention";
    static constexpr attention_traits traits{.has_log_sum_exp = false};

    depthwise_convolution<U> convolution = {};     ///< none if it has no weights
    P pattern = {};                                ///< which keys a query sees
    tensor_view<const U> positional_encoding = {}; ///< (batch or 1, kv_heads or 1, m, d_k), or none
    tensor_view<const U> convolution_input = {};   ///< (batch, kv_heads, n, d_v) instead of v
    double eps = 1e-6;                             ///< is added to the sum of the weights

    template <Scalar T>
    void check(const inputs<T>& in) const {
        detail::check_linear_attention(name, in, pattern, eps);
        local<T>(*this).check(name, in, pattern);
    }
    void check_apart(const output_memory& out) const {
        attn::check_apart(pattern, out);
        local<float>(*this).check_apart(out);
    }
    shape output_shape(const input_shapes& s) const { return {s.queries.batch, s.queries.heads, s.queries.tokens, s.values.channels}; }
    template <Scalar T>
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency, const detail::linear_rows<T>* rows = nullptr) const {
        const auto grid = convolution.grid(rows ? rows->queries : s.queries.tokens);
        return kernel_of<T>::workspace_bytes(s, concurrency, convolution.present() ? &grid : nullptr);
    }
    template <Scalar T>
    void forward(const inputs<T>& in, const outputs<T>& out, const execution& run) const {
        with_kernel(in, detail::all_rows(in), run, [&](const auto& kernel, std::byte* memory) { kernel(in, out, run, memory); });
    }
    /// f(what computes it: a kernel::linear_attention; the memory for it).
    template <Scalar T>
    void with_kernel(const inputs<T>& in, const detail::linear_rows<T>& rows, const execution& run, const auto& f) const {
        const query_features<T> queries{in.queries, relu{}};
        const key_features<T> keys{rows.keys, relu{}, positional_encoding, rows.first_key};
        f(kernel_of<T>(queries, keys, pattern, {.eps = eps}, local<T>(*this).term(in, rows)), run.workspace().bytes().data());
    }

    /// The gradients of the inputs, and of what the operator refers to: see simplified_linear_backward.hpp.
    template <Scalar T>
    using gradients = local_gradients<T>;
    template <Scalar T>
    void check_gradients(const inputs<T>&, const gradients<T>& wanted, const auto& check) const {
        local<T>(*this).check_gradients(name, wanted, check);
    }
    template <Scalar T>
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        static_assert(
            detail::HasBackward<simplified_linear_attention, T>,
            "attn: the gradient of simplified linear attention has an include of its own: attn/attention/simplified_linear_backward.hpp");
        return detail::backward_of<simplified_linear_attention, T>::workspace_bytes(*this, s, concurrency);
    }
    template <Scalar T>
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const gradients<T>& wanted,
                  const execution& run) const {
        detail::backward_of<simplified_linear_attention, T>::run(*this, in, saved, d_out, wanted, run);
    }

private:
    template <Scalar T>
    using local = detail::local_arguments<T, U>;

    template <Scalar T>
    using query_features = kernel::mapped_features<T, relu>;
    template <Scalar T>
    using key_features = kernel::mapped_features<T, relu, U>;
    template <Scalar T>
    using kernel_of = kernel::linear_attention<T, query_features<T>, key_features<T>, P, kernel::local_term<T, U>>;
};

} // namespace attn
