// Recurrent attention by each of its rules, on sequences whose tokens are queries and keys.
#include "linear_case.hpp"

#include "attn/attention/recurrent_backward.hpp"
#include "attn/reference/recurrent_attention.hpp"

namespace attn::testing {

namespace {

/// Numbers of each token, random: log decays in (-1, 0); of keys whose numbers lie in -2 .. 2, beta |k|^2 is 1/2 on average; b has a length of 1
/// or so, and a is a part of it.
template <Scalar T>
struct recurrent_numbers {
    tensor<T> log_decay, channel_decay, beta, a, b, first_state;

    explicit recurrent_numbers(const problem& p)
        : log_decay(random_tensor<T>({1, p.kv_heads, p.keys, 1}, 11, T(0.5))), channel_decay(random_tensor<T>({p.batch, p.kv_heads, p.keys, p.key_dim}, 12, T(0.5))),
          beta(random_tensor<T>({p.batch, 1, p.keys, 1}, 13, T(0.5))), a({p.batch, p.kv_heads, p.keys, p.key_dim}),
          b(random_tensor<T>(a.shape(), 14, unit_limit<T> / static_cast<T>(std::sqrt(static_cast<double>(p.key_dim))))),
          first_state(random_tensor<T>({p.batch, p.kv_heads, p.key_dim, p.value_dim}, 15)) {
        for (auto* t : {&log_decay, &channel_decay}) std::transform(t->data(), t->data() + t->shape().size(), t->data(), [](T x) { return x - T(0.5); });
        const auto part = random_tensor<T>({p.batch, p.kv_heads, p.keys, 1}, 16, T(0.5));
        for (index_t e = 0; e < a.shape().size(); ++e) a.data()[e] = (part.data()[e / p.key_dim] + T(0.5)) * b.data()[e];
        for (index_t e = 0; e < beta.shape().size(); ++e) beta.data()[e] = (beta.data()[e] + T(0.5)) * T(0.75) / static_cast<T>(p.key_dim);
    }
};

/// Numbers of T as those of S.
template <Scalar S, Scalar T>
tensor<S> in_numbers(const tensor_view<const T>& from) {
    if (!from.data()) return {};
    tensor<S> to(from.shape());
    detail::for_each_number(from.shape(), [&](index_t b, index_t h, index_t i, index_t c) { to(b, h, i, c) = static_cast<S>(from(b, h, i, c)); });
    return to;
}

/// What an operator refers to that has a gradient; without memory what it has not.
template <class Op>
auto recurrent_parameters(const Op& op) {
    const auto terms = op.rule.terms();
    return std::array{terms.log_decay, terms.beta, terms.erase, terms.read, op.first_state};
}
/// Gradients of what it has, as the operator takes them.
template <Scalar T, class Op>
recurrent_gradients<T> recurrent_wanted(const Op& op, const wanted_gradients<T>& all) {
    recurrent_gradients<T> g;
    static_cast<input_gradients<T>&>(g) = all;
    tensor_view<T>* const to[] = {&g.log_decay, &g.beta, &g.a, &g.b, &g.first_state};
    std::size_t number = 0, there = 0;
    for (const auto& view : recurrent_parameters(op)) {
        if (view.data()) *to[number] = all.parameter(there++);
        ++number;
    }
    return g;
}

/// A rule and its definition, with gradients.
template <class Made, class Gradients>
class recurrent_with_gradients : public Made {
public:
    Gradients gradients;

    recurrent_with_gradients(Made made, Gradients of) : Made(std::move(made)), gradients(std::move(of)) {}

    std::vector<shape> parameter_shapes() const {
        std::vector<shape> shapes;
        for (const auto& view : recurrent_parameters(this->op))
            if (view.data()) shapes.push_back(view.shape());
        return shapes;
    }
    template <Scalar T>
    recurrent_gradients<T> wanted(const wanted_gradients<T>& all) const {
        return recurrent_wanted(this->op, all);
    }
    /// Nothing cancels by the formula.
    std::vector<double> terms(const inputs<double>&, const tensor_view<const double>&) const { return {}; }
};

/// f(what the definition takes of the rule, the first state), in numbers of S.
template <Scalar S, class Op>
void with_terms(const Op& op, const auto& f) {
    const auto terms = op.rule.terms();
    const auto log_decay = in_numbers<S>(terms.log_decay), beta = in_numbers<S>(terms.beta), a = in_numbers<S>(terms.erase), b = in_numbers<S>(terms.read),
               first = in_numbers<S>(op.first_state);
    const auto view = [](const tensor<S>& t) { return t.data() ? t.view() : tensor_view<const S>(); };
    f(reference::recurrent_terms<S>{view(log_decay), view(beta), view(a), view(b)}, view(first));
}

template <Scalar T, class Op>
auto recurrent_with_definition(const problem& p, const Op& op, const std::shared_ptr<recurrent_numbers<T>>& own) {
    const auto reference = [op, p]<Scalar S>(const inputs<S>& in, const outputs<S>& out) {
        const auto all = [&](const inputs<S>& tokens, const outputs<S>& to) {
            with_terms<S>(op, [&](const auto& terms, const auto& first) {
                reference::recurrent_attention<S>(terms, op.scale_for(p.key_dim), tokens, to, first);
            });
        };
        const auto& q = in.queries.shape();
        if (q.tokens == p.queries) return all(in, out);
        // Some of the rows.
        tensor<S> queries({q.batch, q.heads, p.keys, q.channels}), values({q.batch, q.heads, p.keys, p.value_dim});
        const auto first_query = first_row(in, p);
        detail::for_each_number(q, [&](index_t n, index_t h, index_t i, index_t c) { queries(n, h, first_query + i, c) = in.queries(n, h, i, c); });
        all({queries, in.keys, in.values}, {values});
        detail::for_each_number(out.values.shape(), [&](index_t n, index_t h, index_t i, index_t c) { out.values(n, h, i, c) = values(n, h, first_query + i, c); });
    };
    const auto naive = [op, p](const naive_forms<T>& by, const inputs<T>& in, const outputs<T>& out) {
        const auto terms = op.rule.terms();
        by.recurrent(in, out, {terms.log_decay, terms.beta, terms.erase, terms.read}, static_cast<T>(op.scale_for(p.key_dim)), op.first_state);
    };
    const auto gradients = [op, p]<Scalar S>(const inputs<S>& in, const output_gradients<S>& given, const wanted_gradients<S>& all) {
        with_terms<S>(op, [&](const auto& terms, const auto& first) {
            reference::recurrent_gradients_of<S>(terms, op.scale_for(p.key_dim), in, given.values, recurrent_wanted(op, all), first);
        });
    };
    return recurrent_with_gradients(made_linear{op, reference, naive, linear_flops(p), own}, gradients);
}

bool is_a_sequence(const problem& p) {
    const auto &q = p.positions.first_query, &k = p.positions.first_key;
    return p.queries == p.keys && q.count() == 0 && k.count() == 0 && q[0] == k[0];
}

/// make(numbers, T{}): the operator.
template <class Make>
registered recurrent_case(std::string name, Make make) {
    return linear_case(
        std::move(name), "4 n d_k d_v",
        [make]<class T>(const problem& p) {
            const auto own = std::make_shared<recurrent_numbers<T>>(p);
            return recurrent_with_definition<T>(p, make(*own, T{}), own);
        },
        is_a_sequence);
}

const auto recurrent_linear_case =
    recurrent_case("recurrent_linear", []<class T>(const auto&, T) { return attn::recurrent_attention{.rule = rule::linear<T>{}}; });
const auto recurrent_gated_case =
    recurrent_case("recurrent_gated", []<class T>(const auto& own, T) { return attn::recurrent_attention{.rule = rule::gated<T>{own.log_decay}}; });
const auto recurrent_channels_case = recurrent_case("recurrent_gated_channel", []<class T>(const auto& own, T) {
    return attn::recurrent_attention{.rule = rule::gated<T>{own.channel_decay}, .scale = 0.25};
});
const auto recurrent_delta_case =
    recurrent_case("recurrent_delta", []<class T>(const auto& own, T) { return attn::recurrent_attention{.rule = rule::delta<T>{own.beta}}; });
const auto recurrent_gated_delta_case = recurrent_case("recurrent_gated_delta", []<class T>(const auto& own, T) {
    return attn::recurrent_attention{.rule = rule::gated_delta<T>{own.log_decay, own.beta}, .first_state = own.first_state};
});
const auto recurrent_kda_case = recurrent_case("recurrent_kda", []<class T>(const auto& own, T) {
    return attn::recurrent_attention{.rule = rule::gated_delta<T>{own.channel_decay, own.beta}};
});
const auto recurrent_general_case = recurrent_case("recurrent_general", []<class T>(const auto& own, T) {
    return attn::recurrent_attention{.rule = rule::general<T>{own.channel_decay, own.a, own.b}, .first_state = own.first_state};
});

} // namespace

} // namespace attn::testing
