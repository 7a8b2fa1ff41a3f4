// The gradient of an attention operator, and the front door through which all of them are called.
#pragma once

#include "../core/gradients.hpp"
#include "attention.hpp"

#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// An attention operator with a gradient.
/// - `gradients<T>`: input_gradients<T>, or what derives from it, with one view more for each parameter that has a gradient too.
/// - `check_gradients(in, wanted, check)`: calls check(name, view, shape) for each of the additional views; throws if one cannot be wanted.
/// - `backward_workspace_bytes<T>(shapes, concurrency)`: the scratch memory that `backward` needs.
/// - `backward(in, saved, d_out, wanted, run)`: computes. Everything has been checked; it allocates nothing and writes only to `wanted`.
/// What computes the gradient of attn's own operators is an include apart from them: attention/softmax_backward.hpp, and so on.
template <class A>
concept DifferentiableAttention =
    Attention<A> && requires(const A& op, const inputs<float>& in, const saved_outputs<float>& saved, const output_gradients<float>& d_out,
                             const typename A::template gradients<float>& wanted, const input_shapes& shapes, const execution& run) {
        requires std::derived_from<typename A::template gradients<float>, input_gradients<float>>;
        op.check_gradients(in, wanted, [](std::string_view, const tensor_view<float>&, const shape&) {});
        { op.template backward_workspace_bytes<float>(shapes, index_t{1}) } -> std::same_as<std::size_t>;
        op.backward(in, saved, d_out, wanted, run);
    };

/// The gradients of an operator's inputs and parameters, all views.
template <DifferentiableAttention A, Scalar T>
using gradients_of = typename A::template gradients<T>;

/// Bytes of workspace that the gradient of `op` on such shapes needs with such an executor or execution. Throws attention_error if no
/// tensors have such shapes.
template <Scalar T, DifferentiableAttention A>
std::size_t backward_workspace_bytes(const A& op, const input_shapes& shapes, const detail::call_execution& run = {}) {
    detail::check_shapes<T>(A::name, shapes);
    return op.template backward_workspace_bytes<T>(shapes, run.concurrency());
}

namespace detail {

/// Throws attention_error unless what a gradient reads has the shapes of the values and of log_sum_exp, where the operator has one.
template <Scalar T>
void check_read_by_gradient(std::string_view operation, const saved_outputs<T>& saved, const output_gradients<T>& d_out,
                            const shape& values, const std::optional<shape>& rows) {
    const auto check = [&](std::string_view argument, const tensor_view<const T>& view, const shape& expected) {
        check_view(operation, argument, view);
        if (view.shape() != expected) refuse_result(operation, argument, view.shape(), expected);
    };
    check("saved.values", saved.values, values);
    check("d_out.values", d_out.values, values);
    if (rows) check("saved.log_sum_exp", saved.log_sum_exp, *rows);
    check_view(operation, "d_out.log_sum_exp", d_out.log_sum_exp);
    if (!d_out.log_sum_exp.data()) return;
    if (!rows) detail::raise(argument_error(operation, "d_out.log_sum_exp", "is given, but without a softmax there is none"));
    check("d_out.log_sum_exp", d_out.log_sum_exp, *rows);
}

/// What is refused of a gradient, whatever the operator: shapes that do not fit, and what is written overlapping what is read.
template <DifferentiableAttention A, Scalar T>
void check_backward(const A& op, const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out,
                    const gradients_of<A, T>& wanted) {
    const auto shapes = shapes_of(in);
    const auto require_wide = [&](std::string_view argument, const stored_view<const T>& view) {
        if (view.is_narrow())
            detail::raise(argument_error(A::name, argument, "of shape ", view.shape(),
                                         " is stored in 16 bits: gradients are computed of numbers that are not"));
    };
    require_wide("q", in.queries);
    require_wide("k", in.keys);
    require_wide("v", in.values);
    if constexpr (!A::traits.has_log_sum_exp) check_read_by_gradient(A::name, saved, d_out, op.output_shape(shapes), {});
    else check_read_by_gradient(A::name, saved, d_out, op.output_shape(shapes), log_sum_exp_shape(op, shapes));
    const auto for_each = [&](const auto& visit) {
        const auto check = [&](std::string_view argument, const tensor_view<T>& view, const shape& expected) {
            visit(argument, view, expected, false);
        };
        check("wanted.queries", wanted.queries, shapes.queries);
        check("wanted.keys", wanted.keys, shapes.keys);
        check("wanted.values", wanted.values, shapes.values);
        op.check_gradients(in, wanted, check);
    };
    check_gradients<T>(A::name, for_each, [&](const output_memory& memory) {
        check_apart_of_inputs(in, memory);
        memory.require_apart("saved.values", saved.values);
        memory.require_apart("saved.log_sum_exp", saved.log_sum_exp);
        memory.require_apart("d_out.values", d_out.values);
        memory.require_apart("d_out.log_sum_exp", d_out.log_sum_exp);
        op.check_apart(memory);
    });
}

} // namespace detail

/// The gradient of a loss with respect to what a call of an operator read: from the call's inputs, what it wrote (`saved`), and the
/// gradient of the loss with respect to that (`d_out`), a pure function:
///     wanted.queries = d loss / d q,   wanted.keys = d loss / d k,   wanted.values = d loss / d v,   and of the operator's parameters
/// What has no memory in `wanted` is not computed. The gradients have the same bits for every executor and number of threads. `run` as in
/// `attend`. Throws attention_error, before anything is read or written: shapes that do not fit, a gradient that overlaps what is read or
/// another gradient, a given workspace too small.
template <DifferentiableAttention A, Scalar T>
void backward(const A& op, const inputs<T>& in, const std::type_identity_t<saved_outputs<T>>& saved,
              const std::type_identity_t<output_gradients<T>>& d_out, const std::type_identity_t<gradients_of<A, T>>& wanted,
              const detail::call_execution& run = {}) {
    op.check(in);
    detail::check_backward(op, in, saved, d_out, wanted);
    const auto shapes = shapes_of(in);
    run.reserve(A::name, "the gradient for q", shapes.queries, op.template backward_workspace_bytes<T>(shapes, run.concurrency()));
    op.backward(in, saved, d_out, wanted, run);
}

/// No call: gradients of another operator are refused in one sentence when the program is compiled.
template <DifferentiableAttention A, Scalar T, class Wanted>
    requires(!std::convertible_to<const Wanted&, const gradients_of<A, T>&>)
void backward(const A&, const inputs<T>&, const std::type_identity_t<saved_outputs<T>>&, const std::type_identity_t<output_gradients<T>>&,
              const Wanted&, const detail::call_execution& = {}) {
    constexpr bool own = std::convertible_to<const Wanted&, const gradients_of<A, T>&>;
    static_assert(own, "attn: wanted is gradients of the operator and the tensors' scalar type: attn::gradients_of<Operator, float>");
}

} // namespace attn
