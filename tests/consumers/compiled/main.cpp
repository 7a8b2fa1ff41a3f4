// Every operator and norm of attn::compiled, for every instruction set that this machine has, against the headers' results.
#include <attn/attn.hpp>
#include <attn/compiled.hpp>

#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <utility>
#include <vector>

namespace {

using attn::compiled::target;

int failures = 0, compared = 0;
std::size_t bits = 0; ///< of all results so far, in one number
/// What the program is compiled for, which is the least that its architecture has.
const auto own = attn::compiled::runs(target::neon) ? target::neon : target::sse2;

template <class T>
struct problem {
    attn::shape queries{.batch = 2, .heads = 4, .tokens = 37, .channels = 24}, keys{.batch = 2, .heads = 2, .tokens = 53, .channels = 24};
    attn::tensor<T> q{queries}, k{keys}, v{keys}, out{queries}, log_sum_exp{{2, 4, 37, 1}}, bias{{1, 4, 37, 53}}, matrix{{1, 2, 7, 53}};
    attn::inputs<T> in;
    std::vector<double> slopes = attn::alibi_slopes(4), sinks{0.5, -1, 2, 0}, mean, variance;
    std::vector<T> weight, shift;
    attn::thread_pool threads{2};

    problem() {
        std::mt19937 random(1);
        std::uniform_real_distribution<T> number(-1, 1);
        for (auto* t : {&q, &k, &v, &bias, &matrix})
            for (attn::index_t e = 0; e < t->shape().size(); ++e) t->data()[e] = number(random);
        for (int c = 0; c < 24; ++c) {
            mean.push_back(static_cast<double>(number(random)));
            variance.push_back(static_cast<double>(1 + number(random)));
            weight.push_back(number(random));
            shift.push_back(number(random));
        }
        in = {q, k, v, attn::bottom_right(37, 53)};
    }

    void compare(const char* what, target where, const attn::tensor<T>& expected, const attn::tensor<T>& computed) {
        T difference = 0;
        for (attn::index_t e = 0; e < expected.shape().size(); ++e) {
            difference = std::isfinite(computed.data()[e]) ? std::max(difference, std::abs(expected.data()[e] - computed.data()[e])) : T(1);
            bits = 31 * bits + std::hash<T>()(computed.data()[e]);
        }
        ++compared;
        // The program's own instruction set gives the same bits, as its code is the same.
        if (where == own ? difference == 0 : difference < 100 * std::numeric_limits<T>::epsilon()) return;
        ++failures;
        std::printf("%s of %zu bytes, instruction set %d: off by %g\n", what, sizeof(T), static_cast<int>(where),
                    static_cast<double>(difference));
    }
    void forget(attn::tensor<T>& t) { std::fill_n(t.data(), t.shape().size(), T(1000)); }

    template <class Op>
    void attend(const char* what, const attn::Attention auto& op, const Op& compiled, target where, bool has_log_sum_exp = false) {
        const auto expected = attn::attend(op, in, threads);
        forget(out);
        attn::compiled::attend(compiled, in, {out}, threads, where);
        compare(what, where, expected, out);
        if (!has_log_sum_exp) return;
        attn::tensor<T> rows(log_sum_exp.shape()), values(queries);
        attn::workspace memory(attn::workspace_bytes<T>(op, shapes_of(in), threads));
        attn::attend(op, in, attn::outputs<T>{values, rows}, attn::execution(threads, memory));
        forget(log_sum_exp);
        attn::compiled::attend(compiled, in, {out, log_sum_exp}, attn::sequential(), where);
        compare(what, where, rows, log_sum_exp);
    }
    template <class Norm>
    void normalise(const char* what, const attn::Norm auto& norm, const Norm& compiled, target where) {
        const attn::tensor<T> expected = attn::normalise(norm, q.view());
        forget(out);
        attn::compiled::normalise(compiled, q, out, threads, where);
        compare(what, where, expected, out);
    }

    /// The library visits the pattern and the score function of a call apart, so each is compared once.
    void attend_patterned(const char* what, const auto& pattern, target where) {
        attend_scored(what, attn::identity_score{}, pattern, where);
    }
    void attend_scored(const char* what, const auto& score, const auto& pattern, target where) {
        attend(what, attn::softmax_attention{.scale = 0.3, .score = score, .pattern = pattern, .sinks = sinks},
               attn::compiled::softmax_attention<T>{.scale = 0.3, .score = score, .pattern = pattern, .sinks = sinks}, where, true);
    }

    void run(target where) {
        const attn::causal causal;
        attend_patterned("dense", attn::dense{}, where);
        attend_patterned("causal", causal, where);
        attend_patterned("local", attn::pattern::local{5, 3}, where);
        attend_patterned("causal & local", causal & attn::pattern::local{5}, where);
        attend_patterned("strided", attn::pattern::strided{7}, where);
        attend_patterned("causal & strided", causal & attn::pattern::strided{7}, where);
        attend_patterned("local | strided", attn::pattern::local{5} | attn::pattern::strided{7}, where);
        attend_patterned("causal & (local | strided)", causal & (attn::pattern::local{5} | attn::pattern::strided{7}), where);
        attend_scored("soft cap", attn::soft_cap{2}, causal, where);
        attend_scored("ALiBi", attn::alibi{slopes}, causal, where);
        attend_scored("additive bias", attn::additive_bias<T>{.bias = bias, .first_query = 16}, causal, where);
        attend("linear", attn::linear_attention{}, attn::compiled::linear_attention<T>{}, where);
        attend("linear causal", attn::linear_attention{.pattern = causal}, attn::compiled::linear_attention<T>{.pattern = causal}, where);

        const attn::linear_projection<T> projection{.matrix = matrix};
        attend("linformer", attn::linformer_attention{.key_projection = projection},
               attn::compiled::linformer_attention<T>{.key_matrix = matrix}, where);

        normalise("layer_norm", attn::layer_norm<T>{.weight = weight, .bias = shift},
                  attn::compiled::layer_norm<T>{.weight = weight, .bias = shift}, where);
        normalise("rms_norm", attn::rms_norm<T>{.weight = weight}, attn::compiled::rms_norm<T>{.weight = weight}, where);
        normalise("batch_norm", attn::batch_norm<T>{.weight = weight, .bias = shift, .mean = mean, .variance = variance},
                  attn::compiled::batch_norm<T>{.weight = weight, .bias = shift, .mean = mean, .variance = variance}, where);
        normalise("rep_batch_norm", attn::rep_batch_norm<T>{.batch = {.batch_statistics = true}, .eta = 0.5},
                  attn::compiled::rep_batch_norm<T>{.batch = {.batch_statistics = true}, .eta = 0.5}, where);
    }
};

/// Errors are those of the headers' calls, word for word.
void check_errors() {
    const attn::tensor<float> q({.tokens = 3, .channels = 4}), v({.tokens = 5, .channels = 4});
    attn::tensor<float> out(q.shape());
    const auto message_of = [](auto&& call) -> std::string {
        try {
            call();
        } catch (const std::invalid_argument& error) { return error.what(); }
        return "none";
    };
    const auto expected = message_of([&] { attn::attend(attn::softmax_attention{}, q, q, v); });
    const auto message = message_of([&] { attn::compiled::attend(attn::compiled::softmax_attention<float>{}, {q, q, v}, {out}); });
    if (message == "none" || message != expected) {
        ++failures;
        std::printf("%s\ninstead of\n%s\n", message.c_str(), expected.c_str());
    }
}

/// An instruction set that the processor does not run is refused, before anything is written.
void check_refused(target where) {
    attn::tensor<float> q({.tokens = 3, .channels = 4}), out(q.shape());
    out.data()[0] = 5;
    try {
        attn::compiled::attend(attn::compiled::softmax_attention<float>{}, {q, q, q}, {out}, attn::sequential(), where);
    } catch (const std::invalid_argument&) {
        if (out.data()[0] == 5 && where != attn::compiled::widest()) return;
    }
    ++failures;
    std::printf("instruction set %d is not refused\n", static_cast<int>(where));
}

} // namespace

int main() {
    problem<float> narrow;
    problem<double> wide;
    for (const auto where : {target::sse2, target::avx2, target::avx512, target::neon}) {
        if (!attn::compiled::runs(where)) {
            check_refused(where);
            continue;
        }
        const auto others = std::exchange(bits, 0);
        narrow.run(where);
        wide.run(where);
        // AVX-512 has the bits of AVX2, which fuses products with sums as SSE2 does not.
        if ((bits == others) == (where == target::avx512)) continue;
        ++failures;
        std::printf("instruction set %d %s\n", static_cast<int>(where),
                    bits == others ? "runs the code of the one before it" : "has other bits than AVX2");
    }
    check_errors();
    std::printf("%d comparisons, %d failures\n", compared, failures);
    return failures == 0 ? 0 : 1;
}
