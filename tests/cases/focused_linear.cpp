#include "convolved_case.hpp"

#include "attn/attention/focused_linear_attention.hpp"
#include "attn/attention/focused_linear_backward.hpp"
#include "attn/reference/linear_attention.hpp"

namespace attn::testing {

namespace {

/// Parameters of a case, random.
template <Scalar T>
struct focused_parameters : convolved<T> {
    std::vector<T> scale;

    focused_parameters(const problem& p, const shape& kernel, index_t heads_of_scale)
        : convolved<T>(p, kernel), scale(static_cast<std::size_t>(heads_of_scale * p.key_dim)) {
        std::mt19937 random(29);
        std::ranges::generate(scale, [&] { return random_parameter(random, T(0.3)); });
    }
    /// How many keys the queries of a batch entry see.
    template <Scalar S>
    index_t seen(index_t batch, const inputs<S>& in) const {
        const auto keys = in.queries.shape().tokens == 0 ? 0 : in.keys.shape().tokens;
        return this->length.empty() ? keys : std::clamp<index_t>(this->length[static_cast<std::size_t>(batch)] - in.positions.first_key[batch], 0, keys);
    }
};

/// Divides numbers of keys by how many the queries see, which makes means of sums.
template <Scalar S, Scalar T>
void divide_by_seen(const tensor_view<S>& x, const focused_parameters<T>& own, const inputs<S>& in) {
    const auto [batch, heads, m, d] = x.shape();
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h)
            for (index_t j = 0; j < own.seen(b, in); ++j)
                for (index_t c = 0; c < d; ++c) x(b, h, j, c) /= static_cast<S>(own.seen(b, in));
}

/// What those terms become by the formula of reference::focused_gradients, of magnitudes; those of the scale are added.
template <Scalar T>
double focused_terms(const tensor_view<const double>& x, int power, std::span<const T> scale, const tensor<double>& of_features, std::span<double> of_scale) {
    const auto [batch, heads, n, d] = x.shape();
    double largest = 0;
    for (index_t b = 0; b < batch; ++b)
        for (index_t i = 0; i < n; ++i) {
            double squares = 0, squares_of_powers = 0, sum = 0;
            const auto each = [&](const auto& f) {
                for (index_t h = 0; h < heads; ++h)
                    for (index_t c = 0; c < d; ++c) {
                        const auto own = static_cast<std::size_t>(std::ssize(scale) > d ? h * d + c : c);
                        const auto softplus = std::log1p(std::exp(static_cast<double>(scale[own])));
                        f(own, (std::max(x(b, h, i, c), 0.0) + 1e-6) / softplus, softplus, of_features(b, h, i, c), x(b, h, i, c) > 0);
                    }
            };
            each([&](std::size_t, double u, double, double, bool) { squares += u * u; });
            const auto norm = std::sqrt(squares);
            each([&](std::size_t, double u, double, double, bool) { squares_of_powers += std::pow(u / norm, 2 * power); });
            const auto norm_of_powers = std::sqrt(squares_of_powers);
            each([&](std::size_t, double u, double, double g, bool) { sum += g * std::pow(u / norm, power) / norm_of_powers; });
            each([&](std::size_t own, double u, double softplus, double g, bool is_on) {
                const auto w = u / norm, y = std::pow(w, power) / norm_of_powers;
                const auto of_u = w * sum + power * std::pow(w, power - 1) / norm_of_powers * (g + y * sum);
                if (is_on) largest = std::max(largest, of_u / softplus);
                of_scale[own] += of_u * u / softplus;
            });
        }
    return largest;
}

template <Scalar T, class Op>
auto focused_with_definition(const problem& p, const Op& op, const std::shared_ptr<focused_parameters<T>>& own) {
    // Calls then with what linear attention of the features themselves reads.
    const auto attend = [=]<Scalar S>(const inputs<S>& in, const auto& then) {
        const auto q = reference::focused_features<S, T>(in.queries, op.power, op.scale);
        const auto encoded = reference::sum_of<S, T>(in.keys, op.positional_encoding);
        auto k = reference::focused_features<S, T>(encoded, op.power, op.scale);
        divide_by_seen<S>(k.view(), *own, in);
        then(inputs<S>{q, k, in.values, in.positions});
    };
    const auto reference = [=]<Scalar S>(const inputs<S>& in, const outputs<S>& out) {
        attend(in, [&](const inputs<S>& mapped) { reference::linear_attention<S>(mapped, out, identity_features{}, op.pattern, true, op.eps, 1); });
        add_convolution<S>(op, *own, in, out, p);
    };
    const auto gradients = [=]<Scalar S>(const inputs<S>& in, const output_gradients<S>& given, const wanted_gradients<S>& wanted) {
        tensor<S> of_f(in.queries.shape()), of_e(in.keys.shape());
        attend(in, [&](const inputs<S>& mapped) {
            reference::linear_gradients<S>(mapped, given.values, {of_f, of_e, wanted.values}, identity_features{}, op.pattern, true, op.eps, 1);
        });
        divide_by_seen<S>(of_e.view(), *own, in);
        std::vector<index_t> queries, keys;
        for (index_t b = 0; b < in.queries.shape().batch; ++b) {
            keys.push_back(own->seen(b, in));
            queries.push_back(keys.back() > 0 ? in.queries.shape().tokens : 0);
        }
        const auto of_scale = wanted.parameter(4);
        const std::span<S> sums(of_scale.data(), static_cast<std::size_t>(of_scale.shape().size()));
        std::ranges::fill(sums, S{0});
        const auto encoded = reference::sum_of<S, T>(in.keys, op.positional_encoding);
        reference::focused_gradients<S, T>(in.queries, op.power, op.scale, of_f, queries, wanted.queries, sums);
        reference::focused_gradients<S, T>(encoded, op.power, op.scale, of_e, keys, wanted.keys, sums);
        add_local_gradients<S>(op, *own, in, given, wanted);
    };
    const auto terms = [=](const inputs<double>& in, const tensor_view<const double>& given) {
        std::vector<double> largest(8);
        attend(in, [&](const inputs<double>& mapped) {
            auto [of_f, of_e, of_values] = each_linear_term(mapped, given, identity_features{}, op.pattern, true, op.eps, 1);
            divide_by_seen<double>(of_e.view(), *own, in);
            std::vector<double> of_scale(op.scale.size());
            largest[0] = focused_terms<T>(in.queries, op.power, op.scale, of_f, of_scale);
            const auto encoded = reference::sum_of<double, T>(in.keys, op.positional_encoding);
            largest[1] = focused_terms<T>(encoded, op.power, op.scale, of_e, of_scale);
            largest[2] = largest_magnitude(of_values);
            largest[3] = largest[1] * static_cast<double>(p.batch); // of the encoding, which all batch entries share
            for (const auto terms_of_one : of_scale) largest[7] = std::max(largest[7], terms_of_one);
        });
        return largest;
    };
    const auto naive = [=](const naive_forms<T>& by, const inputs<T>& in, const outputs<T>& out) {
        attend(in, [&](const inputs<T>& mapped) { by.linear(mapped, out, [](T*, index_t) {}, shown_by(op.pattern, in.positions), static_cast<T>(op.eps)); });
        const auto g = op.convolution.grid(p.queries);
        by.add_convolution(in.values, out.values, {g.height, g.width, g.top, g.left}, op.convolution.weights, op.convolution.bias);
    };
    const auto taps = static_cast<double>(op.convolution.weights.shape().tokens * op.convolution.weights.shape().channels);
    const auto outputs_of_p = static_cast<double>(p.batch * p.heads * p.queries * p.value_dim);
    return made_with_gradients{made_linear{op, reference, naive, linear_flops(p) + 2 * taps * outputs_of_p, own}, gradients, terms};
}

/// One kernel for all heads on the most square grid, as in vision transformers; scales for each head, where keys have as many.
const auto focused_case = linear_case(
    "focused_linear", "4 n d_k d_v + 50 n d_v",
    []<class T>(const problem& p) {
        const auto own = std::make_shared<focused_parameters<T>>(p, shape{1, p.value_dim, 5, 5}, p.heads == p.kv_heads ? p.heads : 1);
        return focused_with_definition<T>(
            p, focused_linear_attention<dense, T>{.scale = own->scale, .convolution = convolution_of<T>(*own, grid_of(p.queries))}, own);
    },
    tokens_agree);

/// One scale for all heads, sequences, a positional encoding, and padding.
const auto focused_sequence_case = linear_case(
    "focused_linear_lengths", "4 n d_k d_v + 14 n d_v",
    []<class T>(const problem& p) {
        const auto own = std::make_shared<focused_parameters<T>>(p, shape{p.heads, p.value_dim, 1, 7}, 1);
        own->length = some_lengths(p);
        return focused_with_definition<T>(p,
                                          focused_linear_attention<pattern::lengths, T>{.power = 2,
                                                                                        .scale = own->scale,
                                                                                        .convolution = convolution_of<T>(*own, {0, 0}),
                                                                                        .pattern = {own->length},
                                                                                        .positional_encoding = own->positional_encoding.view()},
                                          own);
    },
    [](const problem& p) { return tokens_agree(p) && p.batch > 0; });

} // namespace

} // namespace attn::testing
