// Every operator at the farthest positions, held to its definition there; and what lies beyond them is refused.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"

#include <attn/attention/focused_linear_attention.hpp>
#include <attn/attention/linear_attention.hpp>
#include <attn/attention/linformer_attention.hpp>
#include <attn/attention/simplified_linear_attention.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/sparse_attention.hpp>
#include <attn/attention/talking_heads_attention.hpp>
#include <attn/reference/linear_attention.hpp>
#include <attn/reference/linformer.hpp>
#include <attn/reference/softmax.hpp>
#include <attn/reference/talking_heads.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

constexpr index_t n = 45, m = 150, far = farthest_position;

/// Both ends, with the last query beside the last key; and as far from each other as rows can be.
constexpr positions low{-far + m - n, -far}, high{far - n + 1, far - m + 1}, after{far - n + 1, -far}, before{-far, far - m + 1};

/// One type for many patterns, so that a kernel is compiled once: causal but for a prefix, a window, strided keys beyond it, padding.
auto shown(index_t first, index_t window, index_t stride, std::span<const index_t> present) {
    return prefix{first} & (local{window, 0} | strided{stride}) & lengths{present};
}

given<float> problem_at(const positions& where) {
    return random_given<float>({.batch = 2, .heads = 4, .kv_heads = 2, .queries = n, .keys = m, .key_dim = 8, .value_dim = 5, .positions = where});
}

/// Calls f(pattern parameters, where): first, window, stride, present.
template <class F>
void for_each_place(const F& f) {
    constexpr index_t max_index = std::numeric_limits<index_t>::max();
    for (const auto& where : {low, high, after, before}) {
        const auto end = std::max<index_t>(0, where.first_key[0] + m);
        const std::array<index_t, 2> all{max_index, max_index}, some{std::max<index_t>(0, end - 40), end};
        for (const auto& present : {all, some}) {
            f(where, index_t{0}, max_index, index_t{1}, present);                    // causal
            f(where, max_index, max_index, index_t{1}, present);                   // dense
            f(where, std::max<index_t>(0, end - 70), index_t{9}, index_t{7}, present); // a prefix, a window and a stride
            f(where, index_t{0}, index_t{0}, max_index, present);                    // a query's own key
        }
    }
}

template <class Op>
tensor<float> attended(const Op& op, const given<float>& in) {
    sequential here;
    return attn::attend(op, inputs<float>(in), here);
}

/// Compares with the definition, called as define(inputs, outputs).
void check_against(const tensor<float>& ours, const given<float>& in, const auto& define) {
    auto exact = no_answer<double>(ours.shape(), false);
    const auto q = reference::widen(in.queries.view()), k = reference::widen(in.keys.view()), v = reference::widen(in.values.view());
    define(inputs<double>{q, k, v, in.positions}, exact.out());
    CHECK(largest_error(ours, exact.values) / epsilon<float> <= 256);
}

} // namespace

TEST_CASE("softmax_attention at the farthest positions", "[attention][portable]") {
    for_each_place([](const positions& where, index_t first, index_t window, index_t stride, const std::array<index_t, 2>& present) {
        INFO("queries from " << where.first_query[0] << ", keys from " << where.first_key[0] << ", prefix " << first << ", window " << window);
        const auto in = problem_at(where);
        const bool near = where.first_query[0] - where.first_key[0] == m - n;
        const auto decay = [slope = near ? 0.1 : 0.0]<class S>(S score, auto i, auto j) { return score - static_cast<S>(slope) * static_cast<S>(i - j); };
        const softmax_attention op{.score = decay, .pattern = shown(first, window, stride, present)};
        check_against(attended(op, in), in, [&](const auto& wide, const auto& out) {
            reference::softmax<double>(wide, out, {}, op.score, op.pattern);
        });
    });
}

TEST_CASE("talking_heads_attention at the farthest positions", "[attention][portable]") {
    const auto mix = random_tensor<double>({1, 1, 4, 4}, 9, 1);
    for_each_place([&](const positions& where, index_t first, index_t window, index_t stride, const std::array<index_t, 2>& present) {
        INFO("queries from " << where.first_query[0] << ", keys from " << where.first_key[0] << ", prefix " << first << ", window " << window);
        const auto in = problem_at(where);
        const auto pattern = shown(first, window, stride, present);
        const talking_heads_attention<std::remove_const_t<decltype(pattern)>> op{.logits_mix = mix, .weights_mix = mix, .pattern = pattern};
        check_against(attended(op, in), in, [&](const auto& wide, const auto& out) {
            reference::talking_heads<double>(wide, out, mix, {}, mix, {}, {}, identity_score{}, pattern);
        });
    });
}

TEST_CASE("linear attentions at the farthest positions", "[linear][portable]") {
    for_each_place([](const positions& where, index_t first, index_t, index_t, const std::array<index_t, 2>& present) {
        INFO("queries from " << where.first_query[0] << ", keys from " << where.first_key[0] << ", prefix " << first);
        auto in = problem_at(where);
        const auto pattern = prefix{first} & lengths{present};
        const linear_attention op{.feature_map = relu{}, .pattern = pattern};
        check_against(attended(op, in), in, [&](const auto& wide, const auto& out) {
            reference::linear_attention<double>(wide, out, relu{}, pattern, true, op.eps, 1);
        });
        const simplified_linear_attention<std::remove_const_t<decltype(pattern)>, float> simplified{.pattern = pattern};
        check_against(attended(simplified, in), in, [&](const auto& wide, const auto& out) {
            reference::linear_attention<double>(wide, out, relu{}, pattern, true, simplified.eps, 1);
        });
        const focused_linear_attention<lengths, float> focused{.pattern = {present}};
        check_against(attended(focused, in), in, [&](const auto& wide, const auto& out) {
            const auto q = reference::focused_features<double, float>(wide.queries, focused.power, {}),
                       k = reference::focused_features<double, float>(wide.keys, focused.power, {});
            // Its eps is per key that is present, which batch entries differ in.
            for (index_t b = 0; b < 2; ++b) {
                const auto entry = [&](const auto& t) { return t.slice({.batch = {b, 1}}); };
                const auto own = std::span(present).subspan(static_cast<std::size_t>(b), 1);
                const auto keys = std::clamp<index_t>(detail::saturating_sum(own[0], -where.first_key[0]), 0, m);
                const inputs<double> mapped{entry(tensor_view<const double>(q)), entry(tensor_view<const double>(k)), entry(wide.values), where};
                reference::linear_attention<double>(mapped, {entry(out.values)}, identity_features{}, lengths{own}, true,
                                                    focused.eps * static_cast<double>(keys), 1);
            }
        });
    });
}

TEST_CASE("linformer_attention at the farthest positions", "[linformer][portable]") {
    const auto matrix = random_tensor<float>({1, 1, 30, m}, 6, 0.2F);
    for (const auto& where : {low, high, after, before}) {
        const auto end = std::max<index_t>(0, where.first_key[0] + m);
        const std::array<index_t, 2> present{std::max<index_t>(0, end - 40), std::numeric_limits<index_t>::max()};
        const auto in = problem_at(where);
        const linformer_attention<linear_projection<float>, shared_projection, lengths> op{.key_projection = {matrix.view()},
                                                                                           .pattern = {present}};
        const auto project = [&]<class T>(const reference::tokens<T>& x) { return reference::linear_projection<T, float>(x, matrix.view(), {}); };
        check_against(attended(op, in), in,
                      [&](const auto& wide, const auto& out) { reference::linformer<double>(wide, out, project, project, {}, op.pattern); });
    }
}

TEST_CASE("attend: positions beyond the farthest are refused by name", "[attention][portable]") {
    constexpr auto min_index = std::numeric_limits<index_t>::min(), max_index = std::numeric_limits<index_t>::max();
    const auto matrix = random_tensor<float>({1, 1, 30, m}, 6, 0.2F);
    const auto refusals = [&](const positions& where, const std::string& argument, index_t first, index_t rows) {
        const auto in = problem_at(where);
        sequential here;
        const auto expected = argument + " is " + std::to_string(first) + " for " + std::to_string(rows) + " rows, but positions lie between -2^60 and 2^60";
        const auto check = [&](const auto& op) {
            check_says(error_of([&] { (void)attn::attend(op, inputs<float>(in), here); }), {std::string(op.name) + ": " + expected});
        };
        check(softmax_attention{});
        check(talking_heads_attention<>{});
        check(linear_attention<relu>{});
        check(simplified_linear_attention<dense, float>{});
        check(focused_linear_attention<dense, float>{});
        check(linformer_attention{.key_projection = linear_projection<float>{matrix.view()}});
    };
    for (const auto first : {min_index, -far - 1, far - n + 2, far + 1, max_index - n, max_index})
        refusals({.first_query = first}, "positions.first_query", first, n);
    for (const auto first : {min_index, -far - 1, far - m + 2, max_index}) refusals({.first_key = first}, "positions.first_key", first, m);
    const std::array<index_t, 2> each{5, max_index};
    refusals({.first_query = std::span<const index_t>(each)}, "positions.first_query", max_index, n);
    refusals({.first_key = std::span<const index_t>(each)}, "positions.first_key", max_index, m);
}

} // namespace attn::testing
