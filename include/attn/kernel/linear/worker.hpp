// The memory in which one thread computes linear attention.
#pragma once

#include "../../core/inputs.hpp"
#include "../convolution/depthwise.hpp"
#include "scores.hpp"

#include <bit>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Room for a chunk of queries and a block of keys.
template <Scalar T>
struct linear_worker {
    using state_type = linear_state<T>;

    /// A short row of a grid may make a chunk longer than `target_rows`.
    static constexpr index_t max_queries = 128, max_keys = 128;
    /// Queries of a chunk, and keys of a block, a power of two. With keys, values and what is fetched for the next block they fill the
    /// first-level cache twice; half as many would leave the micro-kernel at its beginnings and ends more often.
    static index_t target_rows(const input_shapes& s) {
        constexpr std::size_t bytes = 32768;
        const auto channels = std::max(state_type::whole(s.keys.channels), whole_registers<T>(s.values.channels));
        return std::clamp<index_t>(static_cast<index_t>(std::bit_floor(bytes / sizeof(T) / static_cast<std::size_t>(channels))), 32,
                                   max_keys);
    }

    /// grid: of the convolution, or null.
    linear_worker(detail::scratch& memory, const input_shapes& s, const convolution_grid* grid, bool has_state)
        : key_padded(state_type::whole(s.keys.channels)), padded(whole_registers<T>(s.values.channels)),
          queries(memory.take<T>(max_queries * key_padded)), keys(memory.take<T>(max_keys * key_padded)),
          packed_values(memory.take<T>(max_keys * padded)), numerators(memory.take<T>(max_queries * padded)),
          spare(memory.take<T>(tile_traits<T>::max_rows(1) * padded)), local(memory.take<T>(grid ? max_queries * padded : 0)),
          factors(memory.take<T>(max_queries)), seen(memory.take<index_t>(max_queries)),
          scores(memory, max_queries, max_keys, s.keys.channels, padded),
          state(has_state ? state_type::take(memory, s.keys.channels, s.values.channels) : state_type{}),
          convolution(memory, grid ? *grid : convolution_grid{}, grid ? s.values.channels : 0, max_queries) {}

    index_t key_padded, padded; ///< d_k and d_v in whole registers
    T *queries, *keys;          ///< features
    T *packed_values, *numerators, *spare, *local, *factors;
    index_t* seen; ///< keys of the block that each query of the chunk sees
    linear_scores<T> scores;
    state_type state; ///< of a head whose sum grows from chunk to chunk
    convolution_tile<T> convolution;
    prefetch_next ahead; ///< what is read next
};

} // namespace attn::kernel
