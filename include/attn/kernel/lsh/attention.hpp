// How LSH attention runs: in every round the tokens of some heads are sorted by bucket, and attend to those that lie near them.
#pragma once

#include "../../pattern/bit_table.hpp"
#include "../../simd/elementary.hpp"
#include "../../simd/unfused.hpp"
#include "../attend/merge_row.hpp"
#include "../softmax/scheduler.hpp"
#include "bucket_hash.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What sorted token i sees, for i from `begin` on: those from first[i - begin] to end[i - begin] - 1, without itself. Both rise with i.
struct sorted_window {
    index_t begin;
    const index_t *first, *end;

    bool visible(index_t i, index_t j) const { return first[i - begin] <= j && j < end[i - begin] && j != i; }
    visibility visible(const position_range& i, const position_range& j) const {
        const bool apart = j.last < i.first || i.last < j.first;
        return {apart && first[i.last - begin] <= j.first && j.last < end[i.first - begin],
                j.last < first[i.first - begin] || end[i.last - begin] <= j.first};
    }
    auto visible(const QueryLanes auto& i, index_t j) const {
        return detail::mask_of_each(i, [&](index_t query) { return visible(query, j); });
    }
};

template <Scalar T, class Op>
struct lsh_segment;

/// The memory of a call, and its steps for some heads of a batch entry: as many as have some thousands of tokens together. A round hashes
/// and sorts them, and then attends in segments of some chunks, which a thread copies, attends to and adds to the rounds before.
template <Scalar T, class Op>
struct lsh_work {
    using softmax = softmax_scheduler<T>;
    using hash = bucket_hash<T>;
    static constexpr index_t rows_of_task = hash::rows_of_task, tokens_at_once = 8192, tokens_of_segment = 384;
    static constexpr T nothing = -std::numeric_limits<T>::infinity();

    index_t heads, tokens, chunk, segment;
    shape row_shape, result_shape; ///< of a segment with the chunk before it: its queries and keys, its values
    std::size_t softmax_bytes;
    detail::slices slices;
    index_t *bucket, *order, *bucket_end; ///< of each token; the token at each sorted place; where the sorted tokens of a bucket end
    T* length;                            ///< of each token: |q|
    row_weights<T>* known;                ///< of each token: its weights of the rounds so far
    T* wide = nullptr;                    ///< the rows of the rounds so far, where the result would round them

    /// narrow: the result is of 16-bit numbers. least_slice: a thread's memory is not less.
    lsh_work(detail::scratch& memory, const Op& op, const input_shapes& s, index_t concurrency, bool narrow, std::size_t least_slice = 0)
        : heads(std::clamp<index_t>(tokens_at_once / std::max<index_t>(1, s.queries.tokens), 1, std::max<index_t>(1, s.queries.heads))),
          tokens(s.queries.tokens), chunk(std::min(op.chunk_of(tokens), std::max<index_t>(1, tokens))),
          segment(chunk * std::max<index_t>(1, tokens_of_segment / chunk)), row_shape{1, 1, segment + chunk, s.queries.channels},
          result_shape{1, 1, segment + chunk, s.values.channels},
          softmax_bytes(softmax::workspace_bytes({row_shape, row_shape, result_shape}, true, 1, false)) {
        const auto half = op.rotations.shape().channels;
        slices = {memory, concurrency,
                  std::max({detail::bytes_for<lsh_segment<T, Op>>(*this, softmax_bytes), hash::task_bytes(s.queries.channels, half),
                            least_slice})};
        for (auto* const each : {&bucket, &order}) *each = memory.take<index_t>(heads, tokens);
        bucket_end = memory.take<index_t>(heads, 2 * half + 1);
        length = memory.take<T>(heads, tokens);
        known = memory.take<row_weights<T>>(heads, tokens);
        if (narrow) wide = memory.take<T>(heads, tokens, s.values.channels);
    }

    /// Everything for heads h .. h + count - 1 of batch entry b.
    void attend_some(const Op& op, const inputs<T>& all, const outputs<T>& result, const execution& run, index_t b, index_t h,
                     index_t count) const {
        const tensor_part some{.batch = {b, 1}, .heads = {h, count}};
        const auto in = all.slice(some, some);
        const auto out = result.slice(some);
        find_lengths(in.queries, run, count);
        for (index_t round = 0; round < op.rotations.shape().batch; ++round) {
            find_order(op, in.queries, run, h, count, round);
            for_each_piece(run, count, segment, [&](index_t head, index_t begin, index_t end, detail::scratch memory) {
                attend({memory, *this, softmax_bytes}, op, in, out, head, begin, end, round == 0);
            });
        }
        for_each_token(run, count, [&](index_t head, index_t i) { finish(op, in, out, head, i); });
    }

    /// Calls f(head, first, end, memory) for pieces of so many tokens of each head.
    void for_each_piece(const execution& run, index_t count, index_t size, const auto& f) const {
        const auto pieces = (tokens + size - 1) / size;
        run.for_each(count * pieces, [&](index_t task, index_t slice) {
            const auto begin = task % pieces * size;
            f(task / pieces, begin, std::min(tokens, begin + size), slices[slice]);
        });
    }
    /// Calls f(head, token) for all tokens of so many heads.
    void for_each_token(const execution& run, index_t count, const auto& f) const {
        for_each_piece(run, count, rows_of_task, [&](index_t head, index_t i, index_t end, const detail::scratch&) {
            for (; i < end; ++i) f(head, i);
        });
    }
    /// |q| of all tokens of so many heads.
    void find_lengths(const stored_view<const T>& q, const execution& run, index_t count) const {
        for_each_piece(run, count, segment, [&](index_t head, index_t i, index_t end, detail::scratch memory) {
            for (const lsh_segment<T, Op> own(memory, *this, softmax_bytes); i < end; ++i)
                length[head * tokens + i] = own.length_of(q, head, i);
        });
    }
    /// Buckets and sorted order of a round, of heads h .. h + count - 1, which q holds.
    void find_order(const Op& op, const stored_view<const T>& q, const execution& run, index_t h, index_t count, index_t round) const {
        for_each_piece(run, count, rows_of_task, [&](index_t head, index_t i, index_t end, const detail::scratch& memory) {
            hash(op.rotations, round, h + head)(q.rows(0, head, i), end - i, bucket + head * tokens + i, 1, memory);
        });
        run.for_each(count, [&](index_t head, index_t) { sort(op, head); });
    }
    /// What the sorted places from `at` to stop - 1 see, as sorted_window has it.
    void find_windows(const Op& op, index_t head, index_t at, index_t stop, index_t* first, index_t* end) const {
        const auto *const placed = order + head * tokens, *const buckets = bucket + head * tokens;
        const auto* const ends = bucket_end + head * (2 * op.rotations.shape().channels + 1);
        for (auto place = at; place < stop; ++place) {
            const auto here = place / chunk * chunk, of = buckets[placed[place]];
            first[place - at] = std::max(of == 0 ? 0 : ends[of - 1], here - std::min(here, chunk));
            end[place - at] = op.pattern.is_causal ? place : std::min(ends[of], here + chunk);
        }
    }

private:
    /// The sorted places from `at` to stop - 1, which are whole chunks, in one round.
    void attend(const lsh_segment<T, Op>& segment_memory, const Op& op, const inputs<T>& in, const outputs<T>& to, index_t head, index_t at,
                index_t stop, bool is_first) const {
        segment_memory.with_sorted(*this, op, in, head, at, stop,
                                   [&](const auto& sorted, const auto& visible, T scale, const execution& run) {
                                       const auto channels = result_shape.channels;
                                       const outputs<T> result{head_major(segment_memory.out, {1, 1, stop - at, channels})};
                                       softmax round({sorted, result, visible, nullptr, scale, {}}, run);
                                       round.add_keys(sorted, 0);
                                       const auto weights = round.sums();
                                       for (index_t r = 0; r < stop - at; ++r) {
                                           const auto token = order[head * tokens + at + r];
                                           const T* const from = segment_memory.out + r * channels;
                                           const auto into = row_of(to, head, token);
                                           auto& so_far = known[head * tokens + token];
                                           const row_weights<T> added{weights.maximum[r], weights.sum[r]};
                                           if (is_first) {
                                               for (index_t c = 0; c < channels; ++c) into.data[c * into.channel_stride] = from[c];
                                               so_far = added;
                                           } else {
                                               so_far = merge_row<T>(into, so_far, row_block<const T>{from, 0, 1}, added, channels);
                                           }
                                       }
                                   });
    }
    /// The row of a token while rounds are added to it.
    row_block<T> row_of(const outputs<T>& out, index_t head, index_t token) const {
        if (wide) return {wide + (head * tokens + token) * result_shape.channels, 0, 1};
        return out.values.rows(0, head, token).numbers();
    }
    /// Sorts the tokens of a head by bucket, then by position, which counting keeps.
    void sort(const Op& op, index_t head) const {
        const auto buckets = 2 * op.rotations.shape().channels;
        const auto* const own = bucket + head * tokens;
        auto* const begin = bucket_end + head * (buckets + 1);
        std::fill_n(begin, buckets + 1, index_t{0});
        for (index_t i = 0; i < tokens; ++i) ++begin[own[i] + 1];
        for (index_t w = 0; w < buckets; ++w) begin[w + 1] += begin[w];
        for (index_t i = 0; i < tokens; ++i) order[head * tokens + begin[own[i]]++] = i; // which leaves the ends
    }
    /// A token that met no other in any round sees itself.
    void finish(const Op& op, const inputs<T>& in, const outputs<T>& out, index_t head, index_t i) const {
        auto log = known[head * tokens + i].log_sum_exp();
        const auto row = row_of(out, head, i);
        if (log == nothing) {
            const T score = detail::score_scale<T>(op.scale, row_shape.channels) * length[head * tokens + i];
            log = score + static_cast<T>(simd::log(static_cast<double>(op.rotations.shape().batch)));
            for (index_t c = 0; c < result_shape.channels; ++c)
                row.data[c * row.channel_stride] = std::isnan(score) ? score : in.values(0, head, i, c);
        }
        if (wide) store_row<T>(row.data, result_shape.channels, out.values.rows(0, head, i));
        if (out.log_sum_exp.data()) out.log_sum_exp(0, head, i, 0) = log;
    }
};

/// A segment's tokens as they are sorted, and the chunk's before it: what softmax attention reads of them.
template <Scalar T, class Op>
struct lsh_segment {
    using work = lsh_work<T, Op>;

    std::span<std::byte> of_softmax;
    T *queries, *keys, *values, *out;
    index_t *first, *end;

    lsh_segment(detail::scratch& memory, const work& w, std::size_t softmax_bytes)
        : of_softmax(memory.take<std::byte>(static_cast<index_t>(softmax_bytes)), softmax_bytes),
          queries(memory.take<T>(w.segment, w.row_shape.channels)), keys(memory.take<T>(w.row_shape.tokens, w.row_shape.channels)),
          values(memory.take<T>(w.row_shape.tokens, w.result_shape.channels)), out(memory.take<T>(w.segment, w.result_shape.channels)),
          first(memory.take<index_t>(w.segment)), end(memory.take<index_t>(w.segment)) {}

    /// |q|, which no square overflows. Of a copy: a strided row would be summed in another order.
    T length_of(const stored_view<const T>& x, index_t head, index_t i) const {
        const auto channels = x.shape().channels;
        double largest = 0, sum = 0;
        for (index_t c = 0; c < channels; ++c) queries[c] = x(0, head, i, c);
        for (index_t c = 0; c < channels; ++c) largest = std::max(largest, std::abs(static_cast<double>(queries[c])));
        if (largest == 0) largest = 1; // zeros, or NaN
        for (index_t c = 0; c < channels; ++c) {
            const auto part = static_cast<double>(queries[c]) / largest;
            sum += simd::unfused(part * part);
        }
        return static_cast<T>(largest * std::sqrt(sum));
    }
    /// f(what softmax attention reads, the keys that it sees, the scale, how to run it) of the sorted places from `at` to stop - 1, which
    /// are whole chunks.
    void with_sorted(const work& w, const Op& op, const inputs<T>& in, index_t head, index_t at, index_t stop, const auto& f) const {
        const auto before = std::min(at, w.chunk), d_k = w.row_shape.channels, d_v = w.result_shape.channels;
        for (auto place = at - before; place < stop; ++place) copy(w, in, head, w.order[head * w.tokens + place], place - at, before);
        w.find_windows(op, head, at, stop, first, end);
        const auto view = [](T* data, index_t count, index_t channels) { return head_major(data, {1, 1, count, channels}); };
        const inputs<T> sorted{view(queries, stop - at, d_k),
                               view(keys, before + stop - at, d_k),
                               view(values, before + stop - at, d_v),
                               {.first_query = at, .first_key = at - before}};
        const sorted_window window{at, first, end};
        const visible_keys_of<T, sorted_window> visible(window, shapes_of(sorted), sorted.positions);
        sequential here;
        workspace memory(of_softmax);
        f(sorted, visible, detail::score_scale<T>(op.scale, d_k), execution(here, memory));
    }

private:
    /// A token to row r; of those before the segment, which are keys only, r < 0.
    void copy(const work& w, const inputs<T>& in, index_t head, index_t token, index_t r, index_t before) const {
        const auto d_k = w.row_shape.channels, d_v = w.result_shape.channels;
        const T norm = w.length[head * w.tokens + token], divisor = norm == 0 ? T{1} : norm;
        auto* const key = keys + (before + r) * d_k;
        for (index_t c = 0; c < d_k; ++c) key[c] = in.queries(0, head, token, c);
        if (r >= 0) std::copy_n(key, d_k, queries + r * d_k);
        for (index_t c = 0; c < d_k; ++c) key[c] /= divisor;
        for (index_t c = 0; c < d_v; ++c) values[(before + r) * d_v + c] = in.values(0, head, token, c);
    }
};

} // namespace attn::kernel
