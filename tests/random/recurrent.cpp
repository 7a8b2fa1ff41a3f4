// Problems of recurrent attention: every rule against its definition, with decays of any size.
#include "differences.hpp"
#include "others.hpp"
#include "recurrent_checks.hpp"

#include <attn/attention/recurrent_backward.hpp>

namespace attn::fuzz {

namespace {

using testing::recurrent_rule;
using enum testing::recurrent_rule;

/// What a rule takes of each token, and the state that it begins with.
template <Scalar T>
struct drawn_terms {
    recurrent_rule kind = linear;
    tensor<T> log_decay, beta, a, b, first_state;
    bool by_channel = false, from_first = false;
    bool along_b = false; ///< a is b times a number of 0 .. 1
    std::optional<double> scale;
};

/// Those of all batch entries and heads, or of one of each.
template <Scalar T>
struct some_terms {
    std::shared_ptr<const drawn_terms<T>> all;
    index_t batch = -1, head = -1;

    tensor_view<const T> of(const tensor<T>& t) const {
        if (batch < 0) return t.view();
        return t.slice({.batch = {t.shape().batch == 1 ? 0 : batch, 1}, .heads = {t.shape().heads == 1 ? 0 : head, 1}});
    }
    tensor_view<const T> first_state() const { return all->from_first ? of(all->first_state) : tensor_view<const T>(); }
    /// As the definition takes them, in S: f(terms, first state).
    template <class S, class F>
    void with_definition(const F& f) const {
        const auto in_numbers = [&](bool taken, const tensor<T>& t) {
            if (!taken) return tensor<S>();
            const auto from = of(t);
            tensor<S> to(from.shape());
            attn::detail::for_each_number(from.shape(), [&](index_t n, index_t h, index_t i, index_t c) { to(n, h, i, c) = S(from(n, h, i, c)); });
            return to;
        };
        const auto kind = all->kind;
        const auto g = in_numbers(kind == gated || kind == gated_delta || kind == general, all->log_decay), beta = in_numbers(kind == delta || kind == gated_delta, all->beta),
                   a = in_numbers(kind == general, all->a), b = in_numbers(kind == general, all->b), first = in_numbers(all->from_first, all->first_state);
        const auto view = [](const tensor<S>& t) { return t.data() ? t.view() : tensor_view<const S>(); };
        f(reference::recurrent_terms<S>{view(g), view(beta), view(a), view(b)}, view(first));
    }
    double scale(index_t key_dim) const { return all->scale.value_or(1 / std::sqrt(static_cast<double>(key_dim))); }
};

double length_of(index_t count, const auto& number) {
    double squares = 0;
    for (index_t c = 0; c < count; ++c) squares += number(c) * number(c);
    return std::sqrt(squares);
}

/// How wrong results may be where a state is corrected by what it holds. Magnitudes alone would grow with every token, but no token makes an
/// error of a column of S longer than by
///     |E - beta k (E k)^T| <= max E max(1, |beta |k|^2 - 1|),      |E - a b^T| <= max E + |a| |b|,      or max(max E, |a| |b|) of a along b,
/// so that errors add up, of each token's correction and of each sum at a border of 16 tokens: `unit` times the number of its terms, times
///     |S_border| + sum over j since then of |k_j| |z_j| + |a_j| |y_j|
template <Scalar T>
class error_of_states {
public:
    error_of_states(const inputs<double>& in, const reference::recurrent_terms<double>& terms, const tensor_view<const double>& first, double scale, bool along_b,
                    const tensor_view<double>& bounds)
        : in_(in), terms_(terms), scale_(std::abs(scale)), along_b_(along_b), bounds_(bounds), d_k_(in.keys.shape().channels), d_v_(in.values.shape().channels),
          rounding_(unit_of<T> * static_cast<double>(d_k_ + 120)) {
        for (index_t b = 0; b < in.keys.shape().batch; ++b)
            for (index_t g = 0; g < in.keys.shape().heads; ++g) bound(b, g, first);
    }

private:
    void bound(index_t b, index_t g, const tensor_view<const double>& first) {
        const auto numbers = static_cast<std::size_t>(d_v_);
        std::vector<double> state(static_cast<std::size_t>(d_k_ * d_v_)), error(numbers), held(numbers), read(numbers);
        const auto s = [&](index_t c, index_t n) -> double& { return state[static_cast<std::size_t>(c * d_v_ + n)]; };
        const auto column = [&](index_t n) { return length_of(d_k_, [&](index_t c) { return s(c, n); }); };
        if (first.data())
            attn::detail::for_each_number({1, 1, d_k_, d_v_}, [&](index_t, index_t, index_t c, index_t n) { s(c, n) = first(b, g, c, n); });
        for (index_t n = 0; n < d_v_; ++n) held[static_cast<std::size_t>(n)] = column(n);
        const auto term = [&](const tensor_view<const double>& of, index_t i, index_t c) { return reference::recurrent_terms<double>::at(of, b, g, i, c); };
        const auto [batch, heads, tokens, channels] = in_.queries.shape();
        const auto group = heads / in_.keys.shape().heads;
        for (index_t i = 0; i < tokens; ++i) {
            const auto key = length_of(d_k_, [&](index_t c) { return in_.keys(b, g, i, c); });
            double decay = terms_.log_decay.data() ? 0 : 1;
            for (index_t c = 0; terms_.log_decay.data() && c < d_k_; ++c) decay = std::max(decay, std::exp(term(terms_.log_decay, i, c)));
            const bool erases = terms_.b.data() != nullptr;
            const auto a = erases ? length_of(d_k_, [&](index_t c) { return term(terms_.a, i, c); }) : 0;
            const auto b_length = erases ? length_of(d_k_, [&](index_t c) { return term(terms_.b, i, c); }) : 0;
            const auto beta = terms_.beta.data() ? term(terms_.beta, i, 0) : 0;
            const auto growth = erases ? (along_b_ ? std::max(decay, a * b_length) : decay + a * b_length) : decay * std::max(1.0, beta * key * key - 1);
            // What the token reads, which it is corrected by: S^T b, or (E S)^T k.
            for (index_t n = 0; n < d_v_; ++n) {
                double y = 0;
                for (index_t c = 0; c < d_k_; ++c)
                    y += erases ? term(terms_.b, i, c) * s(c, n)
                                : in_.keys(b, g, i, c) * s(c, n) * (terms_.log_decay.data() ? std::exp(term(terms_.log_decay, i, c)) : 1);
                read[static_cast<std::size_t>(n)] = std::abs(y);
            }
            std::vector<double> before = held;
            reference::recurrent_step<double>(terms_, in_, b, g, i, state);
            for (index_t n = 0; n < d_v_; ++n) {
                const auto at = static_cast<std::size_t>(n);
                const auto value = std::abs(in_.values(b, g, i, n)), z = terms_.beta.data() ? beta * (value + read[at]) : value;
                const auto wrong = rounding_ * (erases ? a * b_length * before[at] : key * beta * (key * decay * before[at] + value));
                held[at] = decay * held[at] + key * z + a * read[at] + least;
                error[at] = growth * error[at] + wrong + least * (1 + before[at]);
                for (index_t h = g * group; h < (g + 1) * group; ++h) {
                    const auto query = length_of(d_k_, [&](index_t c) { return in_.queries(b, h, i, c); });
                    bounds_(b, h, i, n) = 2 * scale_ * query * (error[at] + rounding_ * held[at]) + least;
                }
                if (i % 16 == 15) {
                    error[at] += rounding_ * held[at];
                    held[at] = column(n) + error[at];
                }
            }
        }
    }

    static constexpr double least = 64 * static_cast<double>(std::numeric_limits<T>::min());
    const inputs<double>& in_;
    const reference::recurrent_terms<double>& terms_;
    double scale_;
    bool along_b_;
    tensor_view<double> bounds_;
    index_t d_k_, d_v_;
    double rounding_;
};

/// Recurrent attention with terms: what is asked of it whatever its rule is.
template <Scalar T>
class recurrent_with_terms : public operation<T> {
public:
    recurrent_with_terms(const Attention auto& op, const some_terms<T>& terms) : operation<T>(op), terms_(terms) {
        const auto of = op.rule.terms();
        parameters_ = {of.log_decay, of.beta, of.erase, of.read, op.first_state};
    }

    void reference(const inputs<double>& in, const outputs<double>& out) const override { define(in, out); }
    void bounds(const inputs<double>& in, const outputs<double>& bounds) const override {
        if (terms_.all->kind == linear || terms_.all->kind == gated)
            return write_bounds<T>(in, bounds, [&](const auto& known, const auto& out) { define(known, out); }, 2);
        terms_.template with_definition<double>([&](const auto& defined, const auto& first) {
            error_of_states<T>(in, defined, first, terms_.scale(in.keys.shape().channels), terms_.all->along_b, bounds.values.numbers());
        });
    }
    std::vector<shape> parameter_shapes(const input_shapes&) const override {
        std::vector<shape> shapes;
        for (const auto& view : parameters_)
            if (view.data()) shapes.push_back(view.shape());
        return shapes;
    }
    void reference_gradients(const inputs<bounded<T>>& in, const output_gradients<bounded<T>>& given, const testing::wanted_gradients<bounded<T>>& wanted) const override {
        terms_.template with_definition<bounded<T>>([&](const auto& defined, const auto& first) {
            reference::recurrent_gradients_of<bounded<T>>(defined, terms_.scale(in.keys.shape().channels), in, given.values, named(wanted), first);
        });
    }

protected:
    template <class S>
    recurrent_gradients<S> named(const testing::wanted_gradients<S>& all) const {
        recurrent_gradients<S> wanted;
        static_cast<input_gradients<S>&>(wanted) = all;
        tensor_view<S>* const to[] = {&wanted.log_decay, &wanted.beta, &wanted.a, &wanted.b, &wanted.first_state};
        std::size_t there = 0;
        for (std::size_t number = 0; number < parameters_.size(); ++number)
            if (parameters_[number].data()) *to[number] = all.parameter(there++);
        return wanted;
    }

private:
    template <class S>
    void define(const inputs<S>& in, const outputs<S>& out) const {
        terms_.template with_definition<S>([&](const auto& defined, const auto& first) {
            reference::recurrent_attention<S>(defined, terms_.scale(in.keys.shape().channels), in, out, first);
        });
    }

    some_terms<T> terms_;
    std::array<tensor_view<const T>, 5> parameters_;
};

template <Scalar T, class Rule>
class recurrent_operation final : public operation_of<T, recurrent_attention<Rule>, recurrent_with_terms<T>> {
public:
    using recurrent_operation::operation_of::operation_of;

private:
    recurrent_gradients<T> gradients(const testing::wanted_gradients<T>& wanted) const override { return this->named(wanted); }
};

template <Scalar T>
any_operation<T> recurrent_of(const some_terms<T>& terms) {
    const auto& all = *terms.all;
    const auto with = [&]<class Rule>(const Rule& rule) -> any_operation<T> {
        return std::make_unique<recurrent_operation<T, Rule>>(recurrent_attention<Rule>{.rule = rule, .scale = all.scale, .first_state = terms.first_state()}, terms);
    };
    switch (all.kind) {
    case gated:
        return with(rule::gated<T>{terms.of(all.log_decay)});
    case delta:
        return with(rule::delta<T>{terms.of(all.beta)});
    case gated_delta:
        return with(rule::gated_delta<T>{terms.of(all.log_decay), terms.of(all.beta)});
    case general:
        return with(rule::general<T>{terms.of(all.log_decay), terms.of(all.a), terms.of(all.b)});
    default:
        return with(rule::linear<T>{});
    }
}

} // namespace

/// Log decays of a few percent, of e or so, or mixed with those that leave nothing and all.
double draw_log_decay(draw& random, index_t kind) {
    static constexpr double mixed[] = {0, 0, -1e-9, -1e-3, -0.7, -5, -50, -90, -1e4, -std::numeric_limits<double>::infinity()};
    return kind == 0 ? random.real(-0.1, 0) : kind == 1 ? random.real(-2, 0) : kind == 2 && !random.one_in(4) ? random.real(-0.5, 0) : random.one_of(mixed);
}

template <Scalar T>
trial<T> draw_recurrent(draw& random) {
    trial<T> t;
    t.size = draw_sizes(random);
    auto& s = t.size;
    s.queries = random.size(random.one_in(4) ? 300 : 70);
    s.key_dim = random.number(1, random.one_in(3) ? 140 : 20);
    s.value_dim = random.number(random.one_in(20) ? 0 : 1, random.one_in(3) ? 140 : 20);
    const double limit = random.one_in(30) ? 2e7 : 1e6;
    while (static_cast<double>(s.batch * s.heads * s.queries * s.key_dim) * static_cast<double>(s.value_dim + 1) > limit)
        (random.one_in(2) ? s.key_dim : s.queries) /= 2, s.key_dim = std::max<index_t>(1, s.key_dim);
    s.keys = s.queries;
    draw_positions(random, s);
    s.first_key = s.first_query;
    t.in = draw_given<T>(random, s, numbers::usual);
    for (index_t e = 0; e < t.in.keys.shape().size(); ++e) t.in.keys.data()[e] *= static_cast<T>(0.5 / std::sqrt(static_cast<double>(s.key_dim))); // at most of length 1

    auto all = std::make_shared<drawn_terms<T>>();
    static constexpr recurrent_rule kinds[] = {linear, gated, delta, gated_delta, general};
    all->kind = random.one_of(kinds);
    all->by_channel = random.one_in(2);
    all->from_first = random.one_in(2);
    all->along_b = random.one_in(2);
    if (random.one_in(3)) all->scale = random.real(-1, 1);
    const auto term = [&](index_t channels) { return shape{random.one_in(3) ? 1 : s.batch, random.one_in(3) ? 1 : s.kv_heads, s.keys, channels}; };
    const auto decays = random.number(0, 3);
    const auto longest_beta = random.one_in(2) ? 1.0 : 2.0, length = 1 / std::sqrt(static_cast<double>(s.key_dim));
    all->log_decay = filled<T>(term(all->by_channel ? s.key_dim : 1), [&] { return draw_log_decay(random, decays); });
    all->beta = filled<T>(term(1), [&] { return random.real(0, longest_beta); });
    all->b = filled<T>(term(s.key_dim), [&] { return random.real(-length, length); });
    all->a = filled<T>(all->along_b ? all->b.shape() : term(s.key_dim), [&] { return random.real(-length, length); });
    if (all->along_b)
        for (index_t row = 0; row < all->b.shape().size() / s.key_dim; ++row) {
            const auto part = static_cast<T>(random.real(0, 1));
            for (index_t c = 0; c < s.key_dim; ++c) all->a.data()[row * s.key_dim + c] = part * all->b.data()[row * s.key_dim + c];
        }
    all->first_state = filled<T>({s.batch, s.kv_heads, s.key_dim, s.value_dim}, [&] { return random.real(-2, 2); });

    for (const auto [kind, name] : testing::all_rules)
        if (kind == all->kind) t.name = name;
    t.name += joined(all->by_channel ? ", by channel" : "", ", decays of kind ", decays, all->from_first ? ", from a state" : "", ", terms of ", all->log_decay.shape(),
                     all->beta.shape(), all->a.shape(), all->b.shape());
    t.op = recurrent_of<T>({all});
    t.has_gradient = s.queries * s.key_dim * s.value_dim <= 40'000; // whose definition keeps all states
    t.part = [all](index_t b, index_t g) { return recurrent_of<T>({all, b, g}); };
    t.cuts.unit = std::max<index_t>(1, s.queries);
    t.keys_stand_alone = false;
    return t;
}

outcome check_recurrent(draw& random) {
    return check_trial(random, [&]<Scalar T>(std::type_identity<T>) { return draw_recurrent<T>(random); });
}

} // namespace attn::fuzz
