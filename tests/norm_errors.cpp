// What norms refuse, before anything is written: the message names norm, argument and shapes.
#include "catch.hpp"
#include "norm_checks.hpp"

#include <attn/core/eigen.hpp>
#include <attn/norm/fold.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/norm/progressive_rep_batch_norm.hpp>
#include <attn/norm/batch_norm.hpp>
#include <attn/norm/recalibration.hpp>
#include <attn/norm/rms_norm.hpp>

namespace attn::testing {

namespace {


const std::vector<float> five(5, 1.0F);
const std::vector<double> five_doubles(5, 1.0), four_doubles(4, 1.0);
const std::string both_shapes = "(1, 2, 3, 4)";

/// A call that must be refused, on an output that must stay as it is.
template <class F>
std::string refusal(const F& call) {
    tensor<float> x({1, 2, 3, 4}), out({1, 2, 3, 4});
    std::fill_n(out.data(), 24, guard<float>);
    const auto message = error_of([&] { call(x.view(), out.view()); });
    CHECK(std::all_of(out.data(), out.data() + 24, [](float y) { return same_bits(y, guard<float>); }));
    return message;
}
template <Norm N>
std::string refusal_of(const N& norm) {
    return refusal([&](auto x, auto out) { normalise(norm, x, out); });
}

} // namespace

TEST_CASE("norm errors: parameters", "[norm]") {
    CHECK_THAT(refusal_of(layer_norm<float>{.weight = five}), Contains("layer_norm: weight has 5 entries") && Contains(both_shapes));
    CHECK_THAT(refusal_of(layer_norm<float>{.bias = five}), Contains("layer_norm: bias has 5 entries") && Contains(both_shapes));
    CHECK_THAT(refusal_of(rms_norm<float>{.weight = five}), Contains("rms_norm: weight has 5 entries"));
    CHECK_THAT(refusal_of(batch_norm<float>{.weight = five}), Contains("batch_norm: weight has 5 entries"));
    CHECK_THAT(refusal_of(batch_norm<float>{.bias = five}), Contains("batch_norm: bias has 5 entries"));
    CHECK_THAT(refusal_of(batch_norm<float>{.mean = five_doubles, .variance = four_doubles}), Contains("batch_norm: mean has 5 entries"));
    CHECK_THAT(refusal_of(batch_norm<float>{.mean = four_doubles, .variance = five_doubles}),
               Contains("batch_norm: variance has 5 entries"));
    CHECK_THAT(refusal_of(batch_norm<float>{.mean = four_doubles}), Contains("batch_norm: variance is missing"));
    CHECK_THAT(refusal_of(batch_norm<float>{.variance = four_doubles}), Contains("batch_norm: mean is missing"));
    CHECK_THAT(refusal_of(rep_batch_norm<float>{{.weight = five}}), Contains("rep_batch_norm: weight has 5 entries"));
    for (const double eps : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        CHECK_THAT(refusal_of(layer_norm<float>{.eps = eps}), Contains("layer_norm: eps is"));
        CHECK_THAT(refusal_of(rms_norm<float>{.eps = eps}), Contains("rms_norm: eps is"));
        CHECK_THAT(refusal_of(batch_norm<float>{.eps = eps}), Contains("batch_norm: eps is"));
    }
    for (const double momentum : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()})
        CHECK_THAT(refusal_of(batch_norm<float>{.momentum = momentum}), Contains("batch_norm: momentum is"));
    CHECK_THAT(refusal_of(rep_batch_norm<float>{.eta = std::numeric_limits<double>::infinity()}),
               Contains("rep_batch_norm: eta is not finite"));
    CHECK_THAT(refusal_of(rep_batch_norm<float>{.eta = 1e39}), Contains("rep_batch_norm: eta is 1e+39, which is not finite as a float"));
}

TEST_CASE("norm errors: inference without statistics is asked for, never guessed", "[norm]") {
    constexpr auto missing = ": mean is missing, and variance: inference needs running statistics, or batch_statistics = true";
    CHECK_THAT(refusal_of(batch_norm<float>{}), Contains(std::string("batch_norm") + missing));
    CHECK_THAT(refusal_of(rep_batch_norm<float>{}), Contains(std::string("rep_batch_norm") + missing));
    CHECK_THAT(refusal_of(progressive_rep_batch_norm<layer_norm<float>>{}), Contains(std::string("progressive_rep_batch_norm") + missing));
    CHECK_THAT(refusal_of(batch_norm<float>{.mean = four_doubles, .variance = four_doubles, .batch_statistics = true}),
               Contains("batch_norm: batch_statistics is true, but mean and variance are given too"));
    const auto accepts = [](const auto& norm, const shape& s) { return error_of([&] { (void)normalise(norm, tensor<float>(s)); }) == nothing_thrown; };
    CHECK(accepts(batch_norm<float>{.batch_statistics = true}, {1, 2, 3, 4}));
    CHECK(accepts(rep_batch_norm<float>{.batch = {.batch_statistics = true}}, {1, 2, 3, 4}));
    CHECK(accepts(batch_norm<float>{}, {1, 2, 3, 0}));
}

TEST_CASE("norm errors: shapes, strides, overlap and workspace", "[norm]") {
    const layer_norm<float> norm;
    tensor<float> other({1, 2, 3, 5});
    CHECK_THAT(refusal([&](auto x, auto) { normalise(norm, x, other.view()); }),
               Contains("layer_norm: out has shape (1, 2, 3, 5)") && Contains(both_shapes));
    CHECK_THAT(refusal([&](auto x, auto) { normalise(norm, x, {nullptr, x.shape(), x.strides()}); }),
               Contains("layer_norm: out") && Contains("null"));
    CHECK_THAT(refusal([&](auto x, auto out) { normalise(norm, {nullptr, x.shape(), x.strides()}, out); }),
               Contains("layer_norm: x") && Contains("null"));
    CHECK_THAT(refusal([&](auto x, auto out) { normalise(norm, {x.data(), {1, 2, -3, 4}, x.strides()}, out); }), Contains("negative"));
    CHECK_THAT(refusal([&](auto x, auto out) { normalise(norm, {x.data(), x.shape(), {24, 12, 1, 3}}, out); }),
               Contains("layer_norm: x") && Contains("channel stride of 3"));
    CHECK_THAT(refusal([&](auto x, auto out) { normalise(norm, x, {out.data(), out.shape(), {24, 12, 1, 3}}); }),
               Contains("layer_norm: out") && Contains("channel stride of 3"));
    CHECK_THAT(refusal([&](auto x, auto out) { normalise(norm, x, {out.data(), out.shape(), {24, 12, 0, 1}}); }),
               Contains("elements overlap"));
    CHECK_THAT(error_of([&] {
                   tensor<float> memory({1, 1, 5, 4});
                   const shape s{.tokens = 4, .channels = 4};
                   normalise(norm, tensor_view<const float>(memory.data(), s, {0, 0, 4, 1}),
                             tensor_view<float>(memory.data() + 4, s, {0, 0, 4, 1}));
               }),
               Contains("layer_norm: out") && Contains("overlaps x") && Contains("(1, 1, 4, 4)"));
    Eigen::MatrixXf columns(3, 4);
    CHECK_THAT(error_of([&] { normalise(norm, view(columns), view(columns)); }), Contains("channel stride of 3"));
    sequential here;
    workspace none;
    CHECK_THAT(refusal([&](auto x, auto out) { normalise(batch_norm<float>{.batch_statistics = true}, x, out, execution(here, none)); }),
               Contains("batch_norm: workspace has 0 bytes"));
}

TEST_CASE("norm errors: training", "[norm]") {
    sequential here;
    workspace memory(100000), none;
    const execution run(here, memory);
    batch_norm_statistics four(4), five_channels(5);
    const batch_norm<float> norm;
    const progressive_rep_batch_norm<layer_norm<float>> progressive{};
    const tensor<bool> mask({1, 2, 2, 1}), hidden({1, 2, 3, 1}), wide({1, 2, 3, 4});
    CHECK_THAT(refusal([&](auto x, auto out) { train(norm, x, out, five_channels, run); }),
               Contains("batch_norm: statistics are of 5 channels") && Contains(both_shapes));
    CHECK_THAT(refusal([&](auto x, auto) { train(norm, x, x, four, run); }), Contains("batch_norm: out") && Contains("not done in place"));
    CHECK_THAT(refusal([&](auto x, auto out) { train(norm, x, out, four, run, mask); }),
               Contains("batch_norm: mask has shape (1, 2, 2, 1)") && Contains(both_shapes));
    CHECK_THAT(refusal([&](auto x, auto out) { train(norm, x, out, four, run, wide); }),
               Contains("batch_norm: mask has shape (1, 2, 3, 4)"));
    CHECK_THAT(refusal([&](auto x, auto out) { train(norm, x, out, four, run, hidden); }), Contains("has 0 tokens that count"));
    CHECK_THAT(refusal([&](auto x, auto out) { train(norm, x, out, four, execution(here, none)); }), Contains("batch_norm: workspace"));
    CHECK_THAT(refusal([&](auto x, auto out) { train(rep_batch_norm<float>{{.eps = 0}}, x, out, four, run); }),
               Contains("rep_batch_norm: eps"));
    for (const double gamma : {-0.01, 1.01, std::numeric_limits<double>::quiet_NaN()})
        CHECK_THAT(refusal([&](auto x, auto out) { train(progressive, x, out, four, gamma, run); }),
                   Contains("progressive_rep_batch_norm: gamma is"));
    CHECK_THAT(refusal([&](auto x, auto out) {
                   train(progressive_rep_batch_norm<layer_norm<float>>{{.weight = five}, {}}, x, out, four, 0.5, run);
               }),
               Contains("layer_norm: weight has 5 entries"));
    const auto one = [](auto view) { return decltype(view)(view.data(), {1, 1, 1, 4}, view.strides()); };
    CHECK_THAT(refusal([&](auto x, auto out) { train(norm, one(x), one(out), four, run); }),
               Contains("batch_norm: x of shape (1, 1, 1, 4) has 1 token"));
    CHECK_THAT(refusal([&](auto x, auto out) { train(progressive, one(x), one(out), four, 0.5, run); }), Contains("1 tokens that count"));
    CHECK(four.mean == std::vector<double>(4, 0.0));
    CHECK(four.variance == std::vector<double>(4, 1.0));
    CHECK(four.batches == 0);

    recalibration r(5);
    CHECK_THAT(refusal([&](auto x, auto) { r.add<float>(x, run); }),
               Contains("recalibration: x has shape (1, 2, 3, 4)") && Contains("5 channels"));
    CHECK_THAT(error_of([&] { (void)r.statistics(); }), Contains("recalibration: x has given 0 tokens"));
}

TEST_CASE("norm errors: folding", "[norm]") {
    std::vector<float> w(20), b(5), short_b(4), weight(4), bias(4);
    const shape s{.tokens = 5, .channels = 4};
    const linear_view<float> linear{head_major(w.data(), s), b}, transposed{head_major(w.data(), {.tokens = 4, .channels = 5}), short_b},
        no_bias{head_major(w.data(), s), {}}, bad_bias{head_major(w.data(), s), short_b};
    const batch_norm<float> norm{.mean = four_doubles, .variance = four_doubles}, without;
    const auto refused = [](const auto& f) { return error_of([&] { f(); }); };
    CHECK_THAT(refused([&] { fold(without, linear, linear); }), Contains("fold: norm has no running statistics"));
    CHECK_THAT(refused([&] { fold(rep_batch_norm<float>{}, linear, linear); }), Contains("fold: norm has no running statistics"));
    CHECK_THAT(refused([&] { fold(norm, linear, no_bias); }), Contains("fold: folded has no bias"));
    CHECK_THAT(refused([&] { fold(norm, bad_bias, linear); }),
               Contains("fold: linear has a bias of 4 entries") && Contains("(1, 1, 5, 4)"));
    CHECK_THAT(refused([&] { fold(norm, linear, transposed); }),
               Contains("fold: folded has a weight of shape (1, 1, 4, 5)") && Contains("(1, 1, 5, 4)"));
    CHECK_THAT(refused([&] { fold(linear, norm, linear); }), Contains("batch_norm: mean has 4 entries"));
    const tensor<float> probe({1, 1, 2, 3});
    CHECK_THAT(refused([&] { fold(norm, linear, linear, probe); }), Contains("fold: probe has shape (1, 1, 2, 3)"));
    CHECK_THAT(refused([&] { reparameterised(rep_batch_norm<float>{}, std::span(weight), std::span(bias)); }),
               Contains("rep_batch_norm: mean is missing"));
    CHECK_THAT(refused([&] { reparameterised(rep_batch_norm<float>{norm}, std::span(b), std::span(bias)); }),
               Contains("weight' has 5 entries"));
}

} // namespace attn::testing
