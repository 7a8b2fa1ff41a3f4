// What the tests, the benchmarks and the demo know of an operator. One file in this folder registers one family of operators;
// everything that runs over all cases picks it up with no other edit.
#pragma once

#include "attn/attention/backward.hpp"
#include "attn/reference/number.hpp"
#include "../numbers.hpp"
#include "../random_numbers.hpp"
#include "naive_forms.hpp"

#include <any>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace attn::testing {

/// The sizes of one call.
struct problem {
    index_t batch = 1, heads = 1, kv_heads = 1, queries = 1, keys = 1, key_dim = 1, value_dim = 1;
    attn::positions positions = top_left();

    input_shapes shapes() const {
        return {{batch, heads, queries, key_dim}, {batch, kv_heads, keys, key_dim}, {batch, kv_heads, keys, value_dim}};
    }
};

/// Gradients that a case may be asked for: of the inputs, and of the operator's parameters that have one, in an order of the case's own.
template <class T>
struct wanted_gradients : input_gradients<T> {
    std::vector<tensor_view<T>> parameters = {};

    /// One of them; without memory where there is none, or it is not wanted.
    tensor_view<T> parameter(std::size_t number) const { return number < parameters.size() ? parameters[number] : tensor_view<T>{}; }
};

/// An operator made for one problem, with the parameters it refers to; the type of the operator is hidden.
template <Scalar T>
struct instance {
    virtual ~instance() = default;
    /// The operator's fast kernel, through the front door.
    virtual void attend(const inputs<T>&, const outputs<T>&, const execution&) const = 0;
    virtual std::size_t workspace_bytes(const input_shapes&, index_t concurrency) const = 0;
    virtual shape output_shape(const input_shapes&) const = 0;
    /// Other than the above only where log_sum_exp has other heads, or less memory does.
    virtual shape log_sum_exp_shape(const input_shapes& s) const {
        auto rows = output_shape(s);
        rows.channels = 1;
        return rows;
    }
    virtual std::size_t least_workspace_bytes(const input_shapes& s, index_t concurrency) const { return workspace_bytes(s, concurrency); }
    /// For a result that is stored in 16 bits.
    virtual std::size_t narrow_workspace_bytes(const input_shapes& s, index_t concurrency) const { return workspace_bytes(s, concurrency); }
    /// The definition, in double.
    virtual void reference(const inputs<double>&, const outputs<double>&) const = 0;
    /// The textbook formula in the operator's own precision: what accuracy is judged against.
    virtual void plain(const inputs<T>&, const outputs<T>&) const = 0;
    /// The same with Eigen and whole matrices (n x m where attention has one): what speed is judged against.
    virtual void naive(const naive_forms<T>&, const inputs<T>&, const outputs<T>&) const = 0;

    /// Whether the operator has a gradient; if it has, what follows.
    virtual bool has_gradient() const { return false; }
    /// Of the parameters that have one.
    virtual std::vector<shape> parameter_shapes(const input_shapes&) const { return {}; }
    virtual std::size_t backward_workspace_bytes(const input_shapes&, index_t) const { return 0; }
    /// The kernel, through the front door.
    virtual void backward(const inputs<T>&, const saved_outputs<T>&, const output_gradients<T>&, const wanted_gradients<T>&, const execution&) const {}
    /// The largest sum of the magnitudes of the terms that make a gradient, of queries, keys, values and parameters, where they cancel by the
    /// formula; of the others nothing, or 0.
    virtual std::vector<double> gradient_terms(const inputs<double>&, const output_gradients<double>&) const { return {}; }
    /// The definition, in double, and in the operator's own precision.
    virtual void reference_gradients(const inputs<double>&, const output_gradients<double>&, const wanted_gradients<double>&) const {}
    virtual void plain_gradients(const inputs<T>&, const output_gradients<T>&, const wanted_gradients<T>&) const {}

    /// Floating-point operations that the result needs: for softmax 2 (d_k + d_v) for each visible pair.
    virtual double useful_flops(const problem&) const = 0;
    /// Those that the kernel spends: more where it computes pairs that the pattern hides.
    virtual double visited_flops(const problem& p) const { return useful_flops(p); }
};

/// An operator, and what its views refer to.
template <class Op>
struct made {
    Op op;
    std::any parameters = {};
};

/// One operator, ready for any problem that it supports.
struct attention_case {
    std::string name;                               ///< "softmax_causal": in test names, benchmark names and the demo's table
    std::string cost;                               ///< operations, for a reader: "2 n m (d_k + d_v) / 2"
    bool has_log_sum_exp = true;
    bool rows_stand_alone = true;                   ///< a row keeps its bits while what it does not see changes
    bool heads_stand_alone = true;                  ///< a head reads its own queries, and its keys and values, only
    std::function<bool(const problem&)> supports;   ///< whether the operator is meant for such sizes
    std::function<std::unique_ptr<instance<float>>(const problem&)> make_float = {};
    std::function<std::unique_ptr<instance<double>>(const problem&)> make_double = {}; ///< none where doubles are not tested

    template <Scalar T>
    std::unique_ptr<instance<T>> make(const problem& p) const {
        if constexpr (std::same_as<T, float>) return make_float(p);
        else return make_double(p);
    }
};

/// All registered cases, by name.
std::vector<attention_case>& all_cases();

/// Registers a case before main: `static const registered softmax{...};`
struct registered {
    explicit registered(attention_case c);
    /// With instances from build(problem, T{}), of each type that is tested.
    template <class Build>
    registered(attention_case c, const Build& build) : registered(made_by(std::move(c), build)) {}

private:
    template <class Build>
    static attention_case made_by(attention_case c, const Build& build) {
        if constexpr (is_tested<float>) c.make_float = [build](const problem& p) { return build(p, float{}); };
        if constexpr (is_tested<double>) c.make_double = [build](const problem& p) { return build(p, double{}); };
        return c;
    }
};

} // namespace attn::testing
