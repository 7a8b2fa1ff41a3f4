// Focused linear attention: features sharpened by a power.
#pragma once

#include "../kernel/linear/attention.hpp"
#include "../kernel/linear/focused_features.hpp"
#include "backward.hpp"
#include "feature_map.hpp"
#include "local_arguments.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Focused linear attention: linear attention with features that are sharpened, and a depthwise convolution of the values.
/// For q (batch, heads, n, d_k), k (batch, kv_heads, m, d_k), v (batch, kv_heads, m, d_v), without a scale:
///     u = (relu(x) + 1e-6) / softplus(scale),      f(x) = |u| u^power / |u^power|
///     out_i = f(q_i) S / (f(q_i) . z + eps) + DWC(v)_i,      S = sum_j f(k_j)^T v_j / m,      z = sum_j f(k_j) / m
/// over the m keys j that query i sees. Powers are by channel; norms are over the channels of all heads of a token together. DWC and the
/// positional encoding, which is added to k first, are those of simplified_linear_attention. Patterns: dense and lengths.
///
/// Time: 4 d_k d_v + 2 d_v kernel_height kernel_width flops a token and the powers. Memory: the workspace, with two numbers a token; that
/// of the gradient, with the features and their gradients, 4 d_k numbers a token and head.
/// A row of the result depends on its query, the keys that it sees and where they lie, and what the convolution reads around it, bit by
/// bit: not on the number of queries in the call, executor, threads, strides or the rest of the batch.
/// U, the scalar type of its arrays, is that of the tokens.
/// Han et al. 2023, "FLatten Transformer: Vision Transformer using Focused Linear Attention".
template <class P = dense, Scalar U = float>
struct focused_linear_attention {
    static_assert(detail::require_pattern<P>());
    static constexpr std::string_view name = "focused_linear_attention";
    static constexpr attention_traits traits{.has_log_sum_exp = false};

    int power = 3;                ///< at least 1
    borrowed<const U> scale = {}; ///< before the softplus: d_k numbers, or d_k for each head (then kv_heads = heads), or none (0)
    depthwise_convolution<U> convolution = {};     ///< none if it has no weights
    P pattern = {};                                ///< which keys a query sees
    tensor_view<const U> positional_encoding = {}; ///< (batch or 1, kv_heads or 1, m, d_k), or none
    tensor_view<const U> convolution_input = {};   ///< (batch, kv_heads, n, d_v) instead of v
    double eps = 1e-6;                             ///< is added to the mean of the weights

    template <Scalar T>
    void check(const inputs<T>& in) const {
        detail::check_linear_attention(name, in, pattern, eps);
        static_assert(
            !detail::follows_queries<decltype(at(std::declval<const P&>(), index_t{}, index_t{}))>,
            "attn: focused linear attention divides by the number of keys, the same for every query: its patterns are dense and lengths");
        local<T>(*this).check(name, in, pattern);
        const auto &q = in.queries.shape(), &k = in.keys.shape();
        if (power < 1) detail::raise(argument_error(name, "power", "is ", power, ", but must be at least 1"));
        if (!scale.empty() && std::ssize(scale) != q.channels && (std::ssize(scale) != q.heads * q.channels || k.heads != q.heads))
            detail::raise(argument_error(name, "scale", "has ", scale.size(), " entries, but q has shape ", q, " and k ", k));
    }
    void check_apart(const output_memory& out) const {
        out.require_apart("scale", scale);
        attn::check_apart(pattern, out);
        local<float>(*this).check_apart(out);
    }
    shape output_shape(const input_shapes& s) const { return {s.queries.batch, s.queries.heads, s.queries.tokens, s.values.channels}; }
    template <Scalar T>
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency, const detail::linear_rows<T>* rows = nullptr) const {
        const auto grid = convolution.grid(rows ? rows->queries : s.queries.tokens);
        detail::scratch own;
        for (const auto& read : {s.queries, rows ? rows->keys.shape() : s.keys}) features<T>(own, read, s.queries.heads, concurrency);
        return own.used_bytes() + kernel_of<T>::workspace_bytes(s, concurrency, convolution.present() ? &grid : nullptr);
    }
    template <Scalar T>
    void forward(const inputs<T>& in, const outputs<T>& out, const execution& run) const {
        with_kernel(in, detail::all_rows(in), run, [&](const auto& kernel, std::byte* memory) { kernel(in, out, run, memory); });
    }
    /// f(what computes it: a kernel::linear_attention; the memory for it).
    template <Scalar T>
    void with_kernel(const inputs<T>& in, const detail::linear_rows<T>& rows, const execution& run, const auto& f) const {
        std::byte* const memory = run.workspace().bytes().data();
        const auto heads = in.queries.shape().heads;
        detail::scratch own(memory);
        features<T> queries(own, in.queries.shape(), heads, run.concurrency()), keys(own, rows.keys.shape(), heads, run.concurrency());
        queries.prepare({in.queries, relu{}}, power, scale, run);
        keys.prepare({rows.keys, relu{}, positional_encoding, rows.first_key}, power, scale, run);
        f(kernel_of<T>(queries, keys, pattern, {.eps = eps, .eps_per_key = true}, local<T>(*this).term(in, rows)),
          memory + own.used_bytes());
    }

    /// The gradients of the inputs, and of what the operator refers to, in the same shapes: see focused_linear_backward.hpp.
    template <Scalar T>
    struct gradients : local_gradients<T> {
        std::span<T> scale = {}; ///< through the softplus, of queries and keys
    };
    template <Scalar T>
    void check_gradients(const inputs<T>&, const gradients<T>& wanted, const auto& check) const {
        local<T>(*this).check_gradients(name, wanted, check);
        const shape expected{.tokens = 1, .channels = std::ssize(scale)};
        detail::check_wanted(name, "wanted.scale", detail::as_row(wanted.scale), !scale.empty(), expected, check);
    }
    template <Scalar T>
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        static_assert(
            detail::HasBackward<focused_linear_attention, T>,
            "attn: the gradient of focused linear attention has an include of its own: attn/attention/focused_linear_backward.hpp");
        return detail::backward_of<focused_linear_attention, T>::workspace_bytes(*this, s, concurrency);
    }
    template <Scalar T>
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const gradients<T>& wanted,
                  const execution& run) const {
        detail::backward_of<focused_linear_attention, T>::run(*this, in, saved, d_out, wanted, run);
    }

private:
    template <Scalar T>
    using local = detail::local_arguments<T, U>;

    template <Scalar T>
    using features = kernel::focused_features<T, relu, U>;
    template <Scalar T>
    using kernel_of = kernel::linear_attention<T, features<T>, features<T>, P, kernel::local_term<T, U>>;
};

} // namespace attn
