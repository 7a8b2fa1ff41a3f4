// An operator under test, its type hidden: what the checks need of it.
#pragma once

#include "bounded.hpp"
#include "sizes.hpp"

#include "cases/case.hpp"

#include <attn/attention/any_attention.hpp>
#include <attn/attention/ragged_backward.hpp>

#include <functional>
#include <memory>

namespace attn::fuzz {

template <Scalar T>
class operation {
public:
    const bool has_log_sum_exp, has_least_workspace;

    template <Attention Op>
    explicit operation(const Op& op) : has_log_sum_exp(Op::traits.has_log_sum_exp), has_least_workspace(Op::traits.has_least_workspace), any_(op) {}
    operation(const operation&) = delete;
    virtual ~operation() = default;

    virtual void attend(const inputs<T>& in, const outputs<T>& out, const execution& run) const { attn::attend(any_, in, out, run); }
    void attend(const ragged& batch, const inputs<T>& in, const outputs<T>& out, const execution& run) const { attn::attend(any_, batch, in, out, run); }
    /// Of a result that may be stored in 16 bits, if it is `narrow`.
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency, bool narrow = false) const {
        return narrow ? any_.template narrow_workspace_bytes<T>(s, concurrency) : any_.template workspace_bytes<T>(s, concurrency);
    }
    virtual std::size_t least_workspace_bytes(const input_shapes& s, index_t concurrency) const { return workspace_bytes(s, concurrency); }
    shape output_shape(const input_shapes& s) const { return any_.output_shape(s); }
    shape log_sum_exp_shape(const input_shapes& s) const { return any_.log_sum_exp_shape(s); }
    /// The definition, in double.
    virtual void reference(const inputs<double>&, const outputs<double>&) const = 0;
    /// How far from the definition each number may be, of inputs in T: values and, where there is one, log_sum_exp.
    virtual void bounds(const inputs<double>&, const outputs<double>& bounds) const = 0;

    virtual std::vector<shape> parameter_shapes(const input_shapes&) const { return {}; }
    virtual std::size_t backward_workspace_bytes(const input_shapes&, index_t concurrency) const = 0;
    virtual void backward(const inputs<T>&, const saved_outputs<T>&, const output_gradients<T>&, const testing::wanted_gradients<T>&, const execution&) const = 0;
    /// Those of the inputs, of a ragged batch.
    virtual void backward(const ragged&, const inputs<T>&, const saved_outputs<T>&, const output_gradients<T>&, const input_gradients<T>&, const execution&) const = 0;
    /// Its definition.
    virtual void reference_gradients(const inputs<bounded<T>>&, const output_gradients<bounded<T>>&, const testing::wanted_gradients<bounded<T>>&) const = 0;

private:
    any_attention<T> any_;
};

/// An operator with a gradient, by its type; what is compiled once for each type of number is in Base, which is made of `drawn` besides.
template <Scalar T, class Op, class Base = operation<T>>
class operation_of : public Base {
public:
    explicit operation_of(const Op& op, const auto&... drawn) : Base(op, drawn...), op_(op) {}

    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const override {
        if constexpr (DifferentiableAttention<Op>) return op_.template backward_workspace_bytes<T>(s, concurrency);
        else return 0;
    }
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given, const testing::wanted_gradients<T>& wanted,
                  const execution& run) const override {
        if constexpr (DifferentiableAttention<Op>) attn::backward(op_, in, saved, given, gradients(wanted), run);
    }
    void backward(const ragged& batch, const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given, const input_gradients<T>& wanted,
                  const execution& run) const override {
        if constexpr (DifferentiableAttention<Op>) {
            gradients_of<Op, T> own{};
            static_cast<input_gradients<T>&>(own) = wanted;
            attn::backward(op_, batch, in, saved, given, own, run);
        }
    }

protected:
    /// What is wanted, by name.
    virtual typename Op::template gradients<T> gradients(const testing::wanted_gradients<T>&) const = 0;
    const Op op_;
};

template <Scalar T>
using any_operation = std::unique_ptr<const operation<T>>;

/// One problem: an operator, its inputs, and what else may be asked of it.
template <Scalar T>
struct trial {
    std::string name; ///< all that was drawn, for a reader
    any_operation<T> op;
    sizes size;
    given<T> in;
    /// The operator for one batch entry and one head of keys, with the query heads that share it; none if it mixes heads or batch entries.
    std::function<any_operation<T>(index_t batch, index_t kv_head)> part;
    /// The operator for queries first .. first + queries - 1 and such keys, where something is given to it by token. Its definition is not.
    std::function<any_operation<T>(index_t first, index_t queries, index_t first_key, index_t keys)> within;
    /// How queries may be cut into calls: between units of so many rows. A call takes so many units before and after its own along.
    struct {
        index_t unit = 1, before = 0, after = 0;
    } cuts;
    bool has_gradient = true;
    bool keys_stand_alone = true; ///< so that keys that nobody sees may be left out
    bool may_spoil = true;
};

} // namespace attn::fuzz
