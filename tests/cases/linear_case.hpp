// How to register a case of a linear attention: say how to make the operator and its reference, the rest follows.
#pragma once

#include "attn/attention/attention.hpp"
#include "attn/pattern/pattern.hpp"
#include "case.hpp"
#include "../answers.hpp"

#include <any>
#include <array>

namespace attn::testing {

/// An operator, its definition and the same with Eigen, and what they all refer to. Definitions are generic over the scalar type:
/// reference(inputs<S>, outputs<S>).
template <class Op, class Reference, class Naive>
struct made_linear {
    Op op;
    Reference reference;
    Naive naive;
    double flops; ///< useful ones of a call
    std::any parameters = {};
};

/// The same of an operator with a gradient, whose definition is generic too: gradients(inputs<S>, given<S>, wanted_gradients<S>).
template <class Op, class Reference, class Naive, class Gradients, class Terms>
class made_with_gradients : public made_linear<Op, Reference, Naive> {
public:
    Gradients gradients;
    Terms terms; ///< as instance::gradient_terms

    made_with_gradients(made_linear<Op, Reference, Naive> made, Gradients of, Terms sizes)
        : made_linear<Op, Reference, Naive>(std::move(made)), gradients(std::move(of)), terms(std::move(sizes)) {}

    std::vector<shape> parameter_shapes() const {
        std::vector<shape> shapes;
        if constexpr (has_local_term)
            shapes = {this->op.positional_encoding.shape(), this->op.convolution.weights.shape(), row_of(this->op.convolution.bias), this->op.convolution_input.shape()};
        if constexpr (has_scales) shapes.push_back(row_of(this->op.scale));
        return shapes;
    }
    /// As the operator takes them.
    template <Scalar T>
    auto wanted(const wanted_gradients<T>& all) const {
        gradients_of<Op, T> g;
        static_cast<input_gradients<T>&>(g) = all;
        if constexpr (has_local_term) {
            const auto there = [&](std::size_t number) { return all.parameter(number).shape().size() > 0 ? all.parameter(number) : tensor_view<T>{}; };
            g.positional_encoding = there(0);
            const auto numbers = [&](std::size_t number) { return std::span<T>(there(number).data(), static_cast<std::size_t>(there(number).shape().size())); };
            g.convolution = {there(3), there(1), numbers(2)};
            if constexpr (has_scales) g.scale = numbers(4);
        }
        return g;
    }

private:
    static constexpr bool has_local_term = requires(const Op& op) { op.positional_encoding; };
    static constexpr bool has_scales = requires(const Op& op) { std::ssize(op.scale); };
    static shape row_of(const auto& numbers) { return {.tokens = 1, .channels = std::ssize(numbers)}; }
};

template <class Op, class Reference, class Naive, class Gradients, class Terms>
made_with_gradients(made_linear<Op, Reference, Naive>, Gradients, Terms) -> made_with_gradients<Op, Reference, Naive, Gradients, Terms>;

/// The terms of linear attention's gradients: products that cancel where a denominator is, of features f and e,
///     dq_i of (|g_i| . |v_j| + |g_i . out_i|) |e_j|,      dk_j of the same times |f_i|,      dv_j of |A_ij| |g_i|,      g_i = dO_i / N_i
template <class F, class P>
std::array<tensor<double>, 3> each_linear_term(const inputs<double>& in, const tensor_view<const double>& given, const F& phi, const P& pattern, bool normalise, double eps,
                                   double scale) {
    const auto [batch, heads, n, d_k] = in.queries.shape();
    const auto [kv_batch, kv_heads, m, d_v] = in.values.shape();
    tensor<double> of_queries(in.queries.shape()), of_keys(in.keys.shape()), of_values(in.values.shape());
    for (auto* t : {&of_queries, &of_keys, &of_values}) std::fill_n(t->data(), t->shape().size(), 0.0);
    for (index_t b = 0; b < batch; ++b)
        for (index_t h = 0; h < heads; ++h)
            for (index_t i = 0; i < n; ++i) {
                const auto g = h / (heads / kv_heads);
                const auto sees = [&](index_t j) { return static_cast<bool>(at(pattern, b, h).visible(in.positions.first_query[b] + i, in.positions.first_key[b] + j)); };
                std::vector<double> weight(static_cast<std::size_t>(m)), size(weight);
                double sum = eps, of_sum = 0;
                for (index_t j = 0; j < m; ++j) {
                    if (!sees(j)) continue;
                    const auto at_j = static_cast<std::size_t>(j);
                    for (index_t c = 0; c < d_k; ++c) weight[at_j] += phi(in.queries(b, h, i, c)) * phi(in.keys(b, g, j, c));
                    for (index_t c = 0; c < d_v; ++c) size[at_j] += std::abs(given(b, h, i, c) * in.values(b, g, j, c));
                    sum += weight[at_j];
                    of_sum += std::abs(weight[at_j]) * size[at_j];
                }
                const auto factor = normalise ? std::abs(1 / sum) : std::abs(scale);
                for (index_t j = 0; j < m; ++j) {
                    if (!sees(j)) continue;
                    const auto at_j = static_cast<std::size_t>(j);
                    const auto of_weight = factor * (size[at_j] + (normalise ? of_sum * factor : 0));
                    for (index_t c = 0; c < d_k; ++c) {
                        of_queries(b, h, i, c) += of_weight * std::abs(phi(in.keys(b, g, j, c)));
                        of_keys(b, g, j, c) += of_weight * std::abs(phi(in.queries(b, h, i, c)));
                    }
                    for (index_t c = 0; c < d_v; ++c) of_values(b, g, j, c) += std::abs(weight[at_j] * given(b, h, i, c)) * factor;
                }
            }
    return {std::move(of_queries), std::move(of_keys), std::move(of_values)};
}
/// The largest of each.
template <class F, class P>
std::vector<double> linear_terms(const inputs<double>& in, const tensor_view<const double>& given, const F& phi, const P& pattern, bool normalise, double eps,
                                 double scale) {
    std::vector<double> largest;
    for (const auto& terms : each_linear_term(in, given, phi, pattern, normalise, eps, scale)) largest.push_back(largest_magnitude(terms));
    return largest;
}


template <Scalar T, class Made>
class linear_instance final : public instance<T> {
public:
    explicit linear_instance(Made m) : made_(std::move(m)) {}

    void attend(const inputs<T>& in, const outputs<T>& out, const execution& run) const override { attn::attend(made_.op, in, out, run); }
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const override {
        return made_.op.template workspace_bytes<T>(s, concurrency);
    }
    shape output_shape(const input_shapes& s) const override { return made_.op.output_shape(s); }
    void reference(const inputs<double>& in, const outputs<double>& out) const override { made_.reference(in, out); }
    void plain(const inputs<T>& in, const outputs<T>& out) const override { made_.reference(in, out); }
    void naive(const naive_forms<T>& by, const inputs<T>& in, const outputs<T>& out) const override { made_.naive(by, in, out); }
    double useful_flops(const problem&) const override { return made_.flops; }

    bool has_gradient() const override { return differentiable; }
    std::vector<shape> parameter_shapes(const input_shapes&) const override {
        if constexpr (differentiable) return made_.parameter_shapes();
        else return {};
    }
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const override {
        if constexpr (differentiable) return made_.op.template backward_workspace_bytes<T>(s, concurrency);
        else return 0;
    }
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given, const wanted_gradients<T>& wanted,
                  const execution& run) const override {
        if constexpr (differentiable) attn::backward(made_.op, in, saved, given, made_.wanted(wanted), run);
    }
    std::vector<double> gradient_terms(const inputs<double>& in, const output_gradients<double>& given) const override {
        if constexpr (differentiable) return made_.terms(in, given.values);
        else return {};
    }
    void reference_gradients(const inputs<double>& in, const output_gradients<double>& given, const wanted_gradients<double>& wanted) const override {
        if constexpr (differentiable) made_.gradients(in, given, wanted);
    }
    void plain_gradients(const inputs<T>& in, const output_gradients<T>& given, const wanted_gradients<T>& wanted) const override {
        if constexpr (differentiable) made_.gradients(in, given, wanted);
    }

private:
    static constexpr bool differentiable = requires(const Made& m) { m.gradients; };
    Made made_;
};

/// 2 d_k d_v for each key and each query.
inline double linear_flops(const problem& p) {
    return 2.0 * static_cast<double>(p.key_dim * p.value_dim) * static_cast<double>(p.batch * (p.kv_heads * p.keys + p.heads * p.queries));
}

/// The grid that n tokens are: the most square one.
inline std::array<index_t, 2> grid_of(index_t n) {
    index_t height = 1;
    for (index_t h = 1; h * h <= n; ++h)
        if (n % h == 0) height = h;
    return {height, n / height};
}

/// The first of the problem's tokens that a call's rows are: of some queries only, as benchmarks ask the reference for, position tells.
template <Scalar T>
index_t first_row(const inputs<T>& in, const problem& p) {
    return in.queries.shape().tokens == p.queries ? 0 : in.positions.first_query[0];
}

/// phi on the numbers of a matrix.
template <Scalar T, class F>
map_numbers<T> each_number(const F& phi) {
    return [phi](T* x, index_t count) { std::transform(x, x + count, x, [&](T number) { return static_cast<T>(phi(number)); }); };
}
/// What a pattern shows.
template <class P>
sees_key shown_by(const P& pattern, const positions& where) {
    if (std::same_as<P, dense>) return {};
    return [pattern, where](index_t batch, index_t i, index_t j) {
        return static_cast<bool>(at(pattern, batch, 0).visible(where.first_query[batch] + i, where.first_key[batch] + j));
    };
}

/// Registers a case from make.template operator()<T>(problem), which returns a made_linear.
template <class Make>
registered linear_case(std::string name, std::string cost, Make make, std::function<bool(const problem&)> supports) {
    const auto build = [make]<class T>(const problem& p, T) -> std::unique_ptr<instance<T>> {
        auto m = make.template operator()<T>(p);
        return std::make_unique<linear_instance<T, decltype(m)>>(std::move(m));
    };
    return registered({.name = std::move(name),
                       .cost = std::move(cost),
                       .has_log_sum_exp = false,
                       .supports = std::move(supports)},
                      build);
}

} // namespace attn::testing
