// One tile of attention: scores of a panel of queries with up to 128 keys, their softmax, and the weighted values.
#pragma once

#include "added_scores.hpp"
#include "lone_query.hpp"
#include "panel_queries.hpp"
#include "tile_keys.hpp"
#include "work_ahead.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// One thread's memory, and the steps of one panel of queries that do not depend on pattern or score function:
///     scores   S^T = K Q^T, lanes are queries: only Q is transposed, K is read as it lies, one broadcast number at a time
///     softmax  vertical in every lane (online_softmax)
///     values   O += P V, lanes are channels: P is read from the score tile as broadcasts, V as it lies, O stays in cache
template <Scalar T, class Arch>
class softmax_tile {
public:
    using lanes = simd::lanes<T, Arch>;
    using traits = tile_traits<T, Arch>;
    static constexpr index lane_count = lanes::size;

    /// Queries of a panel in registers: so many that Q, the scores and O stay in the nearest caches. A few more where that makes one panel
    /// of all queries, so that a window of 49 or 64 reads its keys but once.
    static constexpr index good_registers = simd::register_count<Arch> >= 32 ? 3 : 6, most_registers = good_registers * 4 / 3;
    static constexpr index most_queries = most_registers * lane_count;
    /// The most queries of a panel of so many that are there.
    static constexpr index panel_queries(index queries) { return (queries <= most_queries ? most_registers : good_registers) * lane_count; }
    /// Keys that a schedule tells apart.
    static constexpr index grain = 8;
    static_assert(most_queries <= 64, "a key's visibility is kept as one bit per query");

    softmax_tile(detail::scratch& memory, index key_channels, index value_channels)
        : key_channels_(key_channels), value_channels_(value_channels), padded_(whole_registers<T, Arch>(value_channels)),
          queries_(memory.take<T>(most_queries * key_channels)), scores_(memory.take<T>(most_queries * tile_keys<T, Arch>::most)),
          lone_scores_(memory.take<T>(tile_keys<T, Arch>::most)), visible_(memory.take<std::uint64_t>(tile_keys<T, Arch>::most)),
          keys_(memory, key_channels, value_channels), softmax_(online_softmax<T, Arch>::take(memory, most_registers, padded_)) {}

    /// A new panel: the queries of `tile`, times factor. `queries` begins with the tile's first, row 0 of keys and values is at first_key.
    void begin(const query_tile& tile, const row_block<const T>& queries, const row_block<const T>& keys, const row_block<const T>& values,
               index first_key, index key_count, T factor) {
        tile_ = tile;
        ahead_ = next_tile_ = {};
        keys_.begin(tile, keys, values, first_key, key_count);
        const bool lone = leaves_lone_query<T, Arch>(tile.count);
        const auto columns = tile.count - lone;
        softmax_.reset((columns + lane_count - 1) / lane_count, lone);
        pushed_ = shrinks_ = false;
        transpose_rows<T, Arch>(queries, columns, key_channels_, factor, queries_, stride());
        if (lone) {
            const T* const row = queries.data + columns * queries.row_stride;
            for (index c = 0; c < key_channels_; ++c) queries_[stride() * key_channels_ + c] = factor * row[c * queries.channel_stride];
        }
    }
    /// Asks for what lies behind position `key`, the end of what the panel visits: as many keys as it has queries, which with a window or
    /// causal the next panel is the first to read. Called before the panel's last tile is pushed, which is to have asked for everything.
    void fetch_beyond(index key) {
        keys_.add_beyond(ahead_, key, tile_.count);
        ahead_.spread(keys_.rows() / grain + tile_.count / traits::max_rows(traits::max_columns));
    }
    /// What the panel asks for while it computes.
    panel_ahead<T>& ahead() { return ahead_; }
    /// Asks for rows that the next tile reads, while this one computes.
    void fetch_for_next_tile(const row_block<const T>& rows, index count, index channels) {
        next_tile_ = {};
        next_tile_.add({rows, count, channels});
        next_tile_.spread(keys_.rows() / grain + tile_.count / traits::max_rows(traits::max_columns));
    }
    /// The same panel once more, from the start.
    void begin_again() {
        softmax_.begin_again();
        pushed_ = false;
    }
    /// The same after a careful turn, with smaller weights for the queries whose sums of values were not finite.
    void begin_smaller(index keys) {
        softmax_.grow(infinite_, keys);
        shrinks_ = true;
        begin_again();
    }
    const query_tile& queries() const { return tile_; }
    online_softmax<T, Arch>& softmax() { return softmax_; }
    index registers() const { return softmax_.registers; }
    index stride() const { return softmax_.registers * lane_count; }
    /// The keys of the tile.
    tile_keys<T, Arch>& keys() { return keys_; }
    /// Scores of one key with the queries of one register.
    T* scores(index row, index reg) { return scores_ + row * stride() + reg * lane_count; }
    /// Scores of the lone query, which comes after all registers.
    T* lone_scores(index row) { return lone_scores_ + row; }
    bool has_lone_query() const { return softmax_.lone; }
    /// One bit per query: who sees the key of a row. Only of segments that are not full.
    std::uint64_t& visible(index row) { return visible_[row]; }
    /// Rows outside of which the queries of one register see nothing, once the tile's keys are multiplied.
    const row_range& seen_rows(index reg) const { return seen_[static_cast<std::size_t>(reg)]; }

    /// The positions of one register of queries, or of all.
    simd::query_lanes<T, Arch> queries_of(index reg) const { return queries_from<T, Arch, lane_count>(tile_, reg * lane_count); }
    auto all_queries() const { return queries_from<T, Arch, most_queries>(tile_, 0); }

    /// S^T = K Q^T + added, which is added_scores or no_scores; `raises`: the maxima too. Of a segment that is not full, only the registers
    /// are computed that see a key of each group of rows.
    template <class Added>
    void multiply_keys(const key_segment<T>& segment, const Added& added, bool raises) {
        if (has_lone_query()) multiply_lone_query(segment, added);
        const auto multiply = [&](index row, index rows, index count, index left, index right) {
            for (index reg = left; reg < right; ++reg) see(reg, segment.first_row + row, rows * count);
            with_constant<traits::max_columns>(right - left, [&](auto c) {
                with_constant<traits::max_rows(c())>(rows,
                                                     [&](auto r) { multiply_rows<r(), c()>(segment, row, count, left, added, raises); });
            });
        };
        for_each_piece(softmax_.registers, traits::max_columns, [&](index first, index columns) {
            const index most_rows = traits::max_rows(static_cast<int>(columns)), end = first + columns;
            if (segment.keys.full) {
                for_each_size(segment.keys.count, most_rows,
                              [&](index row, index rows, index count) { multiply(row, rows, count, first, end); });
                return;
            }
            for_each_piece(segment.keys.count, std::min<index>(grain, most_rows), [&](index row, index rows) {
                index left = first, right = end;
                std::uint64_t seen = 0;
                for (index j = 0; j < rows; ++j) seen |= visible_[segment.first_row + row + j];
                leave_out_unseen<lane_count>(seen, left, right);
                multiply(row, rows, 1, left, right);
            });
        });
    }
    /// All scores of the tile become weights. `careful`: who sees which key is found out before.
    void weigh_scores(bool careful) {
        if (careful) find_seen();
        softmax_.push_seen_scores(scores_, keys_.rows(), seen_.data());
        if (has_lone_query()) push_lone_query(softmax_, lone_scores_, keys_.rows());
    }

    /// Takes the tile's weights in, and empties the tile. `careful` leaves hidden keys out instead of multiplying their values by 0.
    void push(bool careful) {
        if (shrinks_) shrink_weights();
        for_each_piece(padded_ / lane_count, traits::max_columns, [&](index first, index columns) {
            with_constant<traits::max_columns>(columns, [&](auto c) { add_values<c()>(first * lane_count, careful); });
        });
        seen_ = {};
        keys_.clear();
        pushed_ = true;
    }
    /// The same for the last keys of a panel. With `results` the panel ends here, and goes to them straight from the registers. False if a
    /// value of NaN or infinity has come into its sums, be it by a weight of 0.
    bool push_last(bool careful, const row_block<T>& results, T sink) {
        results_ = results;
        if (results.data) softmax_.finish(sink, share_.data());
        zeros_.fill(T{0});
        infinite_ = 0;
        last_ = true;
        push(careful);
        last_ = false;
        return std::all_of(zeros_.begin(), zeros_.end(), [](T x) { return x == 0; });
    }
    /// The panel has seen no key.
    void push_nothing() { std::fill_n(softmax_.values, tile_.count * padded_, T{0}); }
    /// Whether rows can be results of push_last.
    bool ends_in(const row_block<T>& results) const { return results.channel_stride == 1 && padded_ == value_channels_; }

private:
    /// Scores of `count` times a few keys. The loop is here and not where it is called: the way into and out of this function took 3 % of
    /// the time of a window.
    template <int Rows, int Columns, class Added>
    [[gnu::noinline]] void multiply_rows(const key_segment<T>& segment, index row, index count, index reg, const Added& added,
                                         bool raises) {
        constexpr bool adds = !std::same_as<Added, no_scores>;
        const auto lane = reg * lane_count;
        const T* keys = segment.key_rows + row * segment.key_stride;
        const T* const queries = queries_ + lane;
        const index query_stride = stride();
        for (; count > 0; --count, row += Rows, keys += Rows * segment.key_stride) {
            ahead_.step();
            next_tile_.step();
            matrix_tile<Rows, Columns, T, Arch> tile;
            tile.zero();
            ahead_.multiply_add(tile, keys, segment.key_stride, unit_stride{}, queries, query_stride, key_channels_);
            // While the scores are in registers: a pass over them by itself took twice as long.
            if constexpr (adds) tile.add(added.from(row, lane).numbers, added.stride);
            if (raises) tile.raise(softmax_.next_maximum + lane);
            tile.store(scores_ + (segment.first_row + row) * query_stride + lane, query_stride);
        }
    }

    /// Scores of the lone query.
    template <class Added>
    void multiply_lone_query(const key_segment<T>& segment, [[maybe_unused]] const Added& added) {
        const T* const query = queries_ + stride() * key_channels_;
        T* const scores = lone_scores(segment.first_row);
        for (index first = 0; first < segment.keys.count; first += lane_count) {
            ahead_.step();
            kernel::multiply_lone_query<T, Arch>(query, segment.key_rows + first * segment.key_stride, segment.key_stride, key_channels_,
                                                 std::min(lane_count, segment.keys.count - first), scores + first);
        }
        if constexpr (!std::same_as<Added, no_scores>)
            for (index j = 0; j < segment.keys.count; ++j) scores[j] += added.lone[j];
        see(registers(), segment.first_row, segment.keys.count);
    }
    void see(index reg, index row, index rows) {
        auto& range = seen_[static_cast<std::size_t>(reg)];
        range.first = range.last == 0 ? row : std::min(range.first, row);
        range.last = std::max(range.last, row + rows);
    }

    /// Rows outside of which `count` queries from one on see nothing, in as many registers as they lie in.
    row_range seen_rows_of(index query, index count) const {
        auto all = seen_rows(query / lane_count);
        for (auto reg = query / lane_count + 1; reg <= (query + count - 1) / lane_count; ++reg) {
            all.first = std::min(all.first, seen_rows(reg).first);
            all.last = std::max(all.last, seen_rows(reg).last);
        }
        return all;
    }

    /// Scores of a query, which become its weights: numbers[row * stride].
    struct query_scores {
        const T* numbers;
        index stride;
    };
    query_scores scores_of(index query) const {
        if (query == stride()) return {lone_scores_, 1};
        return {scores_ + query, stride()};
    }

    /// Before the scores become weights: which keys count for which query, by the pattern and by a score of -infinity.
    void find_seen() {
        for (const auto& segment : keys_.segments()) {
            for (index j = segment.first_row; j < segment.first_row + segment.keys.count; ++j) {
                if (segment.keys.full) visible_[j] = ~std::uint64_t{0};
                for (index q = 0; q < tile_.count; ++q) {
                    const auto scores = scores_of(q);
                    if (scores.numbers[j * scores.stride] < lowest_maximum<T>) visible_[j] &= ~query_bits(q, 1);
                }
            }
        }
    }

    /// The weights of queries whose values are summed smaller than they are.
    void shrink_weights() {
        softmax_.shrink(scores_, keys_.rows());
        if (!has_lone_query()) return;
        for (index j = 0; j < keys_.rows(); ++j) lone_scores_[j] /= softmax_.growth[stride()];
    }

    /// O += P V for Columns registers of channels.
    template <int Columns>
    void add_values(index channel, bool careful) {
        if (careful) {
            for (index query = 0; query < tile_.count; ++query) add_seen_values<Columns>(query, channel);
        } else {
            for_each_size(tile_.count - has_lone_query(), traits::max_rows(Columns), [&](index query, index rows, index count) {
                with_constant<traits::max_rows(Columns)>(rows, [&](auto r) { add_weighted_values<r(), Columns>(query, count, channel); });
            });
            if (!has_lone_query()) return;
            add_weighted_values<1, Columns>(stride(), 1, channel);
        }
    }
    /// `count` groups of queries, of which each skips the keys before and after those it sees.
    template <int Rows, int Columns>
    [[gnu::noinline]] void add_weighted_values(index query, index count, index channel) {
        for (; count > 0; --count, query += Rows) {
            ahead_.step();
            matrix_tile<Rows, Columns, T, Arch> tile;
            load_values(tile, query, channel);
            const auto weights = scores_of(query);
            const auto rows = seen_rows_of(query, Rows);
            for (const auto& segment : keys_.segments()) {
                index first = 0, last = segment.keys.count;
                if (!segment.keys.full) {
                    first = std::clamp<index>(rows.first - segment.first_row, 0, last);
                    last = std::clamp<index>(rows.last - segment.first_row, first, last);
                    const auto own = query_bits(query, Rows);
                    const auto* const visible = visible_ + segment.first_row;
                    while (first < last && !(visible[first] & own)) ++first;
                    while (first < last && !(visible[last - 1] & own)) --last;
                }
                ahead_.multiply_add(tile, weights.numbers + (segment.first_row + first) * weights.stride, unit_stride{}, weights.stride,
                                    segment.value_rows + first * segment.value_stride + channel, segment.value_stride, last - first);
            }
            store_values(tile, query, channel);
        }
    }
    /// The same sum in the same order for one query, but over the keys it sees only.
    template <int Columns>
    [[gnu::noinline]] void add_seen_values(index query, index channel) {
        matrix_tile<1, Columns, T, Arch> tile;
        load_values(tile, query, channel);
        const auto weights = scores_of(query);
        for (const auto& segment : keys_.segments()) {
            for (index j = 0; j < segment.keys.count; ++j) {
                const auto row = segment.first_row + j;
                if (visible_[row] & query_bits(query, 1))
                    tile.multiply_add(weights.numbers + row * weights.stride, unit_stride{}, unit_stride{},
                                      segment.value_rows + j * segment.value_stride + channel, unit_stride{}, 1);
            }
        }
        store_values(tile, query, channel);
    }
    template <int Rows, int Columns>
    [[gnu::always_inline]] void load_values(matrix_tile<Rows, Columns, T, Arch>& tile, index query, index channel) const {
        if (pushed_)
            tile.load_scaled(softmax_.values + query * padded_ + channel, padded_, softmax_.factor + query);
        else
            tile.zero();
    }
    template <int Rows, int Columns>
    [[gnu::always_inline]] void store_values(matrix_tile<Rows, Columns, T, Arch>& tile, index query, index channel) {
        if (last_) {
            const lanes zero = tile.times_zero();
            (lanes::load(zeros_.data()) + zero).store(zeros_.data());
            if constexpr (Rows == 1)
                if ((zero == lanes(T{0})).bits() != simd::lane_bits::first(lane_count)) infinite_ |= query_bits(query, 1);
        }
        if (last_ && results_.data) {
            tile.scale(share_.data() + query);
            tile.store(results_.data + query * results_.row_stride + channel, results_.row_stride);
        } else {
            tile.store(softmax_.values + query * padded_ + channel, padded_);
        }
    }

    index key_channels_, value_channels_, padded_;
    T *queries_, *scores_, *lone_scores_;
    std::uint64_t* visible_;
    tile_keys<T, Arch> keys_;
    online_softmax<T, Arch> softmax_;
    bool pushed_ = false, last_ = false; ///< whether keys have been pushed, whether those at hand are the last
    bool shrinks_ = false;               ///< whether some queries' values are summed smaller than they are
    std::uint64_t infinite_ = 0;         ///< one bit per query, of those whose last sums were made one by one: not all were finite
    row_block<T> results_{};
    std::array<T, static_cast<std::size_t>(most_queries)> share_{};
    std::array<T, static_cast<std::size_t>(lane_count)> zeros_{}; ///< 0 times all sums

    panel_ahead<T> ahead_, next_tile_;
    query_tile tile_{};
    std::array<row_range, static_cast<std::size_t>(most_registers)> seen_{};
};

} // namespace attn::kernel
