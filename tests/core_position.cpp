// Sums at the ends of an index, and the last positions that there are.
#include "errors.hpp"

#include <attn/core/position.hpp>

namespace attn::testing {

TEST_CASE("saturating_sum: the sum, or the nearest index to it", "[core]") {
    constexpr auto min_index = std::numeric_limits<index_t>::min(), max_index = std::numeric_limits<index_t>::max();
    std::vector<index_t> numbers;
    for (const index_t centre : {min_index + 3, min_index / 2, index_t{0}, max_index / 2, max_index - 3})
        for (index_t by = -3; by <= 3; ++by) numbers.push_back(centre + by);
    index_t wrong = 0, beyond = 0;
    for (const auto a : numbers)
        for (const auto b : numbers) {
            index_t sum = 0;
            const bool is_beyond = __builtin_add_overflow(a, b, &sum);
            if (is_beyond) sum = a < 0 ? min_index : max_index;
            beyond += is_beyond;
            wrong += detail::saturating_sum(a, b) != sum;
        }
    CHECK(wrong == 0);
    CHECK(beyond > 0);
}

TEST_CASE("check_positions: rows lie between the farthest positions, both included", "[core]") {
    constexpr auto far = farthest_position, min_index = std::numeric_limits<index_t>::min(), max_index = std::numeric_limits<index_t>::max();
    const auto refused = [](index_t first, index_t count) {
        return error_of([&] { detail::check_positions("operation", "first", first, count); }) != nothing_thrown;
    };
    for (const index_t count : {0, 1, 2, 100}) {
        INFO(count << " rows");
        const auto last = far - std::max<index_t>(count - 1, 0);
        CHECK_FALSE(refused(-far, count));
        CHECK_FALSE(refused(last, count));
        for (const auto first : {min_index, -far - 1, last + 1, max_index}) CHECK(refused(first, count));
    }
    CHECK_FALSE(refused(-far, 2 * far + 1)); // all of them
    CHECK(refused(-far, 2 * far + 2));
    CHECK(refused(far, max_index));
    CHECK(error_of([] { detail::check_positions("operation", "first", far, 2); }) ==
          "operation: first is 1152921504606846976 for 2 rows, but positions lie between -2^60 and 2^60 (attn::farthest_position)");
}

} // namespace attn::testing
