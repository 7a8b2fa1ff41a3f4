// Misuse at run time: every wrong argument is refused, by name and with its shape, before anything is read or written.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"

#include <attn/attn.hpp>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

namespace attn::testing {

using namespace pattern;

namespace {

/// Memory that may be pointed at but neither read nor written: whoever does is killed.
class forbidden_memory {
public:
    static constexpr std::size_t bytes = std::size_t{1} << 24;

#if __has_include(<sys/mman.h>)
    forbidden_memory() : begin_(::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) { REQUIRE(begin_ != MAP_FAILED); }
    ~forbidden_memory() { ::munmap(begin_, bytes); }
#else
    forbidden_memory() : begin_(::operator new(bytes)) {}
    ~forbidden_memory() { ::operator delete(begin_); }
#endif
    forbidden_memory(const forbidden_memory&) = delete;
    forbidden_memory& operator=(const forbidden_memory&) = delete;

    /// Tensor number n, far from the others.
    tensor_view<float> tensor(int n, const shape& s) const { return head_major(static_cast<float*>(begin_) + (n + 1) * 100'000, s); }

private:
    void* begin_;
};

/// A call of which everything is right, for tests to spoil one thing of.
struct good_call {
    forbidden_memory memory;
    tensor_view<float> q = memory.tensor(0, {2, 4, 9, 8}), k = memory.tensor(1, {2, 2, 11, 8}), v = memory.tensor(2, {2, 2, 11, 5});
    tensor_view<float> out = memory.tensor(3, {2, 4, 9, 5}), log_sum_exp = memory.tensor(4, {2, 4, 9, 1});
    attn::positions positions = top_left();
    std::size_t missing_bytes = 0;

    /// What the error says.
    template <class Op = softmax_attention<>>
    std::string refusal(const Op& op = {}) const {
        sequential here;
        workspace space(op.template workspace_bytes<float>({{2, 4, 9, 8}, {2, 2, 11, 8}, {2, 2, 11, 5}}, 1) - missing_bytes);
        const inputs<float> in{q, k, v, positions};
        return error_of([&] { attn::attend(op, in, outputs<float>{out, log_sum_exp}, execution(here, space)); });
    }
    /// The same of the operator's own check, which comes first; cheap to compile.
    template <class Op>
    std::string check(const Op& op) const {
        return error_of([&] { op.check(inputs<float>{q, k, v, positions}); });
    }
};

/// The view with another shape.
tensor_view<float> reshaped(const tensor_view<float>& t, const shape& s) { return {t.data(), s, t.strides()}; }

} // namespace

TEST_CASE("attend: shapes that do not fit are refused", "[attention][portable]") {
    good_call call;
    SECTION("batch of k") {
        call.k = reshaped(call.k, {3, 2, 11, 8});
        check_says(call.refusal(), {"softmax_attention: k ", "(3, 2, 11, 8)", "(2, 4, 9, 8)", "batch"});
    }
    SECTION("batch of v") {
        call.v = reshaped(call.v, {1, 2, 11, 5});
        check_says(call.refusal(), {"softmax_attention: v ", "(1, 2, 11, 5)", "(2, 4, 9, 8)", "batch"});
    }
    SECTION("channels of k") {
        call.k = reshaped(call.k, {2, 2, 11, 7});
        check_says(call.refusal(), {"softmax_attention: k ", "(2, 2, 11, 7)", "(2, 4, 9, 8)", "channels"});
    }
    SECTION("no channels") {
        call.q = reshaped(call.q, {2, 4, 9, 0});
        call.k = reshaped(call.k, {2, 2, 11, 0});
        check_says(call.refusal(), {"softmax_attention: q ", "(2, 4, 9, 0)", "channel"});
    }
    SECTION("tokens of v") {
        call.v = reshaped(call.v, {2, 2, 12, 5});
        check_says(call.refusal(), {"softmax_attention: v ", "(2, 2, 12, 5)", "(2, 2, 11, 8)", "tokens"});
    }
    SECTION("heads of v") {
        call.v = reshaped(call.v, {2, 4, 11, 5});
        check_says(call.refusal(), {"softmax_attention: v ", "(2, 4, 11, 5)", "(2, 2, 11, 8)", "heads"});
    }
    SECTION("heads that do not divide") {
        call.k = reshaped(call.k, {2, 3, 11, 8});
        call.v = reshaped(call.v, {2, 3, 11, 5});
        check_says(call.refusal(), {"softmax_attention: k ", "(2, 3, 11, 8)", "(2, 4, 9, 8)", "heads"});
    }
    SECTION("no heads of keys") {
        call.k = reshaped(call.k, {2, 0, 11, 8});
        call.v = reshaped(call.v, {2, 0, 11, 5});
        check_says(call.refusal(), {"softmax_attention: k ", "(2, 0, 11, 8)", "heads"});
    }
    SECTION("negative") {
        call.q = reshaped(call.q, {2, 4, -9, 8});
        check_says(call.refusal(), {"softmax_attention: q ", "negative", "(2, 4, -9, 8)"});
    }
    SECTION("no memory") {
        call.v = {nullptr, call.v.shape(), call.v.strides()};
        check_says(call.refusal(), {"softmax_attention: v ", "null", "(2, 2, 11, 5)"});
    }
}

TEST_CASE("attend: positions and parameters that do not fit are refused", "[attention][portable]") {
    good_call call;
    const std::vector<index_t> three{1, 2, 3}, two{1, 2};
    SECTION("positions of queries") {
        call.positions.first_query = std::span<const index_t>(three);
        check_says(call.refusal(), {"softmax_attention: positions.first_query ", "3 entries", "(2, 4, 9, 8)"});
    }
    SECTION("positions of keys") {
        call.positions.first_key = std::span<const index_t>(three);
        check_says(call.refusal(), {"softmax_attention: positions.first_key ", "3 entries"});
    }
    SECTION("sinks and scale") {
        const std::vector<double> sinks(3);
        check_says(call.refusal(softmax_attention{.sinks = sinks}), {"softmax_attention: sinks ", "3 entries", "(2, 4, 9, 8)"});
        for (const double scale : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
            check_says(call.refusal(softmax_attention{.scale = scale}), {"softmax_attention: scale ", "finite"});
        CHECK(call.refusal(softmax_attention{.scale = 1e39}) == "softmax_attention: scale is 1e+39, which is not finite as a float"); // what is computed with
    }
    SECTION("patterns") {
        check_says(call.check(softmax_attention{.pattern = strided{0}}), {"softmax_attention: pattern strided{0}"});
        check_says(call.check(softmax_attention{.pattern = local{-1}}), {"softmax_attention: pattern local{-1, -1}"});
        check_says(call.check(softmax_attention{.pattern = local{3, -2} & local{2}}), {"pattern local{3, -2}"});
        check_says(call.check(softmax_attention{.pattern = !(local{2} | block_diagonal{0})}), {"pattern block_diagonal{0}"});
        check_says(call.check(softmax_attention{.pattern = on_heads{2, 1}}), {"pattern on_heads{2, 1}"});
        check_says(call.check(softmax_attention{.pattern = lengths{three}}), {"softmax_attention: pattern lengths", "batch"});
        const std::vector<index_t> all{11, 0}, beyond{3, 12};
        call.positions = {};
        CHECK(call.check(softmax_attention{.pattern = lengths{all}}) == nothing_thrown);
        CHECK(call.refusal(softmax_attention{.pattern = dense{} & !lengths{beyond}}) ==
              "softmax_attention: pattern lengths{2 values} holds the length 12, but there are 11 keys; if they are some of a longer sequence, give their positions");
        for (const auto& some : {top_left(), bottom_right(9, 11), positions{.first_key = 5}}) { // of more keys
            call.positions = some;
            CHECK(call.check(softmax_attention{.pattern = lengths{beyond}}) == nothing_thrown);
        }
        call.positions = top_left();
        const tensor<bool> narrow({1, 1, 9, 10}), heads({1, 3, 9, 11}), fitting({2, 4, 9, 11});
        check_says(call.check(softmax_attention{.pattern = tiles(narrow.view())}), {"pattern tiles", "(1, 1, 9, 10)", "keys"});
        check_says(call.check(softmax_attention{.pattern = tiles(heads.view())}), {"pattern tiles", "(1, 3, 9, 11)", "heads"});
        check_says(call.check(softmax_attention{.pattern = tiles(fitting.view(), 1)}), {"pattern tiles", "queries"});
        CHECK(call.check(softmax_attention{.pattern = tiles(fitting.view())}) == nothing_thrown);
    }
    SECTION("scores") {
        const std::vector<double> slopes(3);
        const tensor<float> narrow({1, 1, 9, 10}), batch({3, 1, 9, 11}), fitting({2, 4, 9, 11});
        check_says(call.check(softmax_attention{.score = soft_cap{0}}), {"softmax_attention: score soft_cap"});
        check_says(call.check(softmax_attention{.score = alibi(slopes)}), {"softmax_attention: score alibi", "3"});
        check_says(call.check(softmax_attention{.score = additive_bias(narrow.view())}), {"score additive_bias", "(1, 1, 9, 10)"});
        check_says(call.check(softmax_attention{.score = composed_score{soft_cap{5}, additive_bias(batch.view())}}),
                   {"score additive_bias", "(3, 1, 9, 11)"});
        check_says(call.check(softmax_attention{.score = additive_bias(fitting.view(), 0, 1)}), {"score additive_bias", "key"});
        CHECK(call.check(softmax_attention{.score = additive_bias(fitting.view())}) == nothing_thrown);
    }
}

TEST_CASE("attend: where queries stand beside keys is said if it matters and there are not as many", "[attention][portable]") {
    good_call call;
    call.positions = {};
    CHECK(call.refusal(softmax_attention{.pattern = causal{}}) ==
          "softmax_attention: positions are not given, but q has 9 tokens and k 11, and the pattern compares their positions: attn::top_left() puts the first "
          "query beside the first key, attn::bottom_right(9, 11) the last beside the last");
    const std::vector<double> slopes(4, 0.5);
    CHECK(call.refusal(softmax_attention{.score = alibi(slopes)}) ==
          "softmax_attention: positions are not given, but q has 9 tokens and k 11, and the score compares their positions: attn::top_left() puts the first "
          "query beside the first key, attn::bottom_right(9, 11) the last beside the last");

    const auto each_that_compares = [&](const auto& f) {
        const auto pattern = [&](const auto& p) { f(softmax_attention{.pattern = p}); };
        pattern(causal{}), pattern(local{2}), pattern(strided{3}), pattern(dilated_window{2, 3}), pattern(block_diagonal{4}), pattern(fixed{4, 1}), pattern(global{1});
        pattern(prefix{2}), pattern(predicate{[](auto i, auto j) { return i == j; }}), pattern(neighborhood(neighborhood_rule<1>{.grid = {11}, .window = {3}}));
        pattern(dense{} & causal{}), pattern(causal{} | dense{}), pattern(!causal{}), pattern((dense{} & !local{1}) | on_heads{0, 1});
        const tensor<float> table({1, 4, 1, 8}), gates({2, 4, 11, 1});
        const auto score = [&](const auto& s) { f(softmax_attention{.score = s}); };
        score(alibi(slopes)), score(kerple_logarithmic(slopes, slopes)), score(relative_buckets(table)), score(forgetting(gates));
        score([]<class S>(S x, auto i, auto j) { return x - S(i - j); });
        score(composed_score{soft_cap{3}, alibi(slopes)});
        f(talking_heads_attention{.pattern = causal{}}), f(talking_heads_attention{.score = alibi(slopes)});
        f(linear_attention{.pattern = causal{}}), f(linear_attention{.pattern = prefix{2}});
        f(linformer_attention{.key_projection = mean_pooling{2}, .pattern = !causal{}});
    };
    const auto each_that_does_not = [&](const auto& f) {
        const std::vector<index_t> present{3, 11};
        const std::vector<std::int32_t> of_queries(9), of_keys(11);
        const tensor<bool> mask({1, 1, 9, 11}), blocks({1, 1, 3, 3});
        const tensor<index_t> lists({1, 1, 3, 2});
        const tensor<float> bias({1, 1, 9, 11});
        const auto pattern = [&](const auto& p) { f(softmax_attention{.pattern = p}); };
        pattern(dense{}), pattern(lengths{present}), pattern(tiles(mask)), pattern(block_sparse{blocks, 4}), pattern(segments(of_queries, of_keys)), pattern(on_heads{0, 2});
        pattern(dense{} & !lengths{present}), pattern(on_heads{0, 2} | tiles(mask));
        const auto score = [&](const auto& s) { f(softmax_attention{.score = s}); };
        score(identity_score{}), score(soft_cap{3}), score(additive_bias(bias)), score(composed_score{soft_cap{3}, additive_bias(bias)});
        f(talking_heads_attention{.score = additive_bias(bias), .pattern = tiles(mask)});
        f(linear_attention{.pattern = lengths{present}});
    };
    const auto refused = [&](const auto& op) { check_says(call.check(op), {": positions are not given, but q has ", "attn::top_left()", "attn::bottom_right("}); };
    const auto taken = [&](const auto& op) { CHECK(call.check(op) == nothing_thrown); };
    each_that_compares(refused);
    each_that_does_not(taken);
    for (const auto& where : {top_left(), bottom_right(9, 11), positions{.first_key = 0}}) {
        call.positions = where;
        taken(softmax_attention{.score = alibi(slopes), .pattern = causal{}});
    }
    const std::vector<index_t> each{2, 0};
    call.positions = {.first_query = each};
    taken(softmax_attention{.pattern = causal{}});
    call.positions = {};
    for (const index_t keys : {9, 0}) {
        call.k = reshaped(call.k, {2, 2, keys, 8}), call.v = reshaped(call.v, {2, 2, keys, 5});
        taken(softmax_attention{.score = alibi(slopes), .pattern = causal{}});
    }
}

TEST_CASE("attend: outputs and workspaces that do not fit are refused", "[attention][portable]") {
    good_call call;
    SECTION("shape of out") {
        call.out = reshaped(call.out, {2, 4, 9, 8});
        check_says(call.refusal(), {"softmax_attention: out ", "(2, 4, 9, 8)", "(2, 4, 9, 5)"});
    }
    SECTION("shape of log_sum_exp") {
        call.log_sum_exp = reshaped(call.log_sum_exp, {2, 2, 9, 1});
        check_says(call.refusal(), {"softmax_attention: log_sum_exp ", "(2, 2, 9, 1)", "(2, 4, 9, 1)"});
    }
    SECTION("no out") {
        call.out = {nullptr, call.out.shape(), call.out.strides()};
        check_says(call.refusal(), {"softmax_attention: out ", "null"});
    }
    SECTION("out on an input") {
        for (const auto* input : {&call.q, &call.k, &call.v}) {
            call.out = head_major(input->data() + input->shape().size() - 1, {2, 4, 9, 5});
            check_says(call.refusal(), {"softmax_attention: out ", "(2, 4, 9, 5)", "overlaps ", to_string(input->shape())});
        }
    }
    SECTION("log_sum_exp on an input, or on out") {
        call.log_sum_exp = reshaped(head_major(call.k.data() + 3, {2, 4, 9, 1}), {2, 4, 9, 1});
        check_says(call.refusal(), {"softmax_attention: log_sum_exp ", "overlaps k"});
        call.log_sum_exp = head_major(call.out.data() + 100, {2, 4, 9, 1});
        check_says(call.refusal(), {"softmax_attention: log_sum_exp ", "overlaps out"});
    }
    SECTION("out on itself") {
        call.out = {call.out.data(), {2, 4, 9, 5}, {180, 45, 4, 1}};
        check_says(call.refusal(), {"softmax_attention: out ", "(2, 4, 9, 5)", "overlap"});
        call.out = {call.out.data(), {2, 4, 9, 5}, {0, 45, 5, 1}};
        check_says(call.refusal(), {"softmax_attention: out ", "overlap"});
    }
    SECTION("workspace") {
        call.missing_bytes = 1;
        check_says(call.refusal(), {"softmax_attention: workspace ", "bytes", "(2, 4, 9, 8)"});
    }
}

TEST_CASE("attend: a shape is refused by shape_error, a value by argument_error", "[attention][portable]") {
    const tensor<float> x({.tokens = 3, .channels = 4}), other({.tokens = 3, .channels = 5});
    CHECK_THROWS_AS(attend(softmax_attention{}, x, other, x), shape_error);
    CHECK_THROWS_AS(attend(softmax_attention{.scale = NAN}, x, x, x), argument_error);
    CHECK_THROWS_AS(attend(softmax_attention{.pattern = strided{0}}, x, x, x), argument_error);
    CHECK_THROWS_AS(attend(softmax_attention{.score = soft_cap{-1}}, x, x, x), argument_error);
    CHECK_THROWS_AS(attend(softmax_attention{}, x, x, x, {.first_query = farthest_position + 1}), argument_error);
    sequential here;
    workspace none;
    tensor<float> out(x.shape()), wide(other.shape());
    CHECK_THROWS_AS(attend(softmax_attention{}, inputs<float>{x, x, x}, outputs<float>{out}, execution(here, none)), argument_error);
    CHECK_THROWS_AS(attend(softmax_attention{}, inputs<float>{x, x, x}, outputs<float>{wide}), shape_error);
}

TEST_CASE("attend: interleaved views do not overlap", "[attention][portable]") {
    // [batch][tokens][q | k | v | out | log_sum_exp] of every head, in one buffer.
    const problem p{2, 2, 2, 9, 9, 8, 5};
    constexpr index_t row = 2 * (8 + 8 + 5 + 5 + 1);
    tensor<float> buffer({1, 1, 2 * 9, row});
    std::fill_n(buffer.data(), buffer.shape().size(), guard<float>);
    const auto part = [&](index_t first, index_t channels) {
        return tensor_view<float>(buffer.data() + first, {2, 2, 9, channels}, {9 * row, channels, row, 1});
    };
    const auto q = part(0, 8), k = part(16, 8), v = part(32, 5), out = part(42, 5), log_sum_exp = part(52, 1);
    const auto in = random_given<float>(p);
    const auto copy = [](const tensor<float>& from, const tensor_view<float>& to) {
        for (index_t e = 0; e < from.shape().size(); ++e) {
            const auto c = e % from.shape().channels, i = e / from.shape().channels;
            to(i / 18, i / 9 % 2, i % 9, c) = from.data()[e];
        }
    };
    copy(in.queries, q);
    copy(in.keys, k);
    copy(in.values, v);
    sequential here;
    workspace memory(workspace_bytes<float>(softmax_attention{}, p.shapes(), here));
    attn::attend(softmax_attention{}, inputs<float>{q, k, v}, outputs<float>{out, log_sum_exp}, execution(here, memory));
    const auto expected = attn::attend(softmax_attention{}, in.queries, in.keys, in.values);
    for (index_t e = 0; e < expected.shape().size(); ++e) CHECK(out(e / 90, e / 45 % 2, e / 5 % 9, e % 5) == expected.data()[e]);
}

} // namespace attn::testing
