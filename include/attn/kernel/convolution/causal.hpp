// Causal convolution of a few taps over tokens: each channel has taps of its own, so lanes are channels.
#pragma once

#include "../../parallel/executor.hpp"
#include "../../simd/unroll.hpp"
#include "../tile_loader.hpp"

#include <algorithm>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A causal convolution's weights (1, channels, 1, taps), and its bias: none, or a number for each channel.
template <class T>
struct causal_parameters {
    stored_view<const T> weights;
    std::span<const T> bias;

    index_t taps() const { return weights.shape().channels; }
    /// Tokens that an output reads before its own.
    index_t history() const { return taps() - 1; }
};

/// What a sum becomes without an activation.
struct unchanged {
    constexpr auto operator()(auto sum) const { return sum; }
};

/// f(the views), all (batch, heads, ., channels); where the heads lie side by side in all of them, as one head: so that rows are long.
template <class... T>
void with_joined_heads(const auto& f, const stored_view<T>&... views) {
    const auto beside = [](const auto& v) { return !v.data() || v.strides().heads == v.shape().channels * v.strides().channels; };
    const auto joined = []<class U>(const stored_view<U>& v) {
        const auto& s = v.shape();
        return stored_view<U>(v.data(), v.format(), {s.batch, 1, s.tokens, s.heads * s.channels}, v.strides());
    };
    if ((beside(views) && ...)) f(joined(views)...);
    else f(views...);
}

/// Some channels of a sequence of tokens, and of the state, which is what came before token 0: zeros, if it has no memory.
template <class T>
struct tokens_and_state {
    stored_rows<const T> tokens, state;
    index_t history;

    /// Copies so many tokens, from one on that may be in the state, to rows of `padded` numbers.
    void copy(index_t first, index_t count, index_t channels, T* to, index_t padded) const {
        const auto before = std::clamp<index_t>(-first, 0, count);
        if (!state.data) std::fill_n(to, before * padded, T{0});
        else if (before > 0) copy_rows<T>(state.from(history + first), before, channels, to, padded);
        if (count > before) copy_rows<T>(tokens.from(first + before), count - before, channels, to + before * padded, padded);
    }
    /// The same from a channel on.
    tokens_and_state from_channel(index_t c) const { return {tokens.from(0, c), state.data ? state.from(0, c) : state, history}; }
};

/// Bias and taps of some neighbouring channels, a row each.
template <Scalar T>
class causal_taps {
public:
    using lanes = simd::lanes<T>;
    static constexpr index_t most_taps = 8;
    /// Channels of a row: a kilobyte, so that tokens are read in long pieces.
    static constexpr index_t width = 1024 / sizeof(T);

    /// Takes those of channels first ... first + count - 1, zeros behind them.
    void load(const causal_parameters<T>& parameters, index_t first, index_t count) {
        taps_ = parameters.taps();
        const auto& weights = parameters.weights;
        const auto bias = parameters.bias.empty() ? nullptr : parameters.bias.data() + first;
        const auto padded = whole_registers<T>(count);
        for (index_t t = 0; t <= taps_; ++t) std::fill(rows_[t] + count / lanes::size * lanes::size, rows_[t] + padded, T{0});
        if (bias) std::copy_n(bias, count, rows_[0]);
        else std::fill_n(rows_[0], count, T{0});
        const auto of_channels = weights.slice({.heads = {first, count}});
        with_format<T>(weights.format(), [&]<class E>(std::type_identity<E>) {
            const row_block<const E> rows{static_cast<const E*>(of_channels.data()), weights.strides().heads, weights.strides().channels};
            if (taps_ == 4 && rows.channel_stride == 1 && rows.row_stride == 4) load_rows<4>(rows, count);
            else load_rows<0>(rows, count);
        });
    }
    /// The bias of the channels from one on, as rows that outputs start from.
    row_block<const T> bias(index_t channel) const { return {rows_[0] + channel, 0, 1}; }

    /// to(i, c) = f(start(i, c) + sum over t of weight(c, t) from(i + t, c)), in the order of t, for so many channels from `channel` on.
    /// All are rows of channels side by side, those of `start` in whole registers; what is written is not read.
    template <bool streaming = false, class E>
    void operator()(const row_block<const E>& from, const row_block<const T>& start, const row_block<E>& to, index_t count, index_t channel,
                    index_t channels, const auto& f) const {
        const auto cover = [&]<int Outputs>(std::integral_constant<int, Outputs>) {
            for (index_t i = 0; i < count; i += Outputs) { // the last may overlap those before: cheaper than tiles of every size
                const auto at = std::min(i, count - Outputs);
                convolve<Outputs, streaming>(from.from(at), start.from(at), to.from(at), channel, channels, f);
            }
        };
        if (count >= together) cover(std::integral_constant<int, together>{});
        else cover(std::integral_constant<int, 1>{});
    }

private:
    /// Outputs that share the weights which are loaded.
    static constexpr int together = 8;

    /// The taps of channels, a row each: registers at a time, where so many taps of a channel and the next lie side by side.
    template <int Taps, class E>
    void load_rows(const row_block<const E>& rows, index_t count) {
        index_t c = 0;
        if constexpr (Taps > 0) {
            for (; c + lanes::size <= count; c += lanes::size) {
                lanes taps[std::size_t{Taps}];
                simd::unroll<Taps>([&](auto t) { taps[t] = simd::operand_lanes<E>::load(rows.data + c * Taps + t * lanes::size); });
                simd::deinterleave<Taps, T>(taps);
                simd::unroll<Taps>([&](auto t) { taps[t].store(rows_[1 + t] + c); });
            }
        }
        for (; c < count; ++c)
            for (index_t t = 0; t < taps_; ++t) rows_[1 + t][c] = rows(c, t);
    }

    template <int Outputs, bool streaming, class E>
    [[gnu::noinline]] void convolve(row_block<const E> from, row_block<const T> start, row_block<E> to, index_t channel, index_t channels,
                                    const auto& f) const {
        const auto taps = taps_;
        const auto of_register = [&](index_t c, auto is_whole) {
            const auto load = [&](index_t row) {
                if constexpr (is_whole()) return lanes(load_lanes(from, row, c));
                else return lanes(simd::operand_lanes<E>::load_first(from.address(row, c), channels - c));
            };
            lanes sum[std::size_t{Outputs}];
            simd::unroll<Outputs>([&](auto o) { sum[o] = lanes::load(start.address(o, c)); });
            for (index_t t = 0; t < taps; ++t) {
                const auto weight = lanes::load(rows_[1 + t] + channel + c);
                simd::unroll<Outputs>([&](auto o) { sum[o] = fma(load(o + t), weight, sum[o]); });
            }
            simd::unroll<Outputs>([&](auto o) {
                simd::prefetch(from.address(taps + Outputs - 1 + o, c));
                const auto result = static_cast<lanes>(f(sum[o]));
                if constexpr (is_whole()) store_stored<streaming>(result, to.address(o, c));
                else store_first_stored(result, to.address(o, c), channels - c);
            });
        };
        index_t c = 0;
        for (; c + lanes::size <= channels; c += lanes::size) of_register(c, std::true_type{});
        if (c < channels) of_register(c, std::false_type{});
    }

    index_t taps_ = 0;
    alignas(alignment) T rows_[std::size_t{1 + most_taps}][std::size_t{width}]; ///< the bias, then the taps
};

/// out(i) = f(bias + sum over t of weight(t) x(i - taps + 1 + t)), where x before token 0 is `first_state`, and last_state = the last
/// taps - 1 tokens of x with the state before them. x and out (batch, heads, n, channels), states (batch, heads, taps - 1, channels), or
/// none; parameters of heads x channels. Each output is the same sum wherever and however it lies. last_state may be first_state.
template <Scalar T, class F>
class causal_convolution {
public:
    /// streaming: whether a result of T is written past the caches.
    causal_convolution(const causal_parameters<T>& parameters, const F& f, bool streaming)
        : parameters_(parameters), f_(f), streaming_(streaming) {}

    void operator()(const stored_view<const T>& x, const stored_view<const T>& first_state, const stored_view<T>& out,
                    const stored_view<T>& last_state, const execution& run) const {
        const auto [batch, heads, tokens, channels] = x.shape();
        if (tokens == 0 && !last_state.data()) return;
        const auto groups = (channels + width - 1) / width, spans = std::max<index_t>(1, (tokens + span_tokens - 1) / span_tokens);
        const auto numbers = std::min(width, channels) * std::clamp<index_t>(tokens, 1, span_tokens);
        const auto units = batch * heads * groups * spans,
                   units_of_a_task = std::max<index_t>(1, numbers_of_a_task / std::max<index_t>(1, numbers));
        run.for_each((units + units_of_a_task - 1) / units_of_a_task, [&](index_t task, index_t) {
            causal_taps<T> taps;
            const auto begin = task * units_of_a_task;
            for (auto unit = begin; unit < std::min(units, begin + units_of_a_task); ++unit) { // spans, of sequences, of groups, of heads
                const auto span = unit % spans, b = unit / spans % batch, group = unit / spans / batch % groups,
                           h = unit / spans / batch / groups;
                const tensor_part part{.channels = {group * width, std::min(width, channels - group * width)}};
                const auto count = part.channels.count;
                if (unit == begin || (span == 0 && b == 0)) taps.load(parameters_, h * channels + part.channels.first, count);
                const tokens_and_state<T> from{x.slice(part).rows(b, h), first_state.slice(part).rows(b, h), parameters_.history()};
                convolve(taps, from, out.slice(part).rows(b, h), span * span_tokens, std::min(tokens, (span + 1) * span_tokens), count);
                if (span == 0 && last_state.data()) write_state(from, tokens, count, last_state.slice(part).rows(b, h));
            }
            if (streaming_) simd::finish_streaming();
        });
    }

private:
    static constexpr index_t width = causal_taps<T>::width, span_tokens = 256, numbers_of_a_task = 65536;
    /// Numbers of a tile, which rows are copied to that are not read where they lie, beside the history of its outputs.
    static constexpr index_t tile_numbers = 8192 / sizeof(T), tile_width = 256 / sizeof(T), most_taps = causal_taps<T>::most_taps;

    /// Outputs first .. end - 1 of some channels.
    void convolve(const causal_taps<T>& taps, const tokens_and_state<T>& from, const stored_rows<T>& to, index_t first, index_t end,
                  index_t channels) const {
        const auto& x = from.tokens;
        const auto by_column = [](const auto& rows) { return rows.channel_stride != 1 && rows.row_stride == 1; };
        const auto staged = [&](index_t until) {
            while (first < until) { // as many channels as fit, where there are few tokens, and few where tokens lie side by side
                const bool column = by_column(x) || by_column(to);
                const auto wanted = column ? static_cast<index_t>(alignment / sizeof(T)) : tile_width;
                const auto count = std::min(tile_numbers / wanted, until - first);
                convolve_tile(taps, from, to, first, count, column || count + from.history > most_taps ? wanted : width, channels);
                first += count;
            }
        };
        if (x.channel_stride != 1 || to.channel_stride != 1 || x.format != to.format) return staged(end);
        staged(std::min(end, from.history));
        if (first >= end) return;
        with_format<T>(to.format, [&]<class E>(std::type_identity<E>) {
            const auto in = x.template as<const E>().from(first - from.history);
            const auto out = to.template as<E>().from(first);
            if constexpr (std::same_as<E, T>)
                if (streaming_) return taps.template operator()<true>(in, taps.bias(0), out, end - first, 0, channels, f_);
            taps(in, taps.bias(0), out, end - first, 0, channels, f_);
        });
    }
    /// A few outputs, of a copy of what they read, so many channels at a time.
    void convolve_tile(const causal_taps<T>& taps, const tokens_and_state<T>& from, const stored_rows<T>& to, index_t first, index_t count,
                       index_t at_once, index_t all_channels) const {
        alignas(alignment) T in[std::size_t{tile_numbers + most_taps * tile_width}], out[std::size_t{tile_numbers}];
        for (index_t c = 0; c < all_channels; c += at_once) {
            const auto channels = std::min(at_once, all_channels - c), padded = whole_registers<T>(channels);
            from.from_channel(c).copy(first - from.history, count + from.history, channels, in, padded);
            taps(row_block<const T>{in, padded, 1}, taps.bias(c), row_block<T>{out, padded, 1}, count, c, padded, f_);
            const auto there = to.from(first, c);
            if (there.channel_stride == 1 || there.row_stride != 1) {
                store_rows<T>(out, padded, count, channels, there);
            } else {
                const auto column = whole_registers<T>(count);
                transpose_rows<T>(row_block<const T>{out, padded, 1}, count, channels, T{1}, in, column);
                store_rows<T>(in, column, channels, count, there.transposed());
            }
        }
    }
    /// The state behind so many tokens; all of it is read before it is written.
    static void write_state(const tokens_and_state<T>& from, index_t tokens, index_t channels, const stored_rows<T>& to) {
        alignas(alignment) T state[std::size_t{most_taps * width}];
        from.copy(tokens - from.history, from.history, channels, state, width);
        store_rows<T>(state, width, from.history, channels, to);
    }

    causal_parameters<T> parameters_;
    F f_;
    bool streaming_;
};

} // namespace attn::kernel
