// Which memory counts as apart from an output. That every operator asks for all that it refers to is the misuse tests' to say.
#include "errors.hpp"

#include <attn/core/output_memory.hpp>

#include <array>

namespace attn::testing {

namespace {

struct refers_to {
    std::span<const float> numbers;

    void check_apart(const output_memory& out) const { out.require_apart("numbers", numbers); }
};
struct refers_to_nothing {};

} // namespace

TEST_CASE("output_memory: refuses what shares a byte with the output, and names both", "[core][portable]") {
    std::array<float, 64> memory{};
    const output_memory out("operation", "out", head_major(memory.data() + 10, {1, 2, 3, 4})); // numbers 10 .. 33
    const auto problem = [&](index_t first, index_t count) {
        const auto numbers = std::span(memory).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
        return error_of([&] { out.require_apart("numbers", numbers); });
    };
    CHECK(problem(11, 3) == "operation: out of shape (1, 2, 3, 4) overlaps numbers of shape (1, 1, 1, 3)");
    for (index_t first = 0; first < 60; ++first)
        for (const index_t count : {1, 2, 4}) {
            INFO(count << " numbers from " << first);
            CHECK((problem(first, count) == nothing_thrown) == (first + count <= 10 || first >= 34));
        }
    const auto* const bytes = reinterpret_cast<const std::byte*>(memory.data());
    CHECK(error_of([&] { out.require_apart("bytes", std::span(bytes, 41)); }) ==
          "operation: out of shape (1, 2, 3, 4) overlaps bytes of shape (1, 1, 1, 41)");
    CHECK(error_of([&] { out.require_apart("bytes", std::span(bytes, 40)); }) == nothing_thrown);
}

TEST_CASE("output_memory: what has no elements, or lies between the output's rows, is apart", "[core][portable]") {
    std::array<float, 64> memory{};
    const tensor_view<float> columns(memory.data(), {1, 1, 8, 3}, {64, 64, 8, 1}); // 3 of 8 numbers in each row
    const output_memory out("operation", "out", columns), none("operation", "out", head_major(memory.data(), {1, 1, 0, 8}));
    const auto apart = [&](const output_memory& from, const auto& other) {
        return error_of([&] { from.require_apart("other", other); }) == nothing_thrown;
    };
    CHECK(apart(out, tensor_view<const float>(memory.data() + 3, {1, 1, 8, 5}, {64, 64, 8, 1})));
    CHECK_FALSE(apart(out, tensor_view<const float>(memory.data() + 3, {1, 1, 8, 6}, {64, 64, 8, 1})));
    CHECK(apart(out, head_major(memory.data(), {1, 1, 8, 0})));
    CHECK(apart(out, std::span<const float>()));
    CHECK(apart(out, head_major<const float>(nullptr, {1, 1, index_t{1} << 43, 8}))); // check_view says that it is missing
    CHECK(apart(none, std::span<float>(memory)));
}

TEST_CASE("output_memory: positions of a batch, and values that may or may not refer to memory", "[core]") {
    std::array<float, 4> numbers{};
    std::array<index_t, 4> starts{};
    const output_memory on_numbers("operation", "out", head_major(numbers.data(), {1, 1, 1, 4})),
        on_starts("operation", "out", head_major(starts.data(), {1, 1, 1, 4}));
    CHECK(error_of([&] { on_starts.require_apart("first_query", per_batch(std::span<const index_t>(starts))); }) ==
          "operation: out of shape (1, 1, 1, 4) overlaps first_query of shape (1, 1, 1, 4)");
    CHECK(error_of([&] { on_starts.require_apart("first_query", per_batch(0)); }) == nothing_thrown);
    check_says(error_of([&] { check_apart(refers_to{numbers}, on_numbers); }), {"operation: out", "overlaps numbers"});
    CHECK(error_of([&] { check_apart(refers_to_nothing{}, on_numbers); }) == nothing_thrown);
}

} // namespace attn::testing
