// An attention operator of your own, which is called as attn's are. Registered as in tests/cases/own_operator.cpp, every test and benchmark
// that runs over all operators runs over it: accuracy, layouts, executors, NaN, memory, speed.
#include <attn/attention/eigen.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

namespace my {

/// Sigmoid attention (Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for Sigmoid Self-Attention"):
///     out[b, h, i] = sum_j s(scale q[b, h, i] . k[b, g, j] + bias) v[b, g, j],      s(x) = 1 / (1 + e^-x),      scale = 1 / sqrt(d_k)
/// for q (batch, heads, n, d_k), k (batch, kv_heads, m, d_k), v (batch, kv_heads, m, d_v), g = h / (heads / kv_heads).
struct sigmoid_attention {
    static constexpr std::string_view name = "sigmoid_attention";
    static constexpr attn::attention_traits traits{.has_log_sum_exp = false}; // no softmax

    double bias = -6; ///< about the negative logarithm of the usual number of keys

    template <attn::Scalar T>
    void check(const attn::inputs<T>& in) const {
        attn::check_inputs(name, in); // the shapes of q, k and v; then your own parameters
        if (!std::isfinite(bias)) throw attn::argument_error(name, "bias", "is not finite");
    }
    void check_apart(const attn::output_memory&) const {} // it refers to no memory
    attn::shape output_shape(const attn::input_shapes& s) const {
        return {s.queries.batch, s.queries.heads, s.queries.tokens, s.values.channels};
    }
    template <attn::Scalar T>
    std::size_t workspace_bytes(const attn::input_shapes& s, attn::index_t concurrency) const {
        return static_cast<std::size_t>(concurrency * s.values.channels) * sizeof(T);
    }
    /// Everything has been checked; nothing may be allocated. A query is a task: any thread, any order, the same bits. Its sums lie in the
    /// thread's slice of the workspace, for q, k, v and out may each be stored in 16 bits, and a result is rounded once.
    template <attn::Scalar T>
    void forward(const attn::inputs<T>& in, const attn::outputs<T>& out, const attn::execution& run) const {
        const auto batch = out.values.shape().batch, heads = out.values.shape().heads, n = out.values.shape().tokens;
        const auto group = in.keys.shape().heads == 0 ? 1 : heads / in.keys.shape().heads;
        T* const memory = reinterpret_cast<T*>(run.workspace().bytes().data());
        run.for_each(batch * heads * n, [&](attn::index_t task, attn::index_t slice) {
            const auto b = task / (heads * n), h = task / n % heads, i = task % n;
            attend_query<T>(in, out.values, b, h, h / group, i, memory + slice * out.values.shape().channels);
        });
    }

    /// One row of the formula, in the order in which it is printed; a fast kernel would work on tiles of queries and keys. fma is spelled
    /// out: left to the compiler, it may be fused for channels side by side and not for others, and the layout would change the result.
    template <attn::Scalar T>
    void attend_query(const attn::inputs<T>& in, const attn::stored_view<T>& out, attn::index_t b, attn::index_t h, attn::index_t g,
                      attn::index_t i, T* sums) const {
        const auto d_k = in.queries.shape().channels, d_v = out.shape().channels;
        const auto scale = static_cast<T>(1 / std::sqrt(static_cast<double>(d_k)));
        std::fill_n(sums, d_v, T{0});
        for (attn::index_t j = 0; j < in.keys.shape().tokens; ++j) {
            T score = 0;
            for (attn::index_t c = 0; c < d_k; ++c) score = std::fma(in.queries(b, h, i, c), in.keys(b, g, j, c), score);
            const T weight = 1 / (1 + std::exp(-(scale * score + static_cast<T>(bias))));
            for (attn::index_t c = 0; c < d_v; ++c) sums[c] = std::fma(weight, in.values(b, g, j, c), sums[c]);
        }
        for (attn::index_t c = 0; c < d_v; ++c) out(b, h, i, c) = sums[c];
    }
};
static_assert(attn::Attention<sigmoid_attention>);

} // namespace my

int main() {
    const auto op = my::sigmoid_attention{.bias = -1};
    const Eigen::MatrixXf tokens = 3 * Eigen::MatrixXf::Identity(4, 4);
    const Eigen::MatrixXf weights = attn::attend(op, tokens, tokens, Eigen::MatrixXf(Eigen::MatrixXf::Identity(4, 4)));
    std::puts("weights: each key by itself, so that a row need not sum to one");
    for (Eigen::Index i = 0; i < 4; ++i) {
        for (Eigen::Index j = 0; j < 4; ++j) std::printf(" %.3f", static_cast<double>(weights(i, j)));
        std::puts("");
    }

    // The front door checks before it calls: the shapes for every operator, and what yours asks for.
    const auto problem = [&](const my::sigmoid_attention& asked, const Eigen::MatrixXf& values) -> std::string {
        try {
            (void)attn::attend(asked, tokens, tokens, values);
        } catch (const attn::attention_error& error) { return error.what(); }
        return "none";
    };
    std::puts(problem(op, Eigen::MatrixXf::Zero(3, 4)).c_str());
    std::puts(problem({.bias = std::numeric_limits<double>::infinity()}, tokens).c_str());
    return 0;
}
