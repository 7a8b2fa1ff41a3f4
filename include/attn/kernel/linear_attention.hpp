// The kernel behind every linear attention: sums over the keys, chunks of queries, and the order of evaluation that costs less.
#pragma once

#include "../core/inputs.hpp"
#include "../parallel/executor.hpp"
#include "../pattern/visible_end.hpp"
#include "depthwise_convolution.hpp"
#include "feature_loader.hpp"
#include "linear_scores.hpp"

namespace attn::kernel {

/// A depthwise convolution that is added to the result. Reads input (batch, kv_heads, n, d_v); if that is the values, those that no query
/// may see count as outside the grid.
template <Scalar T, class U>
struct local_term {
    convolution_parameters<U> convolution;
    tensor_view<const T> input;
    bool reads_values = true;
};

/// What the denominator is: out_i = numerator / (denominator + eps), or scale * numerator.
struct linear_normalisation {
    bool normalise = true;
    double eps = 0, scale = 1;
    bool eps_per_key = false; ///< eps is for a mean over the keys, not a sum
};

/// Multiply-adds in each order of evaluation, for queries that share a sum over the keys. pairs: of a query and a key that it sees.
struct linear_costs {
    double by_state, by_scores;

    /// own_pairs: those that the order by states also computes as scores, inside the chunks.
    linear_costs(double keys, double queries, double pairs, double own_pairs, double key_channels, double value_channels)
        : by_state((keys + queries) * key_channels * value_channels + own_pairs * (key_channels + value_channels)),
          by_scores(pairs * (key_channels + value_channels)) {}
};

/// out_i = sum over seen j of (phi(q_i) . phi(k_j)) v_j, normalised, plus a local term. Features: how rows of queries and keys become
/// features. Splits depend on the shape of a head only. Shapes have been checked.
template <Scalar T, class Arch, class QueryFeatures, class KeyFeatures, Pattern P, class U = T>
class linear_attention {
public:
    using lanes = simd::lanes<T, Arch>;
    static constexpr bool causal = detail::follows_queries<decltype(at(std::declval<const P&>(), index{}, index{}))>;

    linear_attention(const QueryFeatures& query_features, const KeyFeatures& key_features, const P& pattern,
                     const linear_normalisation& normalisation, const local_term<T, U>& local)
        : query_features_(query_features), key_features_(key_features), pattern_(pattern), normalisation_(normalisation), local_(local) {}

    static std::size_t workspace_bytes(const input_shapes& s, index concurrency, const convolution_grid* grid) {
        detail::scratch states, slice;
        for (index n = 0; n < states_at_once(s, concurrency); ++n) state_type::take(states, s.keys.channels, s.values.channels);
        worker(slice, s, grid);
        return states.used_bytes() + static_cast<std::size_t>(concurrency) * slice.used_bytes();
    }

    /// memory: workspace_bytes of it.
    void operator()(const inputs<T>& in, const outputs<T>& out, const execution& run, std::byte* memory) const {
        const auto s = shapes_of(in);
        if (s.queries.batch * s.queries.heads * s.queries.tokens * s.values.channels == 0) return;
        detail::scratch counted;
        worker(counted, s, grid());
        const auto with_worker = [&](index slice, auto&& f) {
            detail::scratch own(memory + static_cast<std::size_t>(slice) * counted.used_bytes());
            worker w(own, s, grid());
            f(w);
        };
        if constexpr (causal) {
            run.for_each(s.queries.batch * s.queries.heads, [&](index task, index slice) {
                with_worker(slice, [&](worker& w) { run_causal(w, in, out, task / s.queries.heads, task % s.queries.heads); });
            });
        } else {
            detail::scratch shared(memory + static_cast<std::size_t>(run.concurrency()) * counted.used_bytes());
            run_dense(in, out, run, shared, with_worker);
        }
    }

private:
    using state_type = linear_state<T, Arch>;
    /// Queries of a chunk, and keys of a block: so many that they and their features stay in the nearest cache. A short row of a grid may
    /// make a chunk longer.
    static constexpr index most_queries = 128, most_keys = 128;
    static index good_rows(const input_shapes& s) {
        constexpr index numbers = 32768 / sizeof(T);
        return std::clamp<index>(numbers / std::max(state_type::whole(s.keys.channels), registers_of(s.values.channels)), 32, most_keys);
    }
    /// Queries of a chunk that see different keys: the scores inside chunks cost as much as the square of it.
    static constexpr index causal_queries = 16;
    static constexpr index most_rows = tile_traits<T, Arch>::max_rows(1);
    /// Keys whose sum one task makes, and the most sums of one head.
    static constexpr index keys_of_a_sum = 2048, most_sums = 8;

    static constexpr index registers_of(index channels) { return (channels + lanes::size - 1) / lanes::size * lanes::size; }
    static index sums_of(index keys) { return std::clamp<index>(keys / keys_of_a_sum, 1, most_sums); }
    static index heads_at_once(const input_shapes& s, index concurrency) {
        const auto wanted = concurrency == 1 ? 1 : std::max<index>(1, most_sums * concurrency / sums_of(s.keys.tokens));
        return std::min(wanted, s.keys.batch * s.keys.heads);
    }
    static index states_at_once(const input_shapes& s, index concurrency) {
        return causal ? 0 : heads_at_once(s, concurrency) * sums_of(s.keys.tokens);
    }

    /// One thread's memory.
    struct worker {
        worker(detail::scratch& memory, const input_shapes& s, const convolution_grid* grid)
            : key_padded(state_type::whole(s.keys.channels)), padded(registers_of(s.values.channels)),
              queries(memory.take<T>(most_queries * key_padded)), keys(memory.take<T>(most_keys * key_padded)),
              packed_values(memory.take<T>(most_keys * padded)), numerators(memory.take<T>(most_queries * padded)),
              spare(memory.take<T>(most_rows * padded)), results(memory.take<T>(most_queries * padded)),
              local(memory.take<T>(grid ? most_queries * padded : 0)), factors(memory.take<T>(most_queries)),
              seen(memory.take<index>(most_queries)), scores(memory, most_queries, most_keys, s.keys.channels, padded),
              state(causal ? state_type::take(memory, s.keys.channels, s.values.channels) : state_type{}),
              convolution(memory, grid ? *grid : convolution_grid{}, grid ? s.values.channels : 0, most_queries) {}

        index key_padded, padded;
        T *queries, *keys, *packed_values, *numerators, *spare, *results, *local, *factors;
        index* seen;
        linear_scores<T, Arch> scores;
        state_type state;
        convolution_tile<T, Arch> convolution;
    };

    const convolution_grid* grid() const { return local_.convolution.present() ? &local_.convolution.grid : nullptr; }

    token_chunks chunks_of(const input_shapes& s) const {
        if (causal) return token_chunks::even(s.queries.tokens, causal_queries);
        return grid() ? token_chunks::of(*grid(), good_rows(s), most_queries) : token_chunks::even(s.queries.tokens, good_rows(s));
    }
    /// How many of the keys lie before a position.
    static index keys_before(const inputs<T>& in, index batch, index position) {
        return std::clamp<index>(position - in.positions.first_key[batch], 0, in.keys.shape().tokens);
    }
    /// How many keys a row of queries sees.
    index seen_by(const inputs<T>& in, index batch, index row) const {
        return keys_before(in, batch, detail::visible_end(at(pattern_, batch, 0), in.positions.first_query[batch] + row));
    }
    bool prefers_scores(const inputs<T>& in, index batch) const {
        const auto &q = in.queries.shape(), &k = in.keys.shape();
        const auto number = [](index n) { return static_cast<double>(n); };
        const auto least = number(seen_by(in, batch, 0)), most = number(seen_by(in, batch, q.tokens - 1));
        const auto queries = number(causal ? q.tokens : q.heads / k.heads * q.tokens);
        const auto own = causal ? queries * number(std::min(causal_queries, q.tokens)) / 2 : 0;
        const linear_costs costs(most, queries, queries * (least + most) / 2, own, number(k.channels), number(in.values.shape().channels));
        return costs.by_scores < costs.by_state;
    }

    /// A block of keys, ready to be pushed or scored; what is to be read next beside that.
    struct key_rows {
        feature_rows<T, typename KeyFeatures::on_reading> features;
        const T* values;
        index value_stride, first;
        lines_ahead<T> ahead;
    };
    key_rows load_keys(worker& w, const inputs<T>& in, index batch, index kv_head, index first, index count, bool scored) const {
        const auto values = rows_from(in.values, batch, kv_head, first);
        const auto channels = in.values.shape().channels;
        const auto next = first + count, more = std::min(in.keys.shape().tokens - next, count);
        const auto features = key_features_.load(batch, kv_head, first, count, w.keys, scored || !state_type::maps_on_reading(w.padded));
        key_rows block{features, values.data, values.row_stride, first, keys_ahead(in, batch, kv_head, next, more)};
        if (!readable_in_place(values) || w.padded != channels) {
            copy_rows<T, Arch>(values, count, channels, w.packed_values, w.padded);
            block.values = w.packed_values;
            block.value_stride = w.padded;
        }
        return block;
    }
    /// Pushes the keys [first, end).
    void push_keys(worker& w, const inputs<T>& in, index batch, index kv_head, index first, index end, const state_type& state) const {
        for_each_piece(end - first, good_rows(shapes_of(in)), [&](index at, index count) {
            auto block = load_keys(w, in, batch, kv_head, first + at, count, false);
            state.push(block.features, block.values, block.value_stride, block.ahead);
        });
    }
    static row_block<const T> rows_from(const tensor_view<const T>& tensor, index batch, index head, index first) {
        auto rows = rows_of(tensor, batch, head);
        rows.data += first * rows.row_stride;
        return rows;
    }

    /// A chunk of queries, which meet the keys before `absorbed` as a state and the others by scores. Returns the last block of these.
    key_rows run_chunk(worker& w, const inputs<T>& in, const outputs<T>& out, index batch, index head, const token_chunks& chunks,
                       index chunk, const state_type& state, index absorbed) const {
        const auto first = chunks.first(chunk), end = chunks.end(chunk), count = end - first;
        if (count == 0) return {};
        const auto kv_head = head / (in.queries.shape().heads / in.keys.shape().heads);
        const auto channels = in.values.shape().channels;
        const auto most_seen = seen_by(in, batch, end - 1);
        const bool some_see_nothing = seen_by(in, batch, first) == 0, scored = most_seen > absorbed;
        const auto queries = query_features_.load(batch, head, first, count, w.queries,
                                                  scored || some_see_nothing || !state_type::maps_on_reading(w.padded));
        for (index r = 0; some_see_nothing && r < count && seen_by(in, batch, first + r) == 0; ++r)
            std::fill_n(w.queries + r * w.key_padded, w.key_padded, T{0});

        std::fill_n(w.factors, most_queries, T{0}); // denominators at first
        bool started = false;
        key_rows block{};
        for_each_piece(std::max<index>(0, most_seen - absorbed), good_rows(shapes_of(in)), [&](index at, index keys) {
            block = load_keys(w, in, batch, kv_head, absorbed + at, keys, true);
            for (index r = 0; r < count; ++r) w.seen[r] = std::clamp<index>(seen_by(in, batch, first + r) - block.first, 0, keys);
            std::fill(w.seen + count, w.seen + (count + 3) / 4 * 4, w.seen[count - 1]);
            w.scores.add({w.queries, count, w.key_padded}, {{w.keys, keys, w.key_padded}, block.values, block.value_stride, w.seen},
                         !started, w.numerators, w.factors);
            started = true;
        });
        if (absorbed > 0) state.add_denominators(queries, w.factors);
        make_factors(in, batch, first, count, w.factors);

        if (grid()) {
            const auto present = local_.reads_values
                                     ? keys_before(in, batch, detail::visible_end(at(pattern_, batch, 0), detail::everything - 1))
                                     : local_.input.shape().tokens;
            w.convolution(rows_of(local_.input, batch, kv_head), present, first, count, w.local);
        }
        const auto to = rows_of(out.values, batch, head);
        T* const rows = to.data + first * to.row_stride;
        const bool direct = to.channel_stride == 1 && w.padded == channels;
        auto from = state;
        if (absorbed == 0) from.key_channels = 0; // an empty sum adds nothing, not even the NaN of a query
        from.padded = w.padded;
        auto ahead = ahead_of(in, out, batch, head, chunks, chunk);
        from.finish(queries,
                    {direct ? rows : w.results, direct ? to.row_stride : w.padded, w.factors, started ? w.numerators : nullptr,
                     grid() ? w.local : nullptr},
                    w.spare, ahead);
        for (index r = 0; !direct && r < count; ++r)
            for (index c = 0; c < channels; ++c) rows[r * to.row_stride + c * to.channel_stride] = w.results[r * w.padded + c];
        return block;
    }
    /// Keys and values, or queries and where their results go, which will be needed soon.
    static lines_ahead<T> keys_ahead(const inputs<T>& in, index batch, index kv_head, index first, index count) {
        return {{rows_from(in.keys, batch, kv_head, first), count, in.keys.shape().channels},
                {rows_from(in.values, batch, kv_head, first), count, in.values.shape().channels}};
    }
    static lines_ahead<T> queries_ahead(const inputs<T>& in, const outputs<T>& out, index batch, index head, index first, index count) {
        const auto& s = in.queries.shape();
        const auto rows = std::min(count, s.tokens - first);
        const auto to = rows_of(out.values, batch, head);
        return {{rows_from(in.queries, batch, head, first), rows, s.channels},
                {row_block<const T>{to.data + first * to.row_stride, to.row_stride, to.channel_stride}, rows, out.values.shape().channels}};
    }
    /// What follows a chunk of queries: the next chunk, or another head.
    static lines_ahead<T> ahead_of(const inputs<T>& in, const outputs<T>& out, index batch, index head, const token_chunks& chunks,
                                   index chunk) {
        const auto first = chunks.first(chunk), end = chunks.end(chunk);
        if (chunk + 1 < chunks.count()) return queries_ahead(in, out, batch, head, end, chunks.end(chunk + 1) - end);
        const auto& s = in.queries.shape();
        if (++head == s.heads) head = 0, ++batch;
        if (batch == s.batch) return {};
        const auto group = s.heads / in.keys.shape().heads;
        if (head % group > 0) return queries_ahead(in, out, batch, head, 0, end - first);
        return keys_ahead(in, batch, head / group, 0, std::min(in.keys.shape().tokens, end - first));
    }
    /// Denominators become what numerators are to be multiplied with.
    void make_factors(const inputs<T>& in, index batch, index first, index count, T* factors) const {
        const auto& n = normalisation_;
        const auto eps = n.eps * (n.eps_per_key ? static_cast<double>(seen_by(in, batch, first + count - 1)) : 1);
        for (index r = 0; r < count; r += lanes::size) {
            const auto factor = n.normalise ? lanes(T{1}) / (lanes::load(factors + r) + lanes(eps)) : lanes(n.scale);
            factor.store(factors + r);
        }
        for (index r = 0; r < count && seen_by(in, batch, first + r) == 0; ++r) factors[r] = 0;
    }

    template <class WithWorker>
    void run_dense(const inputs<T>& in, const outputs<T>& out, const execution& run, detail::scratch& memory,
                   const WithWorker& with_worker) const {
        const auto &q = in.queries.shape(), &k = in.keys.shape();
        const auto group = q.heads / k.heads, sums = sums_of(k.tokens), together = heads_at_once(shapes_of(in), run.concurrency());
        const auto first_state = state_type::take(memory, k.channels, in.values.shape().channels);
        detail::scratch counted;
        state_type::take(counted, k.channels, in.values.shape().channels);
        const auto state_of = [&](index n) {
            auto state = first_state;
            state.sums += n * static_cast<index>(counted.used_bytes() / sizeof(T));
            state.key_sum += n * static_cast<index>(counted.used_bytes() / sizeof(T));
            return state;
        };
        const auto chunks = chunks_of(shapes_of(in));
        constexpr index queries_of_a_task = 1024;
        const auto chunks_of_a_task = chunks.of_a_task(queries_of_a_task);
        const auto tasks = (chunks.count() + chunks_of_a_task - 1) / chunks_of_a_task;
        for (index begin = 0; begin < k.batch * k.heads; begin += together) {
            const auto now = std::min(together, k.batch * k.heads - begin);
            run.for_each(now * sums, [&](index task, index slice) {
                const auto batch = (begin + task / sums) / k.heads, kv_head = (begin + task / sums) % k.heads, piece = task % sums;
                if (prefers_scores(in, batch)) return;
                const auto keys = seen_by(in, batch, 0);
                const auto state = state_of(task);
                state.reset();
                with_worker(slice,
                            [&](worker& w) { push_keys(w, in, batch, kv_head, keys * piece / sums, keys * (piece + 1) / sums, state); });
            });
            if (sums > 1)
                run.for_each(now, [&](index head, index) {
                    if (prefers_scores(in, (begin + head) / k.heads)) return;
                    for (index piece = 1; piece < sums; ++piece) state_of(head * sums).merge(state_of(head * sums + piece));
                });
            run.for_each(now * group * tasks, [&](index task, index slice) {
                const auto number = task / (group * tasks), batch = (begin + number) / k.heads;
                const auto head = (begin + number) % k.heads * group + task / tasks % group;
                const auto absorbed = prefers_scores(in, batch) ? 0 : seen_by(in, batch, 0);
                with_worker(slice, [&](worker& w) {
                    if (grid()) w.convolution.load_weights(local_.convolution, head);
                    const auto from = task % tasks * chunks_of_a_task;
                    for (auto chunk = from; chunk < std::min(from + chunks_of_a_task, chunks.count()); ++chunk)
                        run_chunk(w, in, out, batch, head, chunks, chunk, state_of(number * sums), absorbed);
                });
            });
        }
    }

    /// The sum over the keys grows from chunk to chunk: a chunk's own keys are scored, and pushed when it is done.
    void run_causal(worker& w, const inputs<T>& in, const outputs<T>& out, index batch, index head) const {
        const auto chunks = chunks_of(shapes_of(in));
        const bool by_scores = prefers_scores(in, batch);
        if (grid()) w.convolution.load_weights(local_.convolution, head);
        w.state.reset();
        index absorbed = 0;
        for (index chunk = 0; chunk < chunks.count(); ++chunk) {
            const auto common = by_scores ? 0 : std::max<index>(0, seen_by(in, batch, chunks.first(chunk)) - 1);
            if (common > absorbed) {
                push_keys(w, in, batch, head / (in.queries.shape().heads / in.keys.shape().heads), absorbed, common, w.state);
                absorbed = common;
            }
            auto own = run_chunk(w, in, out, batch, head, chunks, chunk, w.state, absorbed);
            if (by_scores || own.features.count == 0) continue;
            w.state.push(own.features, own.values, own.value_stride, own.ahead);
            absorbed += own.features.count;
        }
    }

    const QueryFeatures& query_features_;
    const KeyFeatures& key_features_;
    const P& pattern_;
    linear_normalisation normalisation_;
    local_term<T, U> local_;
};

} // namespace attn::kernel
