// The gradient of recurrent attention: chunks from the last to the first, whose states are computed once more.
#pragma once

#include "../../parallel/executor.hpp"
#include "chunk_gradient.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The gradient of a call of recurrent_attention.
template <Scalar T>
class recurrent_gradient {
public:
    using worker = recurrent_gradient_worker<T>;
    static constexpr index_t chunk = recurrent_chunk;

    recurrent_gradient(const inputs<T>& in, const tensor_view<const T>& d_out, const recurrent_terms<T>& terms,
                       const tensor_view<const T>& first_state, const recurrent_gradients<T>& wanted, double scale)
        : in_(in), terms_(terms), first_(first_state), wanted_(wanted), differentiate_chunk_(in, d_out, terms, wanted, scale),
          advances_({in.queries.slice({.heads = {0, 0}}), in.keys, in.values}, terms) {}

    static std::size_t workspace_bytes(const input_shapes& s, const recurrent_terms<T>& terms, index_t concurrency) {
        const auto shared = detail::bytes_taken([&](detail::scratch& memory) { term_gradients<T>(terms, {}, s.keys).take(memory); });
        return worker_bytes(s, terms, concurrency) + shared;
    }
    /// Of that, what the threads work in.
    static std::size_t worker_bytes(const input_shapes& s, const recurrent_terms<T>& terms, index_t concurrency) {
        return detail::bytes_for_threads(concurrency, bytes_of_worker(s, terms));
    }

    /// memory: workspace_bytes of it.
    void operator()(const execution& run, std::byte* memory) const {
        const auto s = shapes_of(in_);
        detail::scratch behind(memory + worker_bytes(s, terms_, run.concurrency()));
        term_gradients<T> of_terms(terms_, wanted_, s.keys);
        of_terms.take(behind);
        (*this)(of_terms.own(), {0, s.keys.batch * s.keys.heads}, run, memory);
        of_terms.sum();
    }
    /// Of some of the batch entries and kv heads, counted head by head. to: where those of the terms go, of each head by itself. memory:
    /// worker_bytes of it.
    void operator()(const recurrent_gradients<T>& to, const row_range& heads, const execution& run, std::byte* memory) const {
        const auto s = shapes_of(in_);
        const detail::slices slices(memory, bytes_of_worker(s, terms_));
        run.for_each(heads.count, [&](index_t number, index_t slice) {
            const auto task = heads.first + number;
            auto own = slices[slice];
            worker w(own, terms_.sizes(s), recurrent_chunks<T>::group_of(s), s.keys.tokens);
            differentiate(w, task / s.keys.heads, task % s.keys.heads, to);
        });
    }

private:
    static std::size_t bytes_of_worker(const input_shapes& s, const recurrent_terms<T>& terms) {
        return detail::bytes_for<worker>(terms.sizes(s), recurrent_chunks<T>::group_of(s), s.keys.tokens);
    }
    /// All chunks of one batch entry and kv head.
    void differentiate(worker& w, index_t batch, index_t head, const recurrent_gradients<T>& to) const {
        const auto tokens = in_.keys.shape().tokens;
        const state_segments segments(tokens);
        auto& state = w.forward.state;
        state.begin(first_, batch, head);
        const auto save = [&](T* at) { std::copy_n(state.sums, w.state_size, at); };
        const auto advance = [&](index_t chunk_number) {
            const auto first = chunk_number * chunk, count = std::min(chunk, tokens - first);
            advances_.load(w.forward, state, batch, head, first, count);
            advances_.ask_for_keys(w.forward, batch, head, first + count);
            advances_.weigh_and_correct(w.forward, state, count);
            advances_.finish(w.forward, state, count);
        };
        constexpr auto length = state_segments::chunks_of_a_segment;
        T* const own_sums = state.sums;
        for (index_t n = 0; n < (segments.count() - 1) * length; ++n) {
            if (n % length == 0) save(w.segment_states + n / length * w.state_size);
            advance(n);
        }
        save(w.segment_states + (segments.count() - 1) * w.state_size);
        if (const auto& given = wanted_.d_last_state; given.data())
            copy_rows<T>(given.rows(batch, head), in_.keys.shape().channels, in_.values.shape().channels, w.of_state, w.padded);
        else std::fill_n(w.of_state, w.state_size, T{0});
        for (auto segment = segments.count() - 1; segment >= 0; --segment) {
            const auto begin = segment * length, end = std::min(segments.chunks, begin + length);
            state.sums = own_sums;
            std::copy_n(w.segment_states + segment * w.state_size, w.state_size, state.sums);
            state.open();
            for (auto n = begin; n < end; ++n) {
                save(w.chunk_states + (n - begin) * w.state_size);
                if (n + 1 < end) advance(n);
            }
            for (auto n = end - 1; n >= begin; --n) {
                state.open();
                state.sums = w.chunk_states + (n - begin) * w.state_size;
                differentiate_chunk_(w, batch, head, n * chunk, std::min(chunk, tokens - n * chunk), to);
            }
        }
        if (const auto& first = wanted_.first_state; first.data())
            store_rows<T>(w.of_state, w.padded, in_.keys.shape().channels, in_.values.shape().channels,
                          stored_view<T>(first).rows(batch, head));
    }

    inputs<T> in_;
    recurrent_terms<T> terms_;
    tensor_view<const T> first_;
    recurrent_gradients<T> wanted_;
    recurrent_chunk_gradient<T> differentiate_chunk_;
    recurrent_chunks<T> advances_; ///< without queries
};

} // namespace attn::kernel
