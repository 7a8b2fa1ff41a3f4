// What the gradient of recurrent attention keeps in memory: states, rows of a chunk, and sums over what shares a term.
#pragma once

#include "../../core/gradients.hpp"
#include "channel_gradients.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// How the states of a call are kept: all of those at the borders of segments of chunks, and of one segment those at its chunks' borders:
/// so few that those of 128 x 128 floats fill a second-level cache of 1 MiB.
struct state_segments {
    static constexpr index_t chunks_of_a_segment = 16;

    index_t chunks;

    explicit state_segments(index_t tokens) : chunks((tokens + recurrent_chunk - 1) / recurrent_chunk) {}
    index_t count() const { return std::max<index_t>(1, (chunks + chunks_of_a_segment - 1) / chunks_of_a_segment); }
    index_t longest() const { return std::min(std::max<index_t>(1, chunks), chunks_of_a_segment); }
};

/// What one thread works in.
template <Scalar T>
struct recurrent_gradient_worker {
    static constexpr index_t chunk = recurrent_chunk;

    recurrent_gradient_worker(detail::scratch& memory, const recurrent_sizes& sizes, index_t group, index_t tokens)
        : forward(memory, sizes, group, false), rows(memory, sizes, group), padded(whole_registers<T>(sizes.value_channels)),
          state_size(sizes.key_channels * padded), segment_states(memory.take<T>(state_segments(tokens).count(), state_size)),
          chunk_states(memory.take<T>(state_segments(tokens).longest(), state_size)), of_state(memory.take<T>(state_size)),
          d_out(memory.take<T>(group * chunk, padded)), column_stride(whole_registers<T>(std::max<index_t>(group, 1) * chunk)),
          d_columns(memory.take<T>(sizes.value_channels, column_stride)), products(memory.take<T>(sizes.key_channels, column_stride)),
          terms(memory.take<weighted_values<T>>(group + 1)), weights(memory.take<T>(group + 1, chunk * chunk)),
          erased_weights(memory.take<T>(sizes.erases ? group + 1 : 0, chunk * chunk)), differences(memory.take<T>(chunk, padded)),
          negated(memory.take<T>(chunk, padded)), d_values(memory.take<T>(chunk, padded)), scaled(memory.take<T>(chunk, rows.key_padded)) {}

    recurrent_worker<T> forward;
    chunk_gradients<T> rows;
    index_t padded, state_size;
    T *segment_states, *chunk_states;
    T* of_state; ///< G [d_k][padded]
    T* d_out;    ///< scaled
    index_t column_stride;
    T *d_columns, *products; ///< rows whose products with a state are wanted, transposed, and these products, too
    weighted_values<T>* terms;
    T *weights, *erased_weights; ///< of pairs, tokens from the last back
    T* differences;              ///< v - y
    T* negated;                  ///< -dz of what is solved, and then dy
    T* d_values;
    T* scaled;
};

/// Gradients of what a rule takes of each token. Where batch entries or heads share a term, theirs are kept apart until all are there.
template <Scalar T>
class term_gradients {
public:
    term_gradients(const recurrent_terms<T>& terms, const recurrent_gradients<T>& wanted, const shape& keys)
        : terms_(terms), wanted_(wanted), own_(wanted), keys_(keys) {}

    /// Memory for those that are kept apart.
    void take(detail::scratch& memory) {
        for_each_shared([&](const tensor_view<const T>& term, tensor_view<T>& own, const tensor_view<T>& wanted) {
            const shape all{keys_.batch, keys_.heads, keys_.tokens, term.shape().channels};
            T* const numbers = memory.take<T>(all.size());
            if (wanted.data()) own = head_major(numbers, all);
        });
    }
    /// Where those of each batch entry and head go.
    const recurrent_gradients<T>& own() const { return own_; }
    /// Sums what is shared, in the order of batch entries and heads.
    void sum() {
        for_each_shared([](const auto&, const tensor_view<T>& own, const tensor_view<T>& wanted) {
            if (!wanted.data()) return;
            detail::fill_zero(wanted);
            const auto& s = wanted.shape();
            detail::for_each_number(own.shape(), [&](index_t b, index_t h, index_t i, index_t c) {
                wanted(s.batch == 1 ? 0 : b, s.heads == 1 ? 0 : h, i, c) += own(b, h, i, c);
            });
        });
    }

private:
    void for_each_shared(const auto& f) {
        const auto visit = [&](const tensor_view<const T>& term, tensor_view<T>& own, const tensor_view<T>& wanted) {
            const auto& s = term.shape();
            if (term.data() && (s.batch != keys_.batch || s.heads != keys_.heads)) f(term, own, wanted);
        };
        visit(terms_.log_decay, own_.log_decay, wanted_.log_decay);
        visit(terms_.beta, own_.beta, wanted_.beta);
        visit(terms_.erase, own_.a, wanted_.a);
        visit(terms_.read, own_.b, wanted_.b);
    }

    const recurrent_terms<T>& terms_;
    const recurrent_gradients<T>& wanted_;
    recurrent_gradients<T> own_;
    shape keys_;
};

} // namespace attn::kernel
