// The gradient of an attention operator, and the front door through which all of them are called.
#pragma once

#include "../core/gradients.hpp"
#include "attention.hpp"

#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// An attention operator with a gradient.
/// - `gradients<T>`: input_gradients<T>, or what derives from it, with one view more for each parameter that has a gradient too.
/// - `check_gradients(in, wanted, check)`: calls check(name, view, shape) for each of the additional views.
/// - `backward_workspace_bytes<T>(shapes, concurrency)`: the scratch memory that `backward` needs.
/// - `backward(in, saved, given, wanted, run)`: computes. Everything has been checked; it allocates nothing and writes only to `wanted`.
template <class A>
concept DifferentiableAttention =
    Attention<A> && requires(const A& op, const inputs<float>& in, const saved_outputs<float>& saved, const output_gradients<float>& given,
                             const typename A::template gradients<float>& wanted, const input_shapes& shapes, const execution& run) {
        requires std::derived_from<typename A::template gradients<float>, input_gradients<float>>;
        { op.template backward_workspace_bytes<float>(shapes, index_t{1}) } -> std::same_as<std::size_t>;
        op.backward(in, saved, given, wanted, run);
    };

/// The gradients of an operator's inputs and parameters, all views.
template <DifferentiableAttention A, Scalar T>
using gradients_of = typename A::template gradients<T>;

/// Bytes of workspace that the gradient of `op` on such shapes needs with such an executor. Throws attention_error if no tensors have such
/// shapes.
template <Scalar T, DifferentiableAttention A, Executor E>
std::size_t backward_workspace_bytes(const A& op, const input_shapes& shapes, E& executor) {
    detail::check_shape<T>(A::name, "q", shapes.queries);
    detail::check_shape<T>(A::name, "k", shapes.keys);
    detail::check_shape<T>(A::name, "v", shapes.values);
    return op.template backward_workspace_bytes<T>(shapes, detail::concurrency_of(executor));
}

namespace detail {

/// What is refused of a gradient, whatever the operator: shapes that do not fit, and what is written overlapping what is read.
template <Scalar T>
class gradient_checks {
public:
    gradient_checks(std::string_view operation, const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given)
        : operation_(operation), in_(in), saved_(saved), given_(given) {}

    /// Checks what is read against the shapes of the values and of log_sum_exp, where the operator has one.
    void check_read(const shape& values, const std::optional<shape>& rows) const {
        check_read("saved.values", saved_.values, values);
        check_read("given.values", given_.values, values);
        if (rows) check_read("saved.log_sum_exp", saved_.log_sum_exp, *rows);
        if (!given_.log_sum_exp.data()) return;
        if (!rows) throw argument_error(operation_, "given.log_sum_exp", "is given, but without a softmax there is none");
        check_read("given.log_sum_exp", given_.log_sum_exp, *rows);
    }
    /// A gradient that is wanted: against what is read.
    void check_written(std::string_view argument, const tensor_view<T>& view, const shape& expected) const {
        check_output(operation_, argument, view, expected, in_);
        const output_memory memory(operation_, argument, view);
        memory.require_apart("saved.values", saved_.values);
        memory.require_apart("saved.log_sum_exp", saved_.log_sum_exp);
        memory.require_apart("given.values", given_.values);
        memory.require_apart("given.log_sum_exp", given_.log_sum_exp);
    }

private:
    void check_read(std::string_view argument, const tensor_view<const T>& view, const shape& expected) const {
        check_view(operation_, argument, view);
        if (view.shape() != expected)
            throw shape_error(operation_, argument, "has shape " + to_string(view.shape()) + ", but the result has " + to_string(expected));
    }

    std::string_view operation_;
    const inputs<T>& in_;
    const saved_outputs<T>& saved_;
    const output_gradients<T>& given_;
};

template <DifferentiableAttention A, Scalar T>
void check_backward(const A& op, const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given,
                    const gradients_of<A, T>& wanted) {
    const auto shapes = shapes_of(in);
    const auto require_wide = [&](std::string_view argument, const stored_view<const T>& view) {
        if (view.is_narrow())
            throw argument_error(A::name, argument,
                                 "of shape " + to_string(view.shape()) +
                                     " is stored in 16 bits: gradients are computed of numbers that are not");
    };
    require_wide("q", in.queries);
    require_wide("k", in.keys);
    require_wide("v", in.values);
    const gradient_checks<T> checks(A::name, in, saved, given);
    if constexpr (requires { requires !A::has_log_sum_exp; }) checks.check_read(op.output_shape(shapes), {});
    else checks.check_read(op.output_shape(shapes), log_sum_exp_shape(op, shapes));
    const auto for_each_wanted = [&](const auto& f) {
        const auto call = [&](std::string_view argument, const tensor_view<T>& view, const shape& expected) {
            if (view.data()) f(argument, view, expected);
        };
        call("wanted.queries", wanted.queries, shapes.queries);
        call("wanted.keys", wanted.keys, shapes.keys);
        call("wanted.values", wanted.values, shapes.values);
        if constexpr (requires { op.check_gradients(in, wanted, call); }) op.check_gradients(in, wanted, call);
    };
    index_t checked = 0; // there may be any number of them: those of a projection for each head
    for_each_wanted([&](std::string_view argument, const tensor_view<T>& view, const shape& expected) {
        checks.check_written(argument, view, expected);
        const output_memory memory(A::name, argument, view);
        attn::check_apart(op, memory);
        index_t number = 0;
        for_each_wanted([&](std::string_view, const tensor_view<T>& earlier, const shape&) {
            if (number++ < checked) memory.require_apart("another gradient", earlier);
        });
        ++checked;
    });
}

} // namespace detail

/// The gradient of a loss with respect to what a call of an operator read: from the call's inputs, what it wrote (`saved`), and the
/// gradient of the loss with respect to that (`given`), a pure function:
///     wanted.queries = d loss / d q,   wanted.keys = d loss / d k,   wanted.values = d loss / d v,   and of the operator's parameters
/// What has no memory in `wanted` is not computed. The gradients have the same bits for every executor and number of threads. Allocates
/// nothing. Throws attention_error, before anything is read or written: shapes that do not fit, a gradient that overlaps what is read or
/// another gradient, a workspace too small.
template <DifferentiableAttention A, Scalar T>
void backward(const A& op, const inputs<T>& in, const std::type_identity_t<saved_outputs<T>>& saved,
              const std::type_identity_t<output_gradients<T>>& given, const std::type_identity_t<gradients_of<A, T>>& wanted,
              const execution& run) {
    op.check(in);
    detail::check_backward(op, in, saved, given, wanted);
    const auto shapes = shapes_of(in);
    const auto needed = op.template backward_workspace_bytes<T>(shapes, run.concurrency());
    if (run.workspace().size_bytes() < needed) {
        throw argument_error(A::name, "workspace",
                             "has " + std::to_string(run.workspace().size_bytes()) + " bytes, but the gradient for q of shape " +
                                 to_string(shapes.queries) + " on " + std::to_string(run.concurrency()) + " threads needs " +
                                 std::to_string(needed));
    }
    op.backward(in, saved, given, wanted, run);
}

/// The gradient of attention with a workspace that is made for the call: see backward(op, in, saved, given, wanted, run).
template <DifferentiableAttention A, Scalar T, ExecutorArgument E = sequential>
void backward(const A& op, const inputs<T>& in, const std::type_identity_t<saved_outputs<T>>& saved,
              const std::type_identity_t<output_gradients<T>>& given, const std::type_identity_t<gradients_of<A, T>>& wanted,
              E&& executor = {}) {
    op.check(in);
    workspace memory(backward_workspace_bytes<T>(op, shapes_of(in), executor));
    backward(op, in, saved, given, wanted, execution(executor, memory));
}

} // namespace attn
