// Chunks of recurrent attention: what a rule takes of some tokens, the weights of their pairs, and their values, corrected.
#pragma once

#include "../../core/inputs.hpp"
#include "pairs.hpp"

#include <span>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What the rule of a recurrent attention takes of each token and kv head, as far as it is given. log_decay (.., n, 1 or d_k), beta
/// (.., n, 1), erase and read (.., n, d_k); batch and heads may be 1, for all.
template <Scalar T>
struct recurrent_terms {
    tensor_view<const T> log_decay = {}, beta = {}, erase = {}, read = {};

    bool erases() const { return detail::is_given(erase); }
    bool corrects() const { return detail::is_given(beta); }
    recurrent_sizes sizes(const input_shapes& s) const {
        const bool decays = detail::is_given(log_decay);
        return {s.keys.channels, s.values.channels, erases() || (decays && log_decay.shape().channels > 1), decays, erases()};
    }
    /// The rows of one batch entry and head, from a token on.
    static row_block<const T> rows(const tensor_view<const T>& of, index_t batch, index_t head, index_t token) {
        return of.rows(of.shape().batch == 1 ? 0 : batch, of.shape().heads == 1 ? 0 : head, token);
    }
};

/// What one thread works in.
template <Scalar T>
struct recurrent_worker {
    static constexpr index_t chunk = recurrent_chunk;

    recurrent_worker(detail::scratch& memory, const recurrent_sizes& sizes, index_t group, bool keeps_state)
        : padded(whole_registers<T>(sizes.value_channels)), key_padded(whole_registers<T>(sizes.key_channels)),
          queries(memory.take<T>(group * chunk, key_padded)), weights(memory.take<T>(group * chunk, chunk)),
          erased_weights(memory.take<T>(sizes.erases ? group * chunk : 0, chunk)), factors(memory.take<T>(std::max(group, chunk))),
          probes(memory.take<T>(chunk, key_padded)), probe_weights(memory.take<T>(chunk, chunk)),
          probe_erased(memory.take<T>(sizes.erases ? chunk : 0, chunk)),
          token_decays(memory.take<T>(chunk, sizes.by_channel ? key_padded : 1)), beta(memory.take<T>(chunk)),
          spare(reinterpret_cast<T*>(memory.take<std::byte>(static_cast<index_t>(recurrent_state<T>::bytes_to_close(sizes))))),
          state(keeps_state ? recurrent_state<T>{} : recurrent_state<T>::take(memory, sizes)) {}

    index_t padded, key_padded;
    T *queries, *weights, *erased_weights; ///< row head count + i is query i of a head of the group
    row_block<const T> query_rows, values; ///< where those are that are read
    T* factors;                            ///< how much of the state at the border is left, of each row that is read at once
    T *probes, *probe_weights, *probe_erased;
    T* token_decays; ///< of each token a row of d_k, or one number
    T* beta;
    T* differences = nullptr; ///< where v - y goes, if it is wanted
    T* spare;                 ///< room for a chunk of values and a row of keys
    recurrent_state<T> state;
    prefetch_next ahead; ///< what the next chunk reads
};

/// The chunks of a call. Each goes on with the chunk of a state, and is loaded, weighed and corrected; then it may be read.
template <Scalar T>
class recurrent_chunks {
public:
    using lanes = simd::lanes<T>;
    static constexpr index_t chunk = recurrent_chunk;

    recurrent_chunks(const inputs<T>& in, const recurrent_terms<T>& terms)
        : in_(in), terms_(terms), sizes_(terms.sizes(shapes_of(in))), group_(group_of(shapes_of(in))) {}

    const recurrent_sizes& sizes() const { return sizes_; }
    /// Query heads that read a state.
    index_t group() const { return group_; }
    static index_t group_of(const input_shapes& s) { return s.keys.heads == 0 ? 0 : s.queries.heads / s.keys.heads; }
    /// Calls f(first token, count) for the pieces of so many tokens that go on with a state's chunk.
    static void for_each(const recurrent_state<T>& state, index_t tokens, const auto& f) {
        for (index_t token = 0, count = 0; token < tokens; token += count) {
            count = std::min(chunk - state.count, tokens - token);
            f(token, count);
        }
    }

    /// Reads queries, keys, values and what else the rule takes.
    void load(recurrent_worker<T>& w, recurrent_state<T>& state, index_t batch, index_t head, index_t first, index_t count) const {
        const auto d_k = sizes_.key_channels, begun = state.count;
        w.query_rows = queries(w, batch, head, first, count);
        load_columns(in_.keys.rows(batch, head, first), begun, count, state.keys);
        const auto values = in_.values.rows(batch, head, first);
        const bool in_place = count == chunk && !terms_.corrects() && w.padded == sizes_.value_channels && readable_in_place(values);
        if (in_place) w.values = values.numbers();
        else {
            w.values = {state.values, state.padded, 1};
            copy_rows<T>(values, count, sizes_.value_channels, state.values + begun * state.padded, state.padded);
        }
        if (terms_.corrects()) {
            const auto beta = recurrent_terms<T>::rows(terms_.beta, batch, head, first);
            for (index_t i = 0; i < count; ++i) w.beta[i] = beta(i, 0);
            if (sizes_.by_channel) copy_rows<T>(in_.keys.rows(batch, head, first), count, d_k, w.probes, w.key_padded);
        }
        if (sizes_.erases) {
            load_columns(stored_rows<const T>(recurrent_terms<T>::rows(terms_.erase, batch, head, first)), begun, count, state.erased);
            copy_rows<T>(recurrent_terms<T>::rows(terms_.read, batch, head, first), count, d_k, w.probes, w.key_padded);
        }
        if (sizes_.decays) load_decays(w, recurrent_terms<T>::rows(terms_.log_decay, batch, head, first), count);
        else if (sizes_.by_channel) std::fill_n(w.token_decays, count * w.key_padded, T{1});
    }
    /// Makes the weights of pairs, and the values that the state takes.
    void weigh_and_correct(recurrent_worker<T>& w, recurrent_state<T>& state, index_t count) const {
        if (sizes_.by_channel) weigh_by_channel(w, state, count);
        else weigh(w, state, count);
        if (w.padded > 0 && (terms_.corrects() || sizes_.erases)) correct(w, state, count);
    }
    /// Asks for the keys and values of a chunk from a token on, beside the products of one with the state.
    void ask_for_keys(recurrent_worker<T>& w, index_t batch, index_t head, index_t first) const {
        w.ahead.clear();
        const auto count = std::min(chunk, in_.keys.shape().tokens - first);
        w.ahead.add(in_.keys.rows(batch, head, first), count, in_.keys.shape().channels);
        w.ahead.add(in_.values.rows(batch, head, first), count, in_.values.shape().channels);
        w.ahead.spread(count * w.key_padded * w.padded / lanes::size);
    }
    /// Asks for the terms that are rows.
    void ask_for_terms(prefetch_next& ahead, index_t batch, index_t head, index_t first, index_t count) const {
        for (const auto* term : {&terms_.log_decay, &terms_.erase, &terms_.read})
            if (term->shape().channels > 1) ahead.add(recurrent_terms<T>::rows(*term, batch, head, first), count, term->shape().channels);
    }
    /// Counts the tokens, and closes the chunk if it is full.
    void finish(recurrent_worker<T>& w, recurrent_state<T>& state, index_t count) const {
        state.count += count;
        if (state.count == chunk) state.close(w.values, w.spare, w.ahead);
    }

private:
    /// Rows of queries, head after head: where they lie if that will do, and nothing is to decay in them.
    row_block<const T> queries(const recurrent_worker<T>& w, index_t batch, index_t head, index_t first, index_t count) const {
        const auto rows = in_.queries.rows(batch, head * group_, first);
        if (group_ == 1 && !sizes_.by_channel && readable_in_place(rows)) return rows.numbers();
        for (index_t h = 0; h < group_; ++h)
            copy_rows<T>(in_.queries.rows(batch, head * group_ + h, first), count, sizes_.key_channels,
                         w.queries + h * count * w.key_padded, w.key_padded);
        return {w.queries, w.key_padded, 1};
    }
    /// Rows as columns of a chunk, from column `begun` on.
    void load_columns(const stored_rows<const T>& rows, index_t begun, index_t count, T* columns) const {
        if (begun == 0) return transpose_rows<T>(rows, count, sizes_.key_channels, T{1}, columns, chunk);
        for (index_t i = 0; i < count; ++i)
            for (index_t c = 0; c < sizes_.key_channels; ++c) columns[c * chunk + begun + i] = rows(i, c);
    }
    /// e^log_decay: a row of d_k numbers for each token, or one number.
    void load_decays(recurrent_worker<T>& w, const row_block<const T>& logs, index_t count) const {
        const auto exponentiate = [](T* at, index_t numbers) {
            for (index_t c = 0; c < numbers; c += lanes::size) exp(lanes::load(at + c)).store(at + c);
        };
        if (!sizes_.by_channel) {
            std::fill_n(w.token_decays, chunk, T{0});
            for (index_t i = 0; i < count; ++i) w.token_decays[i] = logs(i, 0);
            return exponentiate(w.token_decays, count);
        }
        for (index_t i = 0; i < count; ++i) {
            T* const row = w.token_decays + i * w.key_padded;
            if (terms_.log_decay.shape().channels > 1) copy_rows<T>(logs.from(i), 1, sizes_.key_channels, row, w.key_padded);
            else std::fill_n(row, w.key_padded, logs(i, 0));
            exponentiate(row, w.key_padded);
        }
    }

    /// Weights of pairs where a token's decay is one number, or none.
    void weigh(recurrent_worker<T>& w, recurrent_state<T>& state, index_t count) const {
        const row_block<const T> columns{state.keys, chunk, 1};
        const auto multiply_pairs = [&](const row_block<const T>& rows, index_t row_count, T* weights) {
            multiply_wide<T>(row_count, chunk / lanes::size, {rows, columns, sizes_.key_channels, {weights, chunk, 1}}, w.ahead);
        };
        multiply_pairs(w.query_rows, group_ * count, w.weights);
        if (terms_.corrects()) multiply_pairs(columns.transposed().from(state.count), count, w.probe_weights);
        if (!sizes_.decays) return;
        pair_decays<T> decays(state.decays);
        for (index_t i = 0; i < count; ++i) {
            const auto decay = w.token_decays[i];
            decays.step(state.count + i, decay);
            state.decay[0] = pair_decays<T>::normal(state.decay[0] * decay);
            for (index_t h = 0; h < group_; ++h) decays.scale(w.weights + (h * count + i) * chunk);
            std::fill_n(w.factors + i, count == 1 ? std::max<index_t>(group_, 1) : 1, state.decay[0]);
            if (terms_.corrects()) decays.scale(w.probe_weights + i * chunk);
        }
        decays.store(state.decays);
    }
    /// Weights of pairs where each channel decays by itself: keys decay token by token. Queries and probes become what reads the state at
    /// the chunk's border.
    void weigh_by_channel(recurrent_worker<T>& w, recurrent_state<T>& state, index_t count) const {
        const auto d_k = sizes_.key_channels;
        for (index_t i = 0; i < count; ++i) {
            const auto token = state.count + i;
            const T* const decay = w.token_decays + i * w.key_padded;
            T* const probe = w.probes + i * w.key_padded;
            T *const of_probe = w.probe_weights + i * chunk, *const erased_of_probe = w.probe_erased + i * chunk;
            const auto query = [&](index_t h) { return w.queries + (h * count + i) * w.key_padded; };
            const auto weights = [&](index_t h) { return w.weights + (h * count + i) * chunk; };
            const auto erased_weights = [&](index_t h) { return w.erased_weights + (h * count + i) * chunk; };
            if (sizes_.erases) { // what the token reads before it decays
                multiply_decayed<1, T>(state.keys, d_k, nullptr, token, {probe}, {of_probe});
                multiply_decayed<1, T>(state.erased, d_k, nullptr, token, {probe}, {erased_of_probe});
                scale(probe, state.decay);
            }
            // The first query of a group is multiplied while the keys decay.
            const bool queried = group_ > 0;
            if (terms_.corrects() && queried)
                multiply_decayed<2, T>(state.keys, d_k, decay, token, {probe, query(0)}, {of_probe, weights(0)});
            else if (terms_.corrects()) multiply_decayed<1, T>(state.keys, d_k, decay, token, {probe}, {of_probe});
            else if (queried) multiply_decayed<1, T>(state.keys, d_k, decay, token, {query(0)}, {weights(0)});
            else multiply_decayed<0, T>(state.keys, d_k, decay, token, {}, {});
            if (sizes_.erases && queried) multiply_decayed<1, T>(state.erased, d_k, decay, token, {query(0)}, {erased_weights(0)});
            else if (sizes_.erases) multiply_decayed<0, T>(state.erased, d_k, decay, token, {}, {});
            decay_further(state.decay, decay);
            if (terms_.corrects()) scale(probe, state.decay);
            for (index_t h = 0; h < group_; ++h) {
                if (h > 0) multiply_decayed<1, T>(state.keys, d_k, nullptr, token, {query(h)}, {weights(h)});
                if (h > 0 && sizes_.erases) multiply_decayed<1, T>(state.erased, d_k, nullptr, token, {query(h)}, {erased_weights(h)});
                scale(query(h), state.decay);
            }
        }
    }
    /// Rows of whole registers, as a worker's are; a state's row of decays ends where it ends.
    void scale(T* row, const T* factors) const {
        simd::for_each_register<T>(sizes_.key_channels, [&](index_t c, const auto& load, const auto& store) {
            store(load(row + c) * load(factors + c), row + c);
        });
    }
    void decay_further(T* decays, const T* by) const {
        simd::for_each_register<T>(sizes_.key_channels, [&](index_t c, const auto& load, const auto& store) {
            store(pair_decays<T>::normal(load(decays + c) * load(by + c)), decays + c);
        });
    }

    /// The values of the tokens become z = beta (v - y); or y, which is removed, becomes -y.
    void correct(recurrent_worker<T>& w, recurrent_state<T>& state, index_t count) const {
        const auto vectors =
            sizes_.by_channel ? row_block<const T>{w.probes, w.key_padded, 1} : row_block<const T>{state.keys + state.count, 1, chunk};
        const weighted_values<T> known{w.probe_weights, w.values.data, w.values.row_stride, state.count};
        const auto row = state.count * state.padded;
        recurrent_rows<T> rows{vectors, sizes_.decay_as_one() ? w.factors : nullptr, {}, false};
        corrected_values<T> by{known, w.beta, state.values + row, state.values + row, w.differences};
        if (sizes_.erases) {
            rows.terms = {&known, 1};
            by = {{w.probe_erased, state.removed, state.padded, state.count}, nullptr, nullptr, state.removed + row};
        }
        solve<T>(count, rows, state.columns(), by, w.ahead);
    }

    inputs<T> in_;
    recurrent_terms<T> terms_;
    recurrent_sizes sizes_;
    index_t group_;
};

} // namespace attn::kernel
