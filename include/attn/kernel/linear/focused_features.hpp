// Features with norms over all heads of a token: three numbers a token are computed first, then features a head at a time.
#pragma once

#include "../../parallel/executor.hpp"
#include "../../simd/elementary.hpp"
#include "../../simd/wide_sum.hpp"
#include "feature_loader.hpp"

#include <algorithm>
#include <cmath>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// f = |u| u^p / |u^p| with u = (relu(x) + 1e-6) / softplus(scale), norms over all channels of all heads of a token. With w = u / max u,
/// f = |u| w^p / |w^p|: the largest w^p is 1, so that no power takes the norm out of range, however many channels there are. Of each token
/// 1 / max u, |w| and |u| / |w^p| are kept.
template <Scalar T, class Relu, class U>
struct focused_features {
    using lanes = simd::lanes<T>;
    using source = mapped_features<T, Relu, U>;

    source x = {};
    int power = 3;
    index_t padded;
    index_t heads_of_scale = 1;
    T* inverse_scale;             ///< 1 / softplus(scale) [heads][padded], 0 past the channels
    T* inverse_largest = nullptr; ///< 1 / max u [batch][tokens]
    T* norm = nullptr;            ///< |w| [batch][tokens]
    T* factor = nullptr;          ///< |u| / |w^p| [batch][tokens]
    T* rows = nullptr;            ///< [concurrency][block][padded]
    static constexpr index_t block = 16;
    static constexpr index_t tokens_of_a_task = 16 * block;

    focused_features(detail::scratch& memory, const shape& s, index_t heads, index_t concurrency)
        : padded(linear_state<T>::whole(s.channels)),
          inverse_scale(memory.take<T>(std::max<index_t>(heads, 1), padded)) { // one that all share is there even without heads
        for (T** of_tokens : {&inverse_largest, &norm, &factor}) *of_tokens = memory.take<T>(s.batch, s.tokens);
        rows = memory.take<T>(concurrency, block, padded);
    }
    void prepare(const source& from, int p, std::span<const U> scale, const execution& run) {
        x = from;
        power = p;
        const auto channels = x.x.shape().channels;
        heads_of_scale = std::ssize(scale) > channels ? std::ssize(scale) / channels : 1;
        for (index_t h = 0; h < heads_of_scale; ++h)
            for (index_t c = 0; c < padded; ++c) {
                const double s =
                    scale.empty() || c >= channels ? 0.0 : static_cast<double>(scale[static_cast<std::size_t>(h * channels + c)]);
                inverse_scale[h * padded + c] =
                    c < channels ? static_cast<T>(1 / (std::max(s, 0.0) + simd::log1p(simd::exp(-std::abs(s))))) : T{0};
            }
        for_each_task(run, [&](index_t, index_t entry, index_t first, index_t end, index_t slice) {
            for (auto token = first; token < end; token += block)
                prepare_tokens(entry, x.first_row + token, std::min(block, end - token), rows + slice * block * padded);
        });
    }
    static index_t tasks(const shape& s) { return s.batch * tasks_of_an_entry(s); }
    /// Calls f(task, batch, first, end, slice) for all rows of x, some of one batch entry at a time.
    void for_each_task(const execution& run, const auto& f) const {
        const auto& s = x.x.shape();
        run.for_each(tasks(s), [&](index_t task, index_t slice) {
            const auto of_entry = tasks_of_an_entry(s), first = task % of_entry * tokens_of_a_task;
            f(task, task / of_entry, first, std::min(s.tokens, first + tokens_of_a_task), slice);
        });
    }
    using on_reading = std::identity;
    feature_rows<T> load(index_t batch, index_t head, index_t first, index_t count, T* to, bool) const {
        (*this)(batch, head, first, count, to);
        return {to, count, padded};
    }
    /// to: `count` rows of whole registers, what lies past the channels zero.
    void operator()(index_t batch, index_t head, index_t first, index_t count, T* to) const {
        x(batch, head, first, count, to);
        const T* const scale = scale_of(head);
        for (index_t r = 0; r < count; ++r) {
            const auto token = number_of(batch, first + r);
            const lanes inverse = inverse_largest[token], times = factor[token];
            for (index_t c = 0; c < padded; c += lanes::size) {
                T* const at = to + r * padded + c;
                (raised(focus(lanes::load(at), lanes::load(scale + c)) * inverse, power) * times).store(at);
            }
        }
    }
    const T* scale_of(index_t head) const { return inverse_scale + (heads_of_scale == 1 ? 0 : head * padded); }
    /// u = (relu(x) + 1e-6) / softplus(scale), where `inverse` is 1 / softplus(scale).
    static lanes focus(lanes relu_x, lanes inverse) { return (relu_x + lanes(1e-6)) * inverse; }
    static lanes raised(lanes w, int exponent) {
        if (exponent == 0) return T{1};
        auto result = w;
        for (int n = 1; n < exponent; ++n) result = result * w;
        return result;
    }

private:
    index_t number_of(index_t batch, index_t row) const { return batch * x.x.shape().tokens + row - x.first_row; }
    static index_t tasks_of_an_entry(const shape& s) { return (s.tokens + tokens_of_a_task - 1) / tokens_of_a_task; }
    /// Some tokens, head after head.
    void prepare_tokens(index_t batch, index_t first, index_t count, T* features) const {
        // Calls of_row(r, for_each_u) head by head; sums of a row are copied, so that they are in registers while its numbers go by.
        const auto each = [&](auto&& of_row) {
            for (index_t h = 0; h < x.x.shape().heads; ++h) {
                x(batch, h, first, count, features);
                const T* const scale = scale_of(h);
                for (index_t r = 0; r < count; ++r)
                    of_row(r, [row = features + r * padded, scale, this](auto&& f) {
                        simd::for_each_part<T>(
                            padded, [&](index_t c, auto part, index_t) { f(part, focus(lanes::load(row + c), lanes::load(scale + c))); });
                    });
            }
        };
        lanes largest[block];
        simd::wide_sum<T> squares[block], squares_of_powers[block];
        std::fill_n(largest, block, lanes(T{0}));
        each([&](index_t r, auto&& for_each_u) {
            auto top = largest[r];
            for_each_u([&](auto, lanes u) { top = max(top, u); });
            largest[r] = top;
        });
        for (index_t r = 0; r < count; ++r) {
            T of_lanes[static_cast<std::size_t>(lanes::size)];
            largest[r].store(of_lanes);
            inverse_largest[number_of(batch, first + r)] = 1 / *std::ranges::max_element(of_lanes);
        }
        each([&](index_t r, auto&& for_each_u) {
            // Beside the 1 in their sum smaller powers are nothing, but their squares may be subnormal, and then take many times as long.
            const lanes inverse(inverse_largest[number_of(batch, first + r)]), no_less(0x1p-60);
            auto of_w = squares[r], of_powers = squares_of_powers[r];
            for_each_u([&](auto part, lanes u) {
                const auto w = u * inverse, power_of_w = max(raised(w, power), no_less);
                of_w.add(part, w, w);
                of_powers.add(part, power_of_w, power_of_w);
            });
            squares[r] = of_w;
            squares_of_powers[r] = of_powers;
        });
        for (index_t r = 0; r < count; ++r) {
            const auto at = number_of(batch, first + r);
            norm[at] = std::sqrt(squares[r].total());
            factor[at] = norm[at] / inverse_largest[at] / std::sqrt(squares_of_powers[r].total());
        }
    }
};

} // namespace attn::kernel
