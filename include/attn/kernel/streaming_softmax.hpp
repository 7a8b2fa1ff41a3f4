// The one kernel behind every softmax attention: any pattern, any score function, never an n x m matrix.
#pragma once

#include "../core/inputs.hpp"
#include "../parallel/executor.hpp"
#include "../pattern/passes.hpp"
#include "head_groups.hpp"
#include "softmax_panel.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

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
        return memory.used_bytes() + static_cast<std::size_t>(concurrency) * panel_bytes(queries.channels, values.channels,
                                                                                         score_at(score, 0, 0),
                                                                                         kept_keys(queries, values.tokens, score));
    }

    void operator()(const inputs<T>& in, const outputs<T>& out, const execution& run) const {
        const auto& s = in.queries.shape();
        if (s.batch * s.heads * s.tokens == 0) return;
        detail::scratch memory(run.workspace().bytes().data());
        const auto earlier = between_passes(memory, s);
        const auto kept = kept_keys(s, in.values.shape().tokens, score_);
        std::byte* const slices = run.workspace().bytes().data() + memory.used_bytes();
        for (index pass = 0; pass < max_passes<P>; ++pass) {
            index tasks = 0;
            for (index h = 0; h < s.batch * s.heads; ++h) {
                on_pass(in, {h / s.heads, h % s.heads}, pass, [&](const auto&, index step) {
                    const auto tiles = tile_count(s.tokens, queries_of_a_tile(s.tokens, step), step),
                               together = tiles_of_a_task(s.tokens, step);
                    tasks = std::max(tasks, (tiles + together - 1) / together);
                });
            }
            // A task takes several heads if they are short, of which those that follow each other may share a bias, or if they do share
            // one.
            const bool by_head = tasks == 1 ? panel::scored : kept > 0 && !shared_by_heads(s, score_);
            const auto most_heads = tasks == 1 ? 16 : kept > 0 ? heads_together(s, in.values.shape()) : 1;
            const head_groups groups{s.batch, s.heads,
                                     std::clamp<index>(s.batch * s.heads * tasks / (4 * run.concurrency()), 1, most_heads), by_head};
            run.for_each(groups.count() * tasks, [&](index task, index slice) {
                const auto group = task / tasks;
                const auto score_of = [&](const head_place& place) { return score_at(score_, place.batch, place.head); };
                const auto score = score_of(groups.at(group, 0));
                detail::scratch own(slices +
                                    static_cast<std::size_t>(slice) * panel_bytes(s.channels, in.values.shape().channels, score, kept));
                panel work(own, s.channels, in.values.shape().channels, score, kept);
                for (index number = 0; number < groups.size(group); ++number) {
                    const auto place = groups.at(group, number), next = groups.after(group, number);
                    if (number > 0) work.rebind(score_of(place));
                    on_pass(in, place, pass, [&](const auto& pattern, index step) {
                        const auto most = queries_of_a_tile(s.tokens, step), tiles = tiles_of_a_task(s.tokens, step);
                        const auto first = task % tasks * tiles, end = std::min(first + tiles, tile_count(s.tokens, most, step));
                        for (auto tile = first; tile < end; ++tile) {
                            const auto queries =
                                tile_at(tile, in.positions.first_query[place.batch], s.tokens, most, step, panel::tile_type::lane_count);
                            run_tile(in, out, work, pattern, place, queries, earlier, pass, next);
                        }
                    });
                }
            });
        }
    }

private:
    using bound_score = decltype(score_at(std::declval<const S&>(), 0, 0));
    using panel = softmax_panel<T, Arch, bound_score>;

    static constexpr index queries_of_a_tile(index queries, index step) {
        return panel::tile_type::panel_queries((queries + step - 1) / step);
    }
    /// A residue class's tiles follow each other on one thread, for which its keys are gathered once, as many as are kept.
    static constexpr index tiles_of_a_task(index queries, index step) {
        if (step == 1) return 1;
        return std::clamp<index>(tile_count(queries / step, queries_of_a_tile(queries, step)), 1,
                                 tile_keys<T, Arch>::most_kept / queries_of_a_tile(queries, step) + 1);
    }
    static std::size_t panel_bytes(index key_channels, index value_channels, const bound_score& score, index kept) {
        detail::scratch memory;
        panel(memory, key_channels, value_channels, score, kept);
        return memory.used_bytes();
    }
    static bool shared_by_heads(const shape& queries, const S& score) {
        if constexpr (panel::keeps_bias) return queries.heads > 1 && score_at(score, 0, 0) == score_at(score, 0, 1);
        return false;
    }
    /// The keys of a panel whose bias is kept for the next head, or batch entry, that has the same.
    static index kept_keys(const shape& queries, index keys, const S& score) {
        if constexpr (panel::keeps_bias) {
            const bool shared = shared_by_heads(queries, score) || (queries.batch > 1 && score_at(score, 0, 0) == score_at(score, 1, 0));
            if (shared && keys <= panel::score_type::most_kept_keys) return keys;
        }
        return 0;
    }
    /// Long heads that a panel's bias is kept for: each panel reads the keys and values of all of them. Of 12 heads of 2048 tokens it
    /// waited for memory half of the time, of 4 it did not.
    static index heads_together(const shape& queries, const shape& values) {
        constexpr index near = index{4} << 20; // of a third-level cache, which others use too
        return std::max<index>(
            1, near / std::max<index>(1, values.tokens * (queries.channels + values.channels) * static_cast<index>(sizeof(T))));
    }
    /// Calls f(pattern, step) for one pass of one head, if the head has that many.
    template <class F>
    void on_pass(const inputs<T>& in, const head_place& place, index number, F&& f) const {
        const auto [batch, head] = place;
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
    void run_tile(const inputs<T>& in, const outputs<T>& out, panel& work, const Pattern auto& pattern, const head_place& place,
                  const query_tile& tile, const row_sums& earlier, index pass, const head_place& next) const {
        const auto [batch, head] = place;
        const auto heads_of_keys = in.queries.shape().heads / in.keys.shape().heads, kv_head = head / heads_of_keys;
        const auto first_row = tile.first - in.positions.first_query[batch], first_key = in.positions.first_key[batch];
        const auto rows_of_tile = [&](const auto& tensor, index first) {
            auto rows = rows_of(tensor, batch, head);
            rows.data += first * rows.row_stride;
            rows.row_stride *= tile.step;
            return rows;
        };
        work.tile().begin(tile, rows_of_tile(in.queries, first_row), rows_of(in.keys, batch, kv_head), rows_of(in.values, batch, kv_head),
                          first_key, in.keys.shape().tokens, static_cast<T>(scale_));
        // A panel may be too short for the hardware to foresee the rows that end it, and those that begin the next.
        const auto results = rows_of_tile(out.values, first_row);
        auto& ahead = work.tile().ahead();
        const bool one_panel = tile.count == in.queries.shape().tokens;
        ahead.add({row_block<const T>{results.data, results.row_stride, results.channel_stride}, tile.count, out.values.shape().channels,
                   one_panel});
        if (tile.step > 1) {
            const bool ends_class = first_row + tile.count * tile.step >= in.queries.shape().tokens;
            const auto next_row = ends_class ? first_row % tile.step + 1 : first_row + tile.count * tile.step;
            ahead.add({rows_of_tile(in.queries, next_row), tile.count, in.queries.shape().channels});
            add_next_class(ahead, in, batch, kv_head, first_row, tile);
        } else {
            if (!one_panel)
                ahead.add({rows_of_tile(in.queries, first_row + tile.count), tile.count, in.queries.shape().channels});
            else
                ahead.add({rows_of(in.queries, next.batch, next.head), tile.count, in.queries.shape().channels, true});
            add_next_head(ahead, in, next.batch, next.head / heads_of_keys, first_row, tile.count);
        }
        ahead.spread(in.keys.shape().tokens / tile.step / panel::tile_type::grain);

        const T sink = sinks_.empty() ? -std::numeric_limits<T>::infinity() : static_cast<T>(sinks_[static_cast<std::size_t>(head)]);
        const bool in_place = pass == 0 && work.tile().ends_in(results);
        const bool written = work.run(pattern, first_key, in.keys.shape().tokens, in_place ? results : row_block<T>{}, sink);
        auto& softmax = work.tile().softmax();
        T share[panel::tile_type::most_queries] = {}, maximum[panel::tile_type::most_queries] = {};
        const auto row_of = [&](index q) {
            return (batch * in.queries.shape().heads + head) * in.queries.shape().tokens + first_row + q * tile.step;
        };
        if (pass == 0) {
            if (!written) softmax.finish(sink);
        } else {
            for (index q = 0; q < tile.count; ++q) {
                maximum[q] = earlier.maximum[row_of(q)];
                share[q] = earlier.sum[row_of(q)];
            }
            softmax.finish_after(maximum, share);
        }
        if (written && max_passes<P> == 1 && !out.log_sum_exp.data()) return;
        for (index q = 0; q < tile.count; ++q) {
            if (!written) {
                const T* const values = softmax.values + q * softmax.value_stride;
                T* const to = results.data + q * results.row_stride;
                if (pass == 0)
                    write_row<false, T, Arch>(values, out.values.shape().channels, softmax.factor[q], T{0}, to, results.channel_stride);
                else
                    write_row<true, T, Arch>(values, out.values.shape().channels, softmax.factor[q], share[q], to, results.channel_stride);
            }
            if (max_passes<P> > 1) {
                earlier.maximum[row_of(q)] = softmax.maximum[q];
                earlier.sum[row_of(q)] = softmax.sum[q];
            }
            if (out.log_sum_exp.data()) out.log_sum_exp(batch, head, first_row + q * tile.step, 0) = softmax.log_sum_exp(q);
        }
    }

    /// The panels of one head bring the next head's keys and values closer, each its share, if they fit into a second-level cache beside
    /// their own: where heads are short, as in a vision transformer, the first panel would wait for all of them.
    static void add_next_head(panel_ahead<T>& ahead, const inputs<T>& in, index next_batch, index next_head, index first_row,
                              index queries) {
        const auto& k = in.keys.shape();
        const auto channels = k.channels + in.values.shape().channels;
        constexpr index half_a_cache = index{512} << 10;
        if (k.tokens * channels * static_cast<index>(sizeof(T)) > half_a_cache) return;
        const auto share = (k.tokens * queries + in.queries.shape().tokens - 1) / in.queries.shape().tokens;
        const auto first = std::min(k.tokens, first_row * k.tokens / in.queries.shape().tokens), count = std::min(share, k.tokens - first);
        const auto add_share = [&](const auto& tensor) {
            auto rows = rows_of(tensor, next_batch, next_head);
            rows.data += first * rows.row_stride;
            ahead.add({rows, count, tensor.shape().channels, queries == in.queries.shape().tokens});
        };
        add_share(in.keys);
        add_share(in.values);
    }

    /// The panels of a residue class bring the next one's keys and values closer, each its share, if the class keeps them: no hardware
    /// foresees rows that far apart.
    static void add_next_class(panel_ahead<T>& ahead, const inputs<T>& in, index batch, index kv_head, index first_row,
                               const query_tile& tile) {
        const auto class_rows = [&](index rows) { return (rows + tile.step - 1) / tile.step; };
        const auto skip = floor_mod(tile.first + 1 - in.positions.first_key[batch], tile.step);
        const auto queries = class_rows(in.queries.shape().tokens), keys = class_rows(in.keys.shape().tokens - skip);
        if (keys > tile_keys<T, Arch>::most_kept) return;
        const auto row = first_row / tile.step, begin = row * keys / queries, end = (row + tile.count) * keys / queries;
        const auto add_share = [&](const auto& tensor) {
            auto rows = rows_of(tensor, batch, kv_head);
            rows.data += (skip + begin * tile.step) * rows.row_stride;
            rows.row_stride *= tile.step;
            ahead.add({rows, end - begin, tensor.shape().channels});
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
