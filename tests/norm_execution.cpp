// Every norm in inference: the same bits on any threads, in any layout, in place, and nothing allocated.
#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "norm_checks.hpp"

#include <attn/core/eigen.hpp>
#include <attn/norm/dynamic_tanh.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/norm/progressive_rep_batch_norm.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/norm/unit_norm.hpp>

namespace attn::testing {

namespace {

/// One of each norm for so many channels, with its parameters.
template <Scalar T>
struct every_norm {
    std::vector<T> weight, bias;
    std::vector<double> mean, variance;

    explicit every_norm(index_t channels)
        : weight(random_numbers<T>(channels, 1, 1)), bias(random_numbers<T>(channels, 2)), mean(random_numbers<double>(channels, 3)),
          variance(static_cast<std::size_t>(channels), 2.5) {}

    template <class F>
    void each(const F& f) const {
        const batch_norm<T> batch{weight, bias, mean, variance};
        f(layer_norm<T>{weight, bias});
        f(rms_norm<T>{weight});
        f(unit_norm<T>{});
        f(dynamic_tanh<T>{weight, bias});
        f(dynamic_erf<T>{.weight = weight, .shift = 0.25});
        f(batch);
        f(batch_norm<T>{.weight = weight, .bias = bias, .batch_statistics = true});
        f(rep_batch_norm<T>{batch, 0.7});
        f(progressive_rep_batch_norm<layer_norm<T>>{{weight, bias}, {batch, 0.7}});
    }
};

static_assert(Norm<layer_norm<float>> && Norm<rms_norm<double>> && Norm<batch_norm<float>> && Norm<rep_batch_norm<double>>);
static_assert(Norm<progressive_rep_batch_norm<rms_norm<float>>>);
static_assert(!Norm<batch_norm_statistics>);

} // namespace

TEMPLATE_TEST_CASE("every norm: the same bits for any executor", "[norm][parallel]", ATTN_TEST_NUMBERS) {
    for (const auto& s : {shape{2, 3, 131, 65}, shape{1, 1, 1, 3}, shape{1, 1, 700, 192}, shape{0, 1, 3, 5}}) {
        const auto x = random_rows<TestType>(s, 5);
        every_norm<TestType>(s.channels).each([&](const auto& norm) {
            INFO(norm.name << to_string(s));
            const auto expected = normalise(norm, x);
            for_each_executor([&](auto& executor, const std::string& name) {
                INFO(name);
                tensor<TestType> out(s);
                normalise_on(norm, x, out, executor);
                CHECK(same_bits(out, expected));
            });
        });
    }
}

TEMPLATE_TEST_CASE("every norm: the same bits in any layout, in place and apart, and nothing beside is written", "[norm]", ATTN_TEST_NUMBERS) {
    for (const auto& s : {shape{2, 3, 7, 19}, shape{1, 2, 33, 64}, shape{2, 1, 1, 1}, shape{1, 4, 0, 8}}) {
        const auto x = random_rows<TestType>(s, 6);
        every_norm<TestType>(s.channels).each([&](const auto& norm) {
            INFO(norm.name << to_string(s));
            const auto expected = normalise(norm, x);
            for (const auto from : row_layouts) {
                placed<TestType> in_place(x, from);
                normalise(norm, in_place.view(), in_place.view());
                CHECK(same_bits(in_place.copy(), expected));
                CHECK(in_place.guards_intact());
                for (const auto to : row_layouts) {
                    placed<TestType> in(x, from), out(s, to);
                    normalise(norm, in.view(), out.view());
                    CHECK(same_bits(out.copy(), expected));
                    CHECK(same_bits(in.copy(), x));
                    CHECK((in.guards_intact() && out.guards_intact()));
                }
            }
        });
    }
}

TEMPLATE_TEST_CASE("every norm: rows repeated, backwards and of an Eigen matrix", "[norm]", ATTN_TEST_NUMBERS) {
    using matrix = Eigen::Matrix<TestType, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    matrix x = matrix::Random(11, 21), out(11, 21);
    tensor<TestType> backwards({1, 1, 11, 21}), copied({1, 1, 11, 21});
    std::copy_n(x.data(), x.size(), copied.data());
    every_norm<TestType>(21).each([&](const auto& norm) {
        INFO(norm.name);
        const auto expected = normalise(norm, copied);
        normalise(norm, view(x), view(out));
        CHECK(std::equal(out.data(), out.data() + out.size(), expected.data()));
        const shape s{.tokens = 11, .channels = 21};
        normalise(norm, tensor_view<const TestType>(x.data() + 10 * 21, s, {0, 0, -21, 1}),
                  tensor_view<TestType>(backwards.data() + 10 * 21, s, {0, 0, -21, 1}));
        if (norm.name == "batch_norm") return; // whose statistics, if its own, are of other rows or in another order
        CHECK(std::equal(out.data(), out.data() + out.size(), backwards.data()));
        const auto repeated = normalise(norm, tensor_view<const TestType>(x.data(), {2, 3, 11, 21}, {0, 0, 21, 1}));
        CHECK(std::equal(out.data(), out.data() + out.size(), &repeated(1, 2, 0, 0)));
    });
}

TEMPLATE_TEST_CASE("every norm: results large enough to be written past the caches have the same bits", "[norm]", ATTN_TEST_NUMBERS) {
    const index_t tokens = (index_t{8} << 20) / (64 * sizeof(TestType)) + 3;
    const auto x = random_tensor<TestType>({1, 1, tokens, 64}, 8);
    every_norm<TestType>(64).each([&](const auto& norm) {
        INFO(norm.name);
        tensor<TestType> in_place(x.shape()); // never past the caches
        std::copy_n(x.data(), x.shape().size(), in_place.data());
        normalise(norm, in_place.view(), in_place.view());
        thread_pool pool(2);
        tensor<TestType> out(x.shape());
        normalise_on(norm, x, out, pool);
        CHECK(same_bits(out, in_place));
    });
}

#ifdef ATTN_COUNTS_ALLOCATIONS
TEMPLATE_TEST_CASE("every norm: inference allocates nothing", "[norm]", ATTN_TEST_NUMBERS) {
    const auto x = random_rows<TestType>({2, 2, 300, 33}, 5);
    tensor<TestType> out(x.shape());
    thread_pool pool(3);
    every_norm<TestType>(33).each([&](const auto& norm) {
        workspace memory(norm.workspace_bytes(x.shape(), 3));
        const execution run(pool, memory);
        normalise(norm, x, out, run);
        CHECK(allocations_in([&] { normalise(norm, x, out, run); }) == 0);
    });
}
#endif

} // namespace attn::testing
