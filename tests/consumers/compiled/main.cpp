// Every operator and norm of attn::compiled, and their gradients, for every instruction set that this machine has, against the headers'.
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
    attn::tensor<T> q{queries}, k{keys}, v{keys}, out{queries}, log_sum_exp{{2, 4, 37, 1}}, bias{{1, 4, 37, 53}}, matrix{{1, 2, 7, 53}},
        other_matrix{matrix.shape()}, d_out{queries}, d_rows{log_sum_exp.shape()}, values_of_queries{queries}, rotations{{2, 1, 24, 4}};
    attn::inputs<T> in;
    std::vector<attn::index_t> lengths{53, 20};
    std::vector<double> slopes = attn::alibi_slopes(4), sinks{0.5, -1, 2, 0}, r1{0.5, 1, 2, 0.1}, r2{1, 0.5, 0.25, 2}, mean, variance;
    std::vector<T> weight, shift;
    attn::thread_pool threads{2};

    problem() {
        std::mt19937 random(1);
        std::uniform_real_distribution<T> number(-1, 1);
        for (auto* t : {&q, &k, &v, &bias, &matrix, &other_matrix, &d_out, &d_rows, &values_of_queries, &rotations})
            for (attn::index_t e = 0; e < t->shape().size(); ++e) t->data()[e] = number(random);
        for (int c = 0; c < 24; ++c) {
            mean.push_back(static_cast<double>(number(random)));
            variance.push_back(static_cast<double>(1 + number(random)));
            weight.push_back(number(random));
            shift.push_back(number(random));
        }
        in = {q, k, v, attn::bottom_right(37, 53)};
    }

    /// rounding: of results that are stored in 16 bits.
    void compare(const char* what, target where, const attn::tensor<T>& expected, const attn::tensor<T>& computed, T rounding = 0) {
        T difference = 0, largest = 1;
        for (attn::index_t e = 0; e < expected.shape().size(); ++e) {
            difference = std::isfinite(computed.data()[e]) ? std::max(difference, std::abs(expected.data()[e] - computed.data()[e])) : T(1);
            largest = std::max(largest, std::abs(expected.data()[e]));
            bits = 31 * bits + std::hash<T>()(computed.data()[e]);
        }
        ++compared;
        // The program's own instruction set gives the same bits, as its code is the same.
        if (where == own ? difference == 0 : difference < (100 * std::numeric_limits<T>::epsilon() + rounding) * largest) return;
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
    /// Compares the gradients that `expect` and `compute` write to tensors of such shapes.
    void compare_gradients(const char* what, target where, const std::vector<attn::shape>& shapes, const auto& expect,
                           const auto& compute) {
        std::vector<attn::tensor<T>> expected(shapes.begin(), shapes.end()), computed(shapes.begin(), shapes.end());
        for (auto* tensors : {&expected, &computed})
            for (auto& each : *tensors) forget(each);
        expect(expected);
        compute(computed);
        for (std::size_t g = 0; g < shapes.size(); ++g) compare(what, where, expected[g], computed[g]);
    }
    /// The gradients of the inputs and of parameters of such shapes: wanted<their type>(tensors) makes them of tensors.
    void differentiate(const char* what, const attn::DifferentiableAttention auto& op, const auto& compiled, target where,
                       std::vector<attn::shape> shapes, const auto& wanted, bool has_log_sum_exp) {
        using of_headers = attn::gradients_of<std::remove_cvref_t<decltype(op)>, T>;
        using of_library = typename std::remove_cvref_t<decltype(compiled)>::gradients;
        attn::attend(op, in, has_log_sum_exp ? attn::outputs<T>{out, log_sum_exp} : attn::outputs<T>{out}, threads);
        const auto saved = has_log_sum_exp ? attn::saved_outputs<T>{out, log_sum_exp} : attn::saved_outputs<T>{out};
        const auto given = has_log_sum_exp ? attn::output_gradients<T>{d_out, d_rows} : attn::output_gradients<T>{d_out};
        shapes.insert(shapes.begin(), {in.queries.shape(), in.keys.shape(), in.values.shape()});
        compare_gradients(
            what, where, shapes,
            [&](auto& tensors) { attn::backward(op, in, saved, given, wanted.template operator()<of_headers>(tensors), threads); },
            [&](auto& tensors) {
                attn::compiled::backward(compiled, in, saved, given, wanted.template operator()<of_library>(tensors), threads, where);
            });
    }
    template <class Norm>
    void normalise(const char* what, const attn::DifferentiableNorm auto& norm, const Norm& compiled, target where, bool has_bias = true) {
        const attn::tensor<T> expected = attn::normalise(norm, q.view());
        forget(out);
        attn::compiled::normalise(compiled, q, out, threads, where);
        compare(what, where, expected, out);

        using gradients = typename Norm::gradients; // which is that of the headers' norm, too
        const auto wanted = [&](auto& tensors) {
            const auto number = [&](std::size_t g) {
                return std::span(tensors[g].data(), static_cast<std::size_t>(tensors[g].shape().size()));
            };
            gradients all{};
            all.x = tensors[0];
            all.weight = number(1);
            if (has_bias) all.bias = number(2);
            if constexpr (requires { all.eta; }) all.eta = number(3);
            return all;
        };
        std::vector<attn::shape> shapes{queries, {.tokens = 1, .channels = 24}};
        if (has_bias) shapes.push_back(shapes.back());
        if constexpr (requires(gradients all) { all.eta; }) shapes.push_back({.tokens = 1, .channels = 1});
        compare_gradients(
            what, where, shapes, [&](auto& tensors) { attn::backward(norm, q.view(), d_out.view(), wanted(tensors), threads); },
            [&](auto& tensors) { attn::compiled::backward(compiled, q, d_out, wanted(tensors), threads, where); });
    }

    /// The library visits the pattern and the score function of a call apart, so each is compared once.
    void attend_patterned(const char* what, const auto& pattern, target where) {
        attend_scored(what, attn::identity_score{}, pattern, where, {}, [](const auto&) { return attn::no_gradients(); });
    }
    /// of_score: makes its gradients of tensors, which are of the shapes of its parameters from number 4 on.
    void attend_scored(const char* what, const auto& score, const auto& pattern, target where, std::vector<attn::shape> parameters,
                       const auto& of_score) {
        const attn::softmax_attention op{.scale = 0.3, .score = score, .pattern = pattern, .sinks = sinks};
        const attn::compiled::softmax_attention<T> compiled{.scale = 0.3, .score = score, .pattern = pattern, .sinks = sinks};
        attend(what, op, compiled, where, true);
        parameters.insert(parameters.begin(), {1, 4, 1, 1});
        const auto wanted = [&]<class G>(auto& g) { return G{{g[0], g[1], g[2]}, g[3], of_score(g)}; };
        differentiate(what, op, compiled, where, parameters, wanted, true);
    }
    void attend_linear(const char* what, const auto& pattern, target where) {
        const attn::linear_attention op{.pattern = pattern};
        const attn::compiled::linear_attention<T> compiled{.pattern = pattern};
        attend(what, op, compiled, where);
        differentiate(what, op, compiled, where, {}, []<class G>(auto& g) { return G{g[0], g[1], g[2]}; }, false);
    }

    /// Tokens that are queries and keys, and no gradient of the keys.
    void attend_by_hash(target where) {
        const auto before = std::exchange(in, {q, q, values_of_queries});
        for (const bool is_causal : {false, true}) {
            attn::lsh_attention<T> op{.rotations = rotations, .chunk = 8};
            attn::compiled::lsh_attention<T> compiled{.rotations = rotations, .chunk = 8};
            if (is_causal) op.pattern = attn::causal(), compiled.pattern = attn::causal();
            attend("LSH", op, compiled, where, true);
            differentiate("LSH", op, compiled, where, {}, []<class G>(auto& g) { return G{g[0], {}, g[2]}; }, true);
        }
        in = before;
    }
    /// Tensors of 16-bit numbers.
    template <class S>
    void attend_stored(const char* what, target where) {
        if constexpr (std::same_as<T, float>) {
            const auto narrow = [](const attn::tensor<T>& from) {
                attn::tensor<S> to(from.shape());
                std::transform(from.data(), from.data() + from.shape().size(), to.data(), [](T x) { return static_cast<S>(x); });
                return to;
            };
            const auto compare_stored = [&](const attn::tensor<S>& expected, const attn::tensor<S>& computed) {
                attn::tensor<T> a(expected.shape()), b(expected.shape());
                std::copy_n(expected.data(), expected.shape().size(), a.data());
                std::copy_n(computed.data(), computed.shape().size(), b.data());
                compare(what, where, a, b, 1 / T(64));
            };
            const auto narrow_q = narrow(q), narrow_k = narrow(k), narrow_v = narrow(v);
            const attn::inputs<T> stored{narrow_q, narrow_k, narrow_v, attn::bottom_right(37, 53)};
            attn::tensor<S> expected(queries), computed(queries);
            attn::attend(attn::softmax_attention{.pattern = attn::causal()}, stored, attn::outputs<T>{expected});
            attn::compiled::attend(attn::compiled::softmax_attention<T>{.pattern = attn::causal()}, stored, {computed}, threads, where);
            compare_stored(expected, computed);
            attn::normalise(attn::layer_norm<T>{.weight = weight, .bias = shift}, narrow_q, expected);
            attn::compiled::normalise(attn::compiled::layer_norm<T>{.weight = weight, .bias = shift}, narrow_q, computed, threads, where);
            compare_stored(expected, computed);
        }
    }

    void run(target where) {
        const attn::causal causal;
        attend_by_hash(where);
        attend_stored<Eigen::bfloat16>("bfloat16", where);
        attend_stored<Eigen::half>("half", where);
        attend_patterned("dense", attn::dense{}, where);
        attend_patterned("causal", causal, where);
        attend_patterned("local", attn::pattern::local{5, 3}, where);
        attend_patterned("causal & local", causal & attn::pattern::local{5}, where);
        attend_patterned("strided", attn::pattern::strided{7}, where);
        attend_patterned("causal & strided", causal & attn::pattern::strided{7}, where);
        attend_patterned("local | strided", attn::pattern::local{5} | attn::pattern::strided{7}, where);
        attend_patterned("causal & (local | strided)", causal & (attn::pattern::local{5} | attn::pattern::strided{7}), where);
        attend_patterned("lengths", attn::pattern::lengths{lengths}, where);
        attend_patterned("causal & lengths", causal & attn::pattern::lengths{lengths}, where);
        attend_patterned("prefix", attn::pattern::prefix{21}, where);
        attend_patterned("dilated window", attn::pattern::dilated_window{3, 4}, where);
        attend_patterned("causal & dilated window", causal & attn::pattern::dilated_window{3, 4}, where);
        attend_patterned("block diagonal", attn::pattern::block_diagonal{11}, where);
        attend_scored("soft cap", attn::soft_cap{2}, causal, where, {{1, 1, 1, 1}},
                      [](auto& g) { return attn::soft_cap::gradients<T>{g[4]}; });
        attend_scored("ALiBi", attn::alibi{slopes}, causal, where, {{1, 4, 1, 1}}, [](auto& g) { return attn::alibi::gradients<T>{g[4]}; });
        attend_scored("additive bias", attn::additive_bias<T>{.bias = bias, .first_query = 16}, causal, where, {bias.shape()},
                      [](auto& g) { return typename attn::additive_bias<T>::template gradients<T>{g[4]}; });
        attend_scored("KERPLE, logarithmic", attn::kerple_logarithmic{r1, r2}, causal, where, {{1, 4, 1, 1}, {1, 4, 1, 1}},
                      [](auto& g) { return attn::kerple_logarithmic::gradients<T>{g[4], g[5]}; });
        attend_scored("KERPLE, power", attn::kerple_power{r1, r2}, causal, where, {{1, 4, 1, 1}, {1, 4, 1, 1}},
                      [](auto& g) { return attn::kerple_power::gradients<T>{g[4], g[5]}; });
        attend_linear("linear", attn::dense{}, where);
        attend_linear("linear causal", causal, where);
        attend_linear("linear of lengths", attn::pattern::lengths{lengths}, where);
        attend_linear("linear of a prefix", attn::pattern::prefix{21}, where);

        const attn::linear_projection<T> projection{.matrix = matrix}, other_projection{.matrix = other_matrix};
        const attn::linformer_attention one{.key_projection = projection};
        const attn::compiled::linformer_attention<T> compiled_one{.key_matrix = matrix};
        attend("linformer", one, compiled_one, where, true);
        differentiate(
            "linformer", one, compiled_one, where, {matrix.shape()}, []<class G>(auto& g) { return G{{g[0], g[1], g[2]}, {g[3]}, {}}; },
            true);
        const attn::linformer_attention two{.key_projection = projection, .value_projection = other_projection};
        const attn::compiled::linformer_attention<T> compiled_two{.key_matrix = matrix, .value_matrix = other_matrix};
        attend("linformer of two", two, compiled_two, where, true);
        differentiate(
            "linformer of two", two, compiled_two, where, {matrix.shape(), matrix.shape()},
            []<class G>(auto& g) { return G{{g[0], g[1], g[2]}, {g[3]}, {g[4]}}; }, true);

        normalise("layer_norm", attn::layer_norm<T>{.weight = weight, .bias = shift},
                  attn::compiled::layer_norm<T>{.weight = weight, .bias = shift}, where);
        normalise("rms_norm", attn::rms_norm<T>{.weight = weight}, attn::compiled::rms_norm<T>{.weight = weight}, where, false);
        normalise("batch_norm", attn::batch_norm<T>{.weight = weight, .bias = shift, .mean = mean, .variance = variance},
                  attn::compiled::batch_norm<T>{.weight = weight, .bias = shift, .mean = mean, .variance = variance}, where);
        normalise("rep_batch_norm", attn::rep_batch_norm<T>{.batch = {.weight = weight, .batch_statistics = true}, .eta = 0.5},
                  attn::compiled::rep_batch_norm<T>{.batch = {.weight = weight, .batch_statistics = true}, .eta = 0.5}, where);
    }
};

std::string message_of(const auto& call) {
    try {
        call();
    } catch (const std::invalid_argument& error) { return error.what(); }
    return "none";
}

/// Errors are those of the headers' calls, word for word.
void check_error(const char* what, const auto& of_headers, const auto& of_library) {
    const auto expected = message_of(of_headers), message = message_of(of_library);
    if (message != "none" && message == expected) return;
    ++failures;
    std::printf("%s: %s\ninstead of\n%s\n", what, message.c_str(), expected.c_str());
}

void check_errors() {
    const attn::tensor<float> q({.tokens = 3, .channels = 4}), v({.tokens = 5, .channels = 4}), rows({.tokens = 3, .channels = 1});
    attn::tensor<float> out(q.shape()), number({1, 1, 1, 1});
    const attn::compiled::softmax_attention<float> softmax{};
    const attn::compiled::linear_attention<float> linear{};
    const attn::inputs<float> in{q, q, q}, uneven{q, q, v}, overlapping{q, out, q};
    check_error(
        "values of other tokens", [&] { attn::attend(attn::softmax_attention{}, uneven, attn::outputs<float>{out}); },
        [&] { attn::compiled::attend(softmax, uneven, {out}); });
    const std::vector<attn::index_t> lengths{1, 2};
    check_error(
        "lengths of another batch",
        [&] { attn::attend(attn::softmax_attention{.pattern = attn::pattern::lengths{lengths}}, in, attn::outputs<float>{out}); },
        [&] { attn::compiled::attend(attn::compiled::softmax_attention<float>{.pattern = attn::pattern::lengths{lengths}}, in, {out}); });
    const std::vector<double> two{1, 1};
    check_error(
        "KERPLE of other heads",
        [&] { attn::attend(attn::softmax_attention{.score = attn::kerple_power{two, two}}, in, attn::outputs<float>{out}); },
        [&] { attn::compiled::attend(attn::compiled::softmax_attention<float>{.score = attn::kerple_power{two, two}}, in, {out}); });
    check_error(
        "gradients of values of other tokens", [&] { attn::backward(attn::softmax_attention{}, uneven, {q, rows}, {q}, {}); },
        [&] { attn::compiled::backward(softmax, uneven, {q, rows}, {q}, {}); });
    check_error(
        "d_out of other tokens", [&] { attn::backward(attn::softmax_attention{}, in, {q, rows}, {v}, {{out}}); },
        [&] { attn::compiled::backward(softmax, in, {q, rows}, {v}, {{out}}); });
    check_error(
        "no log_sum_exp", [&] { attn::backward(attn::softmax_attention{}, in, {q}, {q}, {{out}}); },
        [&] { attn::compiled::backward(softmax, in, {q}, {q}, {{out}}); });
    check_error(
        "a gradient of sinks that there are not", [&] { attn::backward(attn::softmax_attention{}, in, {q, rows}, {q}, {{}, number}); },
        [&] { attn::compiled::backward(softmax, in, {q, rows}, {q}, {{}, number}); });
    check_error(
        "a gradient over what is read", [&] { attn::backward(attn::softmax_attention{}, overlapping, {q, rows}, {q}, {{out}}); },
        [&] { attn::compiled::backward(softmax, overlapping, {q, rows}, {q}, {{out}}); });
    check_error(
        "linear d_out of other tokens", [&] { attn::backward(attn::linear_attention{}, in, {q}, {v}, {out}); },
        [&] { attn::compiled::backward(linear, in, {q}, {v}, {out}); });
    const attn::linear_projection<float> projection{.matrix = rows};
    check_error(
        "a matrix of fewer tokens",
        [&] { attn::backward(attn::linformer_attention{.key_projection = projection}, in, {q, rows}, {q}, {{out}}); },
        [&] { attn::compiled::backward(attn::compiled::linformer_attention<float>{.key_matrix = rows}, in, {q, rows}, {q}, {{out}}); });
    check_error(
        "a norm's d_out of other tokens", [&] { attn::backward(attn::layer_norm<float>{}, q.view(), v.view(), {.x = out}); },
        [&] { attn::compiled::backward(attn::compiled::layer_norm<float>{}, q, v, {.x = out}); });
    std::vector<float> bias(4);
    check_error(
        "the bias of a norm without", [&] { attn::backward(attn::rms_norm<float>{}, q.view(), q.view(), {.bias = bias}); },
        [&] { attn::compiled::backward(attn::compiled::rms_norm<float>{}, q, q, {.bias = bias}); });

    // What the headers' types rule out.
    const attn::compiled::softmax_gradients<float> of_cap{{}, {}, attn::soft_cap::gradients<float>{number}};
    const attn::compiled::linformer_attention<float> shared{.key_matrix = q};
    if (message_of([&] { attn::compiled::backward(softmax, in, {q, rows}, {q}, of_cap); }).find("wanted.score") == std::string::npos ||
        message_of([&] { attn::compiled::backward(shared, in, {q, rows}, {q}, {{}, {}, out}); }).find("wanted.value_matrix") ==
            std::string::npos) {
        ++failures;
        std::printf("gradients that the operator has not are not refused\n");
    }
}

/// An instruction set that the processor does not run is refused, before anything is written.
void check_refused(target where) {
    attn::tensor<float> q({.tokens = 3, .channels = 4}), out(q.shape());
    out.data()[0] = 5;
    const auto attend = [&] {
        attn::compiled::attend(attn::compiled::softmax_attention<float>{}, {q, q, q}, {out}, attn::sequential(), where);
    };
    const auto backward = [&] {
        attn::compiled::backward(attn::compiled::layer_norm<float>{}, q, q, {.x = out}, attn::sequential(), where);
    };
    if (message_of(attend) != "none" && message_of(backward) != "none" && out.data()[0] == 5 && where != attn::compiled::widest()) return;
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
