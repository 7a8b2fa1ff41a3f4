#include "catch.hpp"

#include <attn/core/inputs.hpp>
#include <attn/core/output_memory.hpp>
#include <attn/core/tensor.hpp>
#include <attn/core/workspace.hpp>
#include <attn/parallel/thread_pool.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace attn::testing {

namespace {

bool is_aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % alignment == 0; }

} // namespace

TEMPLATE_TEST_CASE("tensor: aligned, contiguous and zero", "[core][portable]", float, double, std::int32_t, bool) {
    for (const auto& s : {shape{1, 1, 1, 1}, shape{2, 3, 5, 7}, shape{1, 1, 97, 1}}) {
        const tensor<TestType> t(s);
        CHECK(t.shape() == s);
        CHECK(is_aligned(t.data()));
        CHECK(t.view().strides() == head_major(t.data(), s).strides());
        CHECK(std::all_of(t.data(), t.data() + s.size(), [](TestType x) { return x == TestType{}; }));
    }
}

TEMPLATE_TEST_CASE("tensor: random numbers of a seed, within a limit, the same everywhere", "[core][portable]", float, double) {
    const shape s{2, 3, 50, 7};
    const auto a = tensor<TestType>::random(s, 1), again = tensor<TestType>::random(s, 1), other = tensor<TestType>::random(s, 2), wide = tensor<TestType>::random(s, 1, 8);
    double sum = 0, squares = 0;
    for (index_t e = 0; e < s.size(); ++e) {
        REQUIRE(a.data()[e] == again.data()[e]);
        REQUIRE(std::abs(a.data()[e]) <= 1);
        REQUIRE(wide.data()[e] == 8 * a.data()[e]);
        sum += static_cast<double>(a.data()[e]), squares += static_cast<double>(a.data()[e]) * static_cast<double>(a.data()[e]);
    }
    const auto count = static_cast<double>(s.size());
    CHECK(std::abs(sum / count) < 4 / std::sqrt(3 * count)); // four deviations of the mean
    CHECK(squares / count == Approx(1.0 / 3).epsilon(0.1));
    CHECK(!std::equal(a.data(), a.data() + s.size(), other.data()));
    CHECK(a.data()[0] == TestType(2 * (static_cast<double>(0x910a2dec89025cc1u >> 11) * 0x1p-53 + 0x1p-54) - 1)); // splitmix64's first of seed 1
    CHECK_THROWS_AS(tensor<TestType>::random({1, 1, -1, 1}, 1), shape_error);
}

TEST_CASE("what only looks, or moves, throws nothing", "[core]") {
    STATIC_REQUIRE(std::is_nothrow_move_constructible_v<tensor<float>> && std::is_nothrow_move_assignable_v<tensor<float>>);
    STATIC_REQUIRE(std::is_nothrow_move_constructible_v<workspace> && std::is_nothrow_move_assignable_v<workspace>);
    STATIC_REQUIRE(std::is_nothrow_convertible_v<const tensor<float>&, tensor_view<const float>>);
    STATIC_REQUIRE(std::is_nothrow_convertible_v<tensor_view<float>, tensor_view<const float>>);
    STATIC_REQUIRE(noexcept(std::declval<tensor_view<float>&>()(0, 0, 0, 0)) && noexcept(std::declval<tensor<float>&>().view()));
    STATIC_REQUIRE(noexcept(shape{}.size()) && noexcept(overlap(tensor_view<float>(), tensor_view<float>())));
    STATIC_REQUIRE(noexcept(std::declval<const execution&>().concurrency()) && noexcept(std::declval<const thread_pool&>().concurrency()));
}

TEST_CASE("tensor: its elements in the order in which they lie, as a span, since a tensor is no list of numbers", "[core]") {
    STATIC_REQUIRE(!std::ranges::range<tensor<index_t>> && !std::convertible_to<tensor<index_t>&, per_batch>);
    tensor<float> t({2, 3, 5, 7});
    std::iota(t.elements().begin(), t.elements().end(), 0.0f);
    CHECK(t(1, 2, 4, 6) == 2 * 3 * 5 * 7 - 1);
    float sum = 0;
    for (const float x : std::as_const(t).elements()) sum += x;
    CHECK(sum == 209 * 210 / 2);
    for (float& x : t.elements()) x = 1;
    CHECK(std::ranges::count(std::as_const(t).elements(), 1.0f) == 210);
    const auto moved = std::move(t);
    CHECK(t.elements().empty()); // NOLINT: moved from
    CHECK(moved.elements().data() == moved.data());
    CHECK(moved.elements().size() == 210);
}

TEST_CASE("tensor: empty ones hold nothing", "[core]") {
    CHECK(tensor<float>().shape().size() == 0);
    CHECK(tensor<float>(shape{0, 2, 3, 4}).shape() == shape{0, 2, 3, 4});
}

TEST_CASE("tensors and views: those of nothing have no extent at all, not even a batch entry and a head", "[core][portable]") {
    tensor<float> from({1, 1, 2, 3});
    const tensor<float> to(std::move(from));
    const shape none{0, 0, 0, 0};
    CHECK(tensor<float>().shape() == none);
    CHECK(from.shape() == none); // NOLINT: moved from
    CHECK(tensor_view<float>().shape() == none);
    CHECK(stored_view<const float>().shape() == none);
}

TEST_CASE("tensor: element access and views reach the same memory, which a move carries along", "[core]") {
    tensor<float> t(shape{2, 2, 2, 2});
    t(1, 0, 1, 0) = 3;
    const tensor_view<const float> view = t;
    CHECK(view(1, 0, 1, 0) == 3);
    CHECK(t.data()[8 + 2] == 3);
    const auto* memory = t.data();
    const auto moved = std::move(t);
    CHECK(moved.data() == memory);
    CHECK(moved(1, 0, 1, 0) == 3);
}

TEST_CASE("workspace: aligned, grows, never shrinks", "[core]") {
    workspace w;
    CHECK(w.size_bytes() == 0);
    CHECK(w.bytes().empty());
    w.reserve(0);
    CHECK(w.size_bytes() == 0);
    w.reserve(1000);
    CHECK(w.size_bytes() == 1000);
    CHECK(is_aligned(w.bytes().data()));
    fill(w, std::byte{1});
    const auto* memory = w.bytes().data();
    w.reserve(10);
    CHECK(w.size_bytes() == 1000);
    CHECK(w.bytes().data() == memory);
    w.reserve(1001);
    CHECK(w.bytes().size() == 1001);
    CHECK(workspace(64).size_bytes() == 64);
}

TEST_CASE("scratch: counting and cutting agree, and the arrays are aligned and apart", "[core][portable]") {
    const auto cut = [](detail::scratch s) {
        const auto* a = s.take<float>(1);
        const auto* none = s.take<double>(0);
        const auto* b = s.take<double>(9);
        const auto* c = s.take<std::byte>(65);
        return std::tuple(s.used_bytes(), a, none, b, c);
    };
    const auto bytes = std::get<0>(cut({}));
    CHECK(bytes == 64 + 128 + 128);
    CHECK(std::get<1>(cut({})) == nullptr);

    const workspace w(bytes);
    const auto [used, a, none, b, c] = cut(detail::scratch(w.bytes().data()));
    CHECK(used == bytes);
    CHECK(is_aligned(a));
    CHECK(is_aligned(b));
    CHECK(is_aligned(c));
    CHECK(static_cast<const void*>(a + 1) <= b);
    CHECK(static_cast<const void*>(b + 9) <= c);
    CHECK(c + 65 <= w.bytes().data() + used);
}

} // namespace attn::testing
