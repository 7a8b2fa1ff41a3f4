// Linear attention: weights that are products of features, so that the keys are summed once for all queries.
#pragma once

#include "../kernel/linear/attention.hpp"
#include "backward.hpp"
#include "feature_map.hpp"
#include "linear_rows.hpp"
#include "mapped_vectors.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Linear attention: weights are products of features, so that a running sum over the keys replaces the scores.
/// For q (batch, heads, n, d_k), k (batch, kv_heads, m, d_k), v (batch, kv_heads, m, d_v); query head h reads kv head h / (heads /
/// kv_heads):
///     out_i = phi(q_i) S / (phi(q_i) . z + eps),      S = sum_j phi(k_j)^T v_j  (d_k, d_v),      z = sum_j phi(k_j)  (d_k)
/// over the keys j that query i sees; without `normalise`, out_i = scale phi(q_i) S. A row that sees no key is 0. Where phi is never
/// negative and eps > 0, a query orthogonal to all its keys gives 0. A hidden key never influences a row, whatever it holds. Patterns:
/// dense, causal, lengths, prefix, and what & and | make of them; the sums are then running sums, which go from chunk to chunk. phi is a
/// map of each channel, or one of whole vectors (VectorFeatureMap: performer_features, cosformer_features, your own): then d_k above is
/// the number of its features; the gradient keeps them, and theirs, in the workspace.
///
/// Time: 2 d_k d_v flops for each key and each query, O(n); causal, some more for the pairs inside a block of 16 keys. Rows that see few
/// keys, at most 2 d_k d_v / (d_k + d_v), are computed in the other order, (phi(q) phi(k)^T) v. Memory: the workspace, some 100 kB a
/// thread at d = 64. Causal heads are computed one by one, others also in parallel over tokens. A row of the result depends on its query,
/// the keys that it sees and where they lie, bit by bit: not on the number of queries in the call, executor, threads, strides or the rest
/// of the batch. Katharopoulos et al. 2020, "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention".
template <class F = elu_plus_one, class P = dense>
    requires FeatureMap<F> || VectorFeatureMap<F>
struct linear_attention {
    static_assert(detail::require_pattern<P>());
    static constexpr std::string_view name = "linear_attention";
    static constexpr attention_traits traits{.has_log_sum_exp = false};

    F feature_map = {};    ///< phi, applied to each channel, or to each token, of q and k
    P pattern = {};        ///< which keys a query sees
    bool normalise = true; ///< divides by the sum of the weights
    double eps = 1e-6;     ///< is added to that sum
    double scale = 1;      ///< multiplies what is not normalised

    template <Scalar T>
    void check(const inputs<T>& in) const {
        detail::check_linear_attention(name, in, pattern, eps);
        detail::check_number<T>(name, "scale", scale);
        if constexpr (requires { feature_map.check(name, index_t{}); }) feature_map.check(name, in.keys.shape().channels);
        if (normalise && scale != 1) detail::raise(argument_error(name, "scale", "is for sums that are not normalised"));
    }
    void check_apart(const output_memory& out) const {
        attn::check_apart(pattern, out);
        if constexpr (requires { feature_map.check_apart(out); }) feature_map.check_apart(out);
    }
    shape output_shape(const input_shapes& s) const { return {s.queries.batch, s.queries.heads, s.queries.tokens, s.values.channels}; }
    template <Scalar T>
        requires FeatureMap<F>
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency, const detail::linear_rows<T>* = nullptr) const {
        return kernel_of<T>::workspace_bytes(s, concurrency, nullptr);
    }
    template <Scalar T>
        requires VectorFeatureMap<F>
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency, const detail::linear_rows<T>* = nullptr) const {
        detail::scratch own;
        const vectors<T> mapped(own, feature_map, s, concurrency);
        return own.used_bytes() +
               kernel_of_vectors<T>::workspace_bytes(vectors<T>::shapes(s, mapped.count), concurrency, nullptr, mapped.keys.staged());
    }
    template <Scalar T>
    void forward(const inputs<T>& in, const outputs<T>& out, const execution& run) const {
        with_kernel(in, detail::all_rows(in), run, [&](const auto& kernel, std::byte* memory) { kernel(in, out, run, memory); });
    }
    /// f(what computes it: a kernel::linear_attention; the memory for it).
    template <Scalar T>
        requires FeatureMap<F>
    void with_kernel(const inputs<T>& in, const detail::linear_rows<T>& rows, const execution& run, const auto& f) const {
        const features<T> queries{in.queries, feature_map}, keys{rows.keys, feature_map, {}, rows.first_key};
        f(kernel_of<T>(queries, keys, pattern, normalisation()), run.workspace().bytes().data());
    }
    /// The same, with features of whole vectors, for which it takes memory first.
    template <Scalar T>
        requires VectorFeatureMap<F>
    void with_kernel(const inputs<T>& in, const detail::linear_rows<T>& rows, const execution& run, const auto& f) const {
        std::byte* const memory = run.workspace().bytes().data();
        detail::scratch own(memory);
        vectors<T> mapped(own, feature_map, shapes_of(in), run.concurrency());
        mapped.prepare(in, pattern, run, rows.key_maxima);
        const kernel_of_vectors<T> kernel(mapped.queries, mapped.keys, pattern, normalisation());
        f(detail::kernel_of_mapped<kernel_of_vectors<T>, vectors<T>>{kernel, mapped}, memory + own.used_bytes());
    }
    /// Whether a key's features depend on what a map of vectors takes of all keys.
    template <Scalar T>
    static constexpr bool shares_key_maxima() {
        if constexpr (VectorFeatureMap<F>) return vectors<T>::shares_maxima;
        else return false;
    }
    /// Writes that, of each head of keys, and of those keys that of(batch) says.
    template <Scalar T>
    void find_key_maxima(const inputs<T>& in, const auto& of, const execution& run, std::span<T> to) const {
        detail::scratch own(run.workspace().bytes().data());
        vectors<T> mapped(own, feature_map, shapes_of(in), run.concurrency());
        mapped.map.prepare();
        mapped.keys.read(in.keys, in.positions.first_key, false);
        mapped.keys.find_maxima(of, run);
        std::ranges::copy(mapped.keys.maxima(), to.begin());
    }
    /// What the denominator is.
    kernel::linear_normalisation normalisation() const { return {.normalise = normalise, .eps = eps, .scale = scale}; }

    /// The gradients of the inputs: see linear_backward.hpp.
    template <Scalar T>
    using gradients = input_gradients<T>;
    template <Scalar T>
    void check_gradients(const inputs<T>&, const gradients<T>&, const auto&) const {} // of parameters it has none
    template <Scalar T>
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        static_assert(detail::HasBackward<linear_attention, T>,
                      "attn: the gradient of linear attention has an include of its own: attn/attention/linear_backward.hpp");
        return detail::backward_of<linear_attention, T>::workspace_bytes(*this, s, concurrency);
    }
    template <Scalar T>
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out, const gradients<T>& wanted,
                  const execution& run) const {
        detail::backward_of<linear_attention, T>::run(*this, in, saved, d_out, wanted, run);
    }

private:
    template <Scalar T>
    using features = kernel::mapped_features<T, F>;
    template <Scalar T>
    using kernel_of = kernel::linear_attention<T, features<T>, features<T>, P>;
    template <Scalar T>
    using vectors = detail::mapped_vectors<T, F, P>;
    template <Scalar T>
    using kernel_of_vectors = kernel::linear_attention<T, typename vectors<T>::features_type, typename vectors<T>::features_type, P>;
};

} // namespace attn
