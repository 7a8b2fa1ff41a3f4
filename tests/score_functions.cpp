#include <attn/core/tensor.hpp>
#include <attn/score/additive_bias.hpp>
#include <attn/score/alibi.hpp>
#include <attn/score/soft_cap.hpp>
#include <attn/score/composed_score.hpp>
#include <attn/score/forgetting.hpp>
#include <attn/score/kerple.hpp>
#include <attn/score/relative_buckets.hpp>
#include <attn/simd/positions.hpp>

#include "catch.hpp"
#include "errors.hpp"

#include <array>
#include <random>

using namespace attn;

namespace {

using attn::index_t; // POSIX has another

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

/// What `check` throws.
template <ScoreFunction F>
std::string complaint(const F& f, const pattern_context& context) {
    return testing::error_of([&] { check(f, context); });
}
const std::string& nothing_thrown = testing::nothing_thrown;

constexpr pattern_context two_by_three{
    .operation = "softmax_attention", .batch = 2, .heads = 3, .first_query = 4, .end_query = 9, .first_key = 0, .end_key = 7};

/// The largest difference between a score function on lanes and on numbers, over scores of both signs, queries and keys.
template <Scalar T, ScoreFunction F>
double largest_lane_error(const F& f, index_t head) {
    using lanes = simd::lanes<T>;
    const auto function = score_at(f, 0, head);
    double largest = 0;
    for (index_t key = 0; key < 40; key += 3)
        for (index_t first_query = 0; first_query < 60; first_query += 11) {
            std::array<T, lanes::size> scores, results;
            for (std::size_t l = 0; l < scores.size(); ++l) scores[l] = static_cast<T>(static_cast<double>(l * 7 % 13) - 6.3);
            const simd::query_lanes<T> queries{{first_query, 2}};
            const lanes result = function(lanes::load(scores.data()), queries, key);
            result.store(results.data());
            for (std::size_t l = 0; l < scores.size(); ++l) {
                const auto expected =
                    static_cast<double>(function(static_cast<double>(scores[l]), first_query + 2 * static_cast<index_t>(l), key));
                const auto error = std::abs(static_cast<double>(results[l]) - expected);
                if (!(error <= largest)) largest = error;
            }
        }
    return largest;
}

/// Has no call of its own, only one per head.
struct times_head {
    struct bound {
        double factor;
        auto operator()(auto score, auto, auto) const { return factor * score; }
    };
    bound at(index_t batch, index_t head) const { return {static_cast<double>(10 * batch + head)}; }
};

struct refuses_everything {
    double operator()(double score, index_t, index_t) const { return score; }
    void check(const score_context& context) const {
        context.refuse("refuses_everything", "refuses " + std::to_string(context.heads) + " heads");
    }
};

static_assert(ScoreFunction<identity_score> && ScoreFunction<soft_cap> && ScoreFunction<alibi> && ScoreFunction<additive_bias<float>>);
static_assert(ScoreFunction<times_head> && ScoreFunction<composed_score<soft_cap, alibi>> && ScoreFunction<composed_score<>>);
static_assert(!ScoreFunction<int> && !ScoreFunction<dense>);
static_assert(!ScoreFunction<decltype([](auto score) { return score; })>);
static_assert(!std::is_constructible_v<alibi, std::vector<double>>, "slopes that are gone when read");
static_assert(std::is_constructible_v<alibi, std::vector<double>&> && std::is_constructible_v<alibi, std::span<double>>);

TEST_CASE("the identity leaves a score alone", "[score][portable]") {
    CHECK(identity_score{}(2.5, index_t{3}, index_t{4}) == 2.5);
    CHECK(complaint(identity_score{}, {}) == nothing_thrown);
}

TEST_CASE("a lambda is a score function and sees absolute positions", "[score][portable]") {
    const auto f = []<class S>(S score, auto query, auto key) {
        using attn::select;
        return select(score > 0, score, S(0.5) * score) + S(100 * (query - key));
    };
    static_assert(ScoreFunction<decltype(f)>);
    CHECK(score_at(f, 5, 6)(3.0, index_t{9}, index_t{7}) == 203);
    CHECK(score_at(f, 5, 6)(-3.0, index_t{7}, index_t{9}) == -201.5);
    CHECK(largest_lane_error<double>(f, 0) == 0);
}

TEST_CASE("select on numbers chooses and does not mix", "[score][portable]") {
    CHECK(select(true, 1.5, not_a_number) == 1.5);
    CHECK(std::isnan(select(false, 1.5, not_a_number)));
    static_assert(std::same_as<decltype(select(true, 1.0F, 2.0)), double>);
}

TEST_CASE("soft cap", "[score][portable]") {
    const auto capped = [](double cap, double score) { return soft_cap{cap}(score, index_t{0}, index_t{0}); };
    CHECK(capped(50, 0) == 0);
    CHECK(capped(2, 2) == Approx(2 * 0.76159415595576489).epsilon(1e-15));
    CHECK(capped(2, -2) == -capped(2, 2));
    CHECK(capped(5, 1e4) == 5);
    CHECK(capped(5, -infinity) == -5);
    CHECK(capped(1e9, 3) == Approx(3).epsilon(1e-14));
    CHECK(std::isnan(capped(5, not_a_number)));
    static_assert(std::same_as<decltype(soft_cap{5}(1.0F, index_t{0}, index_t{0})), float>);
    CHECK(largest_lane_error<double>(soft_cap{3}, 0) < 1e-14);
    CHECK(largest_lane_error<float>(soft_cap{3}, 0) < 3e-6);
}

TEST_CASE("soft cap refuses a cap that caps nothing", "[score][portable]") {
    CHECK(complaint(soft_cap{50}, two_by_three) == nothing_thrown);
    CHECK(complaint(soft_cap{0}, two_by_three) == "softmax_attention: score soft_cap{0} needs a cap between 1e-37 and 1e37");
    CHECK(complaint(soft_cap{1e39}, two_by_three) == "softmax_attention: score soft_cap{1e+39} needs a cap between 1e-37 and 1e37");
    CHECK(complaint(soft_cap{1e-40}, two_by_three) != nothing_thrown);
    CHECK(complaint(soft_cap{-1}, two_by_three) != nothing_thrown);
    CHECK(complaint(soft_cap{infinity}, two_by_three) != nothing_thrown);
    CHECK(complaint(soft_cap{not_a_number}, two_by_three) != nothing_thrown);
}

TEST_CASE("ALiBi's published slopes", "[score][portable]") {
    CHECK(alibi_slopes(0).empty());
    CHECK(alibi_slopes(1) == std::vector{1.0 / 256});
    CHECK(alibi_slopes(8) == std::vector{1.0 / 2, 1.0 / 4, 1.0 / 8, 1.0 / 16, 1.0 / 32, 1.0 / 64, 1.0 / 128, 1.0 / 256});
    // Twelve heads: those of 8, then the first, third, fifth and seventh of 16.
    const auto twelve = alibi_slopes(12);
    const auto sixteen = alibi_slopes(16);
    REQUIRE(twelve.size() == 12);
    for (std::size_t h = 0; h < 8; ++h) CHECK(twelve[h] == alibi_slopes(8)[h]);
    for (std::size_t h = 0; h < 4; ++h) CHECK(twelve[8 + h] == sixteen[2 * h]);
    CHECK(twelve[8] == Approx(0.70710678118654752).epsilon(1e-15));
    CHECK(twelve[11] == Approx(0.08838834764831845).epsilon(1e-15));
    CHECK(sixteen[15] == 1.0 / 256);
    CHECK_THROWS_AS(alibi_slopes(-1), shape_error);
}

TEST_CASE("ALiBi takes the slope of the head times the distance away", "[score][portable]") {
    const auto slopes = alibi_slopes(8);
    const alibi bias{slopes};
    CHECK(bias.at(0, 0)(1.0, index_t{10}, index_t{4}) == 1 - 6 / 2.0);
    CHECK(bias.at(3, 2)(1.0, index_t{4}, index_t{10}) == 1 - 6 / 8.0);
    CHECK(bias.at(0, 7)(1.0, index_t{1'000'000'007}, index_t{1'000'000'007}) == 1);
    CHECK(bias.at(0, 0)(-infinity, index_t{10}, index_t{4}) == -infinity);
    CHECK(largest_lane_error<double>(bias, 1) < 1e-14);
    CHECK(largest_lane_error<float>(bias, 1) < 1e-5);
}

TEST_CASE("ALiBi refuses another count of slopes than heads", "[score][portable]") {
    const auto slopes = alibi_slopes(4);
    CHECK(complaint(alibi{slopes}, two_by_three) == "softmax_attention: score alibi with 4 slopes needs one for each of 3 heads");
    CHECK(complaint(alibi{std::span(slopes).first(3)}, two_by_three) == nothing_thrown);
}

TEST_CASE("a bias tensor adds its entry of batch, head, query and key", "[score][portable]") {
    tensor<float> values({2, 3, 5, 7});
    for (index_t e = 0; e < 2 * 3 * 5 * 7; ++e) values.data()[e] = static_cast<float>(e);
    const additive_bias<float> bias{values.view(), 4, 10};
    for (index_t b = 0; b < 2; ++b)
        for (index_t h = 0; h < 3; ++h)
            for (index_t i = 0; i < 5; ++i)
                for (index_t j = 0; j < 7; ++j)
                    CHECK(bias.at(b, h)(0.5, 4 + i, 10 + j) == 0.5 + static_cast<double>(((b * 3 + h) * 5 + i) * 7 + j));
    static_assert(std::same_as<decltype(bias.at(0, 0)(1.0F, 4, 10)), float>);
}

TEST_CASE("a bias tensor repeats along an extent of 1", "[score][portable]") {
    std::array<double, 4> numbers{1, 2, 3, 4};
    // Strides that would leave the memory if they were followed.
    const strides wild{1000, 1000, 1000, 1000};
    const auto added = [&](const shape& s, const strides& walk) {
        return additive_bias(tensor_view(numbers.data(), s, walk)).at(1, 2)(0.0, index_t{1}, index_t{3});
    };
    CHECK(added({1, 1, 1, 1}, wild) == 1);
    CHECK(added({2, 1, 1, 1}, {1, 1000, 1000, 1000}) == 2);
    CHECK(added({1, 3, 1, 1}, {1000, 1, 1000, 1000}) == 3);
    CHECK(added({1, 1, 2, 1}, {1000, 1000, 1, 1000}) == 2);
    CHECK(added({1, 1, 1, 4}, {1000, 1000, 1000, 1}) == 4);
    const auto row = additive_bias(tensor_view(numbers.data(), {1, 1, 1, 4}, wild)).at(0, 0);
    CHECK(row.rows.row_stride == 0);
    CHECK(row.rows.channel_stride == 1000);
}

TEST_CASE("a bias tensor is repeated over images, at positions of its own for each entry", "[score][portable]") {
    tensor<float> values({2, 1, 4, 3});
    for (index_t e = 0; e < values.shape().size(); ++e) values.data()[e] = static_cast<float>(e);
    const std::vector<index_t> queries{10, 20}, keys{0, 5, 7, 9};
    const additive_bias bias{values, queries, keys};
    for (index_t b = 0; b < 4; ++b) {
        const auto q = queries[static_cast<std::size_t>(b % 2)], k = keys[static_cast<std::size_t>(b)];
        CHECK(bias.at(b, 0)(0.0, q + 2, k + 1) == static_cast<double>((b % 2 * 4 + 2) * 3 + 1));
    }
    const std::vector<index_t> at{11, 20, 10, 21};
    score_context context{{.operation = "x", .batch = 4, .heads = 1, .first_query = 10, .end_query = 24, .first_key = 0, .end_key = 11,
                           .where = {.first_query = at, .first_key = keys}, .queries = 3, .keys = 2}};
    CHECK(complaint(bias, context) == nothing_thrown);
    context.queries = 4;
    CHECK(complaint(bias, context) == "x: score additive_bias of shape (2, 1, 4, 3) covers query positions 10 to 13, where 11 to 14 occur");
    context.queries = 3;
    context.batch = 3;
    CHECK(complaint(bias, context) == "x: score additive_bias of shape (2, 1, 4, 3) has 2 batch entries, which do not divide 3");
    const std::vector<index_t> three(3);
    context.batch = 4;
    CHECK(complaint(additive_bias{values, three}, context) ==
          "x: score additive_bias of shape (2, 1, 4, 3) has 3 positions, which do not divide 4 batch entries");
    const std::vector<index_t> none;
    CHECK(complaint(additive_bias{values, none}, context) != nothing_thrown);
}

TEST_CASE("a bias of -infinity hides whatever the score is", "[score][portable]") {
    std::array<float, 3> numbers{-std::numeric_limits<float>::infinity(), 1, std::numeric_limits<float>::quiet_NaN()};
    const auto bias = additive_bias(head_major(numbers.data(), {.tokens = 1, .channels = 3})).at(0, 0);
    CHECK(bias(2.0, 0, 0) == -infinity);
    CHECK(bias(not_a_number, 0, 0) == -infinity);
    CHECK(bias(infinity, 0, 0) == -infinity);
    CHECK(std::isnan(bias(not_a_number, 0, 1)));
    CHECK(std::isnan(bias(2.0, 0, 2)));
}

TEST_CASE("a bias tensor refuses what it does not cover", "[score][portable]") {
    const float none = 0;
    const auto of = [&](const shape& s, index_t first_query = 0, index_t first_key = 0) {
        return complaint(additive_bias<float>{head_major(&none, s), first_query, first_key}, two_by_three);
    };
    // Queries 4 to 8, keys 0 to 6, 2 batch entries, 3 heads.
    CHECK(of({2, 3, 9, 7}) == nothing_thrown);
    CHECK(of({1, 1, 1, 1}) == nothing_thrown);
    CHECK(of({1, 3, 5, 1}, 4) == nothing_thrown);
    CHECK(of({1, 1, 100, 100}, -5, -90) == nothing_thrown);
    CHECK(of({3, 1, 9, 7}) == "softmax_attention: score additive_bias of shape (3, 1, 9, 7) has 3 batch entries, which do not divide 2");
    CHECK(of({1, 2, 9, 7}) == "softmax_attention: score additive_bias of shape (1, 2, 9, 7) has 2 heads, where 1 or 3 are needed");
    CHECK(of({1, 1, 8, 7}) ==
          "softmax_attention: score additive_bias of shape (1, 1, 8, 7) covers query positions 0 to 7, where 4 to 8 occur");
    CHECK(of({1, 1, 9, 6}) ==
          "softmax_attention: score additive_bias of shape (1, 1, 9, 6) covers key positions 0 to 5, where 0 to 6 occur");
    CHECK(of({1, 1, 9, 7}, 5) != nothing_thrown);
    CHECK(of({1, 1, 9, 7}, 0, 1) != nothing_thrown);
    CHECK(of({1, 1, 0, 7}) != nothing_thrown);
    const pattern_context no_pairs{.batch = 2, .heads = 3, .first_query = 5, .end_query = 5, .first_key = 6, .end_key = 6};
    CHECK(complaint(additive_bias<float>{head_major(&none, {1, 1, 0, 0})}, no_pairs) == nothing_thrown);

    constexpr auto min_index = std::numeric_limits<index_t>::min(), max_index = std::numeric_limits<index_t>::max();
    for (const index_t first : {min_index, -farthest_position - 1, farthest_position + 1, max_index}) {
        attn::testing::check_says(of({1, 1, 9, 7}, first), {"begins at query position " + std::to_string(first)});
        attn::testing::check_says(of({1, 1, 9, 7}, 0, first), {"begins at key position " + std::to_string(first)});
        CHECK(of({1, 1, 1, 1}, first, first) == nothing_thrown);
        const float one = 3;
        CHECK(additive_bias<float>{head_major(&one, {1, 1, 1, 1}), first, first}.at(0, 0)(0.5, farthest_position, -farthest_position) == 3.5);
    }
    for (const index_t first : {-farthest_position, farthest_position})
        attn::testing::check_says(of({1, 1, 9, 7}, first), {"covers query positions " + std::to_string(first)});
}

TEST_CASE("T5's buckets", "[score][portable]") {
    // By the original's code, for 32 buckets and a distance of 128.
    const bucket_rule both{};
    const index_t distances[] = {-1000, -128, -127, -91, -90, -64, -32, -16, -12, -11, -8, -7, -1, 0, 1, 7, 8, 11, 12, 16, 32, 64, 90, 91, 127, 1000};
    const index_t expected[] = {15, 15, 15, 15, 14, 14, 12, 10, 9, 8, 8, 7, 1, 0, 17, 23, 24, 24, 25, 26, 28, 30, 30, 31, 31, 31};
    for (std::size_t i = 0; i < std::size(distances); ++i) {
        CAPTURE(distances[i]);
        CHECK(both(distances[i]) == expected[i]);
    }
    const bucket_rule past{.bidirectional = false};
    CHECK(past(1) == 0);
    CHECK(past(500) == 0);
    CHECK(past(0) == 0);
    CHECK(past(-15) == 15);
    CHECK(past(-16) == 16);
    CHECK(past(-32) == 21);
    CHECK(past(-64) == 26);
    CHECK(past(-127) == 31);
    CHECK(past(-farthest_position) == 31);
}

TEST_CASE("relative buckets add the number of a head and a bucket", "[score][portable]") {
    tensor<float> table({1, 32, 1, 3}); // (buckets, heads), as in a checkpoint
    for (index_t e = 0; e < 96; ++e) table.data()[e] = static_cast<float>(e);
    const tensor_view<const float> view(table.data(), {1, 3, 1, 32}, {0, 1, 0, 3});
    const relative_buckets bias(view);
    static_assert(std::same_as<decltype(bias), const relative_buckets<float>>);
    const bucket_rule rule{};
    index_t wrong = 0;
    for (index_t h = 0; h < 3; ++h)
        for (index_t i = 0; i < 300; i += 7)
            for (index_t j = 0; j < 300; ++j) wrong += bias.at(1, h)(0.5, i, j) != 0.5 + static_cast<double>(3 * rule(j - i) + h);
    CHECK(wrong == 0);
    CHECK(bias.at(0, 0)(1.0, farthest_position, -farthest_position) == 1 + 3 * 15);
    for (const index_t step : {1, 3})
        for (const index_t first : {-400, -131, -5, 100, 130, 400}) {
            std::array<float, 37> row{};
            bias.at(0, 2).bias_row(first, step, 37, 2, row.data());
            for (index_t q = 0; q < 37; ++q)
                wrong += static_cast<double>(row[static_cast<std::size_t>(q)]) != bias.at(0, 2)(0.0, first + q * step, index_t{2});
        }
    CHECK(wrong == 0);
    CHECK(complaint(bias, two_by_three) == nothing_thrown);
    CHECK(complaint(bias, {.operation = "softmax_attention", .heads = 2}) ==
          "softmax_attention: score relative_buckets of 3 heads has 3 heads, where 1 or 2 are needed");
    const auto refusal = [&](const shape& s, const bucket_rule& r) {
        return testing::error_of([&] { relative_buckets<float>(head_major(static_cast<const float*>(table.data()), s), r); });
    };
    CHECK(refusal({1, 2, 1, 8}, {.max_distance = 3}) == nothing_thrown);
    CHECK(refusal({1, 2, 1, 8}, {.max_distance = 2}) == "relative_buckets: max_distance is 2, but must be above 2 and at most 2^24");
    CHECK(refusal({1, 2, 1, 8}, {.max_distance = farthest_position}) != nothing_thrown);
    CHECK(refusal({1, 2, 1, 7}, {}) == "relative_buckets: table has shape (1, 2, 1, 7): 7 buckets are too few, or odd for two directions");
    CHECK(refusal({1, 2, 1, 7}, {.bidirectional = false}) == nothing_thrown);
    CHECK(refusal({1, 2, 1, 1}, {.bidirectional = false}) != nothing_thrown);
    CHECK(refusal({1, 1, 8, 2}, {}) == "relative_buckets: table has shape (1, 1, 8, 2), but (1, heads, 1, buckets) is needed");
    CHECK(testing::error_of([] { relative_buckets<float>(tensor_view<const float>(nullptr, {1, 1, 1, 8}, {})); }) != nothing_thrown);
    CHECK(relative_buckets(tensor<float>({1, 0, 1, 8})).at(0, 0).of_zero == nullptr); // no heads, none to ask about
}

TEST_CASE("Swin's table becomes the bias of a window", "[score][portable]") {
    tensor<float> table({1, 1, 5 * 3, 2}); // a window of 3 x 2, two heads
    for (index_t e = 0; e < 30; ++e) table.data()[e] = static_cast<float>(e);
    const auto bias = window_bias(table, 3, 2);
    REQUIRE(bias.shape() == shape{1, 2, 6, 6});
    CHECK(bias(0, 0, 0, 0) == 2 * (2 * 3 + 1)); // the middle
    CHECK(bias(0, 1, 0, 0) == 2 * (2 * 3 + 1) + 1);
    CHECK(bias(0, 0, 5, 0) == 2 * (4 * 3 + 2)); // two rows down, one to the right
    CHECK(bias(0, 0, 0, 5) == 0);
    CHECK(bias(0, 0, 1, 2) == 2 * (1 * 3 + 2)); // one row up, one to the right
    const auto refusal = [&](index_t height, index_t width) { return testing::error_of([&] { (void)window_bias(table, height, width); }); };
    CHECK(refusal(2, 3) == nothing_thrown); // 3 x 5
    CHECK(refusal(3, 3) == "window_bias: table has shape (1, 1, 15, 2), but a window of 3 x 3 needs (1, 1, 5 x 5, heads)");
    CHECK(refusal(0, 2) != nothing_thrown);
    CHECK(refusal(-1, -2) != nothing_thrown);
    CHECK(refusal(farthest_position, 2) != nothing_thrown);
    CHECK(testing::error_of([] { (void)window_bias(tensor_view<const float>(nullptr, {1, 1, 1, 2}, {}), 1, 1); }) != nothing_thrown);
}

TEST_CASE("Swin's table gets the gradient of its window's bias", "[score][portable]") {
    for (const auto& [height, width, heads] : {std::array<index_t, 3>{3, 2, 2}, {1, 1, 3}, {4, 5, 1}}) {
        const auto tokens = height * width;
        tensor<double> table({1, 1, (2 * height - 1) * (2 * width - 1), heads}), of_bias({1, heads, tokens, tokens}), of_table(table.shape());
        for (index_t e = 0; e < table.shape().size(); ++e) table.data()[e] = static_cast<double>(e % 7 - 3);
        for (index_t e = 0; e < of_bias.shape().size(); ++e) of_bias.data()[e] = static_cast<double>(e % 11 - 4);
        std::fill_n(of_table.data(), of_table.shape().size(), 1e300);
        window_bias_gradient(of_bias, height, width, of_table);
        // The bias is linear in each number of the table: its derivative is the bias of a table of that 1 alone. Whole numbers are exact.
        for (index_t e = 0; e < table.shape().size(); ++e) {
            tensor<double> one(table.shape());
            one.data()[e] = 1;
            const auto derivative = window_bias(one, height, width);
            double expected = 0;
            for (index_t p = 0; p < derivative.shape().size(); ++p) expected += derivative.data()[p] * of_bias.data()[p];
            CHECK(of_table.data()[e] == expected);
        }
    }
    tensor<float> of_bias({1, 2, 6, 6}), of_table({1, 1, 15, 2});
    const auto refusal = [&](const auto& from, index_t height, index_t width, auto& to) {
        return testing::error_of([&] { window_bias_gradient(from, height, width, to); });
    };
    CHECK(refusal(of_bias, 3, 2, of_table) == nothing_thrown);
    CHECK(refusal(of_bias, 3, 3, of_table) == "window_bias_gradient: of_table has shape (1, 1, 15, 2), but a window of 3 x 3 needs (1, 1, 5 x 5, heads)");
    CHECK(refusal(of_table, 3, 2, of_table) == "window_bias_gradient: of_bias has shape (1, 1, 15, 2), but (1, 2, 6, 6) is needed");
    tensor_view<float> inside(of_bias.data(), of_table.shape(), {30, 30, 2, 1});
    CHECK(refusal(of_bias, 3, 2, inside) ==
          "window_bias_gradient: of_table of shape (1, 1, 15, 2) overlaps of_bias of shape (1, 2, 6, 6)");
}

TEST_CASE("KERPLE's kernels", "[score][portable]") {
    const std::vector<double> r1{0.5, 2, 1}, r2{3, 0.25, 1};
    const kerple_logarithmic logarithmic{r1, r2};
    const kerple_power power{.r1 = r1, .r2 = r2};
    CHECK(logarithmic.at(0, 0)(1.0, index_t{10}, index_t{6}) == Approx(1 - 0.5 * std::log(13.0)).epsilon(1e-15));
    CHECK(logarithmic.at(0, 1)(1.0, index_t{6}, index_t{10}) == Approx(1 - 2 * std::log(2.0)).epsilon(1e-15));
    CHECK(power.at(1, 1)(1.0, index_t{6}, index_t{22}) == Approx(1 - 2 * 2.0).epsilon(1e-15));
    CHECK(power.at(1, 1)(1.0, index_t{6}, index_t{6}) == 1);
    CHECK(largest_lane_error<double>(logarithmic, 0) < 1e-14);
    CHECK(largest_lane_error<float>(logarithmic, 1) < 1e-5);
    CHECK(largest_lane_error<double>(power, 2) < 1e-13);
    CHECK(largest_lane_error<float>(power, 1) < 1e-4);
    CHECK(complaint(logarithmic, two_by_three) == nothing_thrown);
    CHECK(complaint(kerple_logarithmic{std::span(r1).first(2), r2}, two_by_three) ==
          "softmax_attention: score kerple_logarithmic with 2 and 3 numbers needs two for each of 3 heads");
    CHECK(complaint(power, two_by_three) == "softmax_attention: score kerple_power with 3 and 3 numbers has r1 = 0.500000 and r2 = 3.000000 for "
                                            "head 0: both are above 0, and r2 is at most 2");
    const std::vector<double> none{1, 0, 1}, nan{1, 1, not_a_number};
    CHECK(complaint(kerple_logarithmic{r1, none}, two_by_three) != nothing_thrown);
    CHECK(complaint(kerple_logarithmic{nan, r2}, two_by_three) != nothing_thrown);
}

TEST_CASE("forgetting gates add up between a key and its query", "[score][portable]") {
    constexpr auto closed = -std::numeric_limits<float>::infinity();
    tensor<float> gates({2, 1, 9, 1});
    const std::array<float, 18> logs{0, -1, -0.5F, -2, closed, -0.25F, -1, 0, -3, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    std::copy(logs.begin(), logs.end(), gates.data());
    const forgetting score(gates, 5);
    const auto bias = [&](index_t b, index_t i, index_t j) { return score.at(b, 2)(1.0, 5 + i, 5 + j) - 1; };
    CHECK(bias(0, 3, 3) == 0);
    CHECK(bias(0, 3, 2) == -2);
    CHECK(bias(0, 3, 0) == -3.5);
    CHECK(bias(0, 1, 3) == 2.5);
    CHECK(bias(0, 4, 3) == -infinity); // the gate of token 4 is closed
    CHECK(bias(0, 3, 4) == -infinity);
    CHECK(bias(0, 8, 4) == -4.25);
    CHECK(bias(0, 8, 3) == -infinity);
    CHECK(bias(1, 8, 0) == -8);
    CHECK(bias(3, 8, 0) == -8); // repeated
    CHECK(bias(2, 3, 2) == -2);
    std::array<float, 4> row{};
    score.at(0, 0).bias_row(5 + 2, 2, 4, 5 + 4, row.data());
    for (index_t q = 0; q < 4; ++q) CHECK(static_cast<double>(row[static_cast<std::size_t>(q)]) == bias(0, 2 + 2 * q, 4));

    CHECK(complaint(score, {.operation = "x", .batch = 2, .heads = 3, .first_query = 5, .end_query = 14, .first_key = 6, .end_key = 8}) == nothing_thrown);
    CHECK(complaint(score, {.operation = "x", .batch = 2, .heads = 3, .first_query = 5, .end_query = 15, .first_key = 6, .end_key = 8}) ==
          "x: score forgetting with gates of shape (2, 1, 9, 1) covers query positions 5 to 13, where 5 to 14 occur");
    CHECK(complaint(score, {.operation = "x", .batch = 3, .heads = 3}) ==
          "x: score forgetting with gates of shape (2, 1, 9, 1) has 2 batch entries, which do not divide 3");
    gates.data()[3] = 0.5F;
    CHECK(testing::error_of([&] { forgetting{gates}; }) == "forgetting: log_gates hold 0.500000 for token 3: not the logarithm of a gate");
    gates.data()[3] = static_cast<float>(not_a_number);
    CHECK(testing::error_of([&] { forgetting{gates}; }) != nothing_thrown);
    CHECK(testing::error_of([] { forgetting{tensor<double>({1, 1, 3, 2})}; }) ==
          "forgetting: log_gates have shape (1, 1, 3, 2), but (batch, heads, tokens, 1) is needed");
}

TEMPLATE_TEST_CASE("forgetting: a gate that is all but closed loses no other", "[score][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    constexpr auto lowest = std::numeric_limits<T>::lowest();
    const auto closed = -std::numeric_limits<T>::infinity();
    tensor<T> gates({1, 1, 400, 1});
    std::mt19937 random(7);
    for (const T large : {T(-2000), T(-1e10), T(-1e20), lowest, closed}) {
        INFO("large gates of " << large);
        for (index_t t = 0; t < 400; ++t) gates.data()[t] = random() % 5 == 0 ? large : random() % 3 == 0 ? T(-1e4) : -static_cast<T>(random() % 1000) / 100;
        const forgetting gated(gates);
        const auto score = gated.at(0, 0);
        for (index_t j = 0; j < 400; j += 3)
            for (index_t i = j; i < 400; i += 1 + (i - j) / 8) {
                double sum = 0; // of numbers of one sign, from the last on
                for (auto t = i; t > j; --t) sum += static_cast<double>(gates.data()[t]);
                if (std::isinf(sum) && large != closed) sum = -std::numeric_limits<double>::max();
                const auto near = [&](double bias) { return sum == bias || std::abs(bias - sum) <= 1e-9 + 1e-13 * std::abs(sum); };
                CHECK(near(score(0.0, i, j)));
                if (j < i) CHECK((std::isinf(sum) ? near(score(0.0, j, i)) : near(-score(0.0, j, i))));
                T row[1];
                score.bias_row(i, 1, 1, j, row);
                const auto expected = static_cast<T>(std::isinf(sum) ? sum : std::max(sum, static_cast<double>(lowest)));
                CHECK((row[0] == expected || std::abs(row[0] - expected) <= T(1e-9) + std::max(2 * std::numeric_limits<T>::epsilon(), T(1e-13)) * std::abs(expected)));
            }
    }
}

TEST_CASE("composed_score: applies its functions in order", "[score][portable]") {
    const auto twice = [](auto score, auto, auto) { return 2.0 * score; };
    const auto plus_key = []<class S>(S score, auto, auto key) { return score + S(key); };
    CHECK(composed_score{twice, plus_key}(3.0, index_t{0}, index_t{5}) == 11);
    CHECK(composed_score{plus_key, twice}(3.0, index_t{0}, index_t{5}) == 16);
    CHECK(composed_score{plus_key, twice, plus_key}(3.0, index_t{0}, index_t{5}) == 21);
    CHECK(composed_score{twice}(3.0, index_t{0}, index_t{5}) == 6);
    CHECK(composed_score{}(3.0, index_t{0}, index_t{5}) == 3);
    CHECK(composed_score{composed_score{plus_key, twice}, plus_key}(3.0, index_t{0}, index_t{5}) == 21);
    static_assert(std::same_as<decltype(composed_score{twice, twice}(1.0F, index_t{0}, index_t{0})), float>);
    CHECK(largest_lane_error<double>(composed_score{soft_cap{3}, plus_key}, 0) < 1e-13);
}

TEST_CASE("composed_score: binds every member to its batch entry and head", "[score][portable]") {
    const auto plus_one = [](auto score, auto, auto) { return score + 1; };
    const composed_score chain{times_head{}, plus_one, times_head{}};
    CHECK(score_at(chain, 2, 3)(1.0, index_t{0}, index_t{0}) == (23 + 1) * 23);
    CHECK(score_at(composed_score{times_head{}}, 1, 0)(1.0, index_t{0}, index_t{0}) == 10);
    const auto slopes = alibi_slopes(2);
    CHECK(score_at(composed_score{plus_one, alibi{slopes}}, 0, 1)(1.0, index_t{256}, index_t{0}) == 1);
}

TEST_CASE("composed_score: checks every member", "[score][portable]") {
    const auto slopes = alibi_slopes(3);
    CHECK(complaint(composed_score{soft_cap{5}, alibi{slopes}}, two_by_three) == nothing_thrown);
    CHECK(complaint(composed_score{alibi{slopes}, soft_cap{-1}}, two_by_three).find("soft_cap{-1") != std::string::npos);
    CHECK(complaint(composed_score{soft_cap{5}, composed_score{identity_score{}, refuses_everything{}}}, two_by_three) ==
          "softmax_attention: score refuses_everything refuses 3 heads");
}

} // namespace
