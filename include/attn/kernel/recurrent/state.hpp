// The state of recurrent attention of one head, wherever its tokens were cut.
#pragma once

#include "../../core/workspace.hpp"
#include "../prefetch.hpp"
#include "tiles.hpp"

#include <algorithm>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What a state is made for.
struct recurrent_sizes {
    index_t key_channels = 0, value_channels = 0;
    bool by_channel = false; ///< keys decay channel by channel; else each token's decay is one number
    bool decays = false, erases = false;
    /// Whether all channels of a key decay by the same number.
    bool decay_as_one() const { return decays && !by_channel; }
    friend bool operator==(const recurrent_sizes&, const recurrent_sizes&) = default;
};

/// S at the border of a chunk, and the tokens since. A token adds k z^T to the state, and in the general rule a y^T with another vector:
///     S = decay S_border + sum over j of k_j z_j^T + a_j y_j^T
/// where k_j and a_j have decayed since token j. All that the tokens before leave for those behind, at any token.
template <Scalar T>
struct recurrent_state {
    using lanes = simd::lanes<T>;
    static constexpr index_t chunk = recurrent_chunk;

    recurrent_sizes sizes;
    index_t padded = 0;
    index_t count = 0;    ///< tokens since the border
    T* sums = nullptr;    ///< [d_k][padded]
    T* decay = nullptr;   ///< since the border: [d_k] by channel, else [1]
    T* decays = nullptr;  ///< of each token's, since it: [chunk], of 1 for what decays by channel or never
    T* keys = nullptr;    ///< [d_k][chunk]
    T* values = nullptr;  ///< z [chunk][padded]
    T* erased = nullptr;  ///< a [d_k][chunk]
    T* removed = nullptr; ///< y [chunk][padded]

    static recurrent_state take(detail::scratch& memory, const recurrent_sizes& sizes) {
        const auto padded = whole_registers<T>(sizes.value_channels), d_k = sizes.key_channels;
        recurrent_state s{sizes, padded};
        s.sums = memory.take<T>(d_k, padded);
        s.decay = memory.take<T>(d_k);
        s.decays = memory.take<T>(chunk);
        s.keys = memory.take<T>(d_k, chunk);
        s.values = memory.take<T>(chunk, padded);
        if (sizes.erases) s.erased = memory.take<T>(d_k, chunk), s.removed = memory.take<T>(chunk, padded);
        return s;
    }
    /// Bytes that closing a chunk takes.
    static std::size_t bytes_to_close(const recurrent_sizes& sizes) {
        return sizeof(T) *
               static_cast<std::size_t>(chunk * whole_registers<T>(sizes.value_channels) + whole_registers<T>(sizes.key_channels));
    }
    /// Begins with the state of a batch entry and head, of (batch, heads, d_k, d_v); with zero, if that has no memory.
    void begin(const tensor_view<const T>& first, index_t batch, index_t head) {
        if (first.data()) copy_rows<T>(first.rows(batch, head), sizes.key_channels, sizes.value_channels, sums, padded);
        else std::fill_n(sums, sizes.key_channels * padded, T{0});
        open();
    }
    /// Takes all tokens into S, and writes that of a batch entry and head. spare: of bytes_to_close.
    void end(const tensor_view<T>& last, index_t batch, index_t head, T* spare, auto&& ahead) {
        close({values, padded, 1}, spare, ahead);
        store_rows<T>(sums, padded, sizes.key_channels, sizes.value_channels, last.rows(batch, head));
    }
    state_columns<T> columns() const { return {sums, sizes.key_channels, padded}; }
    /// Takes the tokens since the border into S. z: where their rows are. spare: of bytes_to_close.
    void close(row_block<const T> z, T* spare, auto& ahead) {
        if (count == 0) return;
        const T* factors = nullptr;
        if (sizes.decay_as_one()) {
            for (index_t j = 0; j < count; ++j)
                for (index_t c = 0; c < padded; c += lanes::size)
                    (lanes::load(z.address(j, c)) * lanes(decays[j])).store(spare + j * padded + c);
            z = {spare, padded, 1};
            T* const all = spare + chunk * padded;
            std::fill_n(all, sizes.key_channels, decay[0]);
            factors = all;
        } else if (sizes.by_channel) {
            factors = decay;
        }
        const auto add = [&](const T* vectors, const row_block<const T>& rows, const T* scale) {
            multiply_wide<T>(sizes.key_channels, padded / lanes::size, {{vectors, chunk, 1}, rows, count, {sums, padded, 1}, scale, !scale},
                             ahead);
        };
        add(keys, z, factors);
        if (sizes.erases) add(erased, {removed, padded, 1}, nullptr);
        open();
    }

    /// Begins a chunk: no token has come since the border.
    void open() {
        count = 0;
        std::fill_n(decay, sizes.key_channels, T{1});
        std::fill_n(decays, chunk, T{1});
    }
};

} // namespace attn::kernel
