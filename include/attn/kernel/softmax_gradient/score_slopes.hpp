// Score functions and their slopes on tiles of scores, behind an interface, so that the gradient is compiled once for all of them.
#pragma once

#include "../../score/dual.hpp"
#include "../softmax/score_adjustment.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A score function with its slope, tile by tile: scores become adjusted ones, slopes[keys][stride] the derivatives by what they were.
template <Scalar T>
class score_slopes {
public:
    virtual void operator()(const scored_block<T>& tile, T* slopes) const = 0;

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
/// One after the other.
template <Scalar T, class Arch, class... F>
void apply_slopes(const composed_score<F...>& chain, const scored_block<T>& tile, T* slopes) {
    std::apply([&](const auto&... f) { (apply_slopes<T, Arch>(f, tile, slopes), ...); }, chain.functions);
}

template <Scalar T, class Arch, ScoreFunction S>
class score_slopes_of final : public score_slopes<T> {
public:
    explicit score_slopes_of(const S& score) : score_(score) {}

    void operator()(const scored_block<T>& tile, T* slopes) const override {
        std::fill_n(slopes, tile.keys.count * tile.stride, T{1});
        apply_slopes<T, Arch>(score_at(score_, tile.queries.batch, tile.queries.first_head), tile, slopes);
    }

private:
    const S& score_;
};

} // namespace attn::kernel
