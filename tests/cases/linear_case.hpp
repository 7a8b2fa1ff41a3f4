// How to register a case of a linear attention: say how to make the operator and its reference, the rest follows.
#pragma once

#include "attn/attention/attention.hpp"
#include "attn/pattern/pattern.hpp"
#include "case.hpp"
#include "naive_linear.hpp"

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
    void naive(const inputs<T>& in, const outputs<T>& out) const override { made_.naive(in, out); }
    double useful_flops(const problem&) const override { return made_.flops; }

private:
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
                       .supports = std::move(supports),
                       .make_float = [build](const problem& p) { return build(p, float{}); },
                       .make_double = [build](const problem& p) { return build(p, double{}); }});
}

} // namespace attn::testing
