// Softmax attention with bf16_products: its arithmetic, how wrong it may be, and the promises that it keeps as any other.
#include "bf16_product.hpp"
#include "promises.hpp"
#include "softmax_checks.hpp"

#include <Eigen/Core>
#include <attn/attention/products.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/strided.hpp>
#include <attn/score/alibi.hpp>
#include <attn/score/composed_score.hpp>
#include <attn/score/soft_cap.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

template <Pattern P = dense, ScoreFunction S = identity_score>
using rounding_attention = softmax_attention<P, S, bf16_products>;

float rounded(float x) {
    if (std::abs(x) < std::numeric_limits<float>::min()) return std::copysign(0.0F, x);
    return detail::widened<narrow_format::bfloat16>(detail::narrowed<narrow_format::bfloat16>(x));
}

/// The textbook formula in float, its operands rounded where those of bf16_products are.
template <class Op>
answer<float> textbook(const Op& op, const inputs<float>& in) {
    const auto s = shapes_of(in);
    auto out = no_answer<float>(op.output_shape(s), true);
    const auto scale = static_cast<float>(op.scale.value_or(1 / std::sqrt(static_cast<double>(s.queries.channels))));
    std::vector<float> weights(static_cast<std::size_t>(s.keys.tokens));
    for (index_t b = 0; b < s.queries.batch; ++b)
        for (index_t h = 0; h < s.queries.heads; ++h)
            for (index_t i = 0; i < s.queries.tokens; ++i) {
                const auto g = h / (s.queries.heads / s.keys.heads), position = in.positions.first_query[b] + i;
                float largest = op.sinks.empty() ? -infinite<float> : static_cast<float>(op.sinks[static_cast<std::size_t>(h)]), sum = 0;
                const float sink = largest;
                const auto score = score_at(op.score, b, h);
                const auto pattern = at(op.pattern, b, h);
                for (index_t j = 0; j < s.keys.tokens; ++j) {
                    const auto key = in.positions.first_key[b] + j;
                    float product = 0;
                    for (index_t c = 0; c < s.queries.channels; ++c) product += rounded(scale * in.queries(b, h, i, c)) * rounded(in.keys(b, g, j, c));
                    auto& own = weights[static_cast<std::size_t>(j)];
                    own = pattern.visible(position, key) ? static_cast<float>(score(product, position, key)) : -infinite<float>;
                    largest = std::max(largest, own);
                }
                for (auto& w : weights) sum += w = w == -infinite<float> ? 0 : rounded(std::exp(w - largest));
                if (sink != -infinite<float>) sum += std::exp(sink - largest);
                for (index_t c = 0; c < s.values.channels; ++c) {
                    float of_values = 0;
                    for (index_t j = 0; j < s.keys.tokens; ++j)
                        if (const float w = weights[static_cast<std::size_t>(j)]; w != 0) of_values += w * rounded(in.values(b, g, j, c));
                    out.values(b, h, i, c) = sum == 0 ? 0 : of_values / sum;
                }
                out.log_sum_exp(b, h, i, 0) = sum == 0 ? -infinite<float> : largest + std::log(sum);
            }
    return out;
}

template <class Op>
void check_accuracy(const Op& op, const given<float>& in) {
    const auto rounds = textbook(op, in);
    const auto ours = in_its_memory<float>(op, in, rounds.log_sum_exp.shape());
    const auto exact = exact_rows<float>(op, in);
    CHECK(largest_error(ours.values, exact.values) <= 2 * largest_error(rounds.values, exact.values) + 16 * epsilon<float>);
    CHECK(largest_error(ours.log_sum_exp, exact.log_sum_exp) <= 2 * largest_error(rounds.log_sum_exp, exact.log_sum_exp) + 16 * epsilon<float>);
}

} // namespace

TEST_CASE("bf16_lanes: pairs are rounded to nearest even, and their products added in the order of the instruction", "[simd][portable]") {
    using lanes = simd::bf16_lanes;
    using floats = lanes::floats;
    constexpr auto size = static_cast<std::size_t>(lanes::size);
    std::mt19937 random(1);
    const auto any = [&] { return std::bit_cast<float>(static_cast<std::uint32_t>(random())); };
    const auto moderate = [&] { return std::bit_cast<float>((static_cast<std::uint32_t>(random()) & 0x87ffffff) + 0x3c000000); }; // 2^-7 to 2^9
    const auto bits_of = [](float x) { return std::bit_cast<std::uint32_t>(rounded(x)) >> 16; };
    for (int turn = 0; turn < 20'000; ++turn) {
        std::array<float, size> a, b, c, d, sum, expected, ours;
        for (auto* numbers : {&a, &b, &c, &d, &sum}) std::ranges::generate(*numbers, [&] { return turn % 2 == 0 ? any() : moderate(); });
        std::array<simd::bf16_pair, size> pairs, neighbours;
        const auto left = lanes::of(floats::load(a.data()), floats::load(b.data())), right = lanes::of(floats::load(c.data()), floats::load(d.data()));
        left.store(pairs.data());
        lanes::of_neighbours(floats::load(a.data()), floats::load(b.data())).store(neighbours.data());
        bool same = true;
        for (std::size_t l = 0; l < size; ++l) {
            const auto number = [&](std::size_t at) { return at < size ? a[at] : b[at - size]; };
            same = same && pairs[l].bits == (bits_of(a[l]) | bits_of(b[l]) << 16) &&
                   neighbours[l].bits == (bits_of(number(2 * l)) | bits_of(number(2 * l + 1)) << 16);
        }
        CHECK(same);
        if (turn % 2 == 0) continue;
        for (std::size_t l = 0; l < size; ++l) expected[l] = rounded(a[l]) * rounded(c[l]) + (rounded(b[l]) * rounded(d[l]) + sum[l]);
        fma(left, right, floats::load(sum.data())).store(ours.data());
        CHECK(std::ranges::equal(ours, expected, [](float x, float y) { return same_bits(x, y); }));
        emulated_fma(left, right, floats::load(sum.data())).store(ours.data());
        CHECK(std::ranges::equal(ours, expected, [](float x, float y) { return same_bits(x, y); }));
    }
}

TEST_CASE("bf16_products: at most twice the error of the textbook formula with the same rounding", "[attention][portable][arithmetic]") {
    constexpr std::array slopes{0.5, 0.25, 0.1, 0.01};
    constexpr std::array sinks{0.5, -1.0, 30.0, -std::numeric_limits<double>::infinity()};
    for (const index_t channels : {1, 17, 64, 65, 128})
        for (const auto& [n, m] : {std::pair<index_t, index_t>{1, 1}, {1, 40}, {2, 301}, {3, 7}, {5, 129}, {16, 16}, {33, 200}, {70, 260}}) {
            INFO(channels << " channels, " << n << " queries, " << m << " keys");
            auto in = random_given<float>({1, 4, 2, n, m, channels, channels, bottom_right(n, m)});
            const auto bias = hiding_bias<float>({1, 4, n, m}, 5);
            check_accuracy(rounding_attention<>{}, in);
            check_accuracy(rounding_attention<causal>{.sinks = sinks}, in);
            check_accuracy(rounding_attention<decltype(local{1, 0} | strided{4})>{.pattern = local{1, 0} | strided{4}}, in);
            const composed_score score{soft_cap{3}, alibi(slopes)};
            check_accuracy(softmax_attention{.scale = 0.3, .score = score, .pattern = causal{} & local{20, 0}, .products = bf16_products{}}, in);
            in.positions = {};
            check_accuracy(softmax_attention{.score = additive_bias(bias.view()), .products = bf16_products{}}, in);
        }
}

TEST_CASE("bf16_products: what a hidden key holds changes no bit of a row", "[attention][portable]") {
    for (const index_t n : {1, 5, 17, 70})
        for (const index_t m : {24, 151})
            for (const index_t key : {m / 3, m / 3 + 1}) {
                const auto in = random_given<float>({1, 2, 1, n, m, 19, 33});
                const auto sees = [&](index_t i, index_t j) { return j != key || i % 3 == 1; };
                const softmax_attention op{.pattern = mask(n, m, sees), .products = bf16_products{}};
                const auto without = attend_rows<float>(op, in);
                for (const float held : {not_a_number<float>, infinite<float>, lowest<float>}) {
                    INFO(n << " queries, " << m << " keys, hidden " << held);
                    auto other = random_given<float>({1, 2, 1, n, m, 19, 33});
                    std::fill_n(other.keys.view().row(0, 0, key), 19, held);
                    std::fill_n(other.values.view().row(0, 0, key), 33, held);
                    const auto out = attend_rows<float>(op, other);
                    for (index_t i = 0; i < n; ++i) {
                        if (!sees(i, key)) CHECK(same_row(out, without, i));
                        else if (std::isnan(held)) CHECK((nan_row(out.values, i) && nan_row(out.log_sum_exp, i)));
                    }
                }
            }
}

TEST_CASE("bf16_products: huge scores and values", "[attention][portable]") {
    for (const float offset : {0.0F, 128.0F, 1048576.0F, 0x1p100F}) {
        auto in = random_given<float>({1, 1, 1, 21, 200, 1, 3});
        for (index_t i = 0; i < 21; ++i) in.queries(0, 0, i, 0) = i % 2 == 0 ? 1.0F : -1.0F;
        for (index_t j = 0; j < 200; ++j) in.keys(0, 0, j, 0) = offset * static_cast<float>(j * 7 % 4);
        check_accuracy(rounding_attention<>{.scale = 1.0}, in);
    }
    // Their sum passes what floats hold, their mean does not.
    auto in = random_given<float>({1, 1, 1, 18, 301, 3, 5});
    for (index_t e = 0; e < in.values.shape().size(); ++e) in.values.data()[e] = 0x1p127F * (in.values.data()[e] > 0 ? 1.0F : 1.25F);
    const auto ours = attend_rows<float>(rounding_attention<causal>{.pattern = {}}, in);
    for (index_t e = 0; e < in.values.shape().size(); ++e) in.values.data()[e] *= 0x1p-100F;
    const auto smaller = attend_rows<float>(rounding_attention<causal>{.pattern = {}}, in);
    for (index_t e = 0; e < ours.values.shape().size(); ++e) CHECK(std::abs(ours.values.data()[e] * 0x1p-100F / smaller.values.data()[e] - 1) <= 1e-6F);
}

#if defined(__AVX512BF16__)
TEST_CASE("bf16_products: the micro-kernel and its emulation on another instruction set give the same bits", "[kernel]") {
    for (const index_t rows : {1, 2, 3, 7, 16, 45})
        for (const index_t depth : {1, 2, 33, 64, 127})
            for (const index_t columns : {16, 48, 80}) {
                INFO(rows << " x " << depth << " x " << columns);
                const auto a = random_tensor<float>({1, 1, rows, depth}, 1), b = random_tensor<float>({1, 1, depth, columns}, 2);
                std::vector<float> ours(static_cast<std::size_t>(rows * columns)), emulated(ours.size());
                bf16_product(a.data(), b.data(), rows, depth, columns, ours.data());
                emulated_bf16_product(a.data(), b.data(), rows, depth, columns, emulated.data());
                CHECK(ours == emulated);
            }
}
#endif

// What rounds has no gradient.
static_assert(Attention<rounding_attention<>> && !DifferentiableAttention<rounding_attention<>> && DifferentiableAttention<softmax_attention<>>);

} // namespace attn::testing
