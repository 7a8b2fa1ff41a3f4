// The gradient of one chunk of recurrent attention.
#pragma once

#include "../../simd/wide_sum.hpp"
#include "gradient_memory.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The gradient of a chunk, from G, that of the state behind it.
template <Scalar T>
class recurrent_chunk_gradient {
public:
    using lanes = simd::lanes<T>;
    using worker = recurrent_gradient_worker<T>;
    static constexpr index_t chunk = recurrent_chunk;

    recurrent_chunk_gradient(const inputs<T>& in, const tensor_view<const T>& d_out, const recurrent_terms<T>& terms,
                             const recurrent_gradients<T>& wanted, double scale)
        : in_(in), d_out_(d_out), terms_(terms), wanted_(wanted), scale_(static_cast<T>(scale)), chunks_(in, terms) {}

    /// to: of what shares a term. Of the state at the chunk's border; G becomes the gradient of that.
    void operator()(worker& w, index_t batch, index_t head, index_t first, index_t count, const recurrent_gradients<T>& to) const {
        auto& f = w.forward;
        f.differences = w.differences;
        chunks_.load(f, f.state, batch, head, first, count);
        load(w, batch, head, first, count);
        ask_for_previous(w, batch, head, first);
        chunks_.weigh_and_correct(f, f.state, count);
        f.differences = nullptr;
        if (w.padded > 0) of_values(w, count);
        of_pairs(w, count);
        for (index_t c = 0; c < w.rows.key_padded; c += lanes::size)
            channel_gradients<T>(w.rows, chunks_.sizes(), chunks_.group(), reads(), wanted_.log_decay.data() != nullptr, count, c)();
        store(w, batch, head, first, count, to);
        if (w.padded > 0) go_back(w, count);
    }

private:
    bool reads() const { return terms_.corrects() || chunks_.sizes().erases; }

    /// What is read of the chunk before a token, and where its gradients go.
    void ask_for_previous(worker& w, index_t batch, index_t head, index_t token) const {
        auto& ahead = w.forward.ahead;
        ahead.clear();
        const auto count = std::min(chunk, token), first = token - count, group = chunks_.group();
        const auto add = [&](const auto& tensor, index_t of_head) {
            if (tensor.data()) ahead.add(tensor.rows(batch, of_head, first), count, tensor.shape().channels);
        };
        for (const auto* tensor : {&in_.keys, &in_.values}) add(*tensor, head);
        for (const auto* tensor : {&wanted_.keys, &wanted_.values}) add(*tensor, head);
        for (auto h = head * group; h < (head + 1) * group; ++h) {
            add(in_.queries, h);
            add(d_out_, h);
            add(wanted_.queries, h);
        }
        ahead.spread(count * (group * chunk * (w.rows.key_padded + w.padded) + (2 * group + 2) * w.rows.key_padded * w.padded) /
                     lanes::size);
    }
    /// Rows of what a chunk's tokens have, and how much of a key is left at its end.
    void load(worker& w, index_t batch, index_t head, index_t first, index_t count) const {
        const auto& r = w.rows;
        const auto d_k = in_.keys.shape().channels, d_v = in_.values.shape().channels, stride = r.key_padded;
        const auto& sizes = chunks_.sizes();
        for (index_t h = 0; h < chunks_.group(); ++h) {
            copy_rows<T>(in_.queries.rows(batch, head * chunks_.group() + h, first), count, d_k, r.queries + h * count * stride, stride);
            T* const rows = w.d_out + h * count * w.padded;
            copy_rows<T>(d_out_.rows(batch, head * chunks_.group() + h, first), count, d_v, rows, w.padded);
            for (index_t n = 0; n < count * w.padded; n += lanes::size) (lanes::load(rows + n) * lanes(scale_)).store(rows + n);
        }
        copy_rows<T>(in_.keys.rows(batch, head, first), count, d_k, r.keys, stride);
        if (sizes.erases) {
            copy_rows<T>(recurrent_terms<T>::rows(terms_.erase, batch, head, first), count, d_k, r.erased, stride);
            copy_rows<T>(recurrent_terms<T>::rows(terms_.read, batch, head, first), count, d_k, r.probes, stride);
        } else if (terms_.corrects()) {
            std::copy_n(r.keys, count * stride, r.probes);
        }
        for (index_t i = 0; i < count; ++i)
            if (sizes.by_channel) std::copy_n(w.forward.token_decays + i * stride, stride, r.decays + i * stride);
            else std::fill_n(r.decays + i * stride, stride, sizes.decays ? w.forward.token_decays[i] : T{1});
        std::fill_n(r.left + (count - 1) * stride, stride, T{1});
        for (auto at = (count - 1) * stride - lanes::size; at >= 0; at -= lanes::size)
            (lanes::load(r.left + at + stride) * lanes::load(r.decays + at + stride)).store(r.left + at);
        if (!wanted_.log_decay.data()) return;
        for (index_t c = 0; c < d_k; ++c)
            r.state_products[c] = product(w.forward.state.sums + c * w.padded, w.of_state + c * w.padded, w.padded);
        std::fill(r.state_products + d_k, r.state_products + stride, T{0});
    }

    /// Weights of pairs as tokens from the last back read those behind them: to[r][s] = factor weights[i][j] of tokens i = last - s and j =
    /// last - r, for s <= r.
    static void reverse(const T* weights, index_t count, const T* factors, T* to) {
        for (index_t r = 0; r < count; ++r)
            for (index_t s = 0; s <= r; ++s) {
                const auto i = count - 1 - s;
                const auto weight = weights[i * chunk + count - 1 - r];
                to[r * chunk + s] = factors ? factors[i] * weight : weight;
            }
    }
    /// Gradients of the values that the state takes: of z, or of the values v and the removed y.
    void of_values(worker& w, index_t count) const {
        const auto& sizes = chunks_.sizes();
        const auto group = chunks_.group(), last = count - 1, stride = w.padded;
        const state_columns<T> of_state{w.of_state, sizes.key_channels, stride};
        const auto terms_of = [&](const T* weights, T* reversed) {
            for (index_t h = 0; h < group; ++h) {
                reverse(weights + h * count * chunk, count, nullptr, reversed + h * chunk * chunk);
                w.terms[h] = {reversed + h * chunk * chunk, w.d_out + (h * count + last) * stride, -stride, 1};
            }
        };
        const auto vectors = [&](const T* rows) {
            for (index_t n = 0; n < count * w.rows.key_padded; n += lanes::size)
                (lanes::load(rows + n) * lanes::load(w.rows.left + n)).store(w.scaled + n);
            return row_block<const T>{w.scaled + last * w.rows.key_padded, -w.rows.key_padded, 1};
        };
        const auto terms = [&](index_t more) {
            return std::span<const weighted_values<T>>(w.terms, static_cast<std::size_t>(group + more));
        };
        T *const own = w.weights + group * chunk * chunk, *const own_erased = w.erased_weights + group * chunk * chunk;
        T* const negated = w.negated + last * stride;
        if (sizes.erases) {
            terms_of(w.forward.erased_weights, w.erased_weights);
            reverse(w.forward.probe_erased, count, nullptr, own_erased);
            solve<T>(count, {vectors(w.rows.erased), nullptr, terms(0), false}, of_state,
                     {{own_erased, negated, -stride, 0}, nullptr, nullptr, negated}, w.forward.ahead);
            terms_of(w.forward.weights, w.weights);
            reverse(w.forward.probe_weights, count, nullptr, own);
            w.terms[group] = {own, negated, -stride, 0};
            return read(w, count, {vectors(w.rows.keys), nullptr, terms(1), false}, of_state);
        }
        terms_of(w.forward.weights, w.weights);
        if (!terms_.corrects()) return read(w, count, {vectors(w.rows.keys), nullptr, terms(0), false}, of_state);
        reverse(w.forward.probe_weights, count, w.forward.beta, own);
        solve<T>(count, {vectors(w.rows.keys), nullptr, terms(0), false}, of_state, {{own, negated, -stride, 0}, nullptr, nullptr, negated},
                 w.forward.ahead);
        negate(w.negated, w.d_values, count * stride);
        for (index_t i = 0; i < count; ++i) // dy = -beta dz
            for (index_t n = 0; n < stride; n += lanes::size) {
                T* const at = w.negated + i * stride + n;
                (lanes::load(at) * lanes(w.forward.beta[i])).store(at);
            }
    }
    static void negate(const T* from, T* to, index_t count) {
        for (index_t n = 0; n < count; n += lanes::size) (-lanes::load(from + n)).store(to + n);
    }
    void read(worker& w, index_t count, const recurrent_rows<T>& rows, const state_columns<T>& of_state) const {
        T* const last = w.d_values + (count - 1) * w.padded;
        for_each_recurrent_tile<T>(count, w.padded / lanes::size, [&](auto height, auto columns, index_t row, index_t reg) {
            const auto channel = reg * lanes::size;
            read_tile<height(), columns(), T>(rows, of_state, row, channel, T{1}, last - row * w.padded + channel, -w.padded);
        });
    }

    /// Gradients of weights of pairs, and what queries, probes and keys have of the state and of its gradient.
    void of_pairs(worker& w, index_t count) const {
        const auto& r = w.rows;
        const auto& f = w.forward;
        const auto d_v = in_.values.shape().channels, queries = chunks_.group() * count;
        const auto transpose = [&](const row_block<const T>& rows, index_t row_count) {
            transpose_rows<T>(rows, row_count, d_v, T{1}, w.d_columns, w.column_stride);
        };
        const auto weigh = [&](index_t row_count, const T* rows, T* to) {
            multiply_wide<T>(row_count, chunk / lanes::size, {{rows, w.padded, 1}, {w.d_columns, w.column_stride, 1}, d_v, {to, chunk, 1}},
                             w.forward.ahead);
        };
        const auto with_values = [&](const row_block<const T>& values, T* d_weights, T* d_probe_weights, T* d_vectors) {
            transpose(values, count);
            weigh(queries, w.d_out, d_weights);
            if (reads()) weigh(count, w.negated, d_probe_weights);
            multiply_columns(w, w.of_state, count, d_vectors);
        };
        with_values(f.values, r.d_weights, r.d_probe_weights, r.d_keys);
        if (f.state.sizes.erases) with_values({f.state.removed, w.padded, 1}, r.d_erased_weights, r.d_probe_erased, r.d_erased);
        transpose({w.d_out, w.padded, 1}, queries);
        multiply_columns(w, f.state.sums, queries, r.d_queries);
        if (!reads()) return;
        transpose({w.negated, w.padded, 1}, count);
        multiply_columns(w, f.state.sums, count, r.d_probes);
    }
    /// Rows y_i S^T, of a state S or its gradient, for the rows y_i that have been transposed: of columns, so that S is read as it lies.
    void multiply_columns(worker& w, const T* state, index_t row_count, T* to) const {
        const auto d_k = in_.keys.shape().channels, d_v = in_.values.shape().channels, stride = w.column_stride;
        multiply_wide<T>(d_k, whole_registers<T>(row_count) / lanes::size,
                         {{state, w.padded, 1}, {w.d_columns, stride, 1}, d_v, {w.products, stride, 1}}, w.forward.ahead);
        transpose_rows<T>(row_block<const T>{w.products, stride, 1}, d_k, row_count, T{1}, to, w.rows.key_padded);
    }

    /// Stores what is wanted of a chunk's tokens.
    void store(worker& w, index_t batch, index_t head, index_t first, index_t count, const recurrent_gradients<T>& of_terms) const {
        const auto& r = w.rows;
        const auto d_k = in_.keys.shape().channels, d_v = in_.values.shape().channels, stride = r.key_padded;
        const auto rows_of = [&](const tensor_view<T>& to, index_t h) { return stored_view<T>(to).rows(batch, h, first); };
        for (index_t h = 0; wanted_.queries.data() && h < chunks_.group(); ++h)
            store_rows<T>(r.d_queries + h * count * stride, stride, count, d_k, rows_of(wanted_.queries, head * chunks_.group() + h));
        const auto put = [&](const T* rows, index_t row_stride, index_t channels, const tensor_view<T>& to) {
            if (to.data()) store_rows<T>(rows, row_stride, count, channels, rows_of(to, head));
        };
        const bool erases = chunks_.sizes().erases, corrects = terms_.corrects();
        if (corrects) {
            for (index_t n = 0; n < count * stride; n += lanes::size)
                (lanes::load(r.d_keys + n) + lanes::load(r.d_probes + n)).store(r.d_keys + n);
            put_sums(w.d_values, w.differences, w.padded, count, batch, head, first, of_terms.beta);
            negate(w.negated, w.d_values, count * w.padded); // dv = -dy
        }
        put(w.d_values, w.padded, d_v, wanted_.values);
        put(r.d_keys, stride, d_k, wanted_.keys);
        if (erases) {
            put(r.d_erased, stride, d_k, of_terms.a);
            put(r.d_probes, stride, d_k, of_terms.b);
        }
        if (!of_terms.log_decay.data()) return;
        if (terms_.log_decay.shape().channels > 1) return put(r.d_log_decays, stride, d_k, of_terms.log_decay);
        put_sums(r.d_log_decays, nullptr, stride, count, batch, head, first, of_terms.log_decay);
    }
    /// Puts the sum over each row's numbers, or over its products with those of another.
    static void put_sums(const T* rows, const T* others, index_t stride, index_t count, index_t batch, index_t head, index_t first,
                         const tensor_view<T>& to) {
        for (index_t i = 0; to.data() && i < count; ++i) {
            const T *const row = rows + i * stride, *const other = others ? others + i * stride : nullptr;
            to(batch, head, first + i, 0) = other ? product(row, other, stride) : sum(row, stride);
        }
    }
    /// Of whole registers of numbers.
    static T sum(const T* row, index_t numbers) {
        simd::wide_sum<T> sum;
        simd::for_each_part<T>(numbers, [&](index_t n, auto part, index_t) { sum.add(part, lanes::load(row + n)); });
        return sum.total();
    }
    static T product(const T* a, const T* b, index_t numbers) {
        simd::wide_sum<T> sum;
        simd::for_each_part<T>(numbers, [&](index_t n, auto part, index_t) { sum.add(part, lanes::load(a + n), lanes::load(b + n)); });
        return sum.total();
    }

    /// G = decay G + sum over tokens of x_i d_i^T, of queries and probes that read the border.
    void go_back(worker& w, index_t count) const {
        const auto& r = w.rows;
        const auto d_k = in_.keys.shape().channels;
        const auto add = [&](const T* rows, const T* d_rows, const T* scale) {
            multiply_wide<T>(d_k, w.padded / lanes::size,
                             {{rows, 1, r.key_padded}, {d_rows, w.padded, 1}, count, {w.of_state, w.padded, 1}, scale, !scale},
                             w.forward.ahead);
        };
        const T* scale = r.whole_decay;
        for (index_t h = 0; h < chunks_.group(); ++h) {
            add(r.queries + h * count * r.key_padded, w.d_out + h * count * w.padded, scale);
            scale = nullptr;
        }
        if (reads()) add(r.probes, w.negated, scale);
    }

    inputs<T> in_;
    tensor_view<const T> d_out_;
    recurrent_terms<T> terms_;
    recurrent_gradients<T> wanted_;
    T scale_;
    recurrent_chunks<T> chunks_;
};

} // namespace attn::kernel
