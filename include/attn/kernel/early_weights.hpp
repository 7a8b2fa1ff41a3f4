// Weights without waiting for the maximum: exponentials that run between the multiply-adds of the next scores.
#pragma once

#include "added_scores.hpp"
#include "online_softmax.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A softmax divides by the sum of its weights, so what their scores are measured from cancels: the maximum m only keeps them in range. A
/// query's weights are measured from the m that earlier tiles left, and need not wait until all scores of this tile are known. Afterwards,
/// where the sum has passed 2^24, m rises by a power of two, which is exact; where it has passed 2^100, the tile is done again, for that
/// query from the maximum of its scores. No query notices the others.
///
/// Beside the micro-kernel of the next scores an exponential is nearly free: multiply-adds fill two of four pipes, and only 4 of its 11
/// instructions want those. Maxima and exponentials took 9 % of the time of 2048 tokens and 64 channels; so they take 3 %.
template <Scalar T, class Arch>
class early_weights {
public:
    using lanes = simd::lanes<T, Arch>;
    using softmax_type = online_softmax<T, Arch>;
    /// The micro-kernel must leave registers for it, and 2^x be right for x > 0.
    static constexpr bool possible = simd::register_count<Arch> >= 32 && simd::exp2_takes_positive<Arch>;

    early_weights(detail::scratch& memory, index most_queries) : earlier_sum_(memory.take<T>(possible ? most_queries : 0)) {}

    /// Before the scores of a tile. `wanted`: queries that know an m need not wait for the tile's maximum.
    void begin(const softmax_type& softmax, bool wanted) {
        waiting_ = everybody;
        asks_first_keys_ = false;
        if (!possible || !wanted) return;
        waiting_ = queries_without_m(softmax);
        asks_first_keys_ = waiting_ != 0;
        std::copy_n(softmax.sum, count(softmax), earlier_sum_);
        std::fill_n(softmax.factor, count(softmax), T{1});
    }
    /// Whether some queries know no m, and would rather measure from the maximum of the tile's first keys, if they see all of these, than
    /// wait for that of the tile: it is as good as an m that earlier tiles left. The same keys for all, so that a query's m does not
    /// depend on who else is there. Heads of 128 and 256 tokens took 2 to 4 % less time, of 512 up to 1 %.
    bool asks_first_keys() const { return asks_first_keys_; }
    /// Once the maxima have been raised to them: scores[rows][queries], to which `added` is yet to be added. A query whose first scores lie
    /// far apart waits all the same: its maximum may lie as far above them.
    void measure_from_first_keys(const softmax_type& softmax, const T* scores, index rows, const added_scores<T, Arch>& added = {}) {
        for (index at = 0; at < count(softmax); at += lanes::size) {
            const lanes m = lanes::load(softmax.maximum + at), first = lanes::load(softmax.next_maximum + at);
            lanes width = T{0};
            for (index j = 0; j < rows; ++j) {
                lanes score = lanes::load(scores + j * count(softmax) + at);
                if (added.numbers) score = score + lanes::load(added.numbers + j * added.stride + at);
                width = max_or_second(first - score, width);
            }
            const lanes near_first = select(width <= lanes(most_width), first, lanes(lowest_maximum<T>));
            select(m > lanes(lowest_maximum<T>), m, near_first).store(softmax.maximum + at);
        }
        waiting_ = queries_without_m(softmax);
        asks_first_keys_ = false;
    }
    /// True if the tile's scores become weights as they come.
    bool at_once() const { return waiting_ == 0; }

    /// Rows of scores that are to become weights, what is to be added to them before, and one bit per query for each row, who sees its key:
    /// where that is not everybody.
    void add(const softmax_type& softmax, T* scores, index rows, const added_scores<T, Arch>& added = {},
             const std::uint64_t* visible = nullptr) {
        finish();
        added_ = added;
        visible_ = visible;
        maximum_ = softmax.maximum;
        sum_ = softmax.sum;
        stride_ = count(softmax);
        lane_ = 0;
        at_ = scores;
        end_ = scores + rows * stride_;
    }
    [[gnu::always_inline]] bool any() const { return at_ != end_; }
    /// One register of them.
    template <bool adds>
    [[gnu::always_inline]] void step() {
        if (at_ == end_) return;
        lanes score = lanes::load(at_);
        if constexpr (adds) score = score + lanes::load(added_.numbers + lane_);
        lanes weight = simd::exp2_nonpositive(score - lanes::load(maximum_ + lane_));
        if (visible_) weight = select(simd::lane_bits{*visible_ >> lane_}, weight, lanes(T{0}));
        weight.store(at_);
        (lanes::load(sum_ + lane_) + weight).store(sum_ + lane_);
        at_ += lanes::size;
        lane_ += lanes::size;
        if (lane_ != stride_) return;
        lane_ = 0;
        if constexpr (adds) added_.numbers += added_.stride;
        if (visible_) ++visible_;
    }
    template <bool adds>
    [[gnu::always_inline]] void finish() {
        while (any()) step<adds>();
    }
    void finish() {
        if (!any()) return;
        if (added_.numbers)
            finish<true>();
        else
            finish<false>();
    }

    /// Before scores that have raised the maxima become weights: those of queries that need not wait are measured from the m they have.
    void choose_maxima(softmax_type& softmax) const {
        if (waiting_ == everybody) return;
        for (index at = 0; at < count(softmax); at += lanes::size) {
            const simd::lane_bits waits{waiting_ >> at};
            select(waits, lanes::load(softmax.next_maximum + at), lanes::load(softmax.maximum + at)).store(softmax.next_maximum + at);
        }
    }
    /// Takes note of all weights[rows][queries] of a tile; false if they must be made again, because some queries have to wait after all.
    bool settle(softmax_type& softmax, T* weights, index rows) {
        if (waiting_ == everybody) return true;
        const auto in_range = queries_where(softmax, [&](index at) { return lanes::load(softmax.sum + at) <= lanes(most_finite); });
        const auto numbers =
            queries_where(softmax, [&](index at) { return lanes::load(earlier_sum_ + at) == lanes::load(earlier_sum_ + at); });
        const auto waiting = waiting_ | (numbers & ~in_range); // what was NaN before stays so
        if (waiting != waiting_) {
            waiting_ = waiting;
            std::copy_n(earlier_sum_, count(softmax), softmax.sum);
            return false;
        }
        if (in_range & queries_where(softmax, [&](index at) { return lanes::load(softmax.sum + at) > lanes(most_sum); }))
            raise(softmax, weights, rows);
        std::copy_n(softmax.maximum, count(softmax), softmax.next_maximum);
        return true;
    }

private:
    static constexpr std::uint64_t everybody = ~std::uint64_t{0};
    static constexpr auto most_sum = static_cast<T>(0x1p24), most_finite = static_cast<T>(0x1p100), most_width = T{40};

    static std::uint64_t queries_without_m(const softmax_type& softmax) {
        const auto knows_m = [&](index at) { return lanes::load(softmax.maximum + at) > lanes(lowest_maximum<T>); };
        return simd::lane_bits::first(count(softmax)).value & ~queries_where(softmax, knows_m);
    }
    static index count(const softmax_type& softmax) { return softmax.registers * lanes::size; }
    /// One bit per query for which test(first lane of its register) is true.
    static std::uint64_t queries_where(const softmax_type& softmax, auto test) {
        std::uint64_t bits = 0;
        for (index at = 0; at < count(softmax); at += lanes::size)
            bits |= (test(at).bits().value & simd::lane_bits::first(lanes::size).value) << at;
        return bits;
    }
    /// Where a sum has grown large, m rises by its exponent.
    [[gnu::noinline]] static void raise(softmax_type& softmax, T* weights, index rows) {
        using integer = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
        constexpr int mantissa_bits = std::numeric_limits<T>::digits - 1;
        constexpr integer bias = std::numeric_limits<T>::max_exponent - 1;
        for (index at = 0; at < count(softmax); at += lanes::size) {
            T shrink[lanes::size];
            integer most = 0;
            for (index q = 0; q < lanes::size; ++q) {
                const T sum = softmax.sum[at + q];
                const auto exponent = sum > most_sum && sum <= most_finite ? (std::bit_cast<integer>(sum) >> mantissa_bits) - bias : 0;
                softmax.maximum[at + q] += static_cast<T>(exponent);
                shrink[q] = std::bit_cast<T>((bias - exponent) << mantissa_bits);
                most = std::max(most, exponent);
            }
            if (most == 0) continue;
            const auto multiply = [factor = lanes::load(shrink)](T* x) { (lanes::load(x) * factor).store(x); };
            multiply(softmax.sum + at);
            multiply(softmax.factor + at);
            for (index row = 0; row < rows; ++row) multiply(weights + row * count(softmax) + at);
        }
    }

    T* earlier_sum_;
    std::uint64_t waiting_ = everybody; ///< one bit per query: its weights are measured from the tile's maximum
    bool asks_first_keys_ = false;
    added_scores<T, Arch> added_;
    const std::uint64_t* visible_ = nullptr;
    const T* maximum_ = nullptr;
    T *sum_ = nullptr, *at_ = nullptr, *end_ = nullptr;
    index lane_ = 0, stride_ = 0;
};

} // namespace attn::kernel
