// The kernel of recurrent attention.
#pragma once

#include "../../parallel/executor.hpp"
#include "chunks.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Where the states of a call are: those of all batch entries and kv heads, which go on; or none, which begin with `first` and end in
/// `last` (batch, kv_heads, d_k, d_v), if that has memory.
template <Scalar T>
struct recurrent_states {
    std::span<recurrent_state<T>> kept = {};
    tensor_view<const T> first = {};
    tensor_view<T> last = {};
};

/// out_i = scale q_i^T S_i of the state after each token, by one of these rules, where E is a token's decay:
///     S = E S + k v^T,      S = E S + beta k (v - (E S)^T k)^T,      S = E S - a (S^T b)^T + k v^T
/// Shapes have been checked.
template <Scalar T>
class recurrent_attention {
public:
    using lanes = simd::lanes<T>;
    static constexpr index_t chunk = recurrent_chunk;

    recurrent_attention(const inputs<T>& in, const stored_view<T>& out, const recurrent_terms<T>& terms, double scale)
        : chunks_(in, terms), in_(in), out_(out), scale_(static_cast<T>(scale)) {}

    static std::size_t workspace_bytes(const input_shapes& s, const recurrent_terms<T>& terms, index_t concurrency, bool keeps_state) {
        return detail::bytes_for_threads(
            concurrency, detail::bytes_for<recurrent_worker<T>>(terms.sizes(s), recurrent_chunks<T>::group_of(s), keeps_state));
    }

    /// memory: workspace_bytes of it.
    void operator()(const recurrent_states<T>& states, const execution& run, std::byte* memory) const {
        (*this)(states, {0, in_.keys.shape().batch * in_.keys.shape().heads}, run, memory);
    }
    /// Of some of the batch entries and kv heads, counted head by head.
    void operator()(const recurrent_states<T>& states, const row_range& heads, const execution& run, std::byte* memory) const {
        const bool keeps = !states.kept.empty();
        const auto& k = in_.keys.shape();
        const detail::slices slices(memory, detail::bytes_for<recurrent_worker<T>>(chunks_.sizes(), chunks_.group(), keeps));
        run.for_each(heads.count, [&](index_t number, index_t slice) {
            const auto task = heads.first + number;
            auto own = slices[slice];
            recurrent_worker<T> w(own, chunks_.sizes(), chunks_.group(), keeps);
            const auto batch = task / k.heads, head = task % k.heads;
            auto& state = keeps ? states.kept[static_cast<std::size_t>(task)] : w.state;
            if (!keeps) state.begin(states.first, batch, head);
            chunks_.for_each(state, k.tokens, [&](index_t first, index_t count) {
                chunks_.load(w, state, batch, head, first, count);
                ask_for_next(w, batch, head, first + count);
                chunks_.weigh_and_correct(w, state, count);
                if (w.padded > 0) read(w, state, batch, head, first, count);
                chunks_.finish(w, state, count);
            });
            if (states.last.data()) state.end(states.last, batch, head, w.spare, w.ahead);
        });
    }

private:
    /// What is read, and where results go, from a token on.
    void ask_for_next(recurrent_worker<T>& w, index_t batch, index_t head, index_t first) const {
        chunks_.ask_for_keys(w, batch, head, first);
        const auto count = std::min(chunk, in_.keys.shape().tokens - first);
        chunks_.ask_for_terms(w.ahead, batch, head, first, count);
        for (auto h = head * chunks_.group(); h < (head + 1) * chunks_.group(); ++h) {
            w.ahead.add(in_.queries.rows(batch, h, first), count, in_.keys.shape().channels);
            w.ahead.add(out_.rows(batch, h, first), count, in_.values.shape().channels);
        }
        const auto group = chunks_.group();
        w.ahead.spread(count * (group * chunk * w.key_padded + (group + 1) * w.key_padded * w.padded) / lanes::size);
    }

    /// What queries read, of each head of the group, or of all of them where each has but one.
    void read(recurrent_worker<T>& w, recurrent_state<T>& state, index_t batch, index_t head, index_t first, index_t count) const {
        const auto& sizes = chunks_.sizes();
        const auto group = chunks_.group();
        const bool alike = count == 1;
        for (index_t h = 0; h < (alike ? std::min<index_t>(group, 1) : group); ++h) {
            const auto from = h * count;
            const std::array<weighted_values<T>, 2> terms{
                {{w.weights + from * chunk, w.values.data, w.values.row_stride, state.count + 1},
                 {sizes.erases ? w.erased_weights + from * chunk : nullptr, state.removed, state.padded, state.count + 1}}};
            const recurrent_rows<T> rows{
                w.query_rows.from(from), sizes.decay_as_one() ? w.factors : nullptr, {terms.data(), sizes.erases ? 2U : 1U}, alike};
            auto out = out_.rows(batch, head * group + h, first);
            if (alike) out.row_stride = out_.strides().heads;
            for_each_recurrent_tile<T>(
                alike ? group : count, w.padded / lanes::size, [&](auto height, auto columns, index_t row, index_t reg) {
                    const index_t channel = reg * lanes::size, wide = columns() * lanes::size;
                    const auto there = std::min(wide, sizes.value_channels - channel);
                    const auto to = out.from(row, channel);
                    const bool in_place = there == wide && !to.is_narrow() && to.channel_stride == 1;
                    w.ahead.beside(height() * columns() * sizes.key_channels);
                    read_tile<height(), columns(), T>(rows, state.columns(), row, channel, scale_, in_place ? to.numbers().data : w.spare,
                                                      in_place ? to.row_stride : wide);
                    if (!in_place) store_rows<T>(w.spare, wide, height(), there, to);
                });
        }
    }

    recurrent_chunks<T> chunks_;
    inputs<T> in_;
    stored_view<T> out_;
    T scale_;
};

} // namespace attn::kernel
