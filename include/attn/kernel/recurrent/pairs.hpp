// Weights of the pairs of tokens in a chunk of recurrent attention, whose keys decay.
#pragma once

#include "../../simd/elementary.hpp"
#include "state.hpp"

#include <limits>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// One bit for each token before one of a chunk, or for that one alone, in the register of tokens from `first` on.
template <Scalar T>
simd::lane_bits tokens_before(index_t token, index_t first) {
    return simd::lane_bits::first(std::clamp<index_t>(token - first, 0, simd::lanes<T>::size));
}

/// How much of each token of a chunk is left, token by token: a row of products of decays, 1 for the last. Products below the smallest
/// normal number are 0, so that no sum is made of subnormal ones, which take a hundred cycles each.
template <Scalar T>
struct pair_decays {
    using lanes = simd::lanes<T>;
    static constexpr int parts = static_cast<int>(recurrent_chunk) / lanes::size;
    lanes left[std::size_t{parts}];

    explicit pair_decays(const T* from) {
        simd::unroll<parts>([&](auto p) { left[p] = lanes::load(from + p() * lanes::size); });
    }
    void store(T* to) const {
        simd::unroll<parts>([&](auto p) { left[p].store(to + p() * lanes::size); });
    }
    static lanes normal(lanes x) { return select(x < lanes(std::numeric_limits<T>::min()), lanes(T{0}), x); }
    static T normal(T x) { return x < std::numeric_limits<T>::min() ? T{0} : x; }
    /// Goes on to a token, which has this decay.
    void step(index_t token, T decay) {
        simd::unroll<parts>([&](auto p) {
            const auto before = tokens_before<T>(token, p() * lanes::size);
            left[p] = select(before, normal(left[p] * lanes(decay)), lanes(T{1}));
        });
    }
    void scale(T* weights) const {
        simd::unroll<parts>([&](auto p) {
            T* const at = weights + p() * lanes::size;
            (lanes::load(at) * left[p]).store(at);
        });
    }
};

/// weights[r][j] = x_r . column_j of some rows x_r and the columns [d_k][chunk] of a chunk, of which those before `token` decay first, by
/// decay[c] in channel c, if it is given. A sum is four chains, of the channels 0, 4, 8 ..., 1, 5, 9 ... and so on.
template <int Rows, Scalar T>
void multiply_decayed(T* columns, index_t key_channels, const T* decay, index_t token, std::array<const T*, std::size_t{Rows}> rows,
                      std::array<T*, std::size_t{Rows}> weights) {
    using lanes = simd::lanes<T>;
    for (index_t first = 0; first < recurrent_chunk; first += lanes::size) {
        const auto before = simd::lane_mask<T>::from_bits(tokens_before<T>(token, first));
        lanes sum[static_cast<std::size_t>(4 * std::max(Rows, 1))];
        simd::unroll<4 * Rows>([&](auto i) { sum[i] = lanes(T{0}); });
        const auto add = [&](index_t c, auto chain) __attribute__((always_inline)) {
            T* const at = columns + c * recurrent_chunk + first;
            auto column = lanes::load(at);
            if (decay) {
                column *= select(before, lanes(decay[c]), lanes(T{1}));
                column.store(at);
            }
            simd::unroll<Rows>([&](auto r) __attribute__((always_inline)) {
                auto& own = sum[static_cast<std::size_t>(4 * r() + chain())];
                own = fma(lanes(rows[r][c]), column, own);
            });
        };
        index_t c = 0;
        for (; c + 4 <= key_channels; c += 4) simd::unroll<4>([&](auto chain) __attribute__((always_inline)) { add(c + chain(), chain); });
        simd::unroll<3>([&](auto chain) __attribute__((always_inline)) {
            if (c + chain() < key_channels) add(c + chain(), chain);
        });
        simd::unroll<Rows>([&](auto r) {
            const lanes* own = sum + 4 * r();
            ((own[0] + own[1]) + (own[2] + own[3])).store(weights[r] + first);
        });
    }
}

} // namespace attn::kernel
