// The memory in which one thread computes linear attention.
#pragma once

#include "../../core/inputs.hpp"
#include "../convolution/depthwise.hpp"
#include "scores.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Room for a chunk of queries and a block of keys.
template <Scalar T, class Arch>
struct linear_worker {
    using state_type = linear_state<T, Arch>;

    /// A short row of a grid may make a chunk longer than `good_rows`.
    static constexpr index most_queries = 128, most_keys = 128;
    /// Queries of a chunk, and keys of a block. With keys, values and what is fetched for the next block they fill the first-level cache
    /// twice; half as many left the micro-kernel at its beginnings and ends for 1 to 3 % of the time.
    static index good_rows(const input_shapes& s) {
        constexpr index numbers = 32768 / sizeof(T);
        const auto channels = std::max(state_type::whole(s.keys.channels), whole_registers<T, Arch>(s.values.channels));
        return std::clamp<index>(numbers / channels, 32, most_keys);
    }

    /// grid: of the convolution, or null.
    linear_worker(detail::scratch& memory, const input_shapes& s, const convolution_grid* grid, bool has_state)
        : key_padded(state_type::whole(s.keys.channels)), padded(whole_registers<T, Arch>(s.values.channels)),
          queries(memory.take<T>(most_queries * key_padded)), keys(memory.take<T>(most_keys * key_padded)),
          packed_values(memory.take<T>(most_keys * padded)), numerators(memory.take<T>(most_queries * padded)),
          spare(memory.take<T>(tile_traits<T, Arch>::max_rows(1) * padded)), results(memory.take<T>(most_queries * padded)),
          local(memory.take<T>(grid ? most_queries * padded : 0)), factors(memory.take<T>(most_queries)),
          seen(memory.take<index>(most_queries)), scores(memory, most_queries, most_keys, s.keys.channels, padded),
          state(has_state ? state_type::take(memory, s.keys.channels, s.values.channels) : state_type{}),
          convolution(memory, grid ? *grid : convolution_grid{}, grid ? s.values.channels : 0, most_queries) {}

    index key_padded, padded; ///< d_k and d_v in whole registers
    T *queries, *keys;        ///< features
    T *packed_values, *numerators, *spare, *results, *local, *factors;
    index* seen; ///< keys of the block that each query of the chunk sees
    linear_scores<T, Arch> scores;
    state_type state; ///< of a head whose sum grows from chunk to chunk
    convolution_tile<T, Arch> convolution;
};

} // namespace attn::kernel
