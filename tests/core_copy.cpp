#include "catch.hpp"
#include "errors.hpp"

#include <attn/core/copy.hpp>

#include <algorithm>
#include <vector>

namespace attn::testing {

TEMPLATE_TEST_CASE("copy: every number goes to its place, whatever the layouts", "[core][portable]", float, double, index_t) {
    const shape s{2, 3, 5, 7};
    tensor<TestType> from(s), to(s);
    for (index_t e = 0; e < s.size(); ++e) from.data()[e] = static_cast<TestType>(e + 1);
    copy(from, to);
    CHECK(std::equal(from.data(), from.data() + s.size(), to.data()));
    const auto other = copy(from);
    CHECK((other.shape() == s && other.data() != from.data()));
    CHECK(std::equal(from.data(), from.data() + s.size(), other.data()));

    std::vector<TestType> numbers(static_cast<std::size_t>(s.size()));
    const auto by_token = token_major(numbers.data(), s);
    copy(from, by_token);
    CHECK(by_token(1, 2, 3, 4) == from(1, 2, 3, 4));
    CHECK(numbers[7] == from(0, 1, 0, 0));
    const auto part = copy(from.slice({.heads = {1, 2}, .tokens = {4, 1}}).transposed());
    CHECK((part.shape() == shape{2, 2, 7, 1} && part(1, 0, 6, 0) == from(1, 1, 4, 6)));
    copy(from.slice({.tokens = {0, 2}}), to.slice({.tokens = {3, 2}}));
    CHECK((to(1, 2, 3, 6) == from(1, 2, 0, 6) && to(1, 2, 2, 6) == from(1, 2, 2, 6)));
    CHECK(copy(tensor<TestType>({0, 1, 2, 3})).shape() == shape{0, 1, 2, 3});
}

TEST_CASE("copy: what cannot be copied is refused before anything is written", "[core][portable]") {
    const shape s{1, 1, 2, 3};
    auto from = tensor<float>::random(s, 1);
    tensor<float> to(s), longer({1, 1, 3, 3});
    CHECK(error_of([&] { copy(from, longer); }) == "copy: to has shape (1, 1, 3, 3), but from has (1, 1, 2, 3)");
    CHECK(error_of([&] { copy(head_major(static_cast<const float*>(nullptr), s), to); }) == "copy: from has shape (1, 1, 2, 3) but no memory (a null pointer)");
    CHECK(error_of([&] { copy(from, head_major(static_cast<float*>(nullptr), s)); }) == "copy: to has shape (1, 1, 2, 3) but no memory (a null pointer)");
    check_says(error_of([&] { copy(from, tensor_view(to.data(), s, {0, 0, 0, 1})); }), {"copy: to", "its elements overlap"});
    check_says(error_of([&] { copy(longer.slice({.tokens = {0, 2}}), longer.slice({.tokens = {1, 2}})); }), {"copy: to", "overlaps from"});
    CHECK((to(0, 0, 0, 0) == 0 && longer(0, 0, 2, 2) == 0));
    CHECK(error_of([&] { copy(from, to); }) == nothing_thrown);
}

} // namespace attn::testing
