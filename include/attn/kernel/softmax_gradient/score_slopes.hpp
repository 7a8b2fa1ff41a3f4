// Score functions and their slopes on tiles of scores, behind an interface, so that the gradient is compiled once for all of them.
#pragma once

#include "../../score/dual.hpp"
#include "../softmax/score_adjustment.hpp"

#include <array>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A bias whose gradient is wanted: the number of its function in the chain of score functions, where its gradient goes, and the positions at
/// which it begins.
template <Scalar T>
struct bias_gradient {
    index_t function = 0;
    tensor_view<T> to = {};
    per_batch first_query = 0, first_key = 0;
};

/// A score function with its slope, tile by tile: scores become adjusted ones, slopes[keys][stride] the derivatives by what they were behind
/// function number `after` of a chain; by what came in, if that is -1.
template <Scalar T>
class score_slopes {
public:
    virtual void operator()(const scored_block<T>& tile, T* slopes, index_t after) const = 0;

protected:
    ~score_slopes() = default;
};

/// Multiplies the slopes by those of one more function, which is applied. Tiles hold one head.
template <Scalar T, class Arch, class F>
void apply_slopes(const F& function, const scored_block<T>& tile, T* slopes) {
    using lanes = simd::lanes<T, Arch>;
    adjust_registers<T, Arch>(tile, 0, [&](index_t row) {
        const auto queries = positions_of<T, Arch, lanes::size>(tile.queries.tokens, -row);
        return [=, &tile](lanes score, index_t j) {
            const auto adjusted = attn::detail::differentiated(function, score, queries, tile.keys.first + j * tile.keys.step);
            T* const slope = slopes + j * tile.stride + row;
            (lanes::load(slope) * adjusted.derivative).store(slope);
            return adjusted.value;
        };
    });
}
/// What adds a bias leaves slopes as they are.
template <Scalar T, class Arch, class F>
    requires(attn::detail::HasBiasRow<F> || std::same_as<F, head_bias<T>>)
void apply_slopes(const F& function, const scored_block<T>& tile, T*) {
    adjust_scores<T, Arch>(function, tile, 0);
}

/// Calls f(function) for the functions of a chain, or for one that is none.
template <class S, class F>
void for_each_function(const S& score, const F& f) {
    f(score);
}
template <class... S, class F>
void for_each_function(const composed_score<S...>& chain, const F& f) {
    std::apply([&](const auto&... each) { (for_each_function(each, f), ...); }, chain.functions);
}

template <Scalar T, class Arch, ScoreFunction S>
class score_slopes_of final : public score_slopes<T> {
public:
    explicit score_slopes_of(const S& score) : score_(score) {}

    void operator()(const scored_block<T>& tile, T* slopes, index_t after) const override {
        const auto begin = [&] { std::fill_n(slopes, tile.keys.count * tile.stride, T{1}); };
        index_t number = 0;
        begin();
        for_each_function(score_at(score_, tile.queries.batch, tile.queries.first_head), [&](const auto& f) {
            apply_slopes<T, Arch>(f, tile, slopes);
            if (number++ == after) begin();
        });
    }

private:
    const S& score_;
};

/// How many functions a score function is made of.
template <class S>
inline constexpr std::size_t function_count = 1;
template <class... S>
inline constexpr std::size_t function_count<composed_score<S...>> = (function_count<S> + ... + 0);

/// The biases among some score functions whose gradients are wanted: at most Most.
template <Scalar T, std::size_t Most>
struct wanted_biases {
    std::array<bias_gradient<T>, Most> each{};
    std::size_t count = 0;

    /// Those of the functions from `number` on, which is counted on.
    template <class S>
    void add(index_t& number, const S&, const no_gradients&) {
        ++number;
    }
    template <Scalar U>
    void add(index_t& number, const additive_bias<U>& bias, const typename additive_bias<U>::template gradients<T>& wanted) {
        if (wanted.bias.data()) each[count++] = {number, wanted.bias, bias.first_query, bias.first_key};
        ++number;
    }
    template <class... S>
    void add(index_t& number, const composed_score<S...>& chain, const std::tuple<score_gradients<S, T>...>& wanted) {
        [&]<std::size_t... n>(std::index_sequence<n...>) { (add(number, std::get<n>(chain.functions), std::get<n>(wanted)), ...); }(std::index_sequence_for<S...>());
    }
};

} // namespace attn::kernel
