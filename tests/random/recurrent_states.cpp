// Random programs on states of recurrent attention: sequences that go on and fork, beside one call of all of their tokens.
#include "differences.hpp"
#include "on_threads.hpp"
#include "others.hpp"
#include "recurrent_checks.hpp"
#include "stored.hpp"

#include <attn/cache/recurrent_state.hpp>

namespace attn::fuzz {

namespace {

template <Scalar T>
class recurrent_program {
public:
    recurrent_program(draw& random, testing::recurrent_rule kind, const testing::recurrent_sizes& size) : random_(random), kind_(kind), size_(size), decays_(random.number(0, 3)) {}

    outcome run() {
        std::vector<stated> all;
        const bool from_first = random_.one_in(2);
        all.push_back(begun(from_first));
        for (index_t steps = random_.number(2, 14); steps > 0; --steps) step(all);
        for (auto& s : all)
            if (problem_.empty()) check(s);
        return {name_, problem_};
    }

private:
    /// A state, the tokens that it is given, and what came of those that were queried.
    struct stated {
        testing::recurrent_tokens<T> tokens;
        recurrent_state<T> ours;
        tensor<T> values;
        std::vector<bool> queried;
        bool from_first = false;
    };

    testing::recurrent_tokens<T> tokens() {
        testing::recurrent_tokens<T> t(size_, static_cast<unsigned>(random_.number(1, 1 << 20)));
        for (index_t e = 0; e < t.log_decay.shape().size(); ++e) t.log_decay.data()[e] = static_cast<T>(draw_log_decay(random_, decays_));
        return t;
    }
    tensor<T> room() const { return tensor<T>({size_.batch, size_.heads, size_.tokens, size_.value_dim}); }
    stated begun(bool from_first) {
        if (from_first) say("begin with a state");
        auto t = tokens();
        auto state = from_first ? recurrent_state<T>(t.first_state) : recurrent_state<T>(size_.state());
        return {std::move(t), std::move(state), room(), std::vector<bool>(static_cast<std::size_t>(size_.tokens)), from_first};
    }
    void step(std::vector<stated>& all) {
        auto& s = all[static_cast<std::size_t>(random_.number(0, std::ssize(all) - 1))];
        if (!random_.one_in(5)) return take(s);
        say("fork");
        auto other = forked(s);
        if (std::ssize(all) < 3) all.push_back(std::move(other));
        else all[static_cast<std::size_t>(random_.number(0, 2))] = std::move(other);
    }
    /// One that has the same tokens so far, and others behind them.
    stated forked(const stated& s) {
        const auto size = s.ours.size();
        stated other{tokens(), s.ours.fork(), copy_of(s.values), s.queried, s.from_first};
        const auto keep = [&](tensor<T>& to, const tensor<T>& from) {
            attn::detail::for_each_number(to.shape(), [&](index_t b, index_t h, index_t i, index_t c) {
                if (i < size) to(b, h, i, c) = from(b, h, i, c);
            });
        };
        keep(other.tokens.queries, s.tokens.queries), keep(other.tokens.keys, s.tokens.keys), keep(other.tokens.values, s.tokens.values);
        keep(other.tokens.log_decay, s.tokens.log_decay), keep(other.tokens.beta, s.tokens.beta);
        keep(other.tokens.a, s.tokens.a), keep(other.tokens.b, s.tokens.b);
        other.tokens.first_state = copy_of(s.tokens.first_state);
        return other;
    }
    /// Some rows as a caller may have them, which the tokens then are.
    auto stored_rows(tensor<T>& all, index_t first, index_t count) {
        const auto& s = all.shape();
        tensor<T> rows({s.batch, s.heads, count, s.channels});
        attn::detail::for_each_number(rows.shape(), [&](index_t b, index_t h, index_t i, index_t c) { rows(b, h, i, c) = all(b, h, first + i, c); });
        if constexpr (std::same_as<T, float>) {
            auto stored = in_any_format(random_, std::move(rows), draw_layout(random_));
            attn::detail::for_each_number(stored.wide.shape(), [&](index_t b, index_t h, index_t i, index_t c) { all(b, h, first + i, c) = stored.wide(b, h, i, c); });
            return stored;
        } else {
            return testing::placed<T>(rows, draw_layout(random_));
        }
    }
    /// Takes the next tokens, mostly with their queries.
    void take(stated& s) {
        const auto first = s.ours.size(), count = random_.number(0, std::min<index_t>(size_.tokens - first, random_.one_in(2) ? 3 : random_.one_in(2) ? 18 : 150));
        const bool queried = !random_.one_in(4);
        say((queried ? "attend " : "append ") + std::to_string(count));
        auto q = stored_rows(s.tokens.queries, first, count), k = stored_rows(s.tokens.keys, first, count), v = stored_rows(s.tokens.values, first, count);
        testing::placed<T> out(shape{size_.batch, size_.heads, count, size_.value_dim}, draw_layout(random_));
        s.tokens.with_rule(kind_, {first, count}, [&](const auto& op) {
            on_threads(random_.number(1, 4), [&](const execution& run) {
                if (queried) attn::attend(op, inputs<T>{q.view(), k.view(), v.view()}, outputs<T>{out.view()}, s.ours, run);
                else s.ours.append(op, k.view(), v.view(), run);
            });
        });
        if (!out.guards_intact()) problem_ = "wrote beside its output";
        if (s.ours.size() != first + count) problem_ = "has taken another number of tokens";
        const auto result = out.copy();
        attn::detail::for_each_number(result.shape(), [&](index_t b, index_t h, index_t i, index_t c) { s.values(b, h, first + i, c) = result(b, h, i, c); });
        std::fill_n(s.queried.begin() + static_cast<std::ptrdiff_t>(first), count, queried);
    }
    void check(stated& s) {
        const auto size = s.ours.size();
        tensor<T> expected({size_.batch, size_.heads, size, size_.value_dim}), ours(expected.shape()), last(size_.state());
        s.tokens.with_rule(kind_, {0, size}, [&](auto op) {
            if (s.from_first) op.first_state = s.tokens.first_state;
            op.last_state = last;
            attn::attend(op, s.tokens.in({0, size}), outputs<T>{expected});
        });
        attn::detail::for_each_number(ours.shape(), [&](index_t b, index_t h, index_t i, index_t c) {
            ours(b, h, i, c) = s.queried[static_cast<std::size_t>(i)] ? s.values(b, h, i, c) : expected(b, h, i, c);
        });
        problem_ = other_bits(ours, expected);
        if (problem_.empty())
            if (problem_ = other_bits(s.ours.sums(), last); !problem_.empty()) problem_ = "sums " + problem_;
    }
    void say(const std::string& what) { name_ += " " + what + ","; }

    draw& random_;
    testing::recurrent_rule kind_;
    testing::recurrent_sizes size_;
    index_t decays_;
    std::string name_, problem_;
};

} // namespace

outcome check_recurrent_state(draw& random) {
    return in_drawn_numbers(random, [&]<Scalar T>(std::type_identity<T>) -> outcome {
        testing::recurrent_sizes size{.batch = random.number(1, 2), .kv_heads = random.number(1, 3), .tokens = random.number(1, random.one_in(3) ? 300 : 60)};
        const auto channels = [&](index_t least) { return random.number(least, random.one_in(3) ? 140 : 20); };
        size.heads = size.kv_heads * random.number(1, random.one_in(4) ? 9 : 2);
        size.key_dim = channels(1), size.value_dim = channels(0);
        size.by_channel = random.one_in(2), size.one_batch = random.one_in(2), size.one_head = random.one_in(2);
        const auto [kind, name] = testing::all_rules[static_cast<std::size_t>(random.number(0, std::ssize(testing::all_rules) - 1))];
        const auto of = (std::same_as<T, float> ? "float; " : "double; ") + (name + (": " + describe(size))) + ";";
        const auto run = [&] {
            auto result = recurrent_program<T>(random, kind, size).run();
            result.name = of + result.name;
            return result;
        };
        return attn::detail::try_catch<std::exception>(run, [&](const std::exception& e) { return outcome{of, threw(e)}; });
    });
}

} // namespace attn::fuzz
