// Score functions on tiles of scores: lanes are queries, rows are keys.
#pragma once

#include "../core/workspace.hpp"
#include "../pattern/schedule.hpp"
#include "../score/additive_bias.hpp"
#include "../score/then.hpp"
#include "../simd/positions.hpp"
#include "tile_loader.hpp"

namespace attn::kernel {

/// Applies one head's score function F to tiles of scores. Functions of positions compute in registers and need no memory.
template <Scalar T, class Arch, class F>
struct score_tile {
    using lanes = simd::lanes<T, Arch>;
    F function;

    static score_tile take(detail::scratch&, const F& f, index) { return {f}; }
    /// Makes ready for a run of keys and one register of queries.
    void load(const query_tile&, const key_run&) {}
    /// New scores of that register with one key, which is the row-th of the run.
    [[gnu::always_inline]] lanes operator()(lanes score, const simd::query_lanes<T, Arch>& query, index key, index) const {
        return static_cast<lanes>(function(score, query, key));
    }
};

/// A bias lies in memory row by row while lanes are queries: each tile of it is transposed first.
template <Scalar T, class Arch, class U>
struct score_tile<T, Arch, head_bias<U>> {
    using lanes = simd::lanes<T, Arch>;
    head_bias<U> function;
    T* tile = nullptr;

    static score_tile take(detail::scratch& memory, const head_bias<U>& f, index most_keys) {
        return {f, memory.take<T>(most_keys * lanes::size)};
    }
    void load(const query_tile& queries, const key_run& keys) {
        const auto& f = function;
        const row_block<const U> block{f.data + (queries.first - f.first_query) * f.query_stride +
                                           (keys.first - f.first_key) * f.key_stride,
                                       f.query_stride * queries.step, f.key_stride * keys.step};
        // Every row is a stream of its own. More than a register of them at once are more than the hardware follows: a whole panel by
        // 16 keys took 9 % longer.
        constexpr index ahead = 64;
        transpose_rows<T, Arch>(block, queries.count, keys.count, T{1}, tile, lanes::size, ahead);
    }
    [[gnu::always_inline]] lanes operator()(lanes score, const simd::query_lanes<T, Arch>&, index, index row) const {
        const lanes bias = lanes::load(tile + row * lanes::size);
        return select(bias == lanes(-std::numeric_limits<T>::infinity()), bias, score + bias);
    }
};

template <Scalar T, class Arch, class... F>
struct score_tile<T, Arch, then<F...>> {
    using lanes = simd::lanes<T, Arch>;
    std::tuple<score_tile<T, Arch, F>...> parts;

    static score_tile take(detail::scratch& memory, const then<F...>& f, index most_keys) {
        return {std::apply([&](const auto&... part) { return std::tuple{score_tile<T, Arch, F>::take(memory, part, most_keys)...}; },
                           f.functions)};
    }
    void load(const query_tile& queries, const key_run& keys) {
        std::apply([&](auto&... part) { (part.load(queries, keys), ...); }, parts);
    }
    [[gnu::always_inline]] lanes operator()(lanes score, const simd::query_lanes<T, Arch>& query, index key, index row) const {
        std::apply([&](const auto&... part) { ((score = part(score, query, key, row)), ...); }, parts);
        return score;
    }
};

} // namespace attn::kernel
