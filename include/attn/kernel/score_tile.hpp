// Score functions on tiles of scores: lanes are queries, rows are keys.
#pragma once

#include "../core/workspace.hpp"
#include "../pattern/schedule.hpp"
#include "../score/additive_bias.hpp"
#include "../score/then.hpp"
#include "../simd/positions.hpp"
#include "tile_loader.hpp"

namespace attn::kernel {

/// True if all heads read the same bias: then a panel's rows of it stay in cache while the panel goes through the heads.
template <class S>
bool heads_share_bias(const S&) {
    return false;
}
template <Scalar T>
bool heads_share_bias(const additive_bias<T>& score) {
    return score.bias.shape().heads == 1 || score.bias.strides().head == 0;
}
template <class... S>
bool heads_share_bias(const then<S...>& score) {
    return std::apply([](const auto&... part) { return (heads_share_bias(part) || ...); }, score.functions);
}

/// Applies one head's score function F to tiles of scores. Functions of positions compute in registers and need no memory.
template <Scalar T, class Arch, class F>
struct score_tile {
    using lanes = simd::lanes<T, Arch>;
    F function;

    static score_tile take(detail::scratch&, const F& f, index, index) { return {f}; }
    /// Makes ready for keys.count rows of keys and the queries of one panel.
    void load(const query_tile&, const key_run&) {}
    /// New scores of one register: row is the key's row in the tile, lane the register's first lane in the panel.
    [[gnu::always_inline]] lanes operator()(lanes score, const simd::query_lanes<T, Arch>& query, index key, index, index) const {
        return static_cast<lanes>(function(score, query, key));
    }
};

/// A bias lies in memory row by row while lanes are queries: each tile of it is transposed first.
template <Scalar T, class Arch, class U>
struct score_tile<T, Arch, head_bias<U>> {
    using lanes = simd::lanes<T, Arch>;
    head_bias<U> function;
    index stride = 0;
    T* tile = nullptr;

    static score_tile take(detail::scratch& memory, const head_bias<U>& f, index rows, index queries) {
        return {f, queries, memory.take<T>(rows * queries)};
    }
    void load(const query_tile& queries, const key_run& keys) {
        const auto& f = function;
        const row_block<const U> block{f.data + (queries.first - f.first_query) * f.query_stride + (keys.first - f.first_key) * f.key_stride,
                                       f.query_stride * queries.step, f.key_stride * keys.step};
        // As many rows as there are queries, each a stream of its own, are more than the hardware follows.
        constexpr index ahead = 64;
        transpose_rows<T, Arch>(block, queries.count, keys.count, T{1}, tile, stride, ahead);
    }
    [[gnu::always_inline]] lanes operator()(lanes score, const simd::query_lanes<T, Arch>&, index, index row, index lane) const {
        const lanes bias = lanes::load(tile + row * stride + lane);
        return select(bias == lanes(-std::numeric_limits<T>::infinity()), bias, score + bias);
    }
};

template <Scalar T, class Arch, class... F>
struct score_tile<T, Arch, then<F...>> {
    using lanes = simd::lanes<T, Arch>;
    std::tuple<score_tile<T, Arch, F>...> parts;

    static score_tile take(detail::scratch& memory, const then<F...>& f, index rows, index queries) {
        return {std::apply([&](const auto&... part) { return std::tuple{score_tile<T, Arch, F>::take(memory, part, rows, queries)...}; }, f.functions)};
    }
    void load(const query_tile& queries, const key_run& keys) {
        std::apply([&](auto&... part) { (part.load(queries, keys), ...); }, parts);
    }
    [[gnu::always_inline]] lanes operator()(lanes score, const simd::query_lanes<T, Arch>& query, index key, index row, index lane) const {
        std::apply([&](const auto&... part) { ((score = part(score, query, key, row, lane)), ...); }, parts);
        return score;
    }
};

} // namespace attn::kernel
