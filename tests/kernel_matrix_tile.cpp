// The micro-kernel of every size against a plain loop, on whole numbers, whose sums are exact in any order.
#include "answers.hpp"
#include "catch.hpp"

#include <attn/kernel/gemm/matrix_tile.hpp>
#include <attn/simd/unroll.hpp>

#include <utility>
#include <vector>

namespace attn::testing {

namespace {

template <Scalar T>
std::vector<T> whole_numbers(std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<T> numbers(count);
    for (auto& x : numbers) x = static_cast<T>(static_cast<int>(random() % 19) - 9);
    return numbers;
}

/// The operands of a tile, `at` numbers off alignment.
template <Scalar T>
struct operands {
    index_t rows, width, depth, at, a_row, a_depth, stride;
    std::vector<T> a = whole_numbers<T>(static_cast<std::size_t>(at + rows * a_row + depth * a_depth + 1), 1);
    std::vector<T> b = whole_numbers<T>(static_cast<std::size_t>(at + (depth + 1) * stride), 2);
    std::vector<T> factor = whole_numbers<T>(static_cast<std::size_t>(rows), 3);
    std::vector<T> c = whole_numbers<T>(static_cast<std::size_t>(at + rows * stride), 4);
};

/// c = factor * c + a b.
template <int Rows, int Columns, Scalar T>
void multiply(operands<T>& o) {
    kernel::matrix_tile<Rows, Columns, T> tile;
    tile.load(o.c.data() + o.at, o.stride, o.factor.data());
    const T *const a = o.a.data() + o.at, *const b = o.b.data() + o.at;
    if (o.a_depth == 1)
        tile.multiply_add(a, o.a_row, kernel::unit_stride{}, b, o.stride, o.depth);
    else if (o.a_row == 1)
        tile.multiply_add(a, kernel::unit_stride{}, o.a_depth, b, o.stride, o.depth);
    else
        tile.multiply_add(a, o.a_row, o.a_depth, b, o.stride, o.depth);
    tile.store(o.c.data() + o.at, o.stride);
}
/// c = 0.
template <int Rows, int Columns, Scalar T>
void clear(operands<T>& o) {
    kernel::matrix_tile<Rows, Columns, T> tile;
    tile.zero();
    tile.store(o.c.data() + o.at, o.stride);
}

/// Not a template of the tile's size, of which there are dozens.
template <Scalar T>
void check_tile(void (*multiply_tile)(operands<T>&), void (*clear_tile)(operands<T>&), operands<T> o) {
    INFO(o.rows << " rows, " << o.width << " wide, depth " << o.depth << ", offset " << o.at << ", strides " << o.a_row << ", " << o.a_depth
                << ", " << o.stride);
    auto expected = o.c;
    for (index_t i = 0; i < o.rows; ++i)
        for (index_t n = 0; n < o.width; ++n) {
            auto& sum = expected[static_cast<std::size_t>(o.at + i * o.stride + n)];
            sum *= o.factor[static_cast<std::size_t>(i)];
            for (index_t k = 0; k < o.depth; ++k)
                sum += o.a[static_cast<std::size_t>(o.at + i * o.a_row + k * o.a_depth)] *
                       o.b[static_cast<std::size_t>(o.at + k * o.stride + n)];
        }
    multiply_tile(o);
    CHECK(o.c == expected);

    clear_tile(o);
    for (index_t i = 0; i < o.rows; ++i)
        for (index_t n = 0; n < o.width; ++n) expected[static_cast<std::size_t>(o.at + i * o.stride + n)] = 0;
    CHECK(o.c == expected);
}

} // namespace

TEMPLATE_TEST_CASE("matrix_tile: every size against a plain loop", "[kernel][portable]", ATTN_TEST_NUMBERS) {
    using traits = kernel::tile_traits<TestType>;
    simd::unroll<traits::max_columns>([&](auto c) {
        constexpr int columns = c() + 1;
        simd::unroll<traits::max_rows(columns)>([&](auto r) {
            constexpr int rows = r() + 1;
            constexpr index_t width = columns * traits::lane_count;
            for (const index_t depth : {0, 1, 2, 17})
                for (const auto& [at, a_row, a_depth, padding] :
                     {std::array<index_t, 4>{0, depth + 3, 1, 0}, {1, 1, rows + 2, 5}, {3, 41, 2, 1}})
                    check_tile<TestType>(multiply<rows, columns, TestType>, clear<rows, columns, TestType>,
                                         {rows, width, depth, at, a_row, a_depth, width + padding});
        });
    });
}

TEST_CASE("with_constant: calls once, with the number as a constant", "[kernel][portable]") {
    for (index_t n = 0; n <= 8; ++n) {
        std::vector<index_t> seen;
        kernel::with_constant<6>(n, [&](auto constant) { seen.push_back(decltype(constant)::value); });
        CHECK(seen == (n >= 1 && n <= 6 ? std::vector<index_t>{n} : std::vector<index_t>{}));
    }
}

TEST_CASE("for_each_piece: pieces follow each other, as even as they come", "[kernel][portable]") {
    for (index_t max_size = 1; max_size <= 17; ++max_size)
        for (index_t count = 0; count <= 60; ++count) {
            index_t next = 0, pieces = 0, smallest = max_size, largest = 0;
            kernel::for_each_piece(count, max_size, [&](index_t first, index_t size) {
                if (first != next) FAIL_CHECK(count << " by " << max_size << ": a piece begins at " << first);
                next += size;
                ++pieces;
                smallest = std::min(smallest, size);
                largest = std::max(largest, size);
            });
            INFO(count << " by " << max_size);
            CHECK((next == count && pieces == (count + max_size - 1) / max_size && largest <= max_size));
            CHECK((pieces == 0 || largest - smallest <= 1));
        }
}

TEST_CASE("for_each_size: the same pieces, those of a size at once", "[kernel][portable]") {
    for (index_t max_size = 1; max_size <= 17; ++max_size)
        for (index_t count = 0; count <= 60; ++count) {
            std::vector<std::pair<index_t, index_t>> one_by_one, by_size;
            index_t calls = 0;
            kernel::for_each_piece(count, max_size, [&](index_t first, index_t size) { one_by_one.emplace_back(first, size); });
            kernel::for_each_size(count, max_size, [&](index_t first, index_t size, index_t pieces) {
                ++calls;
                for (; pieces > 0; --pieces, first += size) by_size.emplace_back(first, size);
            });
            INFO(count << " by " << max_size);
            CHECK((by_size == one_by_one && calls <= 2));
        }
}

} // namespace attn::testing
