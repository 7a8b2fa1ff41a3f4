// How the gradient of a projection is found, head by head: of its tokens, and part by part of its parameters.
#pragma once

#include "../../core/gradients.hpp"
#include "../../core/workspace.hpp"
#include "token_rows.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Whether the gradient of any parameter of a projection is wanted.
template <Scalar T>
bool any_parameter_wanted(const auto& projection, const auto& wanted) {
    bool any = false;
    detail::for_each_gradient(projection, wanted,
                              [&](std::string_view, const tensor_view<T>& view, const auto&) { any = any || view.data(); });
    return any;
}
/// Begins the sums that the gradients of a projection's parameters are.
template <Scalar T>
void clear_parameter_gradients(const auto& projection, const auto& wanted) {
    detail::for_each_gradient(projection, wanted,
                              [](std::string_view, const tensor_view<T>& view, const auto&) { detail::fill_zero(view); });
}
/// Into how many parts the gradients of a projection's parameters are cut, no number being in two; none without parameters.
template <class G>
index_t parameter_gradient_parts(const auto& projection, const G&, index_t tokens) {
    if constexpr (std::same_as<G, no_gradients>) return 0;
    else return projection.gradient_parts(tokens);
}

/// Writes the gradient of the tokens of one head, (1, 1, m, d). for_each_run(f) calls f(tokens, head, row, count, d_out, memory) for the
/// runs of its projected rows that there are.
template <Scalar T>
void find_token_gradients(const auto& projection, const tensor_view<T>& of_head, const auto& for_each_run) {
    detail::fill_zero(of_head);
    for_each_run([&](const token_rows<T>& x, index_t head, index_t row, index_t count, const row_block<const T>& d_out,
                     detail::scratch& memory) { projection.add_token_gradients(x, head, row, count, d_out, of_head.rows(0, 0), memory); });
}
/// Adds what the rows of one head give to a part of the gradients of the parameters: for_each_run as above.
template <Scalar T, class G>
void add_parameter_gradients(const auto& projection, index_t part, const G& wanted, const auto& for_each_run) {
    if constexpr (!std::same_as<G, no_gradients>)
        for_each_run(
            [&](const token_rows<T>& x, index_t head, index_t row, index_t count, const row_block<const T>& d_out,
                detail::scratch& memory) { projection.add_parameter_gradients(x, head, row, count, d_out, part, wanted, memory); });
}

} // namespace attn::kernel
