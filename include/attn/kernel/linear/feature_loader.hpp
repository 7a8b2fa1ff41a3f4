// Brings rows of queries or keys into the layout of features: phi of each channel, in whole registers.
#pragma once

#include "../../simd/elementary.hpp"
#include "../tile_loader.hpp"
#include "state.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A map of one instruction that changes nothing when it is applied again, so that it can be applied wherever x is read.
template <class Phi>
concept idempotent_map = requires { requires Phi::idempotent; };

/// phi(x + added) of one head's rows. `added`, a tensor that may be left out, has one entry for all batch entries or one for each,
/// and one head for all or one for each. x may be some rows of a longer sequence, `first_row` and those behind: rows are counted from the
/// sequence's first.
template <Scalar T, class Phi, class U = T>
struct mapped_features {
    using lanes = simd::lanes<T>;
    using on_reading = std::conditional_t<idempotent_map<Phi>, Phi, std::identity>;

    stored_view<const T> x;
    Phi phi;
    tensor_view<const U> added = {};
    index_t first_row = 0;

    /// The features as a linear_state reads them, with room for a tile of rows more: where x lies, if it may apply phi there, else, or if
    /// they are to be `written`, in `to`.
    feature_rows<T, on_reading> load(index_t batch, index_t head, index_t first, index_t count, T* to, bool written) const {
        using state = linear_state<T>;
        const auto rows = x.rows(batch, head, first - first_row);
        if constexpr (idempotent_map<Phi>)
            if (!written && !added.data() && state::whole(x.shape().channels) == x.shape().channels && readable_in_place(rows) &&
                first - first_row + state::whole(count) <= x.shape().tokens)
                return {rows.numbers().data, count, rows.row_stride, phi};
        (*this)(batch, head, first, count, to);
        return {to, count, state::whole(x.shape().channels)};
    }
    /// to: `count` rows of whole registers, what lies past the channels zero.
    void operator()(index_t batch, index_t head, index_t first, index_t count, T* to) const {
        const auto channels = x.shape().channels, padded = linear_state<T>::whole(channels);
        const auto rows = x.rows(batch, head, first - first_row);
        if (!added.data() && padded == channels && rows.channel_stride == 1)
            return as_they_lie(rows, [&](const auto& own) {
                for_each_piece(padded / lanes::size, 4, [&](index_t reg, index_t columns) {
                    with_constant<4>(columns, [&]<int Columns>(std::integral_constant<int, Columns>) {
                        const auto from = own;
                        T* at = to + reg * lanes::size;
                        for (index_t r = 0; r < count; ++r, at += padded)
#pragma GCC unroll 4
                            for (int i = 0; i < Columns; ++i)
                                static_cast<lanes>(phi(load_lanes(from, r, (reg + i) * lanes::size))).store(at + i * lanes::size);
                    });
                });
            });
        copy_rows<T>(rows, count, channels, to, padded);
        if (added.data()) {
            const auto& s = added.shape();
            for (index_t r = 0; r < count; ++r) {
                const U* const row = added.row(s.batch == 1 ? 0 : batch, s.heads == 1 ? 0 : head, first + r);
                for (index_t c = 0; c < channels; ++c) to[r * padded + c] += static_cast<T>(row[c * added.strides().channels]);
            }
        }
        for (index_t r = 0; r < count; ++r)
            for (index_t c = 0; c < padded; c += lanes::size) {
                lanes y = phi(lanes::load(to + r * padded + c));
                if (c + lanes::size > channels) y = select(simd::lane_bits::first(channels - c), y, lanes(T{0})); // phi(0) need not be 0
                y.store(to + r * padded + c);
            }
    }
};

} // namespace attn::kernel
