// Score functions and their slopes on tiles of scores, behind an interface, so that the gradient is compiled once for all of them.
#pragma once

#include "../../score/dual.hpp"
#include "../../simd/elementary.hpp"
#include "../attend/score_adjustment.hpp"
#include "pair_sums.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A score function with its slope, tile by tile: scores become adjusted ones, slopes[keys][stride] their derivatives by what `by` names.
template <Scalar T>
class score_slopes {
public:
    virtual void operator()(const scored_block<T>& tile, T* slopes, const derived_by& by) const = 0;
    /// The gradients of its parameters that are wanted.
    virtual void find_parameters(const pair_summation<T>& find) const = 0;

protected:
    ~score_slopes() = default;
};

/// Multiplies the slopes by those of one more function, which is applied. Tiles hold one head.
template <Scalar T, class F>
void apply_slopes(const F& function, const scored_block<T>& tile, T* slopes) {
    using lanes = simd::lanes<T>;
    adjust_registers<T>(tile, 0, [&](index_t row) {
        const auto queries = positions_of<T, lanes::size>(tile.queries.tokens, -row);
        return [=, &tile](lanes score, index_t j) {
            const auto adjusted = attn::detail::differentiated(function, score, queries, tile.keys.first + j * tile.keys.step);
            T* const slope = slopes + j * tile.stride + row;
            (lanes::load(slope) * adjusted.derivative).store(slope);
            return adjusted.value;
        };
    });
}
/// The slopes by a function that adds a bias, which stay as they are.
template <Scalar T, class F>
    requires(attn::detail::HasBiasRow<F> || std::same_as<F, head_bias<T>>)
void apply_slopes(const F& function, const scored_block<T>& tile, T*) {
    adjust_scores<T>(function, tile, 0);
}

/// slopes = the derivatives by the parameter of a function that is not applied yet; 1 for its result.
template <Scalar T, class F>
void begin_slopes(const F& function, const scored_block<T>& tile, T* slopes, index_t parameter) {
    using lanes = simd::lanes<T>;
    std::fill_n(slopes, tile.keys.count * tile.stride, T{1});
    if constexpr (attn::detail::HasParameterSlopes<F>)
        if (parameter >= 0)
            adjust_registers<T>(tile, 0, [&](index_t row) {
                const auto queries = positions_of<T, lanes::size>(tile.queries.tokens, -row);
                return [=, &tile](lanes score, index_t j) {
                    function.parameter_slope(parameter, score, queries, tile.keys.first + j * tile.keys.step)
                        .store(slopes + j * tile.stride + row);
                    return score;
                };
            });
}

/// Calls f(function) for the functions of a chain, or for one that is none: also of what is a chain for a head only.
void for_each_function(const auto& score, const auto& f) { f(score); }
template <class... S>
void for_each_function(const composed_score<S...>& chain, const auto& f) {
    std::apply([&](const auto&... each) { (for_each_function(each, f), ...); }, chain.functions);
}
/// Calls f(function, wanted gradients of it) for the functions of a chain, or for one that is none.
void for_each_function(const auto& score, const auto& wanted, const auto& f) { f(score, wanted); }
template <class... S, class... G, class F>
void for_each_function(const composed_score<S...>& chain, const std::tuple<G...>& wanted, const F& f) {
    [&]<std::size_t... n>(std::index_sequence<n...>) {
        (for_each_function(std::get<n>(chain.functions), std::get<n>(wanted), f), ...);
    }(std::index_sequence_for<S...>());
}

template <Scalar T, ScoreFunction S>
class score_slopes_of final : public score_slopes<T> {
public:
    score_slopes_of(const S& score, const score_gradients<S, T>& wanted) : score_(score), wanted_(wanted) {}

    void operator()(const scored_block<T>& tile, T* slopes, const derived_by& by) const override {
        if (by.function < 0) std::fill_n(slopes, tile.keys.count * tile.stride, T{1});
        index_t number = 0;
        for_each_function(score_at(score_, tile.queries.batch, tile.queries.first_head), [&](const auto& f) {
            if (number == by.function) begin_slopes<T>(f, tile, slopes, by.parameter);
            if (number <= by.function) adjust_scores<T>(f, tile, 0);
            else apply_slopes<T>(f, tile, slopes);
            ++number;
        });
    }
    void find_parameters(const pair_summation<T>& find) const override {
        index_t number = 0;
        for_each_function(score_, wanted_, [&](const auto& f, const auto& wanted) {
            using function = std::remove_cvref_t<decltype(f)>;
            if constexpr (attn::detail::HasGradients<function, T>) {
                constexpr bool has_slopes = attn::detail::HasParameterSlopes<decltype(score_at(f, 0, 0))>;
                f.find_gradients(wanted, parameter_sums<T, has_slopes>(find, number));
            }
            ++number;
        });
    }

private:
    const S& score_;
    const score_gradients<S, T>& wanted_;
};

} // namespace attn::kernel
