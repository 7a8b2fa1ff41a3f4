// A call of each kind, held to its definition, in a program that is compiled without optimisation or with the standard library's own checks:
// intrinsics are macros there, nothing is inlined, and iterators know where they end.
#include <attn/attn.hpp>
#include <attn/reference/linear_attention.hpp>
#include <attn/reference/norms.hpp>
#include <attn/reference/softmax.hpp>
#include <attn/reference/number.hpp>

#include <cmath>
#include <cstdio>
#include <random>

namespace {

using attn::index_t, attn::tensor;

int failures = 0;

template <class T>
tensor<T> numbers(const attn::shape& s, unsigned seed) {
    tensor<T> t(s);
    std::mt19937 random(seed);
    for (index_t e = 0; e < s.size(); ++e) t.data()[e] = static_cast<T>(random()) / T(0x1p31) - T(1);
    return t;
}

template <class T>
void check(const char* what, const tensor<T>& ours, const tensor<double>& exact) {
    double worst = 0;
    for (index_t e = 0; e < exact.shape().size(); ++e) worst = std::max(worst, std::abs(static_cast<double>(ours.data()[e]) - exact.data()[e]));
    if (worst <= 100 * static_cast<double>(std::numeric_limits<T>::epsilon())) return; // and not where it is NaN
    std::printf("%s, %zu bytes a number: wrong by %g\n", what, sizeof(T), worst);
    ++failures;
}

template <class T>
struct calls {
    tensor<T> q = numbers<T>({2, 4, 37, 24}, 1), k = numbers<T>({2, 2, 150, 24}, 2), v = numbers<T>({2, 2, 150, 20}, 3);
    tensor<double> wide_q = attn::reference::widen(q.view()), wide_k = attn::reference::widen(k.view()), wide_v = attn::reference::widen(v.view());
    attn::inputs<T> in{q, k, v, {.first_query = 113}};
    attn::inputs<double> wide{wide_q, wide_k, wide_v, {.first_query = 113}};

    template <class Op>
    void softmax(const char* what, const Op& op) {
        tensor<double> exact({2, 4, 37, 20}), rows({2, 4, 37, 1});
        attn::reference::softmax<double>(wide, {exact, rows}, op.scale, op.score, op.pattern);
        tensor<T> out(exact.shape()), log_sum_exp(rows.shape());
        attn::attend(op, in, {out, log_sum_exp});
        check(what, out, exact);

        const auto given = numbers<T>(out.shape(), 4);
        const auto wide_given = attn::reference::widen(given.view());
        tensor<T> dq(q.shape()), dk(k.shape()), dv(v.shape());
        tensor<double> wide_dq(q.shape()), wide_dk(k.shape()), wide_dv(v.shape());
        attn::backward(op, in, {out, log_sum_exp}, {given}, {{dq, dk, dv}});
        attn::reference::softmax_gradients<double>(wide, {wide_given}, {wide_dq, wide_dk, wide_dv}, {}, op.scale, op.score, op.pattern, {});
        check(what, dq, wide_dq), check(what, dk, wide_dk), check(what, dv, wide_dv);
    }

    void all() {
        static constexpr double slopes[]{0.5, 0.25, 0.125, 0.0625};
        softmax("dense", attn::softmax_attention{});
        softmax("causal, soft cap", attn::softmax_attention{.score = attn::soft_cap{5.0}, .pattern = attn::causal{}});
        softmax("window, logarithm of the distance", attn::softmax_attention{.score = attn::kerple_logarithmic{slopes, slopes}, .pattern = attn::pattern::local{9}});
        softmax("union, slopes", attn::softmax_attention{.score = attn::alibi{slopes}, .pattern = attn::pattern::local{5} | attn::pattern::strided{7}});

        tensor<double> exact({2, 4, 37, 20});
        attn::reference::linear_attention<double>(wide, {exact}, attn::relu{}, attn::dense{}, true, attn::linear_attention<attn::relu>{}.eps, 1.0);
        check("linear attention", attn::attend(attn::linear_attention<attn::relu>{}, q, k, v), exact);

        tensor<double> normed(q.shape());
        attn::reference::layer_norm<double>(wide_q, normed);
        check("layer norm", attn::normalise(attn::layer_norm<T>{}, q), normed);
    }
};

} // namespace

int main() {
    calls<float>().all();
    calls<double>().all();
    return failures;
}
