#include <attn/attention/softmax_attention.hpp>

#include "answers.hpp"
#include "catch.hpp"

#include <array>
#include <numeric>
#include <vector>

namespace attn::testing {
namespace {

/// As std::mdspan, and Kokkos', look to those who read from them: extents and strides of any integer type.
template <class T, std::size_t Rank>
struct mdspan {
    using element_type = T;
    T* data;
    std::array<unsigned, Rank> extents;
    std::array<std::size_t, Rank> strides;

    static constexpr std::size_t rank() { return Rank; }
    T* data_handle() const { return data; }
    unsigned extent(std::size_t r) const { return extents[r]; }
    std::size_t stride(std::size_t r) const { return strides[r]; }
};

} // namespace

TEST_CASE("mdspan: converts to a view, whose missing dimensions have one element", "[core][portable]") {
    std::vector<float> memory(2 * 3 * 4 * 5);
    std::iota(memory.begin(), memory.end(), 0.0f);
    const tensor_view<const float> all = mdspan<float, 4>{memory.data(), {2, 3, 4, 5}, {60, 20, 5, 1}};
    CHECK(all.shape() == shape{2, 3, 4, 5});
    CHECK(all(1, 2, 3, 4) == memory[119]);
    const tensor_view heads = mdspan<float, 3>{memory.data(), {3, 4, 5}, {5, 15, 1}}; // tokens, then heads
    CHECK(heads.shape() == shape{1, 3, 4, 5});
    CHECK(heads(0, 2, 1, 4) == memory[15 + 2 * 5 + 4]);
    const tensor_view rows = mdspan<const float, 2>{memory.data(), {5, 4}, {1, 5}}; // column-major
    CHECK(rows.shape() == shape{1, 1, 5, 4});
    CHECK(rows.strides() == strides{0, 0, 1, 5});
    STATIC_REQUIRE(std::same_as<decltype(rows), const tensor_view<const float>>);
    STATIC_REQUIRE_FALSE(std::convertible_to<mdspan<const float, 2>, tensor_view<float>>);
    STATIC_REQUIRE_FALSE(std::convertible_to<mdspan<double, 2>, tensor_view<const float>>);
}

TEST_CASE("mdspan: attention takes them as they are", "[core]") {
    tensor<float> q({.tokens = 7, .channels = 5}), k({.tokens = 9, .channels = 5});
    for (index_t e = 0; e < q.shape().size(); ++e) q.data()[e] = static_cast<float>(e % 11) - 5;
    for (index_t e = 0; e < k.shape().size(); ++e) k.data()[e] = static_cast<float>(e % 7) - 3;
    const auto as_mdspan = [](const tensor<float>& t) {
        return mdspan<const float, 2>{t.data(), {static_cast<unsigned>(t.shape().tokens), 5}, {5, 1}};
    };
    CHECK(same_bits(attend(softmax_attention{}, as_mdspan(q), as_mdspan(k), as_mdspan(k)), attend(softmax_attention{}, q, k, k)));
}

} // namespace attn::testing
