// The one kernel behind every softmax attention: any pattern, any score function, never an n x m matrix.
#pragma once

#include "../core/inputs.hpp"
#include "../parallel/executor.hpp"
#include "../pattern/narrowed.hpp"
#include "../pattern/passes.hpp"
#include "score_tile.hpp"
#include "softmax_tile.hpp"

namespace attn::kernel {

/// Walks the key runs that a pattern shows to one panel of queries.
template <Scalar T, class Arch, ScoreFunction S>
class softmax_panel {
public:
    using tile_type = softmax_tile<T, Arch>;
    using lanes = simd::lanes<T, Arch>;
    static constexpr bool scored = !std::same_as<S, identity_score>;

    softmax_panel(detail::scratch& memory, index key_channels, index value_channels, const S& score)
        : tile_(memory, key_channels, value_channels), score_(score_tile<T, Arch, S>::take(memory, score, tile_type::most_keys)) {}

    /// The softmax state of a panel that has begun, over all keys that the pattern shows it. 0 * NaN is NaN, so a weight of 0 does not
    /// protect from the value of a hidden key: if a sum is not finite, the panel is done again with every hidden key left out.
    online_softmax<T, Arch>& run(const Pattern auto& pattern, index first_key, index keys) {
        for (careful_ = false;; careful_ = true) {
            index end = first_key + keys;
            for_each_run(pattern, tile_.queries(), first_key, keys, tile_type::grain, [&](const key_run& run) {
                end = run.first + run.count * run.step;
                append(pattern, run);
            });
            if (!careful_) tile_.fetch_beyond(end);
            push();
            if (careful_ || tile_.softmax().has_finite_values(tile_.queries().count)) return tile_.softmax();
            tile_.begin_again();
        }
    }
    tile_type& tile() { return tile_; }

private:
    /// Cuts a run into segments, as evenly as they come so that no tile is left with a few keys, and pushes each full tile.
    void append(const Pattern auto& pattern, key_run run) {
        while (run.count > 0) {
            if (tile_.full()) push();
            auto piece = run;
            const auto rows = tile_.rows();
            if (rows + run.count > tile_type::most_keys) {
                const auto tiles = (rows + run.count + tile_type::good_keys - 1) / tile_type::good_keys;
                const auto even = ((rows + run.count + tiles - 1) / tiles + tile_type::grain - 1) / tile_type::grain * tile_type::grain;
                if (even <= rows) {
                    push();
                    continue;
                }
                piece.count = std::min(even - rows, run.count);
            }
            const auto& segment = tile_.add_segment(piece);
            if (!piece.full) find_visible(pattern, segment);
            run.first += piece.count * run.step;
            run.count -= piece.count;
            if (run.count > 0) push();
        }
    }
    void push() {
        if (tile_.rows() == 0) return;
        for (const auto& segment : tile_.segments()) {
            tile_.multiply_keys(segment);
            if (scored || !segment.keys.full)
                adjust_scores(segment);
            else
                tile_.softmax().raise_maximum(tile_.scores(segment.first_row, 0), segment.keys.count);
        }
        tile_.push(careful_);
    }
    /// One bit per query and key of a segment that is partly visible.
    [[gnu::noinline]] void find_visible(const Pattern auto& pattern, const key_segment<T>& segment) {
        const auto queries = tile_.all_queries();
        const auto present = simd::lane_bits::first(queries.count);
        const auto here = narrowed(pattern, tile_.queries().positions(), segment.keys.positions());
        for (index j = 0; j < segment.keys.count; ++j) // a pattern may answer with one bool for all queries
            tile_.visible(segment.first_row + j) = (present && here.visible(queries, segment.keys.first + j * segment.keys.step)).value;
    }
    /// Applies the score function, and takes hidden keys out of the way.
    [[gnu::noinline]] void adjust_scores(const key_segment<T>& segment) {
        for (index reg = 0; reg < tile_.registers(); ++reg) {
            const auto lane = reg * tile_type::lane_count;
            score_.load(tile_.queries().part(lane, tile_type::lane_count), segment.keys);
            const auto queries = tile_.queries_of(reg);
            T* const maximum = tile_.softmax().next_maximum + lane;
            auto top = lanes::load(maximum);
            for (index j = 0; j < segment.keys.count; ++j) {
                const auto row = segment.first_row + j;
                T* const scores = tile_.scores(row, reg);
                auto x = lanes::load(scores);
                if constexpr (scored)
                    x = score_(x, queries, segment.keys.first + j * segment.keys.step, j) * lanes(std::numbers::log2e_v<T>);
                if (!segment.keys.full) x = select(simd::lane_bits{tile_.visible(row) >> lane}, x, lanes(hidden_score<T>));
                x.store(scores);
                top = max_or_second(x, top);
            }
            top.store(maximum);
        }
    }

    tile_type tile_;
    score_tile<T, Arch, S> score_;
    bool careful_ = false;
};

/// Softmax attention: out = softmax(score(scale * q k^T), keys hidden by the pattern left out) v. Cuts (batch, head, tile of queries) into
/// tasks; a union of patterns with different steps runs as passes one after the other, whose results merge. Shapes have been checked.
/// sinks: one number per head that is added to the softmax denominator as exp(sink), or none.
template <Scalar T, class Arch, Pattern P, ScoreFunction S>
class streaming_softmax {
public:
    streaming_softmax(const P& pattern, const S& score, double scale, std::span<const double> sinks)
        : pattern_(pattern), score_(score), scale_(scale), sinks_(sinks) {}

    static std::size_t workspace_bytes(const shape& queries, const shape& values, const S& score, index concurrency) {
        if (queries.batch * queries.heads == 0) return 0; // there is no head whose score function could be asked
        detail::scratch memory;
        between_passes(memory, queries);
        return memory.used_bytes() +
               static_cast<std::size_t>(concurrency) * panel_bytes(queries.channels, values.channels, score_at(score, 0, 0));
    }

    void operator()(const inputs<T>& in, const outputs<T>& out, const execution& run) const {
        const auto& s = in.queries.shape();
        if (s.batch * s.heads * s.tokens == 0) return;
        detail::scratch memory(run.workspace().bytes().data());
        const auto earlier = between_passes(memory, s);
        std::byte* const slices = run.workspace().bytes().data() + memory.used_bytes();
        constexpr auto most = panel::tile_type::most_queries;
        for (index pass = 0; pass < max_passes<P>; ++pass) {
            index tasks = 0;
            for (index h = 0; h < s.batch * s.heads; ++h) {
                on_pass(in, h / s.heads, h % s.heads, pass, [&](const auto&, index step) {
                    tasks = std::max(tasks, (tile_count(s.tokens, most, step) + tiles_of_a_task(s.tokens, step) - 1) /
                                                tiles_of_a_task(s.tokens, step));
                });
            }
            run.for_each(s.batch * s.heads * tasks, [&](index task, index slice) {
                const auto head = task / tasks % s.heads, batch = task / tasks / s.heads;
                on_pass(in, batch, head, pass, [&](const auto& pattern, index step) {
                    const auto together = tiles_of_a_task(s.tokens, step), first = task % tasks * together;
                    const auto end = std::min(first + together, tile_count(s.tokens, most, step));
                    if (first >= end) return;
                    const auto score = score_at(score_, batch, head);
                    detail::scratch own(slices +
                                        static_cast<std::size_t>(slice) * panel_bytes(s.channels, in.values.shape().channels, score));
                    panel work(own, s.channels, in.values.shape().channels, score);
                    for (auto tile = first; tile < end; ++tile) {
                        const auto queries =
                            tile_at(tile, in.positions.first_query[batch], s.tokens, most, step, panel::tile_type::lane_count);
                        run_tile(in, out, work, pattern, batch, head, queries, earlier, pass);
                    }
                });
            });
        }
    }

private:
    using bound_score = decltype(score_at(std::declval<const S&>(), 0, 0));
    using panel = softmax_panel<T, Arch, bound_score>;

    /// A residue class's tiles follow each other on one thread, for which its keys are gathered once, as many as are kept.
    static constexpr index tiles_of_a_task(index queries, index step) {
        using tile_type = typename panel::tile_type;
        if (step == 1) return 1;
        return std::clamp<index>(tile_count(queries / step, tile_type::most_queries), 1,
                                 tile_type::most_kept / tile_type::most_queries + 1);
    }
    static std::size_t panel_bytes(index key_channels, index value_channels, const bound_score& score) {
        detail::scratch memory;
        panel(memory, key_channels, value_channels, score);
        return memory.used_bytes();
    }
    /// Calls f(pattern, step) for one pass of one head, if the head has that many.
    template <class F>
    void on_pass(const inputs<T>& in, index batch, index head, index number, F&& f) const {
        index n = 0;
        for_each_pass(at(pattern_, batch, head), in.positions.first_query[batch], in.queries.shape().tokens, in.positions.first_key[batch],
                      in.keys.shape().tokens, [&](const auto& pattern, index step) {
                          if (n++ == number) f(pattern, step);
                      });
    }
    /// m and l of every row (batch, heads, n), which the passes of a union hand on.
    struct row_sums {
        T *maximum, *sum;
    };
    static row_sums between_passes(detail::scratch& memory, const shape& queries) {
        const auto rows = max_passes<P> > 1 ? queries.batch * queries.heads * queries.tokens : 0;
        T* const maximum = memory.take<T>(rows);
        return {maximum, memory.take<T>(rows)};
    }
    void run_tile(const inputs<T>& in, const outputs<T>& out, panel& work, const Pattern auto& pattern, index batch, index head,
                  const query_tile& tile, const row_sums& earlier, index pass) const {
        const auto kv_head = head / (in.queries.shape().heads / in.keys.shape().heads);
        const auto first_row = tile.first - in.positions.first_query[batch], first_key = in.positions.first_key[batch];
        const auto rows_of_tile = [&](const auto& tensor, index first) {
            auto rows = rows_of(tensor, batch, head);
            rows.data += first * rows.row_stride;
            rows.row_stride *= tile.step;
            return rows;
        };
        const double factor = scale_ * (panel::scored ? 1.0 : std::numbers::log2e);
        work.tile().begin(tile, rows_of_tile(in.queries, first_row), rows_of(in.keys, batch, kv_head), rows_of(in.values, batch, kv_head),
                          first_key, in.keys.shape().tokens, static_cast<T>(factor));
        // A panel may be too short for the hardware to foresee the rows that end it, and those that begin the next.
        const auto results = rows_of_tile(out.values, first_row);
        auto& ahead = work.tile().ahead();
        ahead.add({row_block<const T>{results.data, results.row_stride, results.channel_stride}, tile.count, out.values.shape().channels});
        ahead.add({rows_of_tile(in.queries, first_row + tile.count * tile.step), tile.count, in.queries.shape().channels});
        add_next_head(ahead, in, batch, kv_head, first_row, tile.count);
        ahead.spread(in.keys.shape().tokens / panel::tile_type::grain);

        auto& softmax = work.run(pattern, first_key, in.keys.shape().tokens);
        T share[panel::tile_type::most_queries] = {}, maximum[panel::tile_type::most_queries] = {};
        const auto row_of = [&](index q) {
            return (batch * in.queries.shape().heads + head) * in.queries.shape().tokens + first_row + q * tile.step;
        };
        if (pass == 0) {
            softmax.finish(sinks_.empty() ? -std::numeric_limits<T>::infinity() : static_cast<T>(sinks_[static_cast<std::size_t>(head)]));
        } else {
            for (index q = 0; q < tile.count; ++q) {
                maximum[q] = earlier.maximum[row_of(q)];
                share[q] = earlier.sum[row_of(q)];
            }
            softmax.finish_after(maximum, share);
        }
        for (index q = 0; q < tile.count; ++q) {
            const T* const values = softmax.values + q * softmax.value_stride;
            T* const to = results.data + q * results.row_stride;
            if (pass == 0)
                write_row<false, T, Arch>(values, out.values.shape().channels, softmax.factor[q], T{0}, to, results.channel_stride);
            else
                write_row<true, T, Arch>(values, out.values.shape().channels, softmax.factor[q], share[q], to, results.channel_stride);
            if (max_passes<P> > 1) {
                earlier.maximum[row_of(q)] = softmax.maximum[q];
                earlier.sum[row_of(q)] = softmax.sum[q];
            }
            if (out.log_sum_exp.data()) out.log_sum_exp(batch, head, first_row + q * tile.step, 0) = softmax.log_sum_exp(q);
        }
    }

    /// The panels of one head bring the next head's keys and values closer, each its share, if they fit into a second-level cache beside
    /// their own: where heads are short, as in a vision transformer, the first panel would wait for all of them.
    static void add_next_head(panel_ahead<T>& ahead, const inputs<T>& in, index batch, index kv_head, index first_row, index queries) {
        const auto& k = in.keys.shape();
        const auto channels = k.channels + in.values.shape().channels;
        constexpr index half_a_cache = index{512} << 10;
        if (k.tokens * channels * static_cast<index>(sizeof(T)) > half_a_cache) return;
        const auto next = batch * k.heads + kv_head + 1;
        if (next >= k.batch * k.heads) return;
        const auto share = (k.tokens * queries + in.queries.shape().tokens - 1) / in.queries.shape().tokens;
        const auto first = std::min(k.tokens, first_row * k.tokens / in.queries.shape().tokens), count = std::min(share, k.tokens - first);
        const auto add_share = [&](const auto& tensor) {
            auto rows = rows_of(tensor, next / k.heads, next % k.heads);
            rows.data += first * rows.row_stride;
            ahead.add({rows, count, tensor.shape().channels});
        };
        add_share(in.keys);
        add_share(in.values);
    }

    const P& pattern_;
    const S& score_;
    double scale_;
    std::span<const double> sinks_;
};

} // namespace attn::kernel
