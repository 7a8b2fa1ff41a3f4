// Keys as a cache keeps them: in blocks of 16, in which a channel's numbers of all keys stand side by side.
#pragma once

#include "../tile_loader.hpp"
#include "quantised.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// How the rows of a page are stored: of numbers side by side, or quantised.
struct row_format {
    index_t channels = 0;
    narrow_format narrow = narrow_format::none;
    int bits = 0; ///< of a number that is quantised, else 0

    bool is_quantised() const { return bits != 0; }
    /// Whether its numbers are stored as they are computed with.
    bool are_numbers() const { return !is_quantised() && narrow == narrow_format::none; }
    quantised_rows quantised() const { return {bits, channels}; }
    /// Bytes of a row whose numbers are computed with in T.
    template <class T>
    index_t row_bytes() const {
        return is_quantised() ? quantised().row_bytes() : channels * number_bytes<T>();
    }
    /// Floats that a row begins with.
    index_t scales() const { return is_quantised() ? quantised().scales() : 0; }
    /// Bytes of what a row is made of behind them.
    template <class T>
    index_t number_bytes() const {
        return is_quantised() ? 1 : narrow == narrow_format::none ? static_cast<index_t>(sizeof(T)) : 2;
    }
    friend bool operator==(const row_format&, const row_format&) = default;
};

/// Keys of a block.
inline constexpr index_t column_block = 16;

/// Keys of a run as numbers of T, in blocks of 16 as below.
template <Scalar T>
struct number_columns {
    const T* blocks; ///< null if they are stored in another way
    index_t first, channels;
};
/// A run of keys in blocks of 16. Where a row of one key would have a number, or a scale, of w bytes at byte b, a block has those of all 16
/// from byte 16 b on.
template <Scalar T>
struct key_columns {
    const std::byte* blocks; ///< from that of the first key on
    index_t first;           ///< the place of the first key in its block
    row_format format;
    index_t block_bytes;
    index_t next; ///< bytes to what is read next, which each load asks for

    /// The keys as numbers, in memory or as they lie.
    number_columns<T> numbers(const T* memory) const { return {memory, first, format.channels}; }
    number_columns<T> numbers() const { return numbers(format.are_numbers() ? reinterpret_cast<const T*>(blocks) : nullptr); }
    /// Reads the blocks of so many keys as numbers.
    void read(index_t count, T* to) const;
    /// The same keys, where their numbers lie in memory: they are what is asked for.
    key_columns of_numbers(const T* memory) const {
        return {
            reinterpret_cast<const std::byte*>(memory), first, {format.channels}, column_block * format.channels * index_t{sizeof(T)}, 0};
    }
};

/// Calls f(from, to, bytes) for what a row of a key is made of: the byte in the row, that in its block, and how many stand there.
template <Scalar T>
void for_each_part(const row_format& format, index_t key, const auto& f) {
    const auto scales = format.scales() * 4, end = format.template row_bytes<T>(), width = format.template number_bytes<T>();
    for (index_t b = 0; b < scales; b += 4) f(b, column_block * b + key * 4, 4);
    for (auto b = scales; b < end; b += width) f(b, column_block * b + key * width, width);
}
/// Stores a row as that of a key of a block.
template <Scalar T>
void scatter_row(const std::byte* row, const row_format& format, std::byte* block, index_t key) {
    for_each_part<T>(format, key,
                     [&](index_t from, index_t to, index_t bytes) { std::memcpy(block + to, row + from, std::size_t(bytes)); });
}
/// Reads it back.
template <Scalar T>
void gather_row(const std::byte* block, index_t key, const row_format& format, std::byte* row) {
    for_each_part<T>(format, key,
                     [&](index_t to, index_t from, index_t bytes) { std::memcpy(row + to, block + from, std::size_t(bytes)); });
}

/// A register of the keys of a block, a channel at a time: numbers of V, those that are computed with or of 16 bits.
template <Scalar T, class V>
class column_reader {
public:
    column_reader(const std::byte* block, const row_format& format, index_t key, index_t next)
        : numbers_(reinterpret_cast<const V*>(block) + key), channels_(format.channels), next_(next) {}
    /// Goes to a channel; the channel before which it is to be called again.
    index_t begin(index_t) { return channels_; }
    [[gnu::always_inline]] simd::lanes<T> operator()(index_t channel) const {
        const auto* const from = numbers_ + channel * column_block;
        simd::prefetch_far(reinterpret_cast<const std::byte*>(from) + next_);
        return simd::operand_lanes<V>::load(from);
    }

private:
    const V* numbers_;
    index_t channels_, next_;
};
/// In the place of numbers: those that are quantised.
template <int Bits>
struct quantised_number;

template <Scalar T, int Bits>
class column_reader<T, quantised_number<Bits>> {
public:
    column_reader(const std::byte* block, const row_format& format, index_t key, index_t next)
        : block_(block), rows_{Bits, format.channels}, key_(key), next_(next) {}
    index_t begin(index_t channel) {
        const auto run = rows_.run_from(channel);
        const auto* const scale = reinterpret_cast<const float*>(block_) + column_block * rows_.scale_at(run.group) + key_;
        numbers_ = {simd::load_floats<T>(scale), Bits == 8 ? simd::lanes<T>(T{0}) : simd::load_floats<T>(scale + column_block)};
        multiples_ = block_ + column_block * (run.byte - channel) + key_;
        simd::prefetch_far(reinterpret_cast<const std::byte*>(scale) + next_);
        shift_ = run.shift;
        if (shift_ == 0)
            for (auto byte = column_block * channel; byte < column_block * run.end; byte += 64)
                simd::prefetch_far(multiples_ + byte + next_);
        return run.end;
    }
    [[gnu::always_inline]] simd::lanes<T> operator()(index_t channel) const {
        return numbers_(multiples_ + channel * column_block, shift_);
    }

private:
    const std::byte *block_, *multiples_ = nullptr;
    quantised_rows rows_;
    index_t key_, next_;
    dequantised_lanes<Bits, T> numbers_;
    int shift_ = 0;
};

/// f(std::type_identity of what column_reader takes for a format).
template <Scalar T>
void with_columns(const row_format& format, const auto& f) {
    if (format.bits == 8) f(std::type_identity<quantised_number<8>>{});
    else if (format.bits == 4) f(std::type_identity<quantised_number<4>>{});
    else with_format<T>(format.narrow, f);
}

/// f(rows, first, count) for some keys of a run, so many at a time as lie in one block.
template <Scalar T>
void for_each_tile(const number_columns<T>& keys, index_t first, index_t count, const auto& f) {
    constexpr auto size = column_block;
    for (index_t next; count > 0; first += next, count -= next) {
        const auto at = keys.first + first;
        next = std::min(count, size - at % size);
        f(row_block<const T>{keys.blocks + at / size * size * keys.channels + at % size, 1, size}, first, next);
    }
}
template <Scalar T>
void key_columns<T>::read(index_t count, T* to) const {
    with_columns<T>(format, [&]<class V>(std::type_identity<V>) {
        const auto* block = blocks;
        for (auto done = -first; done < count; done += column_block, block += block_bytes, to += column_block * format.channels)
            for (index_t key = 0; key < column_block; key += simd::lanes<T>::size) {
                column_reader<T, V> column(block, format, key, 0);
                for (index_t c = 0, end = 0; c < format.channels; ++c) {
                    if (c == end) end = column.begin(c);
                    column(c).store(to + c * column_block + key);
                }
            }
    });
}

} // namespace attn::kernel
