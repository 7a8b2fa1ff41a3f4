// Problems of LSH attention.
#include "answers.hpp"
#include "draw_layout.hpp"
#include "gradient_checks.hpp"
#include "on_threads.hpp"
#include "others.hpp"
#include "sizes.hpp"
#include "stored.hpp"

#include <attn/attention/backward.hpp>
#include <attn/attention/lsh_attention.hpp>
#include <attn/attention/lsh_backward.hpp>
#include <attn/attention/random_projection.hpp>
#include <attn/reference/lsh_attention.hpp>

namespace attn::fuzz {

namespace {

/// The largest error of a result in T, beyond which it is wrong: twice that of the textbook formula in T, and some epsilons of the values and
/// scores there are.
template <Scalar T>
double allowed(const tensor<T>& plain, const tensor<double>& exact, double largest) {
    return 2 * testing::largest_error(plain, exact) + 16 * testing::epsilon<T> * (1 + largest);
}

/// Tokens and values that are stored in 16 bits are widened first, and the result is rounded last.
[[maybe_unused]] std::string broken_storage(draw& random, const lsh_attention<float>& op, const tensor<float>& q, const tensor<float>& v) {
    auto tokens = draw_stored(random, copy_of(q), draw_layout(random)), values = draw_stored(random, copy_of(v), draw_layout(random));
    auto out = draw_room(random, v.shape(), draw_layout(random));
    const auto expected = attend(op, tokens.wide, tokens.wide, values.wide);
    const auto threads = random.number(1, 4);
    const auto bytes = [&](auto format) { return attn::detail::workspace_bytes_for<decltype(format)>(op, {q.shape(), q.shape(), v.shape()}, threads); };
    workspace memory(out.format() == narrow_format::none ? bytes(0.0F) : bytes(attn::detail::sixteen_bits{}));
    testing::fill(memory, std::byte{0xff});
    on_threads(threads, memory, [&](const execution& run) { attend(op, tokens.view(), tokens.view(), values.view(), out.view(), run); });
    const auto problem = !testing::same_bits(lsh_buckets(tokens.view(), op.rotations), lsh_buckets(tokens.wide, op.rotations)) ? "other buckets"
                         : tokens.guards_intact() && values.guards_intact()                                                     ? other_numbers(out, expected)
                                                                                                                                : "an input was written to";
    return problem.empty() ? problem : "stored " + testing::name_of(tokens.format()) + " " + testing::name_of(values.format()) + " " + testing::name_of(out.format()) + ": " + problem;
}

template <Scalar T>
outcome attempt_hashed(draw& random) {
    const auto batch = random.number(0, 2), heads = random.number(1, 3), n = random.size(600), d_k = random.number(1, 80), d_v = random.number(0, 80);
    const auto half = random.number(1, random.one_in(4) ? 200 : 12), rounds = random.number(1, 3);
    tensor<T> rotations({rounds, random.one_in(2) ? heads : 1, d_k, half});
    fill_random_projection<T>(rotations, random.bits());
    lsh_attention<T> op{.rotations = rotations, .pattern = random.one_in(2) ? lsh_pattern(causal{}) : lsh_pattern()};
    if (random.one_in(2)) op.chunk = random.number(1, 70);
    // Few directions: tokens then fall into few buckets, and some are alike. Now and then one is zero.
    const auto directions = random.number(1, 40);
    const auto pool_of = filled<T>({1, 1, directions, d_k}, [&] { return random.one_in(50) ? 0 : random.real(-2, 2); });
    const bool alike = random.one_in(3);
    tensor<T> q({batch, heads, n, d_k});
    for (index_t row = 0; row < batch * heads * n; ++row) {
        const auto from = random.number(0, directions - 1);
        for (index_t c = 0; c < d_k; ++c) q.data()[row * d_k + c] = alike ? pool_of(0, 0, from, c) : static_cast<T>(random.real(-2, 2));
    }
    const auto v = filled<T>({batch, heads, n, d_v}, [&] { return random.real(-1, 1); });
    outcome result{joined("q ", q.shape(), ", d_v ", d_v, ", rotations ", rotations.shape(), ", chunk ", op.chunk_of(n), op.pattern.is_causal ? ", causal" : "",
                          alike ? joined(", ", directions, " directions") : ""), {}};

    const inputs<T> in{q, q, v};
    const auto run = [&](const inputs<T>& from, const outputs<T>& to, auto& executor) {
        workspace memory(attn::workspace_bytes<T>(op, shapes_of(from), executor));
        attn::attend(op, from, to, execution(executor, memory));
    };
    const shape rows{batch, heads, n, 1};
    auto expected = testing::no_answer<T>(v.shape(), rows), plain = testing::no_answer<T>(v.shape(), rows);
    auto exact = testing::no_answer<double>(v.shape(), rows);
    sequential here;
    run(in, expected.out(), here);
    const auto buckets = lsh_buckets(q, rotations);
    const auto scale = 1 / std::sqrt(static_cast<double>(d_k));
    const auto wide_q = reference::widen(q.view()), wide_v = reference::widen(v.view());
    reference::lsh_attention<double>({wide_q, wide_q, wide_v}, exact.out(), buckets.view(), op.chunk_of(n), op.pattern.is_causal, scale);
    reference::lsh_attention<T>(in, plain.out(), buckets.view(), op.chunk_of(n), op.pattern.is_causal, scale);
    const auto error = testing::largest_error(expected.values, exact.values), log_error = testing::largest_error(expected.log_sum_exp, exact.log_sum_exp);
    const auto largest = testing::largest_magnitude(exact.log_sum_exp);
    if (!(error <= allowed(plain.values, exact.values, largest))) result.problem = "values are wrong by " + std::to_string(error / testing::epsilon<T>) + " epsilons";
    else if (!(log_error <= allowed(plain.log_sum_exp, exact.log_sum_exp, largest)))
        result.problem = "log_sum_exp is wrong by " + std::to_string(log_error / testing::epsilon<T>) + " epsilons";
    if (!result.problem.empty()) return result;

    testing::placed<T> other_q(q, draw_layout(random)), other_v(v, draw_layout(random)), out(v.shape(), draw_layout(random));
    static thread_pool pool(3);
    run({other_q.view(), other_q.view(), other_v.view()}, {out.view()}, pool);
    if (!out.guards_intact()) result.problem = "wrote beside its output";
    else if (!testing::same_bits(out.copy(), expected.values)) result.problem = "other bits elsewhere";
    if constexpr (std::same_as<T, float>)
        if (result.problem.empty() && random.one_in(2)) result.problem = broken_storage(random, op, q, v);
    // The definition takes its time: a score for every pair of tokens, and again for its key's length.
    const bool is_small = static_cast<double>(batch * heads * n) * static_cast<double>(n * rounds * (d_k + d_v)) < 2e6;
    if (!result.problem.empty() || !is_small) return result;

    const auto d_out = filled<T>(v.shape(), [&] { return random.real(-1, 1); }), d_rows = filled<T>(rows, [&] { return random.real(-1, 1); });
    std::vector<defined_gradient<T>> defined;
    defined.push_back({"tokens", tensor<bounded<T>>(q.shape())});
    defined.push_back({"values", tensor<bounded<T>>(v.shape())});
    const auto bounded_q = bounded_copy<T>(q), bounded_v = bounded_copy<T>(v), given = bounded_copy<T>(d_out), given_rows = bounded_copy<T>(d_rows);
    reference::lsh_gradients<bounded<T>>({bounded_q, bounded_q, bounded_v}, {given, given_rows}, {defined[0].exact, {}, defined[1].exact}, buckets.view(),
                                         op.chunk_of(n), op.pattern.is_causal, scale);
    testing::placed<T> other_out(expected.values, draw_layout(random)), other_d_out(d_out, draw_layout(random));
    const auto problem = broken_gradient<T>(
        random, defined, [&](index_t concurrency) { return op.template backward_workspace_bytes<T>(shapes_of(in), concurrency); },
        [&](const auto& wanted, bool elsewhere, const execution& on) {
            const input_gradients<T> to{wanted[0], {}, wanted[1]};
            const auto call = [&](const inputs<T>& from, const tensor_view<T>& saved, const tensor_view<const T>& given_values) {
                attn::backward(op, from, {saved, expected.log_sum_exp}, {given_values, d_rows}, to, on);
            };
            if (!elsewhere) call(in, expected.values, d_out);
            else call({other_q.view(), other_q.view(), other_v.view()}, other_out.view(), other_d_out.view());
        });
    if (!problem.empty()) result.problem = "gradient of the " + problem;
    return result;
}

} // namespace

outcome check_hashed(draw& random) {
    return in_drawn_numbers(random, [&]<Scalar T>(std::type_identity<T>) { return attempt_hashed<T>(random); });
}

} // namespace attn::fuzz
