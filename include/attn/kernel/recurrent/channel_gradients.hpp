// Gradients of a chunk of recurrent attention, channel by channel of its keys.
#pragma once

#include "chunks.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// What the products of a chunk leave for its channels: rows of tokens, key_padded numbers each. Queries and probes hold first what their
/// tokens have, then what of it reads the state at the chunk's border; their gradients hold first what that state adds.
template <Scalar T>
struct chunk_gradients {
    static constexpr index_t chunk = recurrent_chunk;

    chunk_gradients(detail::scratch& memory, const recurrent_sizes& sizes, index_t group)
        : key_padded(whole_registers<T>(sizes.key_channels)), decays(memory.take<T>(chunk, key_padded)),
          left(memory.take<T>(chunk, key_padded)), queries(memory.take<T>(group * chunk, key_padded)),
          probes(memory.take<T>(chunk, key_padded)), keys(memory.take<T>(chunk, key_padded)),
          erased(memory.take<T>(sizes.erases ? chunk : 0, key_padded)), d_queries(memory.take<T>(group * chunk, key_padded)),
          d_probes(memory.take<T>(chunk, key_padded)), d_keys(memory.take<T>(chunk, key_padded)),
          d_erased(memory.take<T>(sizes.erases ? chunk : 0, key_padded)), d_log_decays(memory.take<T>(chunk, key_padded)),
          state_products(memory.take<T>(key_padded)), whole_decay(memory.take<T>(key_padded)),
          d_weights(memory.take<T>(group * chunk, chunk)), d_erased_weights(memory.take<T>(sizes.erases ? group * chunk : 0, chunk)),
          d_probe_weights(memory.take<T>(chunk, chunk)), d_probe_erased(memory.take<T>(sizes.erases ? chunk : 0, chunk)) {}

    index_t key_padded;
    T* decays;           ///< of each token
    T* left;             ///< how much of a token's key is left at the end of the chunk
    T *queries, *probes; ///< x
    T *keys, *erased;    ///< k and a; of a rule that erases, as all that is called so
    T *d_queries, *d_probes, *d_keys, *d_erased;
    T* d_log_decays;
    T* state_products; ///< of each channel sum over n of G S, of the state at the border and the gradient of that at the end
    T* whole_decay;    ///< of the chunk
    T *d_weights, *d_erased_weights, *d_probe_weights, *d_probe_erased;
};

/// The gradients of one register of channels of `count` tokens. Decays lie between pairs of tokens: that of token t is met by what stands
/// before it and is read from it on, so its gradient is a sum of partial sums of the others', and nothing cancels.
template <Scalar T>
class channel_gradients {
public:
    using lanes = simd::lanes<T>;
    static constexpr index_t chunk = recurrent_chunk;

    /// of_decays: their gradients are wanted.
    channel_gradients(const chunk_gradients<T>& of, const recurrent_sizes& sizes, index_t group, bool probes, bool of_decays, index_t count,
                      index_t channel)
        : of_(of), decays_(sizes.decays), erases_(sizes.erases), probes_(probes), of_decays_(of_decays), group_(group), count_(count),
          channel_(channel) {}

    void operator()() {
        for (index_t t = 0; t < count_; ++t) {
            decay_[t] = at(of_.decays, t);
            key_[t] = at(of_.keys, t);
            if (erases_) erased_[t] = at(of_.erased, t);
        }
        if (of_decays_) std::fill_n(d_decay_, count_, lanes(T{0}));
        read_from_tokens();
        read_by_tokens();
        if (!of_decays_) return;
        reach_the_end();
        for (index_t t = 0; t < count_; ++t) put(of_.d_log_decays, t, d_decay_[t]);
    }

private:
    lanes at(const T* rows, index_t row) const { return lanes::load(rows + row * of_.key_padded + channel_); }
    void put(T* rows, index_t row, lanes x) const { x.store(rows + row * of_.key_padded + channel_); }

    /// Gradients of queries and probes: x_i meets the border, and the keys before it, which decay on their way.
    void read_from_tokens() {
        lanes key[chunk], erased[chunk], from_border(T{1});
        std::copy_n(key_, count_, key);
        if (erases_) std::copy_n(erased_, count_, erased);
        for (index_t i = 0; i < count_; ++i) {
            if (erases_) meet(of_.probes, of_.d_probes, i, of_.d_probe_weights, of_.d_probe_erased, {i, i}, from_border, key, erased);
            from_border *= decay_[i];
            for (index_t j = 0; decays_ && j < i; ++j) {
                key[j] *= decay_[i];
                if (erases_) erased[j] *= decay_[i];
            }
            for (index_t h = 0; h < group_; ++h)
                meet(of_.queries, of_.d_queries, h * count_ + i, of_.d_weights, of_.d_erased_weights, {i + 1, i + 1}, from_border, key,
                     erased);
            if (probes_ && !erases_) meet(of_.probes, of_.d_probes, i, of_.d_probe_weights, nullptr, {i + 1, i}, from_border, key, erased);
        }
        put(of_.whole_decay, 0, from_border);
    }
    /// What a row meets: the border and the first keys, and between them the decays of the first tokens.
    struct met {
        index_t decays, keys;
    };
    void meet(const T* rows, T* d_rows, index_t row, const T* weights, const T* erased_weights, met first, lanes from_border,
              const lanes* key, const lanes* erased) {
        const auto x = at(rows, row);
        auto sum = at(d_rows, row) * from_border;
        for (index_t j = 0; j < first.decays; ++j) {
            if (of_decays_) d_decay_[j] = fma(x, sum, d_decay_[j]);
            if (j >= first.keys) continue;
            sum = fma(lanes(weights[row * chunk + j]), key[j], sum);
            if (erases_) sum = fma(lanes(erased_weights[row * chunk + j]), erased[j], sum);
        }
        put(d_rows, row, sum);
    }

    /// Gradients of keys: those that x_i reads, from the last token back; x decays on its way to the border.
    void read_by_tokens() {
        lanes d_key[chunk], d_erased[chunk];
        for (index_t j = 0; j < count_; ++j) {
            const auto left = at(of_.left, j);
            d_key[j] = at(of_.d_keys, j) * left;
            if (erases_) d_erased[j] = at(of_.d_erased, j) * left;
            if (!of_decays_) continue;
            end_[j] = key_[j] * d_key[j];
            if (erases_) end_[j] = fma(erased_[j], d_erased[j], end_[j]);
        }
        const auto go_back = [&](T* rows, index_t first_row, const T* weights, const T* erased_weights, index_t behind, bool own) {
            lanes x[chunk];
            for (index_t i = 0; i < count_; ++i) x[i] = at(rows, first_row + i);
            for (auto j = count_ - 1; j >= 0; --j) {
                for (index_t i = j + (own ? 0 : 1); i < count_; ++i) {
                    d_key[j] = fma(lanes(weights[i * chunk + j]), x[i], d_key[j]);
                    if (erases_) d_erased[j] = fma(lanes(erased_weights[i * chunk + j]), x[i], d_erased[j]);
                }
                for (auto i = j + behind; decays_ && i < count_; ++i) x[i] *= decay_[j];
            }
            for (index_t i = 0; i < count_; ++i) put(rows, first_row + i, x[i]);
        };
        for (index_t h = 0; h < group_; ++h) {
            const auto row = h * count_;
            go_back(of_.queries, row, of_.d_weights + row * chunk, of_.d_erased_weights + row * chunk, 0, true);
        }
        if (probes_) go_back(of_.probes, 0, of_.d_probe_weights, of_.d_probe_erased, erases_ ? 1 : 0, false);
        for (index_t j = 0; j < count_; ++j) {
            put(of_.d_keys, j, d_key[j]);
            if (erases_) put(of_.d_erased, j, d_erased[j]);
        }
    }
    /// What of the decays' gradients comes by the state at the end of the chunk.
    void reach_the_end() {
        auto sum = at(of_.state_products, 0) * at(of_.whole_decay, 0);
        for (index_t t = 0; t < count_; ++t) {
            d_decay_[t] += sum;
            sum += end_[t];
        }
    }

    const chunk_gradients<T>& of_;
    bool decays_, erases_, probes_, of_decays_;
    index_t group_, count_, channel_;
    lanes decay_[chunk], key_[chunk], erased_[chunk], d_decay_[chunk], end_[chunk];
};

} // namespace attn::kernel
