// The kernel behind every linear attention: sums over the keys, chunks of queries, and what becomes of them.
#pragma once

#include "keys.hpp"
#include "span_sums.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What the denominator is: out_i = numerator / (denominator + eps), or scale * numerator.
struct linear_normalisation {
    bool normalise = true;
    double eps = 0, scale = 1;
    bool eps_per_key = false; ///< eps is for a mean over the keys, not a sum
};

/// What stands in place of a local_term where there is none.
struct no_local_term {};

/// out_i = sum over seen j of (phi(q_i) . phi(k_j)) v_j, normalised, plus a local term. Features: how rows of queries and keys become
/// features. A row meets some of its keys as a sum over them and scores the others; which ones, and how the sum is made, linear_order says
/// for each row by itself. Shapes have been checked.
template <Scalar T, class QueryFeatures, class KeyFeatures, Pattern P, class Local = no_local_term>
class linear_attention {
public:
    using lanes = simd::lanes<T>;
    using state_type = linear_state<T>;
    static constexpr bool causal = linear_order<T, P>::causal;

    linear_attention(const QueryFeatures& query_features, const KeyFeatures& key_features, const P& pattern,
                     const linear_normalisation& normalisation, const Local& local = {})
        : query_features_(query_features), key_features_(key_features), pattern_(pattern), normalisation_(normalisation), local_(local) {}

    /// staged: numbers that features need at a time, if they say so.
    static std::size_t workspace_bytes(const input_shapes& s, index_t concurrency, const convolution_grid* grid, index_t staged = 0) {
        const auto sums = causal ? 0 : detail::bytes_for<span_sums<T>>(s, concurrency);
        return sums + detail::bytes_for_threads(concurrency, detail::bytes_for<worker>(s, grid, causal, staged));
    }

    /// memory: workspace_bytes of it. summed: null, or of each batch entry and head of keys the sum that its first row takes, or begins
    /// with; the keys in it are not read.
    void operator()(const inputs<T>& in, const outputs<T>& out, const execution& run, std::byte* memory,
                    const linear_states<T>* summed = nullptr) const {
        const auto s = shapes_of(in);
        if (s.queries.batch * s.queries.heads * s.queries.tokens * s.values.channels == 0) return;
        const worker_memory workers{memory, s, grid(), staged()};
        if constexpr (causal) {
            run.for_each(s.queries.batch * s.queries.heads, [&](index_t task, index_t slice) {
                workers.with(slice, [&](worker& w) { run_causal(w, in, out, task / s.queries.heads, task % s.queries.heads, summed); });
            });
        } else {
            detail::scratch shared(memory + detail::bytes_for_threads(run.concurrency(), workers.bytes()));
            run_dense(in, out, run, span_sums<T>(shared, s, run.concurrency()), workers, summed);
        }
    }
    /// Adds the keys first .. end - 1 of one batch entry and head to a sum, as the call of all of them would: where queries see different
    /// keys a sum grows from any border of its blocks, else this is one span of it.
    void add_keys(const inputs<T>& in, index_t batch, index_t kv_head, index_t first, index_t end, index_t slice, std::byte* memory,
                  const state_type& state) const {
        const auto s = shapes_of(in);
        worker_memory{memory, s, grid(), staged()}.with(slice, [&](worker& w) {
            keys_of(in, batch, kv_head).push(w, first, end, causal ? linear_order<T, P>::causal_block : worker::target_rows(s), state);
        });
    }

private:
    using worker = linear_worker<T>;
    using keys_type = linear_keys<T, KeyFeatures, P>;
    using block = typename keys_type::block;

    static constexpr bool has_local = !std::same_as<Local, no_local_term>;

    /// The workers of all threads, one after the other.
    struct worker_memory {
        std::byte* memory;
        const input_shapes& shapes;
        const convolution_grid* grid;
        index_t staged;

        std::size_t bytes() const { return detail::bytes_for<worker>(shapes, grid, causal, staged); }
        void with(index_t slice, const auto& f) const {
            auto slice_memory = detail::slices(memory, bytes())[slice];
            worker w(slice_memory, shapes, grid, causal, staged);
            f(w);
        }
    };

    const convolution_grid* grid() const {
        if constexpr (has_local) return local_.convolution.present() ? &local_.convolution.grid : nullptr;
        else return nullptr;
    }
    index_t staged() const {
        if constexpr (requires { key_features_.staged(); }) return key_features_.staged();
        else return 0;
    }
    /// The token of the grid that the first row is; without one, rows are counted from it.
    index_t first_query() const {
        if constexpr (has_local) return grid() ? local_.first_query : 0;
        else return 0;
    }
    void load_weights(worker& w, index_t head) const {
        if constexpr (has_local)
            if (grid()) w.convolution.load_weights(local_.convolution, head);
    }
    linear_order<T, P> order(const inputs<T>& in) const { return {in, pattern_}; }
    keys_type keys_of(const inputs<T>& in, index_t batch, index_t kv_head) const { return {in, key_features_, order(in), batch, kv_head}; }

    /// The rows first .. end - 1, which meet the keys before `absorbed` as a state and the others by scores. Returns the last block of
    /// these.
    block run_chunk(worker& w, const inputs<T>& in, const outputs<T>& out, index_t batch, index_t head, index_t first, index_t end,
                    const state_type& state, index_t absorbed) const {
        const auto count = end - first;
        const auto keys = keys_of(in, batch, head / (in.queries.shape().heads / in.keys.shape().heads));
        const auto max_seen = order(in).seen_by(batch, end - 1);
        const bool some_see_nothing = order(in).seen_by(batch, first) == 0, scored = max_seen > absorbed;
        const auto queries = load_features<causal, T>(query_features_, batch, head, first, count, w, w.queries, scored || some_see_nothing);
        for (index_t r = 0; some_see_nothing && r < count && order(in).seen_by(batch, first + r) == 0; ++r)
            std::fill_n(w.queries + r * w.key_padded, w.key_padded, T{0});

        std::fill_n(w.factors, worker::max_queries, T{0}); // denominators at first
        bool started = false;
        block own{};
        keys.for_each(absorbed, max_seen, worker::target_rows(shapes_of(in)), [&](index_t first_key, index_t in_block) {
            own = keys.load(w, first_key, in_block, true);
            for (index_t r = 0; r < count; ++r)
                w.seen[r] = std::clamp<index_t>(order(in).seen_by(batch, first + r) - first_key, 0, in_block);
            std::fill(w.seen + count, w.seen + (count + 3) / 4 * 4, w.seen[count - 1]);
            w.scores.add({w.queries, count, w.key_padded}, {{w.keys, in_block, w.key_padded}, own.values, own.value_stride, w.seen},
                         !started, w.numerators, w.factors);
            started = true;
        });
        if (absorbed > 0) state.add_denominators(queries, w.factors);
        make_factors(in, batch, first, count, w.factors);

        if constexpr (has_local) {
            if (grid()) {
                const auto present = local_.reads_values ? order(in).ever_seen(batch) : local_.input.shape().tokens;
                w.convolution(local_.input.rows(batch, keys.kv_head), present, first_query() + first, count, w.local);
            }
        }
        auto from = state;
        if (absorbed == 0) from.key_channels = 0; // an empty sum adds nothing, not even the NaN of a query
        from.padded = w.padded;
        ask_for_next(w.ahead, in, out, batch, head, end, count);
        w.ahead.spread(count * from.key_channels * w.padded / lanes::size);
        from.finish(queries,
                    {out.values.rows(batch, head, first), in.values.shape().channels, w.factors, started ? w.numerators : nullptr,
                     grid() ? w.local : nullptr},
                    w.spare, w.ahead);
        return own;
    }
    /// What is read after the rows of a head before `end`: so many more, and where their results go; or the first keys and values of
    /// another head.
    void ask_for_next(prefetch_next& ahead, const inputs<T>& in, const outputs<T>& out, index_t batch, index_t head, index_t end,
                      index_t count) const {
        ahead.clear();
        const auto &q = in.queries.shape(), &k = in.keys.shape(), &v = in.values.shape();
        const auto group = q.heads / k.heads;
        if (end == q.tokens) {
            end = 0;
            if (++head == q.heads) head = 0, ++batch;
            if (batch == q.batch) return;
        }
        if (end == 0 && head % group == 0) {
            count = std::min(count, k.tokens);
            ahead.add(in.keys.rows(batch, head / group), count, k.channels);
            ahead.add(in.values.rows(batch, head / group), count, v.channels);
            return;
        }
        count = std::min(count, q.tokens - end);
        ahead.add(in.queries.rows(batch, head, end), count, q.channels);
        ahead.add(out.values.rows(batch, head, end), count, v.channels);
        if constexpr (has_local) { // over a grid it asks itself for the row below, where it reads that where it lies
            if (!grid() || (grid()->height > 1 && !local_.input.is_narrow())) return;
            const auto row = first_query() + end + (grid()->kernel_height - 1 - grid()->top) * grid()->width,
                       tokens = local_.input.shape().tokens;
            if (row < tokens) ahead.add(local_.input.rows(batch, head / group, row), std::min(count, tokens - row), v.channels);
        }
    }
    /// Denominators become what numerators are to be multiplied with.
    void make_factors(const inputs<T>& in, index_t batch, index_t first, index_t count, T* factors) const {
        const auto& n = normalisation_;
        const auto eps = n.eps * (n.eps_per_key ? static_cast<double>(order(in).seen_by(batch, first + count - 1)) : 1);
        for (index_t r = 0; r < count; r += lanes::size) {
            const auto factor = n.normalise ? lanes(T{1}) / (lanes::load(factors + r) + lanes(eps)) : lanes(n.scale);
            factor.store(factors + r);
        }
        for (index_t r = 0; r < count && order(in).seen_by(batch, first + r) == 0; ++r) factors[r] = 0;
    }

    /// Sums over the keys first, in spans; then the queries, in tasks of any size.
    void run_dense(const inputs<T>& in, const outputs<T>& out, const execution& run, const span_sums<T>& sums, const worker_memory& workers,
                   const linear_states<T>* summed) const {
        const auto &q = in.queries.shape(), &k = in.keys.shape();
        const auto group = q.heads / k.heads, target = worker::target_rows(shapes_of(in));
        const auto chunks = grid() ? token_chunks::of(*grid(), target, worker::max_queries) : token_chunks::even(q.tokens, target);
        constexpr index_t queries_of_a_task = 1024, span = span_sums<T>::span;
        const auto chunks_of_a_task = chunks.of_a_task(queries_of_a_task);
        const auto tasks = (chunks.count() + chunks_of_a_task - 1) / chunks_of_a_task;
        for (index_t begin = 0; begin < k.batch * k.heads; begin += sums.heads()) {
            const auto now = std::min(sums.heads(), k.batch * k.heads - begin);
            const auto batch_of = [&](index_t number) { return (begin + number) / k.heads; };
            const auto span_begin = [&](index_t batch, index_t n) { // of the first one, the first key
                return n == 0 ? 0 : order(in).block_end(batch, 0, span) + (n - 1) * span;
            };
            const auto spans = [&](index_t number) {
                const auto batch = batch_of(number), keys = order(in).absorbed_by(batch, 0);
                return keys == 0 ? 0 : 1 + (keys - 1 + span - order(in).block_end(batch, 0, span)) / span;
            };
            if (!summed)
                sums.make(now, run, spans, [&](index_t number, index_t n, index_t slice, const state_type& state) {
                    const auto batch = batch_of(number), end = std::min(order(in).absorbed_by(batch, 0), span_begin(batch, n + 1));
                    workers.with(slice, [&](worker& w) {
                        keys_of(in, batch, (begin + number) % k.heads).push(w, span_begin(batch, n), end, target, state);
                    });
                });
            run.for_each(now * group * tasks, [&](index_t task, index_t slice) {
                const auto number = task / (group * tasks), batch = batch_of(number);
                const auto head = (begin + number) % k.heads * group + task / tasks % group;
                workers.with(slice, [&](worker& w) {
                    load_weights(w, head);
                    const auto from = task % tasks * chunks_of_a_task;
                    for (auto chunk = from; chunk < std::min(from + chunks_of_a_task, chunks.count()); ++chunk)
                        if (const auto first = std::max<index_t>(0, chunks.first(chunk) - first_query()),
                            end = std::min(q.tokens, chunks.end(chunk) - first_query());
                            first < end)
                            run_chunk(w, in, out, batch, head, first, end, summed ? summed->of(begin + number) : sums.of(number),
                                      order(in).absorbed_by(batch, 0));
                });
            });
        }
    }

    /// The sum over the keys grows block by block, as far as rows want it: a given one is read where it lies, until then. The block in
    /// which a chunk's keys end is scored, and pushed when that is done.
    void run_causal(worker& w, const inputs<T>& in, const outputs<T>& out, index_t batch, index_t head,
                    const linear_states<T>* summed) const {
        constexpr index_t size = linear_order<T, P>::causal_block;
        const auto rows = order(in);
        const auto keys = keys_of(in, batch, head / (in.queries.shape().heads / in.keys.shape().heads));
        const auto tokens = in.queries.shape().tokens, target = worker::target_rows(shapes_of(in));
        load_weights(w, head);
        index_t absorbed = summed ? std::min(rows.absorbed_by(batch, 0), summed->keys) : 0;
        const bool begun = absorbed > 0;
        auto sum = begun ? summed->of(batch * in.keys.shape().heads + keys.kv_head) : w.state;
        if (!begun) sum.reset();
        const auto grow = [&] { // in the worker's own memory
            if (sum.sums == w.state.sums) return;
            w.state.reset();
            w.state.merge(sum);
            sum = w.state;
        };
        for (index_t first = 0, end = 0; first < tokens; first = end) {
            if (const auto wanted = rows.absorbed_by(batch, first); absorbed < wanted) {
                grow();
                keys.push(w, absorbed, wanted, size, sum);
                absorbed = wanted;
            }
            for (end = first + 1; end < tokens && end - first < target && rows.absorbed_by(batch, end) == absorbed;) ++end;
            const auto own = run_chunk(w, in, out, batch, head, first, end, sum, absorbed);
            const bool whole = own.rows.count > 0 && own.first == absorbed && own.end() == rows.block_end(batch, absorbed, size);
            if (end == tokens || !whole || rows.absorbed_by(batch, end) < own.end()) continue;
            grow();
            keys.push(w, own, sum);
            absorbed = own.end();
        }
    }

    const QueryFeatures& query_features_;
    const KeyFeatures& key_features_;
    const P& pattern_;
    linear_normalisation normalisation_;
    [[no_unique_address]] Local local_;
};

} // namespace attn::kernel
