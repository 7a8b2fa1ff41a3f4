// All gradients of a causal convolution: of its tokens, its first state, its taps and their bias.
#pragma once

#include "../../core/workspace.hpp"
#include "../../score/dual.hpp"
#include "causal.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Where the gradients of a causal convolution go. What has no memory is not wanted.
template <class T>
struct causal_gradients {
    stored_view<T> x, first_state;
    tensor_view<T> weights;
    std::span<T> bias;
};

/// The gradient of a causal convolution y = f(z), F being `unchanged` for one without f. With g = d_out f'(z), 0 outside the tokens, z
/// being computed again; X the state and the tokens behind it, and d X that of the last state added where it is of them:
///     d X[e] = d_last_state[e - n] + sum over t of weight(t) g[e - t],   in this order: of a sequence in pieces, that of the whole
///     d weight(t) = sum over batch, i of g[i] X[i + t],      d bias = sum over batch, i of g[i]
/// Tokens are summed in parts that depend on the shapes only, and parts one after the other: so threads and strides change no bit.
template <Scalar T, class F>
class causal_backward {
public:
    /// x: the shape of the tokens. streaming: whether their gradient is written past the caches.
    causal_backward(const causal_parameters<T>& parameters, const F& f, const shape& x, bool streaming)
        : parameters_(parameters), f_(f), x_(x), streaming_(streaming),
          width_(std::clamp((x.channels + at_once - 1) / at_once * at_once, at_once, causal_taps<T>::width)) {}

    std::size_t workspace_bytes(index_t concurrency) const {
        detail::scratch shared;
        sums(shared);
        return shared.used_bytes() + detail::bytes_for_threads(concurrency, detail::bytes_for<tiles>(width_));
    }

    void operator()(const stored_view<const T>& x, const stored_view<const T>& first_state, const stored_view<const T>& d_out,
                    const stored_view<const T>& d_last_state, const causal_gradients<T>& wanted, std::byte* memory,
                    const execution& run) const {
        if (x_.heads * x_.channels == 0) return;
        detail::scratch shared(memory);
        T* const partial = sums(shared);
        const detail::slices slices(memory + shared.used_bytes(), detail::bytes_for<tiles>(width_));
        const auto chunks = chunks_of_a_sequence(), units = x_.batch * chunks;
        run.for_each(x_.heads * groups() * parts(), [&](index_t task, index_t slice) {
            const auto part = task % parts(), group = task / parts() % groups(), h = task / parts() / groups();
            const tensor_part channels{.channels = {group * width_, std::min(width_, x_.channels - group * width_)}};
            auto own = slices[slice];
            tiles tile(own, width_);
            causal_taps<T> taps;
            taps.load(parameters_, h * x_.channels + channels.channels.first, channels.channels.count);
            T* const to = partial + task * sums_of_a_part();
            std::fill_n(to, sums_of_a_part(), T{0});
            for (auto unit = units * part / parts(); unit < units * (part + 1) / parts(); ++unit) {
                const auto rows = [&](const auto& view) { return view.slice(channels).rows(unit / chunks, h); };
                const tokens_and_state<T> from{rows(x), rows(first_state), parameters_.history()};
                const auto first = unit % chunks * chunk_tokens, end = std::min(x_.tokens, first + chunk_tokens);
                for (auto i = end; i < std::min(x_.tokens, end + chunk_tokens); ++i) // the next, while these are computed
                    for (index_t c = 0; c < width_; c += static_cast<index_t>(alignment / sizeof(T)))
                        simd::prefetch_far(from.tokens.address(i, c)), simd::prefetch_far(rows(d_out).address(i, c));
                differentiate(taps, from, rows(d_out), first, end, channels.channels.count, tile);
                if (wanted.weights.data() || !wanted.bias.empty()) add_sums(tile, end - first, to);
                if (wanted.x.data() || wanted.first_state.data())
                    write_inputs(taps, rows(d_last_state), first, end, channels.channels.count, tile, rows(wanted.x),
                                 rows(wanted.first_state));
            }
        });
        run.for_each(x_.heads * groups(), [&](index_t task, index_t) {
            T* const all = partial + task * parts() * sums_of_a_part();
            for (index_t part = 1; part < parts(); ++part)
                for (index_t c = 0; c < sums_of_a_part(); c += lanes::size)
                    (lanes::load(all + c) + lanes::load(all + part * sums_of_a_part() + c)).store(all + c);
            const auto first = task % groups() * width_, at = task / groups() * x_.channels + first;
            for (index_t c = 0; c < std::min(width_, x_.channels - first); ++c) {
                if (!wanted.bias.empty()) wanted.bias[static_cast<std::size_t>(at + c)] = all[c];
                for (index_t t = 0; wanted.weights.data() && t < parameters_.taps(); ++t)
                    wanted.weights(0, at + c, 0, t) = all[(1 + t) * width_ + c];
            }
        });
    }

private:
    using lanes = simd::lanes<T>;
    /// Tokens of a chunk, those before and behind it that it looks at, and channels whose sums are added to at once.
    static constexpr index_t chunk_tokens = 32, most_history = causal_taps<T>::most_taps - 1, at_once = 4 * lanes::size;

    /// Rows of a task's channels. x: from the first that the chunk's first output reads; z, and g behind `history` zeros: from the chunk's
    /// first output to those behind the chunk that read it.
    struct tiles {
        T *x, *z, *g, *d_x, *start;

        tiles(detail::scratch& memory, index_t width) {
            constexpr auto rows = chunk_tokens + 2 * most_history;
            for (T** tile : {&x, &z, &g, &d_x}) *tile = memory.take<T>(rows, width);
            start = memory.take<T>(most_history, width);
        }
    };

    index_t groups() const { return (x_.channels + width_ - 1) / width_; }
    index_t chunks_of_a_sequence() const { return std::max<index_t>(1, (x_.tokens + chunk_tokens - 1) / chunk_tokens); }
    /// Parts that tokens are summed in: enough for many threads, few enough to be summed at the end.
    index_t parts() const { return std::clamp<index_t>(x_.batch * x_.tokens / 1024, 1, 64); }
    index_t sums_of_a_part() const { return (1 + parameters_.taps()) * width_; }
    /// [head][group][part][bias, taps][width]
    T* sums(detail::scratch& memory) const { return memory.take<T>(x_.heads, groups(), parts(), 1 + parameters_.taps(), width_); }

    /// x and g of a chunk.
    void differentiate(const causal_taps<T>& taps, const tokens_and_state<T>& from, const stored_rows<const T>& d_out, index_t first,
                       index_t end, index_t channels, const tiles& tile) const {
        const auto history = from.history, outputs = std::min(x_.tokens, end + history) - first;
        from.copy(first - history, outputs + history, channels, tile.x, width_);
        T* const g = tile.g + history * width_;
        std::fill_n(tile.g, history * width_, T{0});
        if (outputs > 0) copy_rows<T>(d_out.from(first), outputs, channels, g, width_);
        std::fill_n(g + outputs * width_, (end - first + history - outputs) * width_, T{0});
        if constexpr (!std::same_as<F, unchanged>) {
            taps(row_block<const T>{tile.x, width_, 1}, taps.bias(0), row_block<T>{tile.z, width_, 1}, outputs, 0,
                 whole_registers<T>(channels), unchanged{});
            for (index_t i = 0; i < outputs; ++i)
                for (index_t c = 0; c < channels; c += lanes::size) {
                    T* const at = g + i * width_ + c;
                    (lanes::load(at) * detail::differentiated(f_, lanes::load(tile.z + i * width_ + c)).derivative).store(at);
                }
        }
    }
    /// sums(0) += g of a chunk's outputs, and sums(1 + t) += g x, output by output.
    void add_sums(const tiles& tile, index_t outputs, T* sums) const {
        constexpr int together = 4; // registers
        const T* const g = tile.g + parameters_.history() * width_;
        for (index_t row = 0; row <= parameters_.taps(); ++row)
            for (index_t c = 0; c < width_; c += at_once) {
                lanes sum[together];
                T* const to = sums + row * width_ + c;
                simd::unroll<together>([&](auto k) { sum[k] = lanes::load(to + k * lanes::size); });
                for (index_t i = 0; i < outputs; ++i)
                    simd::unroll<together>([&](auto k) {
                        const auto at = i * width_ + c + k * lanes::size;
                        const auto g_here = lanes::load(g + at);
                        sum[k] = row == 0 ? sum[k] + g_here : fma(g_here, lanes::load(tile.x + (row - 1) * width_ + at), sum[k]);
                    });
                simd::unroll<together>([&](auto k) { sum[k].store(to + k * lanes::size); });
            }
    }
    /// The gradients of a chunk's tokens, and, of the first chunk, of the state. From the last to the first they are a convolution of g.
    void write_inputs(const causal_taps<T>& taps, const stored_rows<const T>& d_last_state, index_t first, index_t end, index_t channels,
                      const tiles& tile, const stored_rows<T>& to_x, const stored_rows<T>& to_state) const {
        const auto history = parameters_.history(), before = first == 0 ? history : 0; // rows of the state
        const auto rows = end - first + before, begin = first + history - before;      // d X[begin] is the first of them
        const auto padded = whole_registers<T>(channels);
        std::fill_n(tile.start, width_, T{0});
        const auto backwards = [&](index_t count, index_t stride, T* last) {
            return row_block<T>{last + (count - 1) * stride, -stride, 1};
        };
        // The last of them are in the last state, too.
        const auto kept = d_last_state.data ? std::clamp<index_t>(begin + rows - x_.tokens, 0, rows) : 0;
        const auto convolve = [&](index_t from, index_t count, const row_block<const T>& start) {
            if (count == 0) return;
            const T* const g = tile.g + (begin + from + count - 1 - first + history) * width_;
            taps(row_block<const T>{g, -width_, 1}, start, backwards(count, width_, tile.d_x + from * width_), count, 0, padded,
                 unchanged{});
        };
        convolve(0, rows - kept, {tile.start, 0, 1});
        if (kept > 0) copy_rows<T>(d_last_state.from(begin + rows - kept - x_.tokens), kept, channels, tile.start, width_);
        convolve(rows - kept, kept, backwards(kept, width_, tile.start));
        if (before > 0 && to_state.data) store_rows<T>(tile.d_x, width_, before, channels, to_state);
        if (end == first || !to_x.data) return;
        const T* const of_x = tile.d_x + before * width_;
        if (streaming_) store_rows<T, true>(of_x, width_, end - first, channels, to_x.from(first));
        else store_rows<T>(of_x, width_, end - first, channels, to_x.from(first));
    }

    causal_parameters<T> parameters_;
    F f_;
    shape x_;
    bool streaming_;
    index_t width_; ///< channels of a task, some zeros behind them
};

} // namespace attn::kernel
