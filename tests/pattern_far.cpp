// Patterns at the farthest positions, and with parameters as large as their type: integers, ranges, lanes and schedules agree.
#include "catch.hpp"
#include "pattern_checks.hpp"

#include <attn/attention/sparse_attention.hpp>
#include <attn/pattern/block_diagonal.hpp>
#include <attn/pattern/dilated_window.hpp>
#include <attn/pattern/prefix.hpp>
#include <attn/pattern/lengths.hpp>
#include <attn/simd/positions.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

constexpr index_t far = farthest_position, max_index = std::numeric_limits<index_t>::max();

/// What the kernels compute with, as a tile of 40 queries of which the rest is padding.
index_t wrong_on_kernel_lanes(const auto& p, index_t first, index_t step, index_t count, index_t key, const auto& formula) {
    using queries = simd::query_lanes<float, 40>;
    queries lanes;
    lanes.first = first;
    lanes.step = step;
    lanes.count = static_cast<int>(count);
    const auto seen = p.visible(lanes, key);
    index_t wrong = 0;
    for (index_t l = 0; l < count; ++l) {
        bool here;
        if constexpr (std::same_as<std::remove_cvref_t<decltype(seen)>, bool>)
            here = seen;
        else
            here = (seen.value >> l & 1) != 0;
        wrong += here != formula(first + l * step, key);
    }
    return wrong;
}

/// At both ends, beside zero, and with the queries at one end and the keys at the other.
void check_everywhere(const auto& p, const auto& formula) {
    constexpr index_t n = 45, m = 53;
    const index_t first_queries[] = {-far, far - n + 1, -20, far - n - 7, -far + 11}, first_keys[] = {-far, far - m + 1, -30};
    const pattern_context context{.end_query = n, .end_key = m};
    check(p, context);
    index_t differing = 0;
    for (const auto i : first_queries)
        for (const auto j : first_keys) {
            for (index_t row = 0; row < n; ++row)
                for (index_t key = 0; key < m; ++key) differing += p.visible(i + row, j + key) != formula(i + row, j + key);
            for (const index_t tile : {1, 16, 40})
                for (const index_t grain : {1, 8}) CHECK(pattern_checks::schedule_offences(p, {i, n, j, m, tile, grain}) == 0);
            for (const index_t step : {1, 3, 7}) {
                const auto count = std::min<index_t>(40, (n - 1) / step + 1);
                for (index_t key = 0; key < m; ++key) differing += wrong_on_kernel_lanes(p, i, step, count, j + key, formula);
            }
        }
    CHECK(differing == 0);
}

index_t floored(index_t a, index_t c) { return a >= 0 ? a / c : -((-a - 1) / c) - 1; }
index_t distance(index_t a, index_t b) { return a < b ? b - a : a - b; }

} // namespace

TEST_CASE("patterns at the farthest positions", "[pattern][portable]") {
    check_everywhere(dense{}, [](auto, auto) { return true; });
    check_everywhere(causal{}, [](auto i, auto j) { return j <= i; });
    check_everywhere(!causal{}, [](auto i, auto j) { return j > i; });
    check_everywhere(local{9, 4}, [](auto i, auto j) { return i - 9 <= j && j <= i + 4; });
    check_everywhere(strided{6}, [](auto i, auto j) { return distance(i, j) % 6 == 0; });
    check_everywhere(dilated_window{3, 5}, [](auto i, auto j) { return distance(i, j) <= 15 && distance(i, j) % 5 == 0; });
    check_everywhere(block_diagonal{12}, [](auto i, auto j) { return floored(i, 12) == floored(j, 12); });
    check_everywhere(fixed{7, 2}, [](auto i, auto j) { return floored(i, 7) == floored(j, 7) || j - 7 * floored(j, 7) >= 5; });
    for (const index_t length : {index_t{3}, far - 40, far}) {
        check_everywhere(prefix{length}, [=](auto i, auto j) { return j < length || j <= i; });
        check_everywhere(global{length}, [=](auto i, auto j) { return i < length || j < length; });
        check_everywhere(detail::shorter_than{length}, [=](auto, auto j) { return j < length; });
    }
    check_everywhere(sparse_transformer_strided(8), [](auto i, auto j) { return j <= i && (i - j < 8 || (i - j) % 8 == 0); });
    check_everywhere(sparse_transformer_symmetric(2, 9), [](auto i, auto j) { return distance(i, j) <= 2 || distance(i, j) % 9 == 0; });
}

TEST_CASE("parameters of patterns as large as their type", "[pattern][portable]") {
    constexpr auto bit = [](int n) { return index_t{1} << n; };
    for (const index_t huge : {max_index, max_index - 1, bit(62), bit(62) + 1, bit(61) + 1, far + 1, far - 1, bit(55)}) {
        INFO("parameter " << huge);
        check_everywhere(local{huge}, [=](auto i, auto j) { return distance(i, j) <= huge; });
        check_everywhere(local{0, huge}, [=](auto i, auto j) { return j >= i && j - i <= huge; });
        check_everywhere(strided{huge}, [=](auto i, auto j) { return distance(i, j) % huge == 0; });
        check_everywhere(dilated_window{0, huge}, [=](auto i, auto j) { return i == j; });
        check_everywhere(dilated_window{1, huge}, [=](auto i, auto j) { return distance(i, j) <= huge && distance(i, j) % huge == 0; });
        check_everywhere(dilated_window{huge, 1}, [=](auto i, auto j) { return distance(i, j) <= huge; });
        check_everywhere(block_diagonal{huge}, [=](auto i, auto j) { return floored(i, huge) == floored(j, huge); });
        check_everywhere(fixed{huge, 1}, [=](auto i, auto j) {
            return floored(i, huge) == floored(j, huge) || j - huge * floored(j, huge) == huge - 1;
        });
        check_everywhere(fixed{huge, 2, 1}, [=](auto i, auto j) {
            const auto column = j - huge * floored(j, huge);
            return floored(i, huge) == floored(j, huge) || (column >= huge - 4 && column < huge - 2);
        });
        check_everywhere(prefix{huge}, [=](auto i, auto j) { return j < huge || j <= i; });
        check_everywhere(global{huge}, [=](auto i, auto j) { return i < huge || j < huge; });
        check_everywhere(sliding_window(huge), [=](auto i, auto j) { return j <= i && i - j < huge; });
        check_everywhere(sparse_transformer_strided(huge), [=](auto i, auto j) { return j <= i && (i - j < huge || (i - j) % huge == 0); });
        check_everywhere(strided{6} & strided{huge}, [=](auto i, auto j) { return distance(i, j) % 6 == 0 && distance(i, j) % huge == 0; });
    }
}

TEST_CASE("parameters of patterns below their range, to the end of their type", "[pattern]") {
    const auto is_refused = [](const auto& p) { CHECK_THROWS_AS(check(p, pattern_context{}), argument_error); };
    for (const auto wrong : {index_t{0}, index_t{-1}, std::numeric_limits<index_t>::min()}) {
        CHECK_THROWS_AS(sliding_window(wrong), argument_error);
        CHECK_THROWS_AS(sparse_transformer_strided(wrong), argument_error);
        CHECK_THROWS_AS(sparse_transformer_strided_heads(wrong, 1), argument_error);
        is_refused(strided{wrong});
        is_refused(dilated_window{1, wrong});
        is_refused(fixed{8, 2, max_index});
        is_refused(fixed{max_index, max_index, 1});
        is_refused(dilated_window{max_index, 2});
    }
}

} // namespace attn::testing
