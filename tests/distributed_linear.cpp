// The linear attentions over ranks have the bits of the call on one machine.
#include "catch.hpp"
#include "errors.hpp"
#include "rank_checks.hpp"
#include "sequence_checks.hpp"

#include <attn/attention/cosformer_features.hpp>
#include <attn/attention/performer_features.hpp>
#include <attn/attention/random_projection.hpp>
#include <attn/distributed/thread_communicator.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/prefix.hpp>
#include <attn/pattern/lengths.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

/// A map of a user's own, which knows the position.
struct squares_and_place {
    index_t features(index_t channels) const { return channels + 1; }
    template <class S>
    void operator()(std::span<const S> x, index_t position, std::span<S> to) const {
        for (std::size_t c = 0; c < x.size(); ++c) to[c] = x[c] * x[c];
        to[x.size()] = S(1) / static_cast<S>(1 + (position < 0 ? -position : position) % 8);
    }
    template <class S>
    void gradient(std::span<const S> x, index_t, std::span<const S> of_features, std::span<S> to) const {
        for (std::size_t c = 0; c < x.size(); ++c) to[c] = S(2) * x[c] * of_features[c];
    }
};

template <Scalar T>
void check_linear(const auto& op, const inputs<T>& in, const std::vector<index_t>& some_ranks) {
    check_over(op, in, partitions(op.pattern, in, some_ranks), false);
}

} // namespace

TEST_CASE("ranks: linear attention", "[distributed]") {
    using T = float;
    const std::vector<index_t> ranks{1, 2, 3, 4, 5, 6, 7}, some{2, 3, 7};
    for (const index_t n : {0, 1, 6, 97, 333, 1500}) {
        const auto in = random_given<T>({2, 4, 2, n, n, 9, 17});
        check_linear(linear_attention{}, inputs<T>(in), ranks);
        check_linear(linear_attention{.pattern = causal{}}, inputs<T>(in), ranks);
    }
    const std::vector<index_t> lengths_of{30, 6'000};
    const auto in = random_given<T>({2, 2, 1, 9'001, 9'001, 8, 12});
    check_linear(linear_attention{}, inputs<T>(in), ranks);
    check_linear(linear_attention{.pattern = causal{}, .normalise = false, .scale = 0.1}, inputs<T>(in), some);
    check_linear(linear_attention{.pattern = lengths{lengths_of}}, inputs<T>(in), some);
    check_linear(linear_attention{.pattern = causal{} & lengths{lengths_of}}, inputs<T>(in), some);
    check_linear(linear_attention{.feature_map = relu{}, .pattern = prefix{3'000}}, inputs<T>(in), some);
}

TEMPLATE_TEST_CASE("ranks: linear attention with features of whole vectors", "[distributed]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const std::vector<index_t> some{1, 2, 3, 7};
    const auto with_maps = [&](const auto& given, const auto& pattern) {
        const inputs<T> in(given);
        tensor<T> directions({1, 1, 21, in.keys.shape().channels});
        fill_orthogonal_directions(directions.view(), 3);
        using P = std::remove_cvref_t<decltype(pattern)>;
        const performer_features performer{directions};
        check_linear(linear_attention<performer_features<T>, P>{.feature_map = performer, .pattern = pattern}, in, some);
        check_linear(linear_attention<cosformer_features, P>{.feature_map = {.length = 20'000}, .pattern = pattern}, in, some);
        check_linear(linear_attention<squares_and_place, P>{.pattern = pattern, .normalise = false, .scale = 0.1}, in, some);
    };
    for (const index_t n : {0, 1, 6, 97, 700}) {
        const auto given = random_given<T>({2, 4, 2, n, n, 9, 17});
        with_maps(given, dense{});
        with_maps(given, causal{});
    }
    const std::vector<index_t> lengths_of{30, 4'900}, none{0, 0};
    const auto given = random_given<T>({2, 2, 1, 5'001, 5'001, 8, 12});
    with_maps(given, lengths{lengths_of});
    with_maps(given, lengths{none});
    with_maps(given, causal{} & lengths{lengths_of});
    with_maps(given, prefix{3'000});
    const auto fewer = random_given<T>({1, 2, 2, 30, 5'000, 8, 16, {.first_query = 2'000, .first_key = -700}}); // ranks may have keys and no queries
    with_maps(fewer, dense{});
    with_maps(fewer, causal{});
}

TEST_CASE("ranks: the features of a key are by the largest number of all keys, which one rank may hold", "[distributed]") {
    auto given = random_given<float>({1, 2, 2, 300, 300, 8, 8});
    for (index_t c = 0; c < 8; ++c) given.keys(0, 1, 250, c) *= 9;
    tensor<float> directions({1, 1, 40, 8});
    fill_orthogonal_directions(directions.view(), 3);
    const linear_attention op{.feature_map = performer_features{directions}};
    check_linear(op, inputs<float>(given), {2, 5});
    const partition parts(op.pattern, shapes_of(inputs<float>(given)), 3);
    check_failures("sequence_parallel", 3, [&](auto& communicator, auto& executor) {
        const tensor_part part{.tokens = parts.queries(communicator.rank())};
        static_cast<void>(attend(sequence_parallel{op, parts}, communicator, inputs<float>(given).slice(part, part), executor));
    });
    const auto errors = [&](index_t features) {
        std::vector<std::string> all(3, nothing_thrown);
        on_thread_ranks(3, [&](auto& ranks) {
            tensor<float> own({1, 1, ranks.rank() == 1 ? features : 40, 8});
            fill_orthogonal_directions(own.view(), 3);
            const linear_attention other{.feature_map = performer_features{own}};
            const tensor_part part{.tokens = parts.queries(ranks.rank())};
            all[static_cast<std::size_t>(ranks.rank())] =
                error_of<std::exception>([&] { static_cast<void>(attend(sequence_parallel{other, parts}, ranks, inputs<float>(given).slice(part, part))); });
        });
        return all;
    };
    for (const auto& error : errors(41)) check_says(error, {"sequence_parallel: ranks 0 and 1 differ in "});
}

TEST_CASE("ranks: linear attention at other positions, of other keys than queries, of 16-bit numbers", "[distributed]") {
    const std::vector<index_t> some{2, 3, 7};
    for (const auto where : {top_left(), positions{.first_query = 2'000, .first_key = -700}, positions{.first_query = -100}, positions{.first_query = 5'123, .first_key = 5'001}}) {
        const auto in = random_given<float>({1, 2, 2, 700, 5'000, 33, 16, where});
        check_linear(linear_attention{}, inputs<float>(in), some);
        check_linear(linear_attention{.pattern = causal{}}, inputs<float>(in), some);
    }
    const auto in = random_given<float>({1, 2, 2, 3'000, 3'000, 16, 8});
    tensor<Eigen::bfloat16> k(in.keys.shape());
    std::transform(in.keys.data(), in.keys.data() + in.keys.shape().size(), k.data(), [](float x) { return Eigen::bfloat16(x); });
    check_linear(linear_attention{.pattern = causal{}}, inputs<float>{in.queries, k, in.values}, some);
    check_linear(linear_attention{}, inputs<float>{in.queries, k, in.values}, some);
    const auto weights = random_tensor<float>({2, 8, 3, 5}, 3);
    check_linear(simplified_linear_attention{.convolution = {.weights = weights, .height = 60, .width = 50}}, inputs<float>{in.queries, k, in.values}, some);
}

TEST_CASE("ranks: simplified and focused linear attention, whose convolution reads beyond a rank's tokens", "[distributed]") {
    using T = float;
    const std::vector<index_t> ranks{1, 2, 3, 4, 5, 6, 7}, some{2, 3, 7};
    for (const index_t channels : {16, 11}) { // read where they lie, and copied
        for (const auto& [height, width, kernel_height, kernel_width] :
             {std::array<index_t, 4>{0, 0, 1, 3}, {1, 1, 3, 3}, {7, 14, 5, 5}, {40, 3, 7, 3}, {3, 40, 3, 9}, {11, 130, 3, 3}, {2, 3, 9, 9}, {55, 57, 5, 5}}) {
            const auto n = height == 0 ? 500 : height * width;
            const auto in = random_given<T>({2, 4, 2, n, n, 16, channels});
            const auto weights = random_tensor<T>({1, channels, kernel_height, kernel_width}, 3), encoding = random_tensor<T>({1, 1, n, 16}, 4),
                       input = random_tensor<T>({2, 2, n, channels}, 5);
            const depthwise_convolution<T> convolution{.weights = weights, .height = height, .width = width};
            check_linear(simplified_linear_attention<dense, T>{.convolution = convolution}, inputs<T>(in), ranks);
            check_linear(simplified_linear_attention<dense, T>{.convolution = convolution, .positional_encoding = encoding, .convolution_input = input}, inputs<T>(in), some);
            check_linear(focused_linear_attention<dense, T>{.convolution = convolution, .positional_encoding = encoding}, inputs<T>(in), some);
        }
    }
    const index_t n = 5'000;
    const auto in = random_given<T>({2, 2, 1, n, n, 8, 8});
    const std::vector<index_t> lengths_of{30, 4'321};
    const auto weights = random_tensor<T>({1, 8, 1, 4}, 3), centred = random_tensor<T>({2, 8, 3, 3}, 3);
    const auto bias = random_tensor<T>({1, 1, 1, 8}, 6), scale = random_tensor<T>({1, 1, 1, 8}, 7);
    const std::span<const T> of_bias(bias.data(), 8), of_scale(scale.data(), 8);
    const depthwise_convolution<T> image{.weights = centred, .bias = of_bias, .height = 100, .width = 50};
    check_linear(simplified_linear_attention<causal, T>{.convolution = {.weights = weights, .causal = true}}, inputs<T>(in), some);
    check_linear(simplified_linear_attention<lengths, T>{.convolution = image, .pattern = lengths{lengths_of}}, inputs<T>(in), some);
    check_linear(focused_linear_attention<lengths, T>{.power = 2, .scale = of_scale, .convolution = image, .pattern = lengths{lengths_of}}, inputs<T>(in), some);
    check_linear(simplified_linear_attention<dense, T>{}, inputs<T>(in), some);
    const auto fewer = random_given<T>({1, 2, 1, 400, 3'000, 8, 5}); // other tokens are convolved than are attended to
    const auto input = random_tensor<T>({1, 1, 400, 5}, 5), kernel = random_tensor<T>({1, 5, 3, 3}, 3);
    check_linear(focused_linear_attention<dense, T>{.convolution = {.weights = kernel, .height = 20, .width = 20}, .convolution_input = input}, inputs<T>(fewer), some);
}

TEST_CASE("ranks: a linear attention that fails on one rank fails on all", "[distributed]") {
    const index_t n = 5'000;
    const auto in = random_given<float>({1, 2, 2, n, n, 8, 8});
    const auto weights = random_tensor<float>({1, 8, 3, 3}, 3);
    const partition parts(dense{}, shapes_of(inputs<float>(in)), 3);
    const auto check = [&](const auto& op) {
        check_failures("sequence_parallel", 3, [&](auto& communicator, auto& executor) {
            const auto own = parts.queries(communicator.rank());
            const auto some = inputs<float>(in).slice({.tokens = own}, {.tokens = own});
            static_cast<void>(attend(sequence_parallel{op, parts}, communicator, some, executor));
        });
    };
    check(linear_attention{});
    check(linear_attention{.pattern = causal{}});
    check(focused_linear_attention{.convolution = {.weights = weights, .height = 50, .width = 100}});
}

TEST_CASE("ranks: a linear attention's parameters are those of all rows, its convolution's input is a rank's", "[distributed]") {
    const index_t n = 100;
    const auto in = random_given<float>({1, 1, 1, n, n, 8, 8});
    const auto encoding = random_tensor<float>({1, 1, 50, 8}, 4), input = random_tensor<float>({1, 1, n, 8}, 4), weights = random_tensor<float>({1, 8, 3, 3}, 4);
    const partition parts(dense{}, shapes_of(inputs<float>(in)), 2);
    const depthwise_convolution<float> convolution{.weights = weights, .height = 10, .width = 10};
    const auto heard = [&](const auto& op) {
        return error_of<shape_error>([&] {
            on_thread_ranks(2, [&](auto& ranks) {
                const auto own = parts.queries(ranks.rank());
                const auto some = inputs<float>(in).slice({.tokens = own}, {.tokens = own});
                static_cast<void>(attend(sequence_parallel{op, parts}, ranks, some));
            });
        });
    };
    check_says(heard(simplified_linear_attention{.positional_encoding = encoding.view()}), {"simplified_linear_attention", "positional_encoding", "(1, 1, 50, 8)", "(1, 1, 100, 8)"});
    check_says(heard(simplified_linear_attention{.convolution = convolution, .convolution_input = input.view()}),
               {"convolution_input", "(1, 1, 100, 8)", "rank", "of the partition holds 50 tokens"});
}

} // namespace attn::testing
