// The kernel behind every linear attention: sums over the keys, chunks of queries, and the order of evaluation that costs less.
#pragma once

#include "../../parallel/executor.hpp"
#include "feature_loader.hpp"
#include "order.hpp"
#include "worker.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What the denominator is: out_i = numerator / (denominator + eps), or scale * numerator.
struct linear_normalisation {
    bool normalise = true;
    double eps = 0, scale = 1;
    bool eps_per_key = false; ///< eps is for a mean over the keys, not a sum
};

/// out_i = sum over seen j of (phi(q_i) . phi(k_j)) v_j, normalised, plus a local term. Features: how rows of queries and keys become
/// features. Splits depend on the shape of a head only. Shapes have been checked.
template <Scalar T, class Arch, class QueryFeatures, class KeyFeatures, Pattern P, class U = T>
class linear_attention {
public:
    using lanes = simd::lanes<T, Arch>;
    static constexpr bool causal = linear_order<T, P>::causal;

    linear_attention(const QueryFeatures& query_features, const KeyFeatures& key_features, const P& pattern,
                     const linear_normalisation& normalisation, const local_term<T, U>& local)
        : query_features_(query_features), key_features_(key_features), pattern_(pattern), normalisation_(normalisation), local_(local) {}

    static std::size_t workspace_bytes(const input_shapes& s, index concurrency, const convolution_grid* grid) {
        detail::scratch states, slice;
        for (index n = 0; n < states_at_once(s, concurrency); ++n) state_type::take(states, s.keys.channels, s.values.channels);
        worker(slice, s, grid, causal);
        return states.used_bytes() + static_cast<std::size_t>(concurrency) * slice.used_bytes();
    }

    /// memory: workspace_bytes of it.
    void operator()(const inputs<T>& in, const outputs<T>& out, const execution& run, std::byte* memory) const {
        const auto s = shapes_of(in);
        if (s.queries.batch * s.queries.heads * s.queries.tokens * s.values.channels == 0) return;
        detail::scratch counted;
        worker(counted, s, grid(), causal);
        const auto with_worker = [&](index slice, auto&& f) {
            detail::scratch own(memory + static_cast<std::size_t>(slice) * counted.used_bytes());
            worker w(own, s, grid(), causal);
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
    using worker = linear_worker<T, Arch>;
    /// Queries of a chunk that see different keys: the scores inside chunks cost as much as the square of it.
    static constexpr index causal_queries = 16;
    /// Keys whose sum one task makes, and the most sums of one head.
    static constexpr index keys_of_a_sum = 2048, most_sums = 8;

    static index sums_of(index keys) { return std::clamp<index>(keys / keys_of_a_sum, 1, most_sums); }
    static index heads_at_once(const input_shapes& s, index concurrency) {
        const auto wanted = concurrency == 1 ? 1 : std::max<index>(1, most_sums * concurrency / sums_of(s.keys.tokens));
        return std::min(wanted, s.keys.batch * s.keys.heads);
    }
    static index states_at_once(const input_shapes& s, index concurrency) {
        return causal ? 0 : heads_at_once(s, concurrency) * sums_of(s.keys.tokens);
    }

    const convolution_grid* grid() const { return local_.convolution.present() ? &local_.convolution.grid : nullptr; }

    token_chunks chunks_of(const input_shapes& s) const {
        if (causal) return token_chunks::even(s.queries.tokens, causal_queries);
        return grid() ? token_chunks::of(*grid(), worker::good_rows(s), worker::most_queries)
                      : token_chunks::even(s.queries.tokens, worker::good_rows(s));
    }
    linear_order<T, P> order(const inputs<T>& in) const { return {in, pattern_}; }

    /// Causal chunks are scored, so that their features are written; micro-kernels have no map to apply there, which saves 1 % of the time.
    template <class Features>
    using read_features = feature_rows<T, std::conditional_t<causal, std::identity, typename Features::on_reading>>;
    template <class Features>
    static read_features<Features> load(const Features& features, index batch, index head, index first, index count, const worker& w, T* to,
                                        bool written) {
        if constexpr (causal) {
            features(batch, head, first, count, to);
            return {to, count, w.key_padded};
        } else {
            return features.load(batch, head, first, count, to, written || !state_type::maps_on_reading(w.padded));
        }
    }
    /// A block of keys, ready to be pushed or scored; what is to be read next beside that.
    struct key_rows {
        read_features<KeyFeatures> features;
        const T* values;
        index value_stride, first;
        keys_ahead<T> ahead;
    };
    key_rows load_keys(worker& w, const inputs<T>& in, index batch, index kv_head, index first, index count, bool scored) const {
        const auto values = rows_of(in.values, batch, kv_head, first);
        const auto channels = in.values.shape().channels;
        const auto features = load(key_features_, batch, kv_head, first, count, w, w.keys, scored);
        key_rows block{features, values.data, values.row_stride, first, {in, batch, kv_head, first + count}};
        if (!readable_in_place(values) || w.padded != channels) {
            copy_rows<T, Arch>(values, count, channels, w.packed_values, w.padded);
            block.values = w.packed_values;
            block.value_stride = w.padded;
        }
        return block;
    }
    /// Pushes the keys [first, end).
    void push_keys(worker& w, const inputs<T>& in, index batch, index kv_head, index first, index end, const state_type& state) const {
        for_each_piece(end - first, worker::good_rows(shapes_of(in)), [&](index at, index count) {
            auto block = load_keys(w, in, batch, kv_head, first + at, count, false);
            state.push(block.features, block.values, block.value_stride, block.ahead);
        });
    }
    /// A chunk of queries, which meet the keys before `absorbed` as a state and the others by scores. Returns the last block of these.
    key_rows run_chunk(worker& w, const inputs<T>& in, const outputs<T>& out, index batch, index head, const token_chunks& chunks,
                       index chunk, const state_type& state, index absorbed) const {
        const auto first = chunks.first(chunk), end = chunks.end(chunk), count = end - first;
        if (count == 0) return {};
        const auto kv_head = head / (in.queries.shape().heads / in.keys.shape().heads);
        const auto channels = in.values.shape().channels;
        const auto most_seen = order(in).seen_by(batch, end - 1);
        const bool some_see_nothing = order(in).seen_by(batch, first) == 0, scored = most_seen > absorbed;
        const auto queries = load(query_features_, batch, head, first, count, w, w.queries, scored || some_see_nothing);
        for (index r = 0; some_see_nothing && r < count && order(in).seen_by(batch, first + r) == 0; ++r)
            std::fill_n(w.queries + r * w.key_padded, w.key_padded, T{0});

        std::fill_n(w.factors, worker::most_queries, T{0}); // denominators at first
        bool started = false;
        key_rows block{};
        for_each_piece(std::max<index>(0, most_seen - absorbed), worker::good_rows(shapes_of(in)), [&](index at, index keys) {
            block = load_keys(w, in, batch, kv_head, absorbed + at, keys, true);
            for (index r = 0; r < count; ++r) w.seen[r] = std::clamp<index>(order(in).seen_by(batch, first + r) - block.first, 0, keys);
            std::fill(w.seen + count, w.seen + (count + 3) / 4 * 4, w.seen[count - 1]);
            w.scores.add({w.queries, count, w.key_padded}, {{w.keys, keys, w.key_padded}, block.values, block.value_stride, w.seen},
                         !started, w.numerators, w.factors);
            started = true;
        });
        if (absorbed > 0) state.add_denominators(queries, w.factors);
        make_factors(in, batch, first, count, w.factors);

        if (grid()) {
            const auto present = local_.reads_values ? order(in).ever_seen(batch) : local_.input.shape().tokens;
            w.convolution(rows_of(local_.input, batch, kv_head), present, first, count, w.local);
        }
        const auto to = rows_of(out.values, batch, head, first);
        const bool direct = to.channel_stride == 1 && w.padded == channels;
        auto from = state;
        if (absorbed == 0) from.key_channels = 0; // an empty sum adds nothing, not even the NaN of a query
        from.padded = w.padded;
        // A convolution over one long row reads as many new tokens; over a grid it asks itself for the row below.
        constexpr index two_tiles = 2 * tile_traits<T, Arch>::max_rows(tile_traits<T, Arch>::max_columns);
        const queries_ahead<T> ahead(in, out, batch, head, chunks, chunk, grid() && grid()->height == 1 ? &local_.input : nullptr,
                                     two_tiles);
        from.finish(queries,
                    {direct ? to.data : w.results, direct ? to.row_stride : w.padded, w.factors, started ? w.numerators : nullptr,
                     grid() ? w.local : nullptr},
                    w.spare, ahead);
        for (index r = 0; !direct && r < count; ++r)
            for (index c = 0; c < channels; ++c) to.data[r * to.row_stride + c * to.channel_stride] = w.results[r * w.padded + c];
        return block;
    }
    /// Denominators become what numerators are to be multiplied with.
    void make_factors(const inputs<T>& in, index batch, index first, index count, T* factors) const {
        const auto& n = normalisation_;
        const auto eps = n.eps * (n.eps_per_key ? static_cast<double>(order(in).seen_by(batch, first + count - 1)) : 1);
        for (index r = 0; r < count; r += lanes::size) {
            const auto factor = n.normalise ? lanes(T{1}) / (lanes::load(factors + r) + lanes(eps)) : lanes(n.scale);
            factor.store(factors + r);
        }
        for (index r = 0; r < count && order(in).seen_by(batch, first + r) == 0; ++r) factors[r] = 0;
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
                if (order(in).prefers_scores(batch, causal_queries)) return;
                const auto keys = order(in).seen_by(batch, 0);
                const auto state = state_of(task);
                state.reset();
                with_worker(slice,
                            [&](worker& w) { push_keys(w, in, batch, kv_head, keys * piece / sums, keys * (piece + 1) / sums, state); });
            });
            if (sums > 1)
                run.for_each(now, [&](index head, index) {
                    if (order(in).prefers_scores((begin + head) / k.heads, causal_queries)) return;
                    for (index piece = 1; piece < sums; ++piece) state_of(head * sums).merge(state_of(head * sums + piece));
                });
            run.for_each(now * group * tasks, [&](index task, index slice) {
                const auto number = task / (group * tasks), batch = (begin + number) / k.heads;
                const auto head = (begin + number) % k.heads * group + task / tasks % group;
                const auto absorbed = order(in).prefers_scores(batch, causal_queries) ? 0 : order(in).seen_by(batch, 0);
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
        const bool by_scores = order(in).prefers_scores(batch, causal_queries);
        if (grid()) w.convolution.load_weights(local_.convolution, head);
        w.state.reset();
        index absorbed = 0;
        for (index chunk = 0; chunk < chunks.count(); ++chunk) {
            const auto common = by_scores ? 0 : std::max<index>(0, order(in).seen_by(batch, chunks.first(chunk)) - 1);
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
