// Copies and transposes of rows: every count, every misalignment, and nothing written beyond.
#include "answers.hpp"
#include "catch.hpp"

#include <attn/kernel/tile_loader.hpp>

namespace attn::testing {

namespace {

/// Numbers to read, all different.
template <Scalar T>
std::vector<T> counted(index_t count) {
    std::vector<T> numbers(static_cast<std::size_t>(count));
    for (std::size_t e = 0; e < numbers.size(); ++e) numbers[e] = static_cast<T>(e + 1);
    return numbers;
}

template <Scalar T>
std::vector<T> guards(index_t count) {
    return std::vector<T>(static_cast<std::size_t>(count), guard<T>);
}

template <Scalar T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
    return std::ranges::equal(a, b, [](const T& x, const T& y) { return same_bits(x, y); });
}

/// Where a row_block of `rows` and `channels` may lie in memory, with its first element in the numbers.
struct arrangement {
    index_t offset, row_stride, channel_stride;
};
std::vector<arrangement> arrangements(index_t rows, index_t channels) {
    return {{0, channels, 1},
            {1, channels + 3, 1},
            {2, 3 * channels + 1, 3},
            {3, 1, rows},
            {rows * channels, -channels, 1},
            {rows * channels, -1, -rows},
            {5, 0, 1}};
}

} // namespace

TEMPLATE_TEST_CASE("copy_rows: count and misalignment", "[kernel][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const index_t rows : {0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 33})
        for (index_t channels = 0; channels <= 35; ++channels)
            for (const auto& from : arrangements(rows, channels))
                for (const index_t padded : {channels, channels + 1, (channels + 15) / 16 * 16})
                    for (const index_t at : {1, 4}) {
                        const auto numbers = counted<T>(from.offset + 4 * (rows + 2) * (channels + 2));
                        const row_block<const T> block{numbers.data() + from.offset, from.row_stride, from.channel_stride};
                        auto to = guards<T>(at + rows * padded + 8);
                        auto expected = to;
                        for (index_t r = 0; r < rows; ++r)
                            for (index_t c = 0; c < padded; ++c)
                                expected[static_cast<std::size_t>(at + r * padded + c)] =
                                    c < channels ? block.data[r * block.row_stride + c * block.channel_stride] : T{0};
                        kernel::copy_rows<TestType>(block, rows, channels, to.data() + at, padded);
                        if (!same(to, expected))
                            FAIL_CHECK(rows << " rows, " << channels << " channels, padded " << padded << ", row stride "
                                            << from.row_stride);
                    }
}

TEMPLATE_TEST_CASE("transpose_rows: count and misalignment", "[kernel][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr index_t size = simd::lanes<T>::size;
    for (index_t rows = 0; rows <= 2 * size + 1; ++rows)
        for (index_t channels = 0; channels <= 35; ++channels)
            for (const auto& from : arrangements(rows, channels))
                for (const index_t at : {0, 3}) {
                    const auto numbers = counted<T>(from.offset + 4 * (rows + 2) * (channels + 2));
                    const row_block<const T> block{numbers.data() + from.offset, from.row_stride, from.channel_stride};
                    const auto whole = (rows + size - 1) / size * size, stride = whole + 2;
                    auto to = guards<T>(at + channels * stride + 8);
                    auto expected = to;
                    for (index_t c = 0; c < channels; ++c)
                        for (index_t r = 0; r < whole; ++r)
                            expected[static_cast<std::size_t>(at + c * stride + r)] =
                                r < rows ? 2 * block.data[r * block.row_stride + c * block.channel_stride] : T{0};
                    kernel::transpose_rows<T>(block, rows, channels, T{2}, to.data() + at, stride);
                    if (!same(to, expected)) FAIL_CHECK(rows << " rows, " << channels << " channels, row stride " << from.row_stride);
                }
}

TEMPLATE_TEST_CASE("readable_in_place: unit stride, and rows not a multiple of pages apart", "[kernel][portable]", ATTN_TEST_NUMBERS) {
    constexpr index_t page = 4096 / sizeof(TestType);
    const auto readable = [](index_t row, index_t channel) {
        return kernel::readable_in_place(row_block<const TestType>{nullptr, row, channel});
    };
    CHECK(readable(64, 1));
    CHECK(readable(-64, 1));
    CHECK(readable(page + 1, 1));
    CHECK_FALSE(readable(64, 2));
    CHECK_FALSE(readable(1, 64));
    CHECK_FALSE(readable(page, 1));
    CHECK_FALSE(readable(-3 * page, 1));
}

} // namespace attn::testing
