// What layers ask of the gradients of the norms inside.
#pragma once

#include "../norm/backward.hpp"
#include "../norm/identity_norm.hpp"
#include "backward.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// A norm that a layer can be trained with.
template <class N>
concept TrainableNorm = DifferentiableNorm<N> || std::same_as<N, identity_norm<typename N::scalar>>;

/// The gradients of a norm's parameters; of a norm that has no gradient, none.
template <class N>
struct gradients_of_norm_type {
    using type = no_parameter_gradients;
};
template <DifferentiableNorm N>
struct gradients_of_norm_type<N> {
    using type = typename N::gradients;
};
template <class N>
using gradients_of_norm = typename gradients_of_norm_type<N>::type;

template <class N>
std::size_t backward_workspace_of(const N& norm, const shape& x, index_t concurrency) {
    if constexpr (DifferentiableNorm<N>) return norm.backward_workspace_bytes(x, concurrency);
    else return 0;
}

/// Calls visit(name, view, shape, rows) for the gradients of a norm's parameters, as a layer does for its own.
template <class N, class G, class V>
void for_each_norm_gradient(const G& wanted, index_t channels, const V& visit) {
    const auto row = [&](std::string_view name, const auto& numbers, index_t count) {
        visit(name, as_row(numbers), shape{.tokens = 1, .channels = count}, true);
    };
    if constexpr (requires { wanted.rep; }) { // a progressive norm's
        for_each_norm_gradient<decltype(N::norm.norm)>(wanted.norm, channels, visit_member("norm", visit));
        for_each_norm_gradient<decltype(N::norm.rep)>(wanted.rep, channels, visit_member("rep", visit));
    } else if constexpr (requires { wanted.weight; }) {
        row("wanted.weight", wanted.weight, channels);
        row("wanted.bias", wanted.bias, N::adds_bias ? channels : 0);
        if constexpr (requires { wanted.eta; }) row("wanted.eta", wanted.eta, 1);
    }
}

} // namespace attn::detail
