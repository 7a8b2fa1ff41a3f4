// Norms of tokens that are stored in 16 bits: they are widened first, and the result is rounded last.
#include "catch.hpp"
#include "executors.hpp"
#include "layouts.hpp"
#include "storage.hpp"

#include <attn/norm/norm.hpp>
#include <attn/norm/dynamic_tanh.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/norm/progressive_rep_batch_norm.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/norm/unit_norm.hpp>

namespace attn::testing {

namespace {

/// Random numbers, some of them subnormal ones of half; if special, an infinity in row 1 and a NaN in row 3.
tensor<float> tokens(const shape& s, bool special) {
    auto x = random_tensor<float>(s, 3);
    for (index_t e = 0; e < s.size(); e += 7) x.data()[e] *= 0x1p-18F;
    if (special && s.batch * s.heads * s.tokens > 3 && s.channels > 0) {
        x.data()[s.channels] = std::numeric_limits<float>::infinity();
        x.data()[3 * s.channels] = std::numeric_limits<float>::quiet_NaN();
    }
    return x;
}

template <class N, Executor E>
void check_formats(const N& norm, const shape& s, layout where, bool special, E& executor) {
    for (const auto from : all_formats)
        for (const auto to : all_formats) {
            INFO(N::name << " of " << to_string(s) << ", layout " << static_cast<int>(where) << ", " << name_of(from) << " to " << name_of(to));
            stored_tensor x(tokens(s, special), from, where), out(tensor<float>(s), to, where);
            const auto expected = normalise(norm, x.wide);
            normalise(norm, x.view(), out.view(), executor);
            CHECK(out.holds(expected));
            CHECK((x.guards_intact() && out.guards_intact()));
            if (from != to) continue;
            normalise(norm, x.view(), x.view(), executor);
            CHECK(x.holds(expected));
            CHECK(x.guards_intact());
        }
}

} // namespace

TEST_CASE("every norm: 16-bit tokens are widened first and rounded last", "[norm][portable][arithmetic]") {
    thread_pool pool(3);
    sequential here;
    for (const index_t channels : {0, 1, 3, 7, 17, 31, 64, 65, 769, 3000})
        for (const auto where : {layout::head_major, layout::token_major, layout::padded_rows, layout::misaligned}) {
            const shape s{2, 3, channels > 700 ? 3 : 11, channels};
            const auto weight = random_tensor<float>({1, 1, 1, channels}, 1), bias = random_tensor<float>({1, 1, 1, channels}, 2);
            const std::span<const float> w(weight.data(), static_cast<std::size_t>(channels)), b(bias.data(), static_cast<std::size_t>(channels));
            const std::vector<double> mean(w.begin(), w.end()), variance(w.size(), 0.7);
            const auto check = [&](const auto& norm, bool special = true) {
                check_formats(norm, s, where, special, here);
                check_formats(norm, s, where, special, pool);
            };
            check(layer_norm<float>{.weight = w, .bias = b});
            check(layer_norm<float>{});
            check(rms_norm<float>{.weight = w});
            check(unit_norm<float>{});
            check(dynamic_tanh<float>{w, b});
            check(dynamic_erf<float>{.bias = b, .shift = 0.25});
            check(batch_norm<float>{.weight = w, .bias = b, .mean = mean, .variance = variance});
            check(batch_norm<float>{.weight = w, .batch_statistics = true}, false);
            check(rep_batch_norm<float>{.batch = {.weight = w, .bias = b, .mean = mean, .variance = variance}, .eta = 0.3});
            check(identity_norm<float>{}, false);
        }
}

TEST_CASE("norms: large 16-bit results, which go past the caches, are those of single rows", "[norm]") {
    const shape s{1, 1, 4200, 1050}, one_row{1, 1, 1, 1050};
    const strides in_lines{0, 0, 1056, 1};
    tensor<float> numbers({1, 1, 4200, 1056});
    tensor<std::uint16_t> x(numbers.shape()), large(numbers.shape()), small(numbers.shape());
    const auto given = tokens(numbers.shape(), true);
    for (const auto format : {narrow_format::bfloat16, narrow_format::half}) {
        for (index_t e = 0; e < given.shape().size(); ++e) x.data()[e] = narrowed(given.data()[e], format);
        const auto check = [&](const auto& norm) {
            const auto run = [&](index_t token, const shape& of, tensor<std::uint16_t>& out) {
                normalise(norm, stored_view<const float>(x.data() + token * 1056, format, of, in_lines),
                          stored_view<float>(out.data() + token * 1056, format, of, in_lines));
            };
            run(0, s, large);
            for (index_t i = 0; i < s.tokens; ++i) run(i, one_row, small);
            CHECK(std::equal(large.data(), large.data() + s.tokens * 1056, small.data()));
        };
        check(layer_norm<float>{});
        check(rms_norm<float>{});
    }
}

TEST_CASE("norms: other formats in the same memory overlap", "[norm]") {
    tensor<float> x({1, 1, 4, 8});
    const stored_view<float> narrow(x.data(), narrow_format::half, x.shape(), x.view().strides());
    CHECK_THROWS_AS(normalise(layer_norm<float>{}, stored_view<const float>(x.view()), narrow), shape_error);
}

} // namespace attn::testing
