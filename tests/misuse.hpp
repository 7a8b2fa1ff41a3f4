// What wrong arguments are tried on: operators, norms and layers as they are but for their computing, so that a table of them compiles
// quickly and whoever gets past the checks is seen.
#pragma once

#include "errors.hpp"

#include <attn/attention/attention.hpp>
#include <attn/layer/layer.hpp>

#include <functional>

namespace attn::testing {

/// Thrown where a call that should have been refused would have computed.
struct nothing_refused : std::runtime_error {
    nothing_refused() : std::runtime_error("nothing was refused") {}
};

/// An operator with its checks, sizes and references, which does not compute.
template <Attention A>
struct checks_of {
    static constexpr std::string_view name = A::name;
    static constexpr attention_traits traits{.has_log_sum_exp = A::traits.has_log_sum_exp, .has_log_sum_exp_shape = true};

    A op = {};

    template <Scalar T>
    void check(const inputs<T>& in) const {
        op.check(in);
    }
    void check_apart(const output_memory& out) const { op.check_apart(out); }
    shape output_shape(const input_shapes& s) const { return op.output_shape(s); }
    shape log_sum_exp_shape(const input_shapes& s) const { return attn::log_sum_exp_shape(op, s); }
    template <Scalar T>
    std::size_t workspace_bytes(const input_shapes&, index_t) const {
        return 0;
    }
    template <Scalar T>
    void forward(const inputs<T>&, const outputs<T>&, const execution&) const {
        throw nothing_refused();
    }
};

/// The same of a norm, and of a layer.
template <Norm N>
struct checks_of_norm {
    using scalar = typename N::scalar;
    static constexpr std::string_view name = N::name;
    static constexpr bool moves_statistics = N::moves_statistics;

    N norm = {};

    void check(const shape& x) const { norm.check(x); }
    void check_apart(const output_memory& out) const { norm.check_apart(out); }
    std::size_t workspace_bytes(const shape&, index_t, bool = false) const { return 0; }
    void forward(const tensor_view<const scalar>&, const tensor_view<scalar>&, const execution&) const { throw nothing_refused(); }
};
template <Layer L>
struct checks_of_layer {
    using scalar = typename L::scalar;
    static constexpr std::string_view name = L::name;
    static constexpr bool in_place = L::in_place, moves_statistics = L::moves_statistics;

    L layer;

    void check(const layer_inputs<scalar>& in) const { layer.check(in); }
    void check_apart(const output_memory& out) const { layer.check_apart(out); }
    shape output_shape(const shape& tokens) const { return layer.output_shape(tokens); }
    std::size_t workspace_bytes(const shape&, const shape&, index_t) const { return 0; }
    void forward(const layer_inputs<scalar>&, const tensor_view<scalar>&, const execution&) const { throw nothing_refused(); }
};

/// A call and what its refusal says.
struct misuse {
    std::string call;
    std::function<void()> make;
    std::vector<std::string> says;
};

inline void check_refused(const std::vector<misuse>& table) {
    for (const auto& [call, make, says] : table) {
        INFO(call);
        std::string said;
        try {
            said = error_of(make);
        } catch (const std::exception& other) { said = std::string("another exception: ") + other.what(); }
        check_says(said, says);
    }
}

/// Numbers that no extent of a small tensor is: none, fewer than none, and so many that products of them do not fit an index.
inline constexpr index_t wrong_extents[] = {0, -1, -(index_t{1} << 62), index_t{1} << 31, index_t{1} << 40, index_t{1} << 62};

/// The shape with one of its four extents changed.
inline shape with_extent(shape s, int dimension, index_t extent) {
    index_t* const extents[] = {&s.batch, &s.heads, &s.tokens, &s.channels};
    *extents[dimension] = extent;
    return s;
}

/// The memory of a view as numbers of another type, which nobody reads: for outputs that lie where they must not.
template <class T>
tensor_view<T> on(const void* memory, const shape& s) {
    return head_major(static_cast<T*>(const_cast<void*>(memory)), s);
}
template <class T>
tensor_view<T> without_memory(const tensor_view<T>& view) {
    return {nullptr, view.shape(), view.strides()};
}

} // namespace attn::testing
