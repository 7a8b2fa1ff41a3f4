// Random programs on states of linear attention: sequences that grow, fork and lose drafts, beside all of their tokens.
#include "differences.hpp"
#include "on_threads.hpp"
#include "others.hpp"
#include "stored.hpp"

#include <attn/attention/linear_attention.hpp>
#include <attn/attention/simplified_linear_attention.hpp>
#include <attn/cache/linear_state.hpp>

namespace attn::fuzz {

namespace {

struct squares_and_one {
    template <class S>
    S operator()(S x) const {
        return x * x + S(1);
    }
};

/// What a program is drawn with.
struct state_sizes {
    state_layout of;
    index_t heads = 0, tokens = 0; ///< at most so many tokens
};

/// One program.
template <Scalar T, class Op>
class state_program {
public:
    state_program(draw& random, const Op& op, const state_sizes& size) : random_(random), op_(op), size_(size) {}

    outcome run() {
        std::vector<stated> all;
        all.push_back({linear_state<T>(op_, size_.of), rows(size_.heads, size_.of.key_channels),
                       rows(size_.of.kv_heads, size_.of.key_channels), rows(size_.of.kv_heads, size_.of.value_channels)});
        for (index_t steps = random_.number(2, 16); steps > 0 && problem_.empty(); --steps) step(all);
        return {name_, problem_};
    }

private:
    /// A state, and what it has been given, with room for all; queries beside it.
    struct stated {
        linear_state<T> ours;
        tensor<T> queries, keys, values;
        index_t last = 0; ///< where the last append began, or where later ones were dropped
    };

    tensor<T> rows(index_t heads, index_t channels) const { return tensor<T>({1, heads, size_.tokens, channels}); }
    static tensor<T> copy_of(const tensor<T>& t) {
        tensor<T> copy(t.shape());
        std::copy_n(t.data(), t.shape().size(), copy.data());
        return copy;
    }
    void step(std::vector<stated>& all) {
        auto& s = all[static_cast<std::size_t>(random_.number(0, std::ssize(all) - 1))];
        switch (random_.number(0, 10)) {
        default:
            return append(s);
        case 6: {
            say("fork");
            stated other{s.ours.fork(), copy_of(s.queries), copy_of(s.keys), copy_of(s.values), s.last};
            if (std::ssize(all) < 3) all.push_back(std::move(other));
            else all[static_cast<std::size_t>(random_.number(0, 2))] = std::move(other);
            return;
        }
        case 7:
            return truncate(s);
        case 8:
            return attend_to(s);
        case 9:
            return attend_to_all(all);
        }
    }
    /// Appends tokens, in any layout and format, and mostly attends with their queries.
    void append(stated& s) {
        const auto first = s.ours.size(), count = random_.number(0, std::min<index_t>(size_.tokens - first, random_.one_in(3) ? 1 : 200));
        say("append " + std::to_string(count));
        if (count > 0) s.last = first;
        const auto new_rows = [&](tensor<T>& to) {
            const auto from = filled<T>({1, to.shape().heads, count, to.shape().channels}, [&] { return random_.real(-2, 2); });
            if constexpr (std::same_as<T, float>) return in_any_format(random_, copy_of(from), draw_layout(random_));
            else return testing::placed<T>(from, draw_layout(random_));
        };
        const auto remember = [&](const auto& from, tensor<T>& to) {
            attn::detail::for_each_number(from.shape(),
                                          [&](index_t, index_t h, index_t i, index_t c) { to(0, h, first + i, c) = from(0, h, i, c); });
        };
        auto k = new_rows(s.keys), v = new_rows(s.values);
        if constexpr (std::same_as<T, float>) remember(k.wide, s.keys), remember(v.wide, s.values);
        else remember(k.copy(), s.keys), remember(v.copy(), s.values);
        remember(filled<T>({1, size_.heads, count, size_.of.key_channels}, [&] { return random_.real(-2, 2); }), s.queries);
        on_threads(random_.number(1, 4), [&](const execution& run) { s.ours.append(k.view(), v.view(), run); });
        if (!random_.one_in(4)) attend_to(s);
    }
    void truncate(stated& s) {
        const auto tokens = random_.one_in(5) ? 0 : random_.number(random_.one_in(2) ? s.last : 0, s.ours.size()), before = s.ours.size();
        say("truncate " + std::to_string(tokens));
        try {
            s.ours.truncate(tokens);
            s.last = std::min(s.last, tokens);
        } catch (const argument_error&) {
            say("(refused)");
            if (tokens == 0 || tokens >= s.last) problem_ = "tokens of the last append were not dropped";
            if (s.ours.size() != before) problem_ = "a refused truncate changed something";
        }
    }
    void attend_to(const stated& s) {
        const auto size = s.ours.size(), count = random_.number(0, random_.one_in(2) ? std::min<index_t>(size - s.last, 3) : size - s.last);
        say("attend with " + std::to_string(count));
        const tensor_part asked{.tokens = {size - count, count}}, there{.tokens = {0, size}};
        auto ours = testing::no_answer<T>({1, size_.heads, count, size_.of.value_channels}, false);
        on_threads(random_.number(1, 4),
                   [&](const execution& run) { attend(op_, s.queries.slice(asked), s.ours, ours.out(), run); });
        const auto exact = attend(op_, inputs<T>{s.queries.slice(there), s.keys.slice(there), s.values.slice(there)});
        tensor<T> expected(ours.values.shape());
        attn::detail::for_each_number(
            expected.shape(), [&](index_t, index_t h, index_t i, index_t c) { expected(0, h, i, c) = exact(0, h, size - count + i, c); });
        if (problem_.empty()) problem_ = other_bits(ours.values, expected);
    }
    /// All states in one call, each with queries of its last append.
    void attend_to_all(const std::vector<stated>& all) {
        std::vector<const linear_state<T>*> each;
        std::vector<index_t> starts{0};
        for (const auto& s : all) {
            each.push_back(&s.ours);
            starts.push_back(starts.back() + random_.number(0, s.ours.size() - s.last));
        }
        say("attend to all with " + std::to_string(starts.back()));
        tensor<T> queries({1, size_.heads, starts.back(), size_.of.key_channels});
        const shape of_all{1, size_.heads, starts.back(), size_.of.value_channels};
        auto ours = testing::no_answer<T>(of_all, false), alone = testing::no_answer<T>(of_all, false);
        for (std::size_t e = 0; e < all.size(); ++e) {
            const auto& of = all[e];
            const row_range rows{starts[e], starts[e + 1] - starts[e]}, asked{of.ours.size() - rows.count, rows.count};
            const auto from = of.queries.slice({.tokens = asked});
            attn::detail::for_each_number(
                from.shape(), [&](index_t, index_t h, index_t i, index_t c) { queries(0, h, rows.first + i, c) = from(0, h, i, c); });
            attend(op_, queries.slice({.tokens = rows}), of.ours, alone.out().slice({.tokens = rows}));
        }
        on_threads(random_.number(1, 4),
                   [&](const execution& run) { attend(op_, queries, linear_state_batch<T>{each, starts}, ours.out(), run); });
        if (problem_.empty()) problem_ = other_bits(ours.values, alone.values);
    }
    void say(const std::string& what) { name_ += " " + what + ","; }

    draw& random_;
    const Op& op_;
    state_sizes size_;
    std::string name_, problem_;
};

template <Scalar T>
outcome check_state_of(draw& random) {
    state_sizes size;
    const auto channels = [&](index_t least) { return random.number(least, random.one_in(3) ? 140 : 12); };
    size.of = {.kv_heads = random.number(1, 3), .key_channels = channels(1), .value_channels = channels(0)};
    size.heads = size.of.kv_heads * random.number(1, 3);
    size.tokens = random.number(1, 700);
    const auto width = random.number(1, random.one_in(4) ? 90 : 5);
    const auto kernel =
        filled<T>({random.one_in(2) ? size.heads : 1, size.of.value_channels, 1, width}, [&] { return random.real(-1, 1); });
    std::vector<T> bias(static_cast<std::size_t>(random.one_in(2) ? size.of.value_channels : 0), T(0.5));
    const auto kind = random.number(0, 5);
    const auto check = [&](const char* what, const auto& op) {
        auto result = state_program<T, std::remove_cvref_t<decltype(op)>>(random, op, size).run();
        result.name = (std::same_as<T, float> ? "float; " : "double; ") + std::to_string(size.heads) + " heads of " +
                      std::to_string(size.of.kv_heads) + ", channels " + std::to_string(size.of.key_channels) + " and " +
                      std::to_string(size.of.value_channels) + "; " + what + ";" + result.name;
        return result;
    };
    switch (kind) {
    case 0:
        return check("elu + 1", linear_attention<elu_plus_one, causal>{});
    case 1:
        return check("squares + 1", linear_attention<squares_and_one, causal>{.eps = 0.5});
    case 2:
        return check("identity, not normalised", linear_attention<identity_features, causal>{.normalise = false, .scale = 0.5});
    case 3:
        return check("simplified", simplified_linear_attention<causal, T>{});
    default:
        return check(("simplified, " + std::to_string(width) + " taps").c_str(),
                     simplified_linear_attention<causal, T>{.convolution = {.weights = kernel, .bias = bias, .causal = true}});
    }
}

} // namespace

outcome check_linear_state(draw& random) {
    return in_drawn_numbers(random, [&]<Scalar T>(std::type_identity<T>) -> outcome {
        try {
            return check_state_of<T>(random);
        } catch (const std::exception& e) { return {"a state of linear attention", threw(e)}; }
    });
}

} // namespace attn::fuzz
