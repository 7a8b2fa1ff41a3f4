// Wrong arguments of operators, patterns, score functions and projections: null, negative, zero, huge, overlapping.
#include "catch.hpp"
#include "misuse.hpp"

#include <attn/attention/focused_linear_attention.hpp>
#include <attn/attention/linear_attention.hpp>
#include <attn/attention/linformer_attention.hpp>
#include <attn/attention/merge.hpp>
#include <attn/attention/pooling.hpp>
#include <attn/attention/simplified_linear_attention.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/sparse_attention.hpp>
#include <attn/attention/strided_convolution.hpp>
#include <attn/attention/talking_heads_attention.hpp>
#include <attn/pattern/block_sparse.hpp>
#include <attn/pattern/tiles.hpp>
#include <attn/score/additive_bias.hpp>
#include <attn/score/alibi.hpp>
#include <attn/score/composed_score.hpp>

#include <optional>

namespace attn::testing {

using namespace pattern;

namespace {

constexpr auto unsized = index_t{1} << 62;

/// Tensors that fit each other, in memory that nobody writes to.
struct good_arguments {
    std::vector<float> memory = std::vector<float>(2000);
    tensor_view<float> q = head_major(memory.data(), {2, 4, 9, 8}), k = head_major(memory.data() + 600, {2, 2, 9, 8}),
                       v = head_major(memory.data() + 900, {2, 2, 9, 5}), out = head_major(memory.data() + 1200, {2, 4, 9, 5});
    tensor_view<float> log_sum_exp = {};
    attn::positions positions = {};

    template <class A>
    void attend(const A& op) const {
        sequential here;
        workspace none;
        attn::attend(checks_of<A>{op}, inputs<float>{q, k, v, positions}, outputs<float>{out, log_sum_exp}, execution(here, none));
    }
    /// The same with `out` on some other memory.
    template <class A>
    void attend_onto(const void* other, const A& op) {
        out = on<float>(other, out.shape());
        attend(op);
    }
};

const good_arguments good;

const std::vector<double> numbers(1000); // more than needed, so that an output on some of them is on nothing else
const auto four = std::span(numbers).first(4), eight = std::span(numbers).subspan(500, 8);
const std::vector<float> weights(1000);

/// An operator with everything but q, k, v and out as it should be.
template <class A>
void check_tensor_arguments(const A& op) {
    INFO(A::name);
    const auto name = std::string(A::name);
    CHECK_THROWS_AS(good.attend(op), nothing_refused); // or else the table below is not about what it says
    for (const auto argument : {&good_arguments::q, &good_arguments::k, &good_arguments::v, &good_arguments::out}) {
        auto call = good;
        const auto refused = [&](const std::vector<std::string>& says) {
            check_refused({{"shape " + to_string((call.*argument).shape()), [&] { call.attend(op); }, says}});
        };
        const auto right = good.*argument;
        call.*argument = without_memory(right);
        refused({name + ": ", "has shape " + to_string(right.shape()), "null pointer"});
        for (int dimension = 0; dimension < 4; ++dimension)
            for (const auto extent : wrong_extents) {
                const auto wrong = with_extent(right.shape(), dimension, extent);
                call.*argument = {right.data(), wrong, right.strides()};
                const auto problem = extent < 0 ? "negative shape " + to_string(wrong) : std::to_string(extent);
                refused({name + ": ", problem});
                call.*argument = head_major(right.data(), wrong);
                refused({name + ": ", problem});
            }
        call.*argument = {right.data(), right.shape(), {.heads = unsized, .tokens = 8}};
        refused({name + ": ", "strides that reach beyond"});
        call.*argument = {right.data(), right.shape(), {.tokens = std::numeric_limits<index_t>::min()}};
        refused({name + ": ", "strides that reach beyond"});
    }
    auto call = good;
    for (const auto& [argument, input] : {std::pair("q", &good.q), {"k", &good.k}, {"v", &good.v}})
        check_refused({{argument, [&] { call.attend_onto(input->data(), op); }, {name + ": out ", std::string("overlaps ") + argument}}});
    call = good;
    call.out = {call.out.data(), call.out.shape(), {180, 45, 4, 1}};
    check_refused({{"itself", [&] { call.attend(op); }, {name + ": out ", "elements overlap"}}});

    call = good;
    const std::vector<index_t> none, three(3), many(400);
    const auto two = std::span(many).first(2);
    for (const auto position : {&positions::first_query, &positions::first_key}) {
        call.positions = {};
        for (const auto& wrong : {none, three}) {
            call.positions.*position = std::span<const index_t>(wrong);
            check_refused({{"positions", [&] { call.attend(op); }, {name + ": positions.first_", std::to_string(wrong.size()) + " entries"}}});
        }
        call.positions.*position = two;
        check_refused({{"onto positions", [&] { auto onto = call; onto.attend_onto(two.data(), op); }, {name + ": out ", "overlaps positions.first_"}}});
    }
    // Nothing to compute, in so many ways that trying each would take for ever.
    const shape empty{index_t{1} << 32, index_t{1} << 32, 0, 8};
    call = good;
    call.q = call.k = call.v = call.out = head_major(call.q.data(), empty);
    check_refused({{"2^32 x 2^32 times nothing", [&] { call.attend(op); }, {name + ": q ", to_string(empty), "more than 2^48 bytes"}}});
    call.q = call.k = call.v = call.out = head_major(call.q.data(), {index_t{1} << 40, 1, 0, 8});
    CHECK_NOTHROW(call.attend(op));
}

/// What asks a pattern or a score function about its parameters.
void ask(const auto& pattern) { good.attend(softmax_attention{.pattern = pattern}); }
void ask_score(const auto& score) { good.attend(softmax_attention{.score = score}); }

} // namespace

TEST_CASE("misuse: tensors of operators", "[misuse][portable]") {
    check_tensor_arguments(softmax_attention<>{});
    check_tensor_arguments(talking_heads_attention<>{});
    check_tensor_arguments(linformer_attention<mean_pooling>{.key_projection = {3}});
    check_tensor_arguments(linear_attention<>{});
    check_tensor_arguments(simplified_linear_attention<>{});
    check_tensor_arguments(focused_linear_attention<>{});
}

TEST_CASE("misuse: tables of patterns, and score functions", "[misuse][portable]") {
    const bool mask[81]{};
    const tensor_view<const bool> blocks = head_major(mask, {1, 1, 9, 9});
    const auto bias = head_major(weights.data(), {1, 1, 9, 9});
    const auto hidden = [](index_t, index_t) { return false; };
    const auto far = [](const auto& view) { return decltype(without_memory(view))(view.data(), view.shape(), {.tokens = unsized}); };
    check_refused({
        {"null blocks", [&] { ask(block_sparse{without_memory(blocks), 1}); }, {"softmax_attention: pattern block_sparse", "null pointer"}},
        {"null blocks inside", [&] { ask(dense{} & !block_sparse{without_memory(blocks), 1}); }, {"pattern block_sparse", "null pointer"}},
        {"negative blocks", [&] { ask(block_sparse{head_major(mask, {1, 1, -9, 9}), 1}); }, {"pattern block_sparse", "negative"}},
        {"huge blocks", [&] { ask(block_sparse{head_major(mask, {1, 1, unsized, 9}), 1}); }, {"pattern block_sparse", "2^48"}},
        {"far blocks", [&] { ask(block_sparse{far(blocks), 1}); }, {"pattern block_sparse", "strides"}},
        {"null mask", [&] { tiles(without_memory(blocks)); }, {"tiles: mask ", "null pointer"}},
        {"negative mask", [&] { tiles(head_major(mask, {1, -1, 9, 9})); }, {"tiles: mask ", "negative"}},
        {"huge mask", [&] { tiles(head_major(mask, {1, 1, unsized, 9})); }, {"tiles: mask ", "2^48"}},
        {"negative queries", [&] { tiles(hidden, -1, 9); }, {"tiles: size ", "(1, 1, -1, 9)"}},
        {"negative keys", [&] { tiles(hidden, 9, -unsized); }, {"tiles: size ", "negative"}},
        {"2^31 x 2^40 pairs", [&] { tiles(hidden, index_t{1} << 31, index_t{1} << 40); }, {"tiles: size ", "2^48"}},
        {"null bias", [&] { ask_score(additive_bias(without_memory(bias))); }, {"softmax_attention: score additive_bias", "null pointer"}},
        {"negative bias", [&] { ask_score(additive_bias(head_major(weights.data(), {1, -1, 9, 9}))); }, {"score additive_bias", "negative"}},
        {"huge bias", [&] { ask_score(additive_bias(head_major(weights.data(), {1, 1, unsized, 9}))); }, {"score additive_bias", "2^48"}},
        {"null bias in a chain", [&] { ask_score(composed_score{identity_score{}, additive_bias(without_memory(bias))}); }, {"additive_bias", "null"}},
        {"no slopes", [&] { ask_score(alibi(std::span<const double>())); }, {"score alibi", "4 heads"}},
        {"a slope that is not there", [&] { alibi(four).at(0, 4); }, {"alibi: slopes are 4", "head 4"}},
        {"negative slopes", [&] { alibi_slopes(-unsized); }, {"alibi_slopes: heads "}},
        {"2^62 slopes", [&] { alibi_slopes(unsized); }, {"alibi_slopes: heads ", "2^48"}},
    });
}

TEST_CASE("misuse: an output on what an operator refers to", "[misuse][portable]") {
    auto call = good;
    const auto onto = [&](const void* other, const auto& op) { return [&call, other, op] { call.attend_onto(other, op); }; };
    const auto bias = head_major(weights.data(), {1, 1, 9, 9});
    const bool mask[81]{};
    const std::vector<index_t> many(400, 9);
    const auto present = std::span(many).first(2);
    const auto matrix = head_major(weights.data(), {1, 1, 3, 9});
    const auto kernel = head_major(weights.data(), {1, 5, 3, 3});
    const auto taps = head_major(weights.data(), {1, 1, 3, 8});
    using linear = linear_projection<float>;
    const std::vector<linear> each{{matrix}, {matrix}};
    const auto identity = identity_score{};
    check_refused({
        {"sinks", onto(four.data(), softmax_attention{.sinks = four}), {"softmax_attention: out ", "overlaps sinks"}},
        {"bias", onto(weights.data(), softmax_attention{.score = additive_bias(bias)}), {"out ", "(2, 4, 9, 5)", "overlaps the bias", "(1, 1, 9, 9)"}},
        {"bias in a chain", onto(weights.data() + 80, softmax_attention{.score = composed_score{identity, additive_bias(bias)}}), {"overlaps the bias"}},
        {"slopes", onto(four.data(), softmax_attention{.score = alibi(four)}), {"overlaps the slopes"}},
        {"lengths", onto(present.data(), softmax_attention{.pattern = lengths{present}}), {"overlaps the lengths"}},
        {"blocks inside", onto(mask, softmax_attention{.pattern = dense{} | !block_sparse{head_major(mask, {1, 1, 9, 9}), 1}}), {"overlaps the blocks"}},
        {"logits_mix", onto(four.data(), talking_heads_attention{.logits_mix = head_major(four.data(), {1, 1, 1, 4}),
            .weights_mix = head_major(eight.data(), {1, 1, 4, 1})}), {"talking_heads_attention: out ", "overlaps logits_mix"}},
        {"weights_mix", onto(eight.data(), talking_heads_attention{.logits_mix = head_major(four.data(), {1, 1, 1, 4}),
            .weights_mix = head_major(eight.data(), {1, 1, 4, 1})}), {"overlaps weights_mix"}},
        {"mixed sinks", onto(four.data(), talking_heads_attention{.sinks = four}), {"overlaps sinks"}},
        {"matrix", onto(weights.data(), linformer_attention<linear>{.key_projection = {matrix}}), {"linformer_attention: out ", "matrix of a projection"}},
        {"matrix of values", onto(weights.data(), linformer_attention<mean_pooling, linear>{{3}, {matrix}}), {"matrix of a projection"}},
        {"matrix of a head", onto(weights.data(), linformer_attention<projection_per_head<linear>>{.key_projection = {each}}), {"matrix of a"}},
        {"weights of a convolution", onto(weights.data(), linformer_attention<channel_convolution<float>, mean_pooling>{{taps}, {3}}),
            {"overlaps the weights of a projection"}},
        {"kernel", onto(weights.data(), simplified_linear_attention<>{.convolution = {.weights = kernel, .height = 3, .width = 3}}),
            {"simplified_linear_attention: out ", "overlaps the convolution's weights"}},
        {"no kernel", onto(weights.data(), simplified_linear_attention<>{.convolution = {.weights = without_memory(kernel), .height = 3, .width = 3}}),
            {"simplified_linear_attention: weights ", "null pointer"}},
        {"its bias", onto(weights.data() + 900, simplified_linear_attention<>{.convolution =
            {.weights = kernel, .bias = std::span(weights).last(5), .height = 3, .width = 3}}), {"convolution's bias"}},
        {"encoding", onto(weights.data(), focused_linear_attention<>{.positional_encoding = head_major(weights.data(), {1, 1, 9, 8})}),
            {"focused_linear_attention: out ", "overlaps positional_encoding"}},
        {"scale", onto(weights.data(), focused_linear_attention<>{.scale = std::span(weights).first(8)}), {"overlaps scale"}},
    });
    call = good;
    call.log_sum_exp = on<float>(four.data(), {2, 4, 9, 1});
    check_refused({{"log_sum_exp on sinks", [&] { call.attend(softmax_attention{.sinks = four}); }, {"log_sum_exp ", "overlaps sinks"}}});
}

} // namespace attn::testing
