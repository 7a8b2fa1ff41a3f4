// Score functions on tiles of scores: lanes are queries, rows are keys.
#pragma once

#include "../core/workspace.hpp"
#include "../pattern/schedule.hpp"
#include "../score/additive_bias.hpp"
#include "../score/then.hpp"
#include "../simd/positions.hpp"
#include "lone_query.hpp"
#include "tile_loader.hpp"

namespace attn::kernel {

/// Applies one head's score function F to tiles of scores. Functions of positions compute in registers and need no memory.
template <Scalar T, class Arch, class F>
struct score_tile {
    using lanes = simd::lanes<T, Arch>;
    F function;

    static score_tile take(detail::scratch&, const F& f, index, T = 1) { return {f}; }
    /// The score function of another head, or batch entry, in the same memory.
    score_tile rebound(const F& f) const { return {f}; }
    /// Makes ready for a panel of queries and all keys that it may see.
    void begin(const query_tile&, index, index) {}
    /// Makes ready for a run of keys and one register of the panel's queries.
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
    T* memory = nullptr;
    T unit = 1;              ///< what scores are multiples of: the bias is multiplied by it
    const T* tile = nullptr; ///< of the run of keys and the register of queries at hand
    index stride = 0;        ///< from key to key

    /// A panel of few keys is transposed at once, and kept for the next batch entry if it has the same bias.
    static constexpr index most_kept = 256; ///< registers
    row_block<const U> kept{};
    index kept_queries = 0, kept_keys = 0, kept_stride = 0, first_query = 0, first_key = 0;

    static score_tile take(detail::scratch& memory, const head_bias<U>& f, index most_keys, T unit = 1) {
        return {f, memory.take<T>(std::max(most_keys, most_kept) * lanes::size), unit};
    }
    score_tile rebound(const head_bias<U>& f) const {
        auto result = *this;
        result.function = f;
        return result;
    }
    void begin(const query_tile& queries, index first, index keys) {
        const bool lone = leaves_lone_query<T, Arch>(queries.count);
        const auto columns = queries.count - lone, registers = (columns + lanes::size - 1) / lanes::size;
        const bool keeps = queries.step == 1 && (registers + lone) * keys <= most_kept;
        const auto block = rows(queries, {first, keys, 1, true});
        const bool same = block.data == kept.data && block.row_stride == kept.row_stride && block.channel_stride == kept.channel_stride &&
                          queries.count == kept_queries && keys == kept_keys;
        first_query = queries.first;
        first_key = first;
        if (keeps && !same) {
            kept_stride = registers * lanes::size;
            transpose_rows<T, Arch>(block, columns, keys, unit, memory, kept_stride);
            if (lone)
                for (index j = 0; j < keys; ++j)
                    memory[kept_stride * keys + j] =
                        unit * static_cast<T>(block.data[columns * block.row_stride + j * block.channel_stride]);
        }
        kept = block;
        kept_queries = keeps ? queries.count : 0;
        kept_keys = keys;
    }
    row_block<const U> rows(const query_tile& queries, const key_run& keys) const {
        const auto& f = function;
        return {f.data + (queries.first - f.first_query) * f.query_stride + (keys.first - f.first_key) * f.key_stride,
                f.query_stride * queries.step, f.key_stride * keys.step};
    }
    bool keeps_panel() const { return kept_queries > 0; }
    /// Of a kept panel: the bias of the lone query for a run of keys.
    const T* lone_row(const key_run& keys) const { return memory + kept_stride * kept_keys + keys.first - first_key; }
    void load(const query_tile& queries, const key_run& keys) {
        if (keeps_panel()) {
            const auto query = queries.first - first_query;
            stride = query < kept_stride ? kept_stride : 1;
            tile = query < kept_stride ? memory + (keys.first - first_key) * stride + query : lone_row(keys);
            return;
        }
        tile = memory;
        stride = lanes::size;
        // Every row is a stream of its own. More than a register of them at once are more than the hardware follows: a whole panel by
        // 16 keys took 9 % longer.
        constexpr index ahead = 64;
        transpose_rows<T, Arch>(rows(queries, keys), queries.count, keys.count, unit, memory, stride, ahead);
    }
    [[gnu::always_inline]] lanes operator()(lanes score, const simd::query_lanes<T, Arch>&, index, index row) const {
        const lanes bias = lanes::load(tile + row * stride);
        return select(bias == lanes(-std::numeric_limits<T>::infinity()), bias, score + bias);
    }
    /// The score, to which the bias has been added, unless it hides the key.
    [[gnu::always_inline]] lanes hide(lanes score, index row) const {
        const lanes bias = lanes::load(tile + row * stride);
        return select(bias == lanes(-std::numeric_limits<T>::infinity()), bias, score);
    }
};

template <Scalar T, class Arch, class... F>
struct score_tile<T, Arch, then<F...>> {
    using lanes = simd::lanes<T, Arch>;
    std::tuple<score_tile<T, Arch, F>...> parts;

    static score_tile take(detail::scratch& memory, const then<F...>& f, index most_keys, T = 1) {
        return {std::apply([&](const auto&... part) { return std::tuple{score_tile<T, Arch, F>::take(memory, part, most_keys)...}; },
                           f.functions)};
    }
    score_tile rebound(const then<F...>& f) const {
        return {[&]<std::size_t... I>(std::index_sequence<I...>) {
            return std::tuple{std::get<I>(parts).rebound(std::get<I>(f.functions))...};
        }(std::index_sequence_for<F...>{})};
    }
    void begin(const query_tile& queries, index first_key, index keys) {
        std::apply([&](auto&... part) { (part.begin(queries, first_key, keys), ...); }, parts);
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
