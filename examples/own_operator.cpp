// An attention operator of your own, which is called as attn's are. Registered as in tests/cases/own_operator.cpp, every test and benchmark
// that runs over all operators runs over it: accuracy, layouts, executors, NaN, memory, speed.
#include <attn/attention/eigen.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

namespace my {

/// The discounted mean: every query takes the same mean of the values, of which the last counts most,
///     out[b, h, i] = sum_j discount^(m - 1 - j) v[b, g, j] / sum_j discount^(m - 1 - j)
/// for v (batch, kv_heads, m, d_v), g = h / (heads / kv_heads). A baseline that looks at no query and no key.
struct discounted_mean {
    static constexpr std::string_view name = "discounted_mean";
    static constexpr attn::attention_traits traits{.has_log_sum_exp = false}; // no softmax

    double discount = 0.9; ///< from 0 to 1

    template <attn::Scalar T>
    void check(const attn::inputs<T>& in) const {
        attn::check_inputs(name, in); // the shapes of q, k and v; then your own parameters
        if (!(discount >= 0 && discount <= 1)) throw attn::argument_error(name, "discount", "is not between 0 and 1");
    }
    void check_apart(const attn::output_memory&) const {} // it refers to no memory
    attn::shape output_shape(const attn::input_shapes& s) const {
        return {s.queries.batch, s.queries.heads, s.queries.tokens, s.values.channels};
    }
    template <attn::Scalar T>
    std::size_t workspace_bytes(const attn::input_shapes& s, attn::index_t concurrency) const {
        return static_cast<std::size_t>(concurrency * s.values.channels) * sizeof(T);
    }
    /// Everything has been checked; nothing may be allocated. A head is a task: any thread, any order, the same bits. Its sums lie in the
    /// thread's slice of the workspace, for v and out may be stored in 16 bits, and a result is rounded once. fma is spelled out: left to
    /// the compiler, it may be fused for channels side by side and not for others, and the layout would change the result.
    template <attn::Scalar T>
    void forward(const attn::inputs<T>& in, const attn::outputs<T>& out, const attn::execution& run) const {
        const auto [batch, heads, n, d_v] = out.values.shape();
        const auto kv_heads = in.values.shape().heads, m = in.values.shape().tokens;
        const auto by = static_cast<T>(discount);
        T* const memory = reinterpret_cast<T*>(run.workspace().bytes().data());
        run.for_each(batch * heads, [&](attn::index_t task, attn::index_t slice) {
            const auto b = task / heads, h = task % heads, g = h / (heads / kv_heads);
            T* const sums = memory + slice * d_v;
            std::fill_n(sums, d_v, T{0});
            T all = 0;
            for (attn::index_t j = 0; j < m; ++j) {
                all = std::fma(by, all, T{1});
                for (attn::index_t c = 0; c < d_v; ++c) sums[c] = std::fma(by, sums[c], in.values(b, g, j, c));
            }
            for (attn::index_t i = 0; i < n; ++i)
                for (attn::index_t c = 0; c < d_v; ++c) out.values(b, h, i, c) = m == 0 ? T{0} : sums[c] / all;
        });
    }
};
static_assert(attn::Attention<discounted_mean>);

} // namespace my

int main() {
    const auto op = my::discounted_mean{.discount = 0.5};
    const Eigen::MatrixXf tokens = Eigen::MatrixXf::Identity(4, 4);
    const Eigen::MatrixXf weights = attn::attend(op, tokens, tokens, tokens); // of the identity: the weights themselves
    std::puts("weights: each key counts twice what the one before it does");
    for (Eigen::Index i = 0; i < 4; ++i) {
        for (Eigen::Index j = 0; j < 4; ++j) std::printf(" %.3f", static_cast<double>(weights(i, j)));
        std::puts("");
    }

    // The front door checks before it calls: the shapes for every operator, and what yours asks for.
    const auto problem = [&](const my::discounted_mean& asked, const Eigen::MatrixXf& values) -> std::string {
        try {
            (void)attn::attend(asked, tokens, tokens, values);
        } catch (const attn::attention_error& error) { return error.what(); }
        return "none";
    };
    std::puts(problem(op, Eigen::MatrixXf::Zero(3, 4)).c_str());
    std::puts(problem({.discount = std::numeric_limits<double>::infinity()}, tokens).c_str());
    return 0;
}
