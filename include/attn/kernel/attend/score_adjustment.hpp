// Score functions on tiles of scores, behind an interface, so that the mainloop is compiled once for all of them.
#pragma once

#include "../../score/additive_bias.hpp"
#include "../../score/composed_score.hpp"
#include "../../simd/elementary.hpp"
#include "../tile_loader.hpp"
#include "query_block.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// scores[keys][stride] of a query block with a run of keys, and memory to transpose a bias in.
template <class T>
struct scored_block {
    const query_block& queries;
    const key_run& keys;
    T* scores;
    index_t stride;
    T* scratch; ///< [keys][stride]
};

/// A score function, tile by tile.
template <Scalar T>
class score_adjustment {
public:
    virtual void operator()(const scored_block<T>& tile) const = 0;

protected:
    ~score_adjustment() = default;
};

/// Calls scores = f(row)(scores, j) for the registers of one head's rows and each key j. Lanes of other heads keep theirs.
template <Scalar T, class F>
void adjust_registers(const scored_block<T>& tile, index_t head, const F& f) {
    using lanes = simd::lanes<T>;
    const auto first_row = head * tile.queries.tokens.count, end_row = first_row + tile.queries.tokens.count;
    const bool alone = tile.queries.heads == 1;
    for (index_t row = first_row / lanes::size * lanes::size; row < end_row; row += lanes::size) {
        const auto of_row = f(row);
        const simd::lane_bits own{bit_range(0, end_row - row) & ~bit_range(0, first_row - row)};
        T* at = tile.scores + row;
        for (index_t j = 0; j < tile.keys.count; ++j, at += tile.stride) {
            const auto score = lanes::load(at);
            const lanes x = of_row(score, j);
            (alone ? x : select(own, x, score)).store(at);
        }
    }
}

/// Whether adjust_scores takes a function. One that is called with registers has to take numbers of any type.
template <Scalar T, class F>
inline constexpr bool adjusts =
    attn::detail::HasBiasRow<F> ||
    std::invocable<const F&, simd::lanes<T>, decltype(positions_of<T, simd::lanes<T>::size>(std::declval<const query_block&>().tokens, 0)),
                   index_t>;
template <Scalar T, Scalar U>
inline constexpr bool adjusts<T, head_bias<U>> = true;
template <Scalar T, class... F>
inline constexpr bool adjusts<T, composed_score<F...>> = (adjusts<T, F> && ...);

/// A function of scores and positions computes in registers.
template <Scalar T, class F>
void adjust_scores(const F& function, const scored_block<T>& tile, index_t head) {
    using lanes = simd::lanes<T>;
    const auto& tokens = tile.queries.tokens;
    if constexpr (adjusts<T, F>) // else the operator's check has said so
        adjust_registers<T>(tile, head, [&](index_t row) {
            const auto queries = positions_of<T, lanes::size>(tokens, head * tokens.count - row);
            return [=, &tile](lanes score, index_t j) {
                return static_cast<lanes>(function(score, queries, tile.keys.first + j * tile.keys.step));
            };
        });
}

/// Scores with a bias. One of -infinity hides the key whatever it holds.
template <Scalar T>
simd::lanes<T> biased(simd::lanes<T> score, simd::lanes<T> bias) {
    const simd::lanes<T> hidden = -std::numeric_limits<T>::infinity();
    return select(bias == hidden, hidden, score + bias);
}
/// Adds the biases that lie in a tile's scratch to its scores.
template <Scalar T>
void add_scratch(const scored_block<T>& tile, index_t head) {
    using lanes = simd::lanes<T>;
    adjust_registers<T>(tile, head, [&](index_t row) {
        return [=, &tile](lanes score, index_t j) { return biased<T>(score, lanes::load(tile.scratch + j * tile.stride + row)); };
    });
}

/// A bias lies in memory row by row while lanes are rows: each tile of it is transposed as it is added. Behind a long run of keys another
/// may follow, whose biases are asked for: rows are more streams than a processor's own prefetchers follow.
template <Scalar T, Scalar U>
void adjust_scores(const head_bias<U>& bias, const scored_block<T>& tile, index_t head) {
    static_assert(std::same_as<T, U>, "attn: an additive_bias has the scalar type of the tokens");
    if constexpr (std::same_as<T, U>) {
        constexpr index_t long_run = 64, line = 64 / sizeof(T);
        const auto& [first, count, step] = tile.queries.tokens;
        const auto rows = bias.rows.from(first - bias.first_query, tile.keys.first - bias.first_key).every(step);
        as_they_lie(rows.transposed().every(tile.keys.step).transposed(), [&](auto from) {
            if (tile.queries.heads == 1)
                return for_each_transposed(from, count, tile.keys.count, T{1}, [&](index_t j, index_t row, simd::lanes<T> column) {
                    if (tile.keys.count >= long_run && j % line == 0)
                        for (auto r = row; r < row + simd::lanes<T>::size; ++r) simd::prefetch_far(from.address(r, j + tile.keys.count));
                    T* const at = tile.scores + j * tile.stride + row;
                    biased<T>(simd::lanes<T>::load(at), column).store(at);
                });
            for (index_t j = 0; j < tile.keys.count; ++j)
                for (index_t q = 0; q < count; ++q) tile.scratch[j * tile.stride + head * count + q] = from(q, j);
            add_scratch<T>(tile, head);
        });
    }
}

/// Adds a bias that a function knows row by row: it is written to scratch memory, key by key, and added from there.
template <Scalar T, attn::detail::HasBiasRow F>
void adjust_scores(const F& function, const scored_block<T>& tile, index_t head) {
    static_assert(attn::detail::HasBiasRowOf<F, T>, "attn: a score function's table has the scalar type of the tokens");
    if constexpr (attn::detail::HasBiasRowOf<F, T>) {
        const auto& [first, count, step] = tile.queries.tokens;
        const auto end = tile.queries.heads == 1 ? whole_registers<T>(count) : count;
        for (index_t j = 0; j < tile.keys.count; ++j) {
            T* const row = tile.scratch + j * tile.stride + head * count;
            function.bias_row(first, step, count, tile.keys.first + j * tile.keys.step, row);
            std::fill(row + count, row + end, T{0});
        }
        add_scratch<T>(tile, head);
    }
}

/// Adjusts scores by the functions of a chain, one after the other.
template <Scalar T, class... F>
void adjust_scores(const composed_score<F...>& chain, const scored_block<T>& tile, index_t head) {
    std::apply([&](const auto&... f) { (adjust_scores<T>(f, tile, head), ...); }, chain.functions);
}

/// True, or the program is not compiled, and one sentence says why.
template <Scalar T, class S>
consteval bool require_generic_score() {
    constexpr bool is_generic = adjusts<T, std::remove_cvref_t<decltype(score_at(std::declval<const S&>(), 0, 0))>>;
    static_assert(is_generic, "attn: a score function takes numbers of any type: [](auto score, auto query, auto key) { ... }");
    return true;
}

template <Scalar T, ScoreFunction S>
class score_adjustment_of final : public score_adjustment<T> {
public:
    explicit score_adjustment_of(const S& score) : score_(score) {}

    void operator()(const scored_block<T>& tile) const override {
        for (index_t head = 0; head < tile.queries.heads; ++head)
            adjust_scores<T>(score_at(score_, tile.queries.batch, tile.queries.first_head + head), tile, head);
    }

private:
    const S& score_;
};

} // namespace attn::kernel
