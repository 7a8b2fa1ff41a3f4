#include "differences.hpp"
#include "draw_layout.hpp"
#include "gradient_checks.hpp"
#include "on_threads.hpp"
#include "others.hpp"
#include "stored.hpp"

#include <attn/attention/causal_backward.hpp>
#include <attn/reference/causal_convolution.hpp>

namespace attn::fuzz {

namespace {

/// What a causal convolution is, and reads.
template <Scalar T, class F>
struct causal_problem {
    tensor<T> x, state, weights;
    std::vector<T> bias;
    bool has_state;
    F activation;

    causal_problem(draw& random, const F& f) : bias(), has_state(random.one_in(2)), activation(f) {
        const bool is_large = random.one_in(8); // so that tokens are shared out to tasks, and sums come in parts
        const auto taps = random.number(2, 8), heads = random.number(1, 3), channels = is_large ? random.number(1, 40) : random.size(is_large ? 40 : 300);
        const auto number = [&] { return random.real(-1, 1); };
        x = filled<T>({random.number(0, 3), heads, is_large ? random.number(200, 3000) : random.number(0, 70), channels}, number);
        state = filled<T>({x.shape().batch, heads, taps - 1, channels}, number);
        weights = filled<T>({1, heads * channels, 1, taps}, number);
        bias.resize(static_cast<std::size_t>(random.number(0, 1) * heads * channels));
        std::ranges::generate(bias, [&] { return static_cast<T>(number()); });
    }
    causal_convolution<T, F> op(const stored_view<const T>& before, const stored_view<T>& after = {}) const { return {weights, bias, activation, before, after}; }
    causal_convolution<T, F> op() const { return op(first_state()); }
    tensor_view<const T> first_state() const { return has_state ? state.view() : tensor_view<const T>(); }
    index_t tokens() const { return x.shape().tokens; }
    /// Some tokens at a time: the ends of pieces.
    std::vector<index_t> cuts(draw& random) const {
        std::vector<index_t> ends{0};
        const auto most = random.one_in(3) ? 1 : random.one_in(2) ? 9 : tokens() + 1;
        while (ends.back() < tokens()) ends.push_back(std::min(tokens(), ends.back() + random.number(random.one_in(4) ? 0 : 1, most)));
        return ends;
    }
};

template <Scalar T>
struct convolved_tokens {
    tensor<T> values, state;

    template <class F>
    explicit convolved_tokens(const causal_problem<T, F>& p) : values(p.x.shape()), state(p.state.shape()) {
        convolve(p.op(p.first_state(), state), p.x, values);
    }
};

template <Scalar T, class F>
std::string broken_causal(draw& random, const causal_problem<T, F>& p, const convolved_tokens<T>& expected) {
    const auto x = bounded_copy<T>(p.x), state = bounded_copy<T>(p.state);
    tensor<bounded<T>> exact(p.x.shape()), kept(p.state.shape());
    reference::causal_convolution<bounded<T>, T>(x, p.has_state ? state.view() : tensor_view<const bounded<T>>(), p.weights, p.bias, p.activation, exact, kept);
    if (const auto problem = too_far(expected.values, exact); !problem.empty()) return problem;
    for (index_t e = 0; e < p.state.shape().size(); ++e)
        if (static_cast<double>(expected.state.data()[e]) != kept.data()[e].value()) return "the last state is another";

    testing::placed<T> from(p.x, draw_layout(random)), to(p.x.shape(), draw_layout(random)), weights(p.weights, draw_layout(random));
    testing::placed<T> held(p.has_state ? copy_of(p.state) : tensor<T>(p.state.shape()), draw_layout(random)), last(p.state.shape(), draw_layout(random));
    const bool in_place = random.one_in(2);
    workspace none;
    const auto threads = random.number(1, 4);
    const auto cuts = p.cuts(random);
    for (std::size_t piece = 1; piece < cuts.size(); ++piece) {
        const tensor_part part{.tokens = {cuts[piece - 1], cuts[piece] - cuts[piece - 1]}};
        auto &before = in_place || piece % 2 == 1 ? held : last, &after = in_place || piece % 2 == 0 ? held : last;
        on_threads(threads, none, [&](const execution& on) {
            auto op = p.op(before.view(), after.view());
            op.weights = weights.view();
            convolve(op, from.view().slice(part), to.view().slice(part), on);
        });
    }
    const bool is_held = in_place || cuts.size() % 2 == 1;
    for (auto* t : {&from, &to, &weights, &held, &last})
        if (!t->guards_intact()) return "wrote beside its output";
    if (const auto problem = other_bits(to.copy(), expected.values); !problem.empty()) return "in pieces: " + problem;
    if (const auto problem = other_bits((is_held ? held : last).copy(), expected.state); !problem.empty()) return "state of pieces: " + problem;

    // The pieces of one sequence, as a ragged batch.
    if (p.x.shape().batch != 1) return {};
    const shape states{std::ssize(cuts) - 1, p.x.shape().heads, p.state.shape().tokens, p.x.shape().channels};
    const auto first = filled<T>(states, [&] { return random.real(-1, 1); });
    tensor<T> ragged_values(p.x.shape()), ragged_states(states);
    on_threads(threads, none, [&](const execution& on) { convolve(p.op(first, ragged_states), ragged{cuts}, from.view(), ragged_values, on); });
    for (index_t e = 0; e < states.batch; ++e) {
        const tensor_part part{.tokens = {cuts[static_cast<std::size_t>(e)], cuts[static_cast<std::size_t>(e) + 1] - cuts[static_cast<std::size_t>(e)]}};
        const auto own = p.x.slice(part);
        tensor<T> values(own.shape()), state_of(p.state.shape());
        convolve(p.op(first.slice({.batch = {e, 1}}), state_of), own, values);
        bool same = true;
        attn::detail::for_each_number(own.shape(), [&](index_t b, index_t h, index_t i, index_t c) {
            same &= testing::same_bits(values(b, h, i, c), ragged_values(b, h, part.tokens.first + i, c));
        });
        attn::detail::for_each_number(state_of.shape(), [&](index_t b, index_t h, index_t i, index_t c) { same &= state_of(b, h, i, c) == ragged_states(e + b, h, i, c); });
        if (!same) return "other bits in a ragged batch";
    }
    return {};
}

/// What is stored in 16 bits is widened first, and rounded last.
template <class F>
std::string broken_storage(draw& random, const causal_problem<float, F>& p) {
    auto x = draw_stored(random, copy_of(p.x), draw_layout(random)), state = draw_stored(random, copy_of(p.state), draw_layout(random)),
         weights = draw_stored(random, copy_of(p.weights), draw_layout(random)), to = draw_room(random, p.x.shape(), draw_layout(random)),
         last = draw_room(random, p.state.shape(), draw_layout(random));
    tensor<float> values(p.x.shape()), kept(p.state.shape());
    auto op = p.op(state.wide, kept);
    op.weights = weights.wide;
    convolve(op, x.wide, values);
    workspace none;
    on_threads(random.number(1, 4), none, [&](const execution& on) {
        convolve(causal_convolution<float, F>{weights.view(), p.bias, p.activation, state.view(), last.view()}, x.view(), to.view(), on);
    });
    if (!x.guards_intact() || !state.guards_intact()) return "an input was written to";
    if (const auto problem = other_numbers(to, values); !problem.empty()) return "stored " + testing::name_of(x.format()) + " " + testing::name_of(to.format()) + ": " + problem;
    const auto problem = other_numbers(last, kept);
    return problem.empty() ? problem : "stored state: " + problem;
}

template <Scalar T, class F>
std::string broken_causal_gradient(draw& random, const causal_problem<T, F>& p) {
    const auto number = [&] { return random.real(-1, 1); };
    const auto d_out = filled<T>(p.x.shape(), number), d_last = filled<T>(p.state.shape(), number);
    const bool has_last = random.one_in(2);
    std::vector<defined_gradient<T>> defined;
    defined.push_back({"x", tensor<bounded<T>>(p.x.shape())});
    defined.push_back({"first state", tensor<bounded<T>>(p.state.shape())});
    defined.push_back({"weights", tensor<bounded<T>>(p.weights.shape())});
    if (!p.bias.empty()) defined.push_back({"bias", tensor<bounded<T>>({1, 1, 1, std::ssize(p.bias)}), lies::in_one_piece});
    const auto row = []<class U>(const tensor_view<U>& numbers) { return std::span<U>(numbers.data(), static_cast<std::size_t>(numbers.shape().size())); };
    const auto row_of = [&]<class U>(const U& all) { return all.size() > 3 ? row(all[3]) : decltype(row(all[0]))(); };
    const auto x = bounded_copy<T>(p.x), state = bounded_copy<T>(p.state), given = bounded_copy<T>(d_out), given_last = bounded_copy<T>(d_last);
    const auto shown = [](const tensor<bounded<T>>& t, bool is) { return is ? t.view() : tensor_view<const bounded<T>>(); };
    reference::causal_convolution_backward<bounded<T>, T>(x, shown(state, p.has_state), p.weights, p.bias, p.activation, given, shown(given_last, has_last), defined[0].exact,
                                                          defined[1].exact, defined[2].exact, defined.size() > 3 ? row(defined[3].exact.view()) : std::span<bounded<T>>());
    testing::placed<T> other_x(p.x, draw_layout(random)), other_d_out(d_out, draw_layout(random)), other_last(d_last, draw_layout(random));
    const auto problem = broken_gradient<T>(
        random, defined, [&](index_t threads) { return on_threads(threads, [&](const execution& on) { return backward_workspace_bytes(p.op(), p.x.shape(), on); }); },
        [&](const auto& wanted, bool elsewhere, const execution& on) {
            const tensor_view<const T> from = elsewhere ? other_x.view() : p.x.view(), of_out = elsewhere ? other_d_out.view() : d_out.view(),
                                       of_last = elsewhere ? other_last.view() : d_last.view();
            backward(p.op(), from, of_out, {wanted[0], wanted[2], row_of(wanted), wanted[1], has_last ? of_last : tensor_view<const T>()}, on);
        });
    if (!problem.empty()) return "gradient of the " + problem;

    // In pieces, from the last to the first, which need their states.
    tensor<T> whole(p.x.shape()), whole_first(p.state.shape()), in_pieces(p.x.shape()), carried = copy_of(d_last), state_gradient(p.state.shape());
    backward(p.op(), p.x, d_out, {.x = whole, .first_state = whole_first, .d_last_state = d_last});
    const auto cuts = p.cuts(random);
    for (auto piece = cuts.size() - 1; piece > 0; --piece) {
        const tensor_part before{.tokens = {0, cuts[piece - 1]}}, part{.tokens = {cuts[piece - 1], cuts[piece] - cuts[piece - 1]}};
        tensor<T> ignored({p.x.shape().batch, p.x.shape().heads, cuts[piece - 1], p.x.shape().channels}), own(p.state.shape());
        convolve(p.op(p.first_state(), own), p.x.slice(before), ignored);
        backward(p.op(own), p.x.slice(part), d_out.slice(part),
                 {.x = in_pieces.slice(part), .first_state = state_gradient, .d_last_state = carried});
        std::swap(carried, state_gradient);
    }
    if (const auto at = other_bits(in_pieces, whole); !at.empty()) return "gradient in pieces: " + at;
    if (const auto at = other_bits(carried, whole_first); !at.empty()) return "gradient of the first state, in pieces: " + at;
    return {};
}

template <Scalar T, class F>
outcome attempt_causal(draw& random, const F& activation, const char* name) {
    const causal_problem<T, F> p(random, activation);
    outcome result{joined(std::same_as<T, float> ? "float x " : "double x ", p.x.shape(), ", weights ", p.weights.shape(), p.bias.empty() ? "" : ", bias",
                          p.has_state ? ", state" : "", name), {}};
    const convolved_tokens<T> expected(p);
    result.problem = broken_causal(random, p, expected);
    if constexpr (std::same_as<T, float>)
        if (result.problem.empty()) result.problem = broken_storage(random, p);
    if (result.problem.empty()) result.problem = broken_causal_gradient(random, p);
    return result;
}

} // namespace

outcome check_causal_convolution(draw& random) {
    return in_drawn_numbers(random, [&]<Scalar T>(std::type_identity<T>) {
        if (random.one_in(2)) return attempt_causal<T>(random, identity_features{}, "");
        return attempt_causal<T>(random, silu{}, ", silu");
    });
}

} // namespace attn::fuzz
