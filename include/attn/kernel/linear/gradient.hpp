// The gradient of linear attention: a pass over the queries with the sums over their keys, and one back with the sums over their queries.
#pragma once

#include "../../parallel/executor.hpp"
#include "../../score/dual.hpp"
#include "../../simd/elementary.hpp"
#include "../../simd/wide_sum.hpp"
#include "gradient_memory.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The gradient of linear attention. With f = phi(q), e = phi(k + encoding), sums over the keys that a query sees, and backwards over the
/// queries that see a key:
///     S_i = sum_j e_j v_j^T,      z_i = sum_j e_j,      g_i = dO_i / (f_i . z_i + eps),      c_i = -(f_i . S_i g_i) / (f_i . z_i + eps)
///     df_i = S_i g_i + c_i z_i,   dS_j = sum_i f_i g_i^T,   dz_j = sum_i c_i f_i,   de_j = dS_j v_j + dz_j,   dv_j = dS_j^T e_j
/// and without normalisation g_i = scale dO_i, c_i = 0. Queries go by in chunks. The keys that all of a chunk see are in the sums; the
/// others, where queries of a chunk see different keys, are taken pair by pair, so that what is hidden is never touched. A task is a kv
/// head: so threads change no bit.
template <Scalar T, class F, Pattern P>
class linear_gradient {
public:
    using call_type = linear_gradient_call<T, F, P>;

    static std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) {
        return detail::bytes_for_threads(concurrency, detail::bytes_for<layout>(s));
    }

    void operator()(const call_type& call, const execution& run) const {
        const auto s = shapes_of(call.in);
        const detail::slices slices(run.workspace().bytes().data(), detail::bytes_for<layout>(s));
        const auto heads = s.keys.heads;
        run.for_each(s.queries.batch * heads, [&](index_t task, index_t slice) {
            auto memory = slices[slice];
            worker(call, layout(memory, s), task / heads, task % heads)();
        });
    }

private:
    using lanes = simd::lanes<T>;
    static constexpr bool causal = linear_order<T, P>::causal;
    using layout = linear_gradient_memory<T, causal>;
    static constexpr index_t max_queries = layout::max_queries, max_keys = layout::max_keys;

    /// One kv head.
    class worker {
    public:
        worker(const call_type& call, const layout& own, index_t batch, index_t kv_head)
            : call_(call), own_(own), batch_(batch), kv_head_(kv_head), order_{call.in, call.pattern},
              queries_(call.in.queries.shape().tokens), seen_(queries_ == 0 ? 0 : order_.seen_by(batch, queries_ - 1)) {
            while (first_ < queries_ && seen_by(first_) == 0) ++first_;
        }

        void operator()() {
            const auto& s = call_.in.keys.shape();
            const bool of_keys = call_.wanted.keys.data() || call_.wanted.values.data();
            std::fill_n(own_.of_keys, seen_ * own_.key_width, T{0});
            std::fill_n(own_.of_values, seen_ * own_.value_width, T{0});
            const auto group = call_.in.queries.shape().heads / s.heads;
            for (auto head = kv_head_ * group; head < (kv_head_ + 1) * group; ++head) {
                forwards(head);
                if (of_keys) backwards(head);
            }
            write_keys();
        }

    private:
        index_t seen_by(index_t row) const { return order_.seen_by(batch_, row); }
        index_t chunk_end(index_t first) const { return std::min(queries_, first + max_queries); }

        /// df of every query, and what its pairs that are taken one by one give to the keys.
        void forwards(index_t head) {
            detail::fill_zero(call_.wanted.queries.slice({.batch = {batch_, 1}, .heads = {head, 1}, .tokens = {0, first_}}));
            std::fill_n(own_.sums, own_.value_width * own_.key_width, T{0});
            std::fill_n(own_.key_sum, own_.key_width, T{0});
            index_t absorbed = 0;
            for (auto first = first_; first < queries_; first = chunk_end(first)) {
                const auto count = chunk_end(first) - first, shared = seen_by(first);
                for_each_block(absorbed, shared, [&](index_t, index_t keys) { add_keys(keys); });
                absorbed = shared;
                load_queries(head, first, count);
                if (causal) load_keys(shared, std::min(max_keys, seen_by(first + count - 1) - shared));
                for (index_t r = 0; r < count; ++r) find_factor(first + r, r, shared);
                load_d_out(head, first, count);
                multiply(count, {own_.d_out, own_.value_width, 1}, call_.in.values.shape().channels, {own_.sums, own_.key_width, 1},
                         own_.of_queries, false);
                for (index_t r = 0; r < count; ++r) finish_query(first + r, r, shared);
                if (call_.wanted.queries.data())
                    write({call_.in.queries, std::identity{}, {}}, own_.of_queries, call_.wanted.queries, head, first, count);
            }
        }
        /// de and dv of the keys that are in the sums: those that later chunks see beyond a chunk's own, before it joins.
        void backwards(index_t head) {
            std::fill_n(own_.of_sums, own_.key_width * own_.value_width, T{0});
            std::fill_n(own_.of_key_sum, own_.key_width, T{0});
            if (first_ == queries_) return;
            auto end = index_t{-1};
            for (auto first = first_ + (queries_ - 1 - first_) / max_queries * max_queries; first >= first_; first -= max_queries) {
                const auto count = chunk_end(first) - first, shared = seen_by(first);
                if (end > shared) give_to_keys(shared, end);
                end = shared;
                load_queries(head, first, count);
                load_d_out(head, first, count);
                multiply(call_.in.keys.shape().channels, {own_.queries, 1, own_.key_width}, count, {own_.d_out, own_.value_width, 1},
                         own_.of_sums, true);
                for (index_t r = 0; r < count; ++r)
                    add(own_.of_key_sum, own_.shares[first + r], own_.queries + r * own_.key_width, own_.key_width);
            }
            give_to_keys(0, end);
        }

        /// Features of keys first .. first + count - 1, and their values; of no key, nothing.
        void load_keys(index_t first, index_t count) const {
            if (count <= 0) return;
            const mapped_features<T, F> features{call_.in.keys, call_.feature_map, call_.encoding};
            features(batch_, kv_head_, first, count, own_.keys);
            copy_rows<T>(call_.in.values.rows(batch_, kv_head_, first), count, call_.in.values.shape().channels, own_.values,
                         own_.value_width);
        }
        /// Calls f(first, count) with blocks of the keys first .. end - 1, loaded.
        void for_each_block(index_t first, index_t end, const auto& f) const {
            for (; first < end; first += max_keys) {
                const auto count = std::min(max_keys, end - first);
                load_keys(first, count);
                f(first, count);
            }
        }
        void load_queries(index_t head, index_t first, index_t count) const {
            const mapped_features<T, F> features{call_.in.queries, call_.feature_map, {}};
            features(batch_, head, first, count, own_.queries);
        }
        /// Loads g: what is given, times the queries' factors.
        void load_d_out(index_t head, index_t first, index_t count) const {
            copy_rows<T>(call_.d_out.rows(batch_, head, first), count, call_.d_out.shape().channels, own_.d_out, own_.value_width);
            for (index_t r = 0; r < count; ++r) {
                T* const row = own_.d_out + r * own_.value_width;
                for (index_t c = 0; c < own_.value_width; c += lanes::size)
                    (lanes::load(row + c) * lanes(own_.factors[first + r])).store(row + c);
            }
        }

        /// Adds the keys that are loaded to S^T and z.
        void add_keys(index_t count) const {
            multiply(call_.in.values.shape().channels, {own_.values, 1, own_.value_width}, count, {own_.keys, own_.key_width, 1}, own_.sums,
                     true);
            for (index_t j = 0; j < count; ++j) add(own_.key_sum, T{1}, own_.keys + j * own_.key_width, own_.key_width);
        }
        /// The factor of a query's gradient, and its weights with the keys from `shared` on.
        void find_factor(index_t query, index_t r, index_t shared) const {
            const T* const f = own_.queries + r * own_.key_width;
            const auto& n = call_.normalisation;
            if (!n.normalise) {
                own_.factors[query] = static_cast<T>(n.scale);
                return;
            }
            auto sum = dot(f, own_.key_sum, own_.key_width);
            for_each_own_key(query, shared, [&](index_t, const T* e, const T*) { sum += dot(f, e, own_.key_width); });
            own_.factors[query] = 1 / (sum + static_cast<T>(n.eps_per_key ? n.eps * static_cast<double>(seen_by(query)) : n.eps));
        }
        /// Completes df, which is S g so far.
        void finish_query(index_t query, index_t r, index_t shared) const {
            const T *const f = own_.queries + r * own_.key_width, *const g = own_.d_out + r * own_.value_width;
            T* const df = own_.of_queries + r * own_.key_width;
            auto sum = dot(f, df, own_.key_width);
            for_each_own_key(query, shared, [&](index_t j, const T* e, const T* v) {
                own_.weights[j] = dot(f, e, own_.key_width);
                own_.products[j] = dot(g, v, own_.value_width);
                sum = std::fma(own_.weights[j], own_.products[j], sum);
            });
            const T share = call_.normalisation.normalise ? -sum * own_.factors[query] : T{0};
            own_.shares[query] = share;
            add(df, share, own_.key_sum, own_.key_width);
            for_each_own_key(query, shared, [&](index_t j, const T* e, const T*) {
                const T of_weight = own_.products[j] + share;
                add(df, of_weight, e, own_.key_width);
                add(own_.of_keys + j * own_.key_width, of_weight, f, own_.key_width);
                add(own_.of_values + j * own_.value_width, own_.weights[j], g, own_.value_width);
            });
        }
        /// Calls f(key, e, v) for the keys from `shared` on that a query sees.
        void for_each_own_key(index_t query, index_t shared, const auto& f) const {
            if constexpr (causal) {
                for (auto j = shared, end = seen_by(query); j < end; ++j)
                    f(j, own_.keys + (j - shared) * own_.key_width, own_.values + (j - shared) * own_.value_width);
            }
        }
        /// de and dv of keys from the sums over their queries.
        void give_to_keys(index_t first, index_t end) const {
            const auto d_k = call_.in.keys.shape().channels, d_v = call_.in.values.shape().channels;
            transpose_rows<T>(row_block<const T>{own_.of_sums, own_.value_width, 1}, own_.key_width, d_v, T{1}, own_.of_sums_transposed,
                              own_.key_width);
            for_each_block(first, end, [&](index_t key, index_t count) {
                multiply(count, {own_.values, own_.value_width, 1}, d_v, {own_.of_sums_transposed, own_.key_width, 1},
                         own_.of_keys + key * own_.key_width, true);
                for (index_t j = 0; j < count; ++j) add(own_.of_keys + (key + j) * own_.key_width, T{1}, own_.of_key_sum, own_.key_width);
                multiply(count, {own_.keys, own_.key_width, 1}, d_k, {own_.of_sums, own_.value_width, 1},
                         own_.of_values + key * own_.value_width, true);
            });
        }
        /// The product of `rows` rows of a and as wide rows of b, `depth` of them; or adds it.
        static void multiply(index_t rows, const row_block<const T>& a, index_t depth, const row_block<const T>& b, T* to, bool adds) {
            multiply_wide<T>(rows, b.row_stride / lanes::size, {a, b, depth, {to, b.row_stride, 1}, nullptr, adds}, no_prefetch());
        }

        void write_keys() const {
            for (index_t first = 0; call_.wanted.keys.data() && first < seen_; first += max_keys)
                write({call_.in.keys, std::identity{}, call_.encoding}, own_.of_keys + first * own_.key_width, call_.wanted.keys, kv_head_,
                      first, std::min(max_keys, seen_ - first));
            const auto& to = call_.wanted.values;
            for (index_t j = 0; to.data() && j < seen_; ++j)
                write_row<false, T>(own_.of_values + j * own_.value_width, to.shape().channels, T{1}, T{0}, to.row(batch_, kv_head_, j),
                                    to.strides().channels);
            const tensor_part unseen{.batch = {batch_, 1}, .heads = {kv_head_, 1}, .tokens = {seen_, call_.in.keys.shape().tokens - seen_}};
            for (const auto* view : {&call_.wanted.keys, &to}) detail::fill_zero(view->slice(unseen));
        }
        /// Gradients of features, times the map's slopes.
        void write(const mapped_features<T, std::identity>& read, T* of_features, const tensor_view<T>& to, index_t head, index_t first,
                   index_t count) const {
            read(batch_, head, first, count, own_.plain);
            for (index_t r = 0; r < count; ++r) {
                T* const row = of_features + r * own_.key_width;
                for (index_t c = 0; c < own_.key_width; c += lanes::size) {
                    const auto slope =
                        detail::differentiated(call_.feature_map, lanes::load(own_.plain + r * own_.key_width + c)).derivative;
                    (lanes::load(row + c) * slope).store(row + c);
                }
                write_row<false, T>(row, to.shape().channels, T{1}, T{0}, to.row(batch_, head, first + r), to.strides().channels);
            }
        }

        static T dot(const T* a, const T* b, index_t count) {
            simd::wide_sum<T> products;
            simd::for_each_part<T>(count,
                                   [&](index_t c, auto part, index_t) { products.add(part, lanes::load(a + c), lanes::load(b + c)); });
            return products.total();
        }
        /// to += factor from.
        static void add(T* to, T factor, const T* from, index_t count) {
            for (index_t c = 0; c < count; c += lanes::size) fma(lanes(factor), lanes::load(from + c), lanes::load(to + c)).store(to + c);
        }

        const call_type& call_;
        layout own_;
        index_t batch_, kv_head_;
        linear_order<T, P> order_;
        index_t queries_, seen_, first_ = 0; ///< of the queries; keys that some see; the first query that sees one
    };
};

} // namespace attn::kernel
