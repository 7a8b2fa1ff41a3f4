#pragma once

#include "score_function.hpp"

#include <tuple>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Score functions one after the other: composed_score{a, b, c} gives c(b(a(score))). `at` and `check` are those of every member.
/// The usual order is soft cap, then biases: a key that a bias of -infinity hides comes back when its score is capped afterwards.
/// Between two functions the score has the type that it began with, so a function that returns double does not widen a float.
template <class... F>
struct composed_score {
    /// Whether one of the functions compares positions.
    static constexpr bool compares_positions = (attn::compares_positions<F> || ...);
    std::tuple<F...> functions;

    /// Applies the first one first.
    constexpr explicit(sizeof...(F) == 1) composed_score(F... in_order) : functions(std::move(in_order)...) {}

    /// The gradients of the functions' parameters, in their order.
    template <class U>
    using gradients = std::tuple<score_gradients<F, U>...>;
    template <class... G>
    void check_gradients(const std::tuple<G...>& wanted, const auto& check) const {
        [&]<std::size_t... n>(std::index_sequence<n...>) {
            (detail::check_score_gradients(std::get<n>(functions), std::get<n>(wanted), check), ...);
        }(std::index_sequence_for<F...>());
    }

    template <class S>
    constexpr S operator()(S score, auto query, auto key) const {
        const auto apply_each = [&](const auto&... f) { ((score = static_cast<S>(f(score, query, key))), ...); };
        std::apply(apply_each, functions);
        return score;
    }
    constexpr auto at(index_t batch, index_t head) const
        requires(detail::HasAt<F> || ...)
    {
        const auto bind_each = [&](const auto&... f) {
            return composed_score<decltype(score_at(f, batch, head))...>(score_at(f, batch, head)...);
        };
        return std::apply(bind_each, functions);
    }
    void check(const score_context& context) const {
        std::apply([&](const auto&... f) { (attn::check(f, context), ...); }, functions);
    }
    void check_apart(const output_memory& out) const {
        std::apply([&](const auto&... f) { (attn::check_apart(f, out), ...); }, functions);
    }
};

} // namespace attn
