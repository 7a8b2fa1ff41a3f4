// Score functions on tiles of scores: lanes are queries, rows are keys.
#pragma once

#include "../core/workspace.hpp"
#include "../pattern/schedule.hpp"
#include "../score/additive_bias.hpp"
#include "../score/then.hpp"
#include "added_scores.hpp"
#include "lone_query.hpp"
#include "tile_loader.hpp"

#include <bitset>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Applies one head's score function F to tiles of scores. Functions of positions compute in registers and need no memory.
template <Scalar T, class Arch, class F>
struct score_tile {
    using lanes = simd::lanes<T, Arch>;
    F function;

    static score_tile take(detail::scratch&, const F& f, index, index) { return {f}; }
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

/// A bias lies in memory row by row while lanes are queries: each tile of it is transposed first. If a panel's tiles all fit into the
/// memory, they are kept for the heads and batch entries that follow and have the same bias.
template <Scalar T, class Arch, class U>
struct score_tile<T, Arch, head_bias<U>> : added_scores<T, Arch> {
    using lanes = simd::lanes<T, Arch>;
    head_bias<U> function;
    T* memory;
    index capacity; ///< of the memory
    T* lone_memory; ///< of the lone query, whose row is not transposed: of as many keys as `memory` holds registers

    static constexpr index most_kept_keys = 2048, block = 16;
    bool keeps_panel = false;
    query_tile panel{}; ///< no queries before `begin`
    index panel_stride = 0;
    bool has_lone = false;
    index first_key = 0, key_count = 0;
    row_block<const U> panel_rows{};
    std::bitset<most_kept_keys / block> transposed{}; ///< of the panel, so many keys a bit

    static score_tile take(detail::scratch& memory, const head_bias<U>& f, index most_keys, index most_queries) {
        constexpr index window = 256 * lanes::size; // a few short panels are worth keeping whoever shares them
        const auto capacity = std::max(most_keys * whole_registers<T, Arch>(most_queries), window);
        return {{}, f, memory.take<T>(capacity), capacity, memory.take<T>(capacity / lanes::size + lanes::size)};
    }
    score_tile rebound(const head_bias<U>& f) const {
        auto result = *this;
        result.function = f;
        return result;
    }
    void begin(const query_tile& queries, index first, index keys) {
        const auto all = rows(queries, {first, keys, 1, true});
        const bool same = all.data == panel_rows.data && all.row_stride == panel_rows.row_stride &&
                          all.channel_stride == panel_rows.channel_stride && queries.count == panel.count && keys == key_count;
        panel = queries;
        has_lone = leaves_lone_query<T, Arch>(queries.count);
        panel_stride = whole_registers<T, Arch>(queries.count - has_lone);
        // Also as many keys of the lone query by itself.
        keeps_panel = queries.step == 1 && keys <= most_kept_keys && std::max<index>(panel_stride, lanes::size) * keys <= capacity;
        first_key = first;
        key_count = keys;
        panel_rows = all;
        if (!keeps_panel || !same) transposed.reset();
    }
    row_block<const U> rows(const query_tile& queries, const key_run& keys) const {
        const auto& f = function;
        return {f.data + (queries.first - f.first_query) * f.query_stride + (keys.first - f.first_key) * f.key_stride,
                f.query_stride * queries.step, f.key_stride * keys.step};
    }
    /// True if a run of keys is not kept from before.
    bool needs(const key_run& keys) const { return !keeps_panel || !is_transposed((keys.first - first_key) / block); }
    void load(const query_tile& queries, const key_run& keys) {
        const auto begin = keeps_panel ? keys.first - first_key : 0, query = keeps_panel ? queries.first - panel.first : 0;
        const bool whole = queries.count == panel.count;
        if (keeps_panel) {
            this->stride = panel_stride;
            keep(begin, begin + keys.count);
        } else {
            this->stride = whole ? panel_stride : whole_registers<T, Arch>(queries.count);
            transpose(queries, keys, whole && has_lone, 0);
        }
        this->numbers = memory + begin * this->stride + query;
        this->lone = lone_memory + begin;
        if (query >= this->stride) *static_cast<added_scores<T, Arch>*>(this) = this->of_lone_query();
    }

private:
    bool is_transposed(index number) const { return transposed[static_cast<std::size_t>(number)]; }
    /// Transposes what is missing of keys begin .. end - 1 of the panel, whole blocks of them.
    void keep(index begin, index end) {
        for (auto number = begin / block; number * block < end; ++number) {
            const auto first = number * block;
            for (; number * block < end && !is_transposed(number); ++number) transposed.set(static_cast<std::size_t>(number));
            const auto count = std::min(number * block, key_count) - first;
            if (count > 0) transpose(panel, {first_key + first, count, 1, true}, has_lone, first);
        }
    }
    /// To row `row` of the memory and those after it.
    void transpose(const query_tile& queries, const key_run& keys, bool with_lone, index row) const {
        // Every row is a stream of its own. More than a register of them at once are more than the hardware follows: a whole panel by
        // 16 keys took 9 % longer.
        constexpr index ahead = 64;
        const auto from = rows(queries, keys);
        const auto columns = queries.count - with_lone;
        transpose_rows<T, Arch>(from, columns, keys.count, T{1}, memory + row * this->stride, this->stride, ahead);
        if (!with_lone) return;
        const U* const last = from.data + columns * from.row_stride;
        for (index j = 0; j < keys.count; ++j) lone_memory[row + j] = static_cast<T>(last[j * from.channel_stride]);
    }
};

template <Scalar T, class Arch, class... F>
struct score_tile<T, Arch, then<F...>> {
    using lanes = simd::lanes<T, Arch>;
    std::tuple<score_tile<T, Arch, F>...> parts;

    static score_tile take(detail::scratch& memory, const then<F...>& f, index most_keys, index most_queries) {
        return {std::apply(
            [&](const auto&... part) { return std::tuple{score_tile<T, Arch, F>::take(memory, part, most_keys, most_queries)...}; },
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
