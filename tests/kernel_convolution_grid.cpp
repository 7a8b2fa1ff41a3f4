// How tokens are cut into chunks: what the convolution and linear attention rely on.
#include "catch.hpp"

#include <attn/kernel/convolution/depthwise.hpp>

namespace attn::testing {

namespace {

using kernel::token_chunks;

/// Chunks follow each other from token 0 to the last, none is empty, none has more than `limit` tokens.
void check_cover(const token_chunks& chunks, index_t tokens, index_t limit) {
    index_t end = 0, wrong = 0;
    for (index_t c = 0; c < chunks.count(); ++c) {
        const auto count = chunks.end(c) - chunks.first(c);
        wrong += chunks.first(c) != end || count < 1 || count > limit;
        end = chunks.end(c);
    }
    CHECK(wrong == 0);
    CHECK(end == tokens);
}

} // namespace

TEST_CASE("token_chunks: even pieces of a sequence", "[kernel]") {
    for (const index_t target : {1, 5, 64})
        for (index_t tokens = 0; tokens < 200; ++tokens) {
            INFO(tokens << " tokens, about " << target << " in a chunk");
            const auto chunks = token_chunks::even(tokens, target);
            check_cover(chunks, tokens, target);
            CHECK(chunks.count() == (tokens + target - 1) / target); // no more of them than it takes
            for (index_t c = 0; c < chunks.count(); ++c) CHECK(chunks.end(c) - chunks.first(c) >= tokens / chunks.count());
        }
}

TEST_CASE("token_chunks: whole rows of a grid, or parts of one row", "[kernel]") {
    constexpr index_t target = 16, limit = 24;
    for (const index_t height : {0, 1, 2, 7, 40})
        for (index_t width = 0; width < 60; ++width) {
            INFO("grid " << height << " x " << width);
            const kernel::convolution_grid grid{.height = height, .width = width};
            const auto chunks = token_chunks::of(grid, target, limit);
            check_cover(chunks, height * width, limit);
            for (index_t c = 0; c < chunks.count(); ++c) {
                const auto first = chunks.first(c), end = chunks.end(c);
                const bool in_one_row = first / width == (end - 1) / width;
                CHECK((in_one_row || (first % width == 0 && end % width == 0)));
                CHECK((width > limit || (first % width == 0 && end % width == 0))); // narrow rows are not cut
            }
        }
}

TEST_CASE("token_chunks: tasks of at least a chunk", "[kernel]") {
    const auto parts = token_chunks::of({.height = 3, .width = 60}, 16, 24); // 4 pieces of 15
    CHECK(parts.of_a_task(60) == 4);
    CHECK(parts.of_a_task(150) == 10);
    CHECK(parts.of_a_task(1) == 1);
    const auto rows = token_chunks::of({.height = 9, .width = 5}, 16, 24); // 3 rows of 5 in a chunk
    CHECK(rows.of_a_task(60) == 4);
    CHECK(rows.of_a_task(1) == 1);
}

TEST_CASE("convolution_grid: taps of a kernel that nobody could hold stay an index", "[kernel]") {
    const kernel::convolution_grid grid{.kernel_height = index_t{1} << 40, .kernel_width = index_t{1} << 40};
    CHECK(grid.taps() == std::numeric_limits<index_t>::max());
    CHECK(kernel::convolution_grid{.kernel_height = 3, .kernel_width = 5}.taps() == 15);
}

} // namespace attn::testing
