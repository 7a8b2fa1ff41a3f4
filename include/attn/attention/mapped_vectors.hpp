// The features of whole vectors of a call of linear attention.
#pragma once

#include "../kernel/linear/vector_features.hpp"
#include "feature_map.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// How linear attention makes features of whole vectors, in scratch memory: those of queries and of keys.
template <Scalar T, VectorFeatureMap F, Pattern P>
struct mapped_vectors {
    using map_type = typename kernel::map_of_rows<F, T>::type;
    using features_type = kernel::vector_features<T, map_type>;
    static constexpr bool causal = kernel::linear_order<T, P>::causal; ///< keys know of no others
    static constexpr bool shares_maxima = map_type::has_maxima && !causal;

    map_type map;
    index_t count; ///< of features
    features_type queries, keys;

    mapped_vectors(scratch& memory, const F& phi, const input_shapes& s, index_t concurrency)
        : map(memory, phi, s.keys.channels), count(phi.features(s.keys.channels)),
          queries(memory, map, s.queries, count, false, concurrency), keys(memory, map, s.keys, count, shares_maxima, concurrency) {}
    mapped_vectors(const mapped_vectors&) = delete; // they refer to the map

    /// key_maxima: of each head of keys, if they are known.
    void prepare(const inputs<T>& in, const P& pattern, const execution& run, std::span<const T> key_maxima = {}) {
        map.prepare();
        queries.read(in.queries, in.positions.first_query, false);
        keys.read(in.keys, in.positions.first_key, causal);
        if (key_maxima.empty()) keys.find_maxima(seen(in, pattern), run);
        else std::ranges::copy(key_maxima, keys.maxima().begin());
    }
    /// The shapes of a call on features.
    static input_shapes shapes(input_shapes s, index_t features) {
        s.queries.channels = s.keys.channels = features;
        return s;
    }
    /// Such a call, whose queries and keys nobody reads.
    inputs<T> unread(const inputs<T>& in) const {
        const auto of = [&](const stored_view<const T>& x) {
            auto s = x.shape();
            s.channels = count;
            return stored_view<const T>(x.data(), x.format(), s, x.strides());
        };
        return {of(in.queries), of(in.keys), in.values, in.positions};
    }

    /// The queries that see a key, of a batch entry: from the first of them on, all.
    static auto seeing(const inputs<T>& in, const P& pattern) {
        return [&in, &pattern](index_t b) {
            const kernel::linear_order<T, P> order{in, pattern};
            const auto end = in.queries.shape().tokens;
            index_t first = 0;
            for (index_t above = end; first < above;)
                if (const auto middle = first + (above - first) / 2; order.seen_by(b, middle) > 0) above = middle;
                else first = middle + 1;
            return kernel::taking_part{first, end};
        };
    }
    /// The keys that a query sees, of a batch entry.
    static auto seen(const inputs<T>& in, const P& pattern) {
        return [&in, &pattern](index_t b) {
            const auto rows = in.queries.shape().tokens;
            return kernel::taking_part{0, rows == 0 ? 0 : kernel::linear_order<T, P>{in, pattern}.seen_by(b, rows - 1)};
        };
    }
};

/// A kernel that reads features, called with the vectors that these are of.
template <class Kernel, class Mapped>
struct kernel_of_mapped {
    const Kernel& kernel;
    const Mapped& mapped;

    void operator()(const auto& in, const auto&... more) const { kernel(mapped.unread(in), more...); }
    void add_keys(const auto& in, const auto&... more) const { kernel.add_keys(mapped.unread(in), more...); }
};

} // namespace attn::detail
