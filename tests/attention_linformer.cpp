// Projected attention and its projections: what is shared, what is refused, and what the conformance suite does not ask.
#include "allocations.hpp"
#include "answers.hpp"
#include "catch.hpp"
#include "own_projection.hpp"

#include <attn/attention/linformer_attention.hpp>
#include <attn/attention/pooling.hpp>
#include <attn/attention/project.hpp>
#include <attn/attention/projection.hpp>
#include <attn/attention/random_projection.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/strided_convolution.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/on_heads.hpp>
#include <attn/pattern/predicate.hpp>

namespace attn::testing {

using namespace pattern;

namespace {


constexpr problem usual{2, 4, 2, 33, 50, 8, 8};

tensor<float> random_projection(const shape& s, std::uint64_t seed) {
    tensor<float> matrix(s);
    fill_random_projection(matrix.view(), seed);
    return matrix;
}

/// The Frobenius norm of a - b over that of b.
double relative_error(const tensor<float>& a, const tensor<float>& b) {
    double difference = 0, size = 0;
    for (index_t e = 0; e < b.shape().size(); ++e) {
        difference += std::pow(static_cast<double>(a.data()[e]) - static_cast<double>(b.data()[e]), 2);
        size += std::pow(static_cast<double>(b.data()[e]), 2);
    }
    return std::sqrt(difference / size);
}

template <class P, Pattern V = dense>
tensor<float> projected(const P& projection, const tensor<float>& x, const V& pattern = {}) {
    tensor<float> out(projected_shape<float>(projection, x.shape()));
    sequential here;
    workspace memory(workspace_bytes<float>(projection, x.shape()));
    project(projection, x, out.view(), execution(here, memory), pattern);
    return out;
}

} // namespace

TEST_CASE("linformer_attention: without projecting it is attention", "[linformer]") {
    const auto in = random_given<float>(usual);
    CHECK(same_bits(attend(linformer_attention{.key_projection = identity_projection{}}, in.queries, in.keys, in.values),
                    attend(softmax_attention{}, in.queries, in.keys, in.values)));
}

TEST_CASE("linformer_attention: a user's own projection", "[linformer]") {
    const auto in = random_given<float>(usual);
    tensor<float> keys({2, 2, 25, 8}), values(keys.shape());
    for (index_t row = 0; row < 2 * 2 * 25; ++row) {
        std::copy_n(in.keys.data() + 2 * row * 8, 8, keys.data() + row * 8);
        std::copy_n(in.values.data() + 2 * row * 8, 8, values.data() + row * 8);
    }
    CHECK(same_bits(attend(linformer_attention{.key_projection = every_other{}}, in.queries, in.keys, in.values),
                    attend(softmax_attention{}, in.queries, keys, values)));
}

TEST_CASE("linformer_attention: one matrix serves heads, keys and values, and layers", "[linformer]") {
    const auto in = random_given<float>(usual);
    const auto e = random_projection({1, 1, 12, 50}, 1), f = random_projection({1, 1, 12, 50}, 2);
    using shared = linformer_attention<linear_projection<float>>;
    static_assert(sizeof(shared) < 300, "an operator holds views");

    SECTION("of all layers, it is stored once") {
#ifdef ATTN_COUNTS_ALLOCATIONS
        std::array<shared, 12> layers;
        CHECK(allocations_in([&] { layers.fill({.key_projection = {e.view()}}); }) == 0);
        for (const auto& layer : layers)
            CHECK((layer.key_projection.matrix.data() == e.data() && &layer.for_values() == &layer.key_projection));
#endif
    }
    SECTION("E = F is both given") {
        const linformer_attention<linear_projection<float>, linear_projection<float>> both{.key_projection = {e.view()},
                                                                                           .value_projection = {e.view()}},
            different{.key_projection = {e.view()}, .value_projection = {f.view()}};
        const auto once = attend(shared{.key_projection = {e.view()}}, in.queries, in.keys, in.values);
        CHECK(same_bits(once, attend(both, in.queries, in.keys, in.values)));
        CHECK(!same_bits(once, attend(different, in.queries, in.keys, in.values)));
    }
    SECTION("of all heads is one for each, the same") {
        tensor<float> copies({1, 2, 12, 50});
        for (index_t h = 0; h < 2; ++h) std::copy_n(e.data(), e.shape().size(), copies.view().row(0, h, 0));
        CHECK(same_bits(attend(shared{.key_projection = {e.view()}}, in.queries, in.keys, in.values),
                        attend(shared{.key_projection = {copies.view()}}, in.queries, in.keys, in.values)));
    }
    SECTION("a shorter sequence uses the first columns") {
        tensor<float> wide({1, 1, 12, 64});
        std::fill_n(wide.data(), wide.shape().size(), guard<float>);
        for (index_t r = 0; r < 12; ++r) std::copy_n(e.view().row(0, 0, r), 50, wide.view().row(0, 0, r));
        CHECK(same_bits(attend(shared{.key_projection = {e.view()}}, in.queries, in.keys, in.values),
                        attend(shared{.key_projection = {wide.view()}}, in.queries, in.keys, in.values)));
    }
}

TEST_CASE("linformer_attention: heads of different projected sizes are each its own", "[linformer]") {
    const problem p{1, 3, 3, 20, 40, 8, 8};
    const auto in = random_given<float>(p);
    std::vector<tensor<float>> matrices;
    std::vector<linear_projection<float>> projections;
    for (const index_t rows : {5, 16, 9}) matrices.push_back(random_projection({1, 1, rows, 40}, static_cast<std::uint64_t>(rows)));
    for (const auto& m : matrices) projections.push_back({m.view()});
    const linformer_attention<projection_per_head<linear_projection<float>>> op{.key_projection = {projections}};
    const auto together = attend(op, in.queries, in.keys, in.values);
    for (index_t h = 0; h < 3; ++h) {
        const auto head = [h](const tensor<float>& t) { return t.slice({.heads = {h, 1}}); };
        const auto alone = attend(linformer_attention<linear_projection<float>>{.key_projection = projections[static_cast<std::size_t>(h)]},
                                  head(in.queries), head(in.keys), head(in.values));
        CHECK(std::memcmp(alone.data(), together.view().row(0, h, 0), static_cast<std::size_t>(alone.shape().size()) * sizeof(float)) == 0);
    }
}

TEST_CASE("project: rows that read no visible token are zero", "[linformer]") {
    const auto x = random_tensor<float>({1, 1, 12, 5}, 1);
    const auto first_half = predicate{[](auto, auto j) { return j < 6; }};
    const auto means = projected(mean_pooling{4}, x, first_half);
    for (index_t c = 0; c < 5; ++c) {
        CHECK(std::abs(means(0, 0, 0, c) - (x(0, 0, 0, c) + x(0, 0, 1, c) + x(0, 0, 2, c)) / 3) < 1e-6f);
        CHECK(means(0, 0, 2, c) == 0);
        CHECK(means(0, 0, 3, c) == 0);
    }
    CHECK(projected(max_pooling{12}, x).shape() == shape{1, 1, 12, 5});
    CHECK(same_bits(projected(max_pooling{12}, x), x));
}

TEST_CASE("project: into rows with gaps, and what does not fit is refused", "[linformer]") {
    const auto x = random_tensor<float>({1, 2, 12, 5}, 1);
    sequential here;
    workspace memory(workspace_bytes<float>(mean_pooling{4}, x.shape())), none;
    tensor<float> wide({1, 2, 4, 8}), out({1, 2, 4, 5});
    const execution run(here, memory);
    project(mean_pooling{4}, x, tensor_view<float>(wide.data(), {1, 2, 4, 5}, {0, 32, 8, 1}), run);
    project(mean_pooling{4}, x, out.view(), run);
    CHECK((wide(0, 1, 3, 4) == out(0, 1, 3, 4) && wide(0, 1, 3, 5) == 0));
    CHECK_THROWS_WITH(project(mean_pooling{3}, x, out.view(), run),
                      Contains("project: out has shape (1, 2, 4, 5), but the result has (1, 2, 3, 5)"));
    CHECK_THROWS_WITH(project(mean_pooling{0}, x, out.view(), run), Contains("project: projection pools to 0 rows"));
    CHECK_THROWS_WITH(project(mean_pooling{4}, x, out.view(), execution(here, none)), Contains("project: workspace has 0 bytes"));
    CHECK_THROWS_WITH(project(mean_pooling{4}, x, tensor_view<float>(out.data(), {1, 2, 4, 5}, {0, 20, 1, 4}), run),
                      Contains("contiguous channels"));
}

// A row of attention weights times R^T R is, on average, that row; its error falls as one over the root of the projected size. That is what
// the paper's proof rests on. Attention with projected scores is another function, which has to be learned: its error against full
// attention does not fall.
TEST_CASE("fill_random_projection: the error against full attention falls as the projection grows", "[linformer]") {
    const problem p{1, 1, 1, 60, 512, 16, 16};
    const auto in = random_given<float>(p);
    tensor<float> identity({1, 1, 512, 512}), by_key({1, 1, 512, 60});
    for (index_t j = 0; j < 512; ++j) identity(0, 0, j, j) = 1;
    const auto full = attend(softmax_attention{}, in.queries, in.keys, in.values),
               weights = attend(softmax_attention{}, in.queries, in.keys, identity);
    for (index_t i = 0; i < 60; ++i)
        for (index_t j = 0; j < 512; ++j) by_key(0, 0, j, i) = weights(0, 0, i, j);
    std::vector<double> errors;
    for (const index_t rows : {32, 128, 512, 2048}) {
        const auto matrix = random_projection({1, 1, rows, 512}, 7);
        const linear_projection<float> r{matrix.view()};
        const auto a = projected(r, by_key), b = projected(r, in.values); // R A^T and R v
        tensor<float> out(full.shape());
        for (index_t i = 0; i < 60; ++i)
            for (index_t k = 0; k < rows; ++k)
                for (index_t c = 0; c < 16; ++c) out(0, 0, i, c) += a(0, 0, k, i) * b(0, 0, k, c);
        errors.push_back(relative_error(out, full));
    }
    INFO("errors " << errors[0] << ", " << errors[1] << ", " << errors[2] << ", " << errors[3]);
    for (std::size_t e = 1; e < errors.size(); ++e) CHECK(std::abs(errors[e - 1] / errors[e] - 2) < 0.5);
}

TEST_CASE("fill_random_projection: N(0, 1 / projected), the same for a seed", "[linformer]") {
    const auto matrix = random_projection({1, 2, 100, 300}, 3), other = random_projection({1, 2, 100, 300}, 4);
    double sum = 0, squares = 0, fourths = 0;
    for (index_t e = 0; e < matrix.shape().size(); ++e) {
        const auto x = 10 * static_cast<double>(matrix.data()[e]);
        sum += x;
        squares += x * x;
        fourths += x * x * x * x;
    }
    const auto count = static_cast<double>(matrix.shape().size());
    CHECK(std::abs(sum / count) < 0.02);
    CHECK(std::abs(squares / count - 1) < 0.03);
    CHECK(std::abs(fourths / count - 3) < 0.2);
    CHECK(same_bits(matrix, random_projection({1, 2, 100, 300}, 3)));
    CHECK(!same_bits(matrix, other));
}

TEST_CASE("linformer_attention: pooling approaches attention as it grows", "[linformer]") {
    const problem p{1, 1, 1, 40, 240, 8, 8};
    auto in = random_given<float>(p);
    for (index_t j = 0; j < 240; ++j)
        for (index_t c = 0; c < 8; ++c) {
            in.keys(0, 0, j, c) = std::sin(0.02f * static_cast<float>(j * (c + 1)));
            in.values(0, 0, j, c) = std::cos(0.03f * static_cast<float>(j * (c + 1)));
        }
    const auto full = attend(softmax_attention{}, in.queries, in.keys, in.values);
    double last = 1;
    for (const index_t rows : {15, 30, 60, 120, 240}) {
        const auto error =
            relative_error(attend(linformer_attention{.key_projection = mean_pooling{rows}}, in.queries, in.keys, in.values), full);
        INFO(rows << " rows: " << error);
        CHECK(error < (rows == 240 ? 1e-6 : 0.5 * last));
        last = error;
    }
}

TEST_CASE("linformer_attention: what cannot work is refused", "[linformer]") {
    const auto in = random_given<float>(usual);
    const auto matrix = random_projection({1, 1, 12, 50}, 1), short_one = random_projection({1, 1, 12, 49}, 1),
               three = random_projection({1, 3, 12, 50}, 1);
    const auto refused = [&](const auto& op, const char* why) {
        CHECK_THROWS_AS(attend(op, in.queries, in.keys, in.values, top_left()), attention_error);
        CHECK_THROWS_WITH(attend(op, in.queries, in.keys, in.values, top_left()), Contains(why));
    };
    using linear = linear_projection<float>;
    refused(linformer_attention<linear, shared_projection, causal>{.key_projection = {matrix.view()}},
            "causal attention cannot be projected");
    refused(linformer_attention<linear, shared_projection, causal>{.key_projection = {matrix.view()}},
            "linformer_attention: pattern shows key 1 of batch entry 0");
    const auto by_head = on_heads{0, 1} & predicate{[](auto, auto j) { return j < 7; }};
    refused(linformer_attention<linear, shared_projection, std::remove_const_t<decltype(by_head)>>{.key_projection = {matrix.view()},
                                                                                                   .pattern = by_head},
            "heads of a group");
    refused(linformer_attention<linear>{.key_projection = {short_one.view()}},
            "key_projection matrix has shape (1, 1, 12, 49), made for fewer than 50 tokens");
    refused(linformer_attention<linear>{.key_projection = {three.view()}},
            "key_projection matrix has shape (1, 3, 12, 50), but there are 2 heads");
    refused(linformer_attention<linear>{.key_projection = {matrix.view(), short_one.view()}},
            "key_projection bias has shape (1, 1, 12, 49)");
    refused(linformer_attention<linear, mean_pooling>{.key_projection = {matrix.view()}, .value_projection = {11}},
            "value_projection gives head 0 11 rows, but key_projection 12");
    refused(linformer_attention<linear>{.key_projection = {matrix.view()}, .scale = NAN}, "scale is not finite");
    const std::vector<linear> one{{matrix.view()}};
    refused(linformer_attention<projection_per_head<linear>>{.key_projection = {one}},
            "key_projection has 1 projections, but there are 2 heads");
    refused(linformer_attention<channel_convolution<float>>{.key_projection = {matrix.view()}},
            "key_projection weights have shape (1, 1, 12, 50)");
}

} // namespace attn::testing
