// The micro-kernel of every size against a plain loop, on whole numbers, whose sums are exact in any order.
#include "answers.hpp"
#include "catch.hpp"

#include <attn/kernel/matrix_tile.hpp>

namespace attn::testing {

namespace {

template <Scalar T>
std::vector<T> whole_numbers(std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<T> numbers(count);
    for (auto& x : numbers) x = static_cast<T>(static_cast<int>(random() % 19) - 9);
    return numbers;
}

/// sum = factor * c + a b, `at` numbers off alignment.
template <int Rows, int Columns, Scalar T>
void check_tile(index depth, index at, index a_row, index a_depth, index padding) {
    INFO(Rows << " rows, " << Columns << " columns, depth " << depth << ", offset " << at << ", strides " << a_row << ", " << a_depth
              << ", padding " << padding);
    using tile_type = kernel::matrix_tile<Rows, Columns, T, simd::native>;
    constexpr index width = Columns * tile_type::lanes::size;
    const auto stride = width + padding;
    const auto a = whole_numbers<T>(static_cast<std::size_t>(at + Rows * a_row + depth * a_depth + 1), 1);
    const auto b = whole_numbers<T>(static_cast<std::size_t>(at + (depth + 1) * stride), 2), factor = whole_numbers<T>(Rows, 3);
    auto c = whole_numbers<T>(static_cast<std::size_t>(at + Rows * stride), 4);
    auto expected = c;
    for (index i = 0; i < Rows; ++i)
        for (index n = 0; n < width; ++n) {
            auto& sum = expected[static_cast<std::size_t>(at + i * stride + n)];
            sum *= factor[static_cast<std::size_t>(i)];
            for (index k = 0; k < depth; ++k)
                sum += a[static_cast<std::size_t>(at + i * a_row + k * a_depth)] * b[static_cast<std::size_t>(at + k * stride + n)];
        }

    tile_type tile;
    tile.load_scaled(c.data() + at, stride, factor.data());
    if (a_depth == 1)
        tile.multiply_add(a.data() + at, a_row, kernel::unit_stride{}, b.data() + at, stride, depth);
    else if (a_row == 1)
        tile.multiply_add(a.data() + at, kernel::unit_stride{}, a_depth, b.data() + at, stride, depth);
    else
        tile.multiply_add(a.data() + at, a_row, a_depth, b.data() + at, stride, depth);
    tile.store(c.data() + at, stride);
    CHECK(c == expected);

    tile.zero();
    tile.store(c.data() + at, stride);
    for (index i = 0; i < Rows; ++i)
        for (index n = 0; n < stride && at + i * stride + n < std::ssize(c); ++n) {
            const auto e = static_cast<std::size_t>(at + i * stride + n);
            if (n < width) expected[e] = 0;
        }
    CHECK(c == expected);
}

} // namespace

TEMPLATE_TEST_CASE("matrix_tile: every size against a plain loop", "[kernel][portable]", float, double) {
    using traits = kernel::tile_traits<TestType, simd::native>;
    simd::unroll<traits::max_columns>([&](auto c) {
        constexpr int columns = c() + 1;
        simd::unroll<traits::max_rows(columns)>([&](auto r) {
            constexpr int rows = r() + 1;
            for (const index depth : {0, 1, 2, 17}) {
                check_tile<rows, columns, TestType>(depth, 0, depth + 3, 1, 0);
                check_tile<rows, columns, TestType>(depth, 1, 1, rows + 2, 5);
                check_tile<rows, columns, TestType>(depth, 3, 41, 2, 1);
            }
        });
    });
}

TEST_CASE("with_constant: calls once, with the number as a constant", "[kernel][portable]") {
    for (index n = 0; n <= 8; ++n) {
        std::vector<index> seen;
        kernel::with_constant<6>(n, [&](auto constant) { seen.push_back(decltype(constant)::value); });
        CHECK(seen == (n >= 1 && n <= 6 ? std::vector<index>{n} : std::vector<index>{}));
    }
}

TEST_CASE("for_each_piece: pieces follow each other, as even as they come", "[kernel][portable]") {
    for (index most = 1; most <= 17; ++most)
        for (index count = 0; count <= 60; ++count) {
            index next = 0, pieces = 0, smallest = most, largest = 0;
            kernel::for_each_piece(count, most, [&](index first, index size) {
                if (first != next) FAIL_CHECK(count << " by " << most << ": a piece begins at " << first);
                next += size;
                ++pieces;
                smallest = std::min(smallest, size);
                largest = std::max(largest, size);
            });
            INFO(count << " by " << most);
            CHECK((next == count && pieces == (count + most - 1) / most && largest <= most && (pieces == 0 || largest - smallest <= 1)));
        }
}

} // namespace attn::testing
