// An operator under test, its type hidden: what the checks need of it.
#pragma once

#include "bounded.hpp"
#include "sizes.hpp"

#include "cases/case.hpp"

#include <attn/attention/any_attention.hpp>

#include <functional>
#include <memory>

namespace attn::fuzz {

template <Scalar T>
struct operation {
    std::function<void(const inputs<T>&, const outputs<T>&, const execution&)> attend;
    std::function<std::size_t(const input_shapes&, index_t concurrency)> workspace_bytes;
    std::function<std::size_t(const input_shapes&, index_t concurrency)> narrow_workspace_bytes; ///< for a result that is stored in 16 bits
    std::function<shape(const input_shapes&)> output_shape;
    std::function<shape(const input_shapes&)> log_sum_exp_shape; ///< none if it has none
    /// The definition, in double.
    std::function<void(const inputs<double>&, const outputs<double>&)> reference;
    /// How far from the definition each number may be; values and, where there is one, log_sum_exp.
    std::function<void(const inputs<T>&, const outputs<double>& bounds)> bounds;
    /// The gradient, for those that have one here.
    std::function<void(const inputs<T>&, const saved_outputs<T>&, const output_gradients<T>&, const testing::wanted_gradients<T>&, const execution&)> backward;
    std::function<std::size_t(const input_shapes&, index_t concurrency)> backward_workspace_bytes;
    std::function<std::vector<shape>(const input_shapes&)> parameter_shapes;
    /// Its definition.
    std::function<void(const inputs<bounded<T>>&, const output_gradients<bounded<T>>&, const testing::wanted_gradients<bounded<T>>&)> reference_gradients;
    bool has_least_workspace = false; ///< bytes for concurrency -c are then the least for c
};

template <Scalar T, class Op>
operation<T> operation_of(const std::shared_ptr<const Op>& op) {
    operation<T> result;
    const auto attend = [](const auto& own, const inputs<T>& in, const outputs<T>& out, const execution& run) { attn::attend(own, in, out, run); };
    if constexpr (Op::traits.has_least_workspace) result.attend = [op, attend](const auto&... arguments) { attend(*op, arguments...); };
    else result.attend = [op, attend, any = any_attention<T>(*op)](const auto&... arguments) { attend(any, arguments...); };
    const auto bytes_for = [op]<Storage S>(std::type_identity<S>) {
        return [op](const input_shapes& s, index_t concurrency) {
            return concurrency < 0 ? attn::detail::least_workspace_bytes_for<S>(*op, s, -concurrency) : attn::detail::workspace_bytes_for<S>(*op, s, concurrency);
        };
    };
    result.workspace_bytes = bytes_for(std::type_identity<T>{});
    if constexpr (std::same_as<T, float>) result.narrow_workspace_bytes = bytes_for(std::type_identity<attn::detail::sixteen_bits>{});
    result.has_least_workspace = Op::traits.has_least_workspace;
    result.output_shape = [op](const input_shapes& s) { return op->output_shape(s); };
    if constexpr (Op::traits.has_log_sum_exp) result.log_sum_exp_shape = [op](const input_shapes& s) { return attn::log_sum_exp_shape(*op, s); };
    return result;
}

/// One problem: an operator, its inputs, and what else may be asked of it.
template <Scalar T>
struct trial {
    std::string name; ///< all that was drawn, for a reader
    operation<T> op;
    sizes size;
    given<T> in;
    /// The operator for one batch entry and one head of keys, with the query heads that share it; none if it mixes heads or batch entries.
    std::function<operation<T>(index_t batch, index_t kv_head)> part;
    /// The operator for queries first .. first + queries - 1 and such keys, where something is given to it by token. Its definition is not.
    std::function<operation<T>(index_t first, index_t queries, index_t first_key, index_t keys)> within;
    /// How queries may be cut into calls: between units of so many rows. A call takes so many units before and after its own along.
    struct {
        index_t unit = 1, before = 0, after = 0;
    } cuts;
    bool keys_stand_alone = true; ///< so that keys that nobody sees may be left out
    bool may_spoil = true;
};

} // namespace attn::fuzz
