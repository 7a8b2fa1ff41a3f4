// The gradient of linear attention.
#pragma once

#include "../kernel/linear/gradient.hpp"
#include "../kernel/linear/vector_gradient.hpp"
#include "backward.hpp"
#include "linear_attention.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <FeatureMap F, Pattern P, Scalar T>
struct detail::backward_of<linear_attention<F, P>, T> {
    using kernel_type = kernel::linear_gradient<T, F, P>;

    static std::size_t workspace_bytes(const auto&, const input_shapes& s, index_t concurrency) {
        return kernel_type::workspace_bytes(s, concurrency);
    }
    static void run(const auto& op, const inputs<T>& in, const auto&, const output_gradients<T>& d_out, const auto& wanted,
                    const execution& run) {
        kernel_type()({in, d_out.values, wanted, op.feature_map, op.pattern, {}, op.normalisation()}, run);
    }
};

namespace detail {

/// Of whole vectors: as of features that are there already, and through the map.
template <VectorFeatureMap F, Pattern P, Scalar T>
struct backward_of<linear_attention<F, P>, T> {
    using kernel_type = kernel::linear_gradient<T, identity_features, P>;

    /// The memory of the features, behind the memory of the kernel.
    struct work {
        using gradient_type = kernel::vector_gradient<T, typename mapped_vectors<T, F, P>::map_type>;

        std::byte* kernel;
        mapped_vectors<T, F, P> mapped;
        gradient_type queries, keys;

        work(scratch& memory, const auto& op, const input_shapes& s, index_t concurrency)
            : kernel(memory.take<std::byte>(static_cast<index_t>(kernel_type::workspace_bytes(
                  mapped_vectors<T, F, P>::shapes(s, op.feature_map.features(s.keys.channels)), concurrency)))),
              mapped(memory, op.feature_map, s, concurrency), queries(memory, mapped.queries, s.queries, mapped.count, concurrency),
              keys(memory, mapped.keys, s.keys, mapped.count, concurrency) {}
    };

    static std::size_t workspace_bytes(const auto& op, const input_shapes& s, index_t concurrency) {
        return bytes_for<work>(op, s, concurrency);
    }
    static void run(const auto& op, const inputs<T>& in, const auto&, const output_gradients<T>& d_out, const auto& wanted,
                    const execution& run) {
        scratch memory(run.workspace().bytes().data());
        work own(memory, op, shapes_of(in), run.concurrency());
        const auto seeing = own.mapped.seeing(in, op.pattern);
        const auto seen = own.mapped.seen(in, op.pattern);
        own.mapped.prepare(in, op.pattern, run);
        own.queries.make(seeing, run);
        own.keys.make(seen, run);
        const inputs<T> mapped{own.queries.features(), own.keys.features(), in.values, in.positions};
        const tensor_view<T> none;
        const input_gradients<T> of_features{wanted.queries.data() ? own.queries.of_features() : none,
                                             wanted.keys.data() ? own.keys.of_features() : none, wanted.values};
        kernel_type()({mapped, d_out.values, of_features, identity_features{}, op.pattern, {}, op.normalisation()}, run);
        if (wanted.queries.data()) own.queries.pull_back(seeing, wanted.queries, run);
        if (wanted.keys.data()) own.keys.pull_back(seen, wanted.keys, run);
    }
};

} // namespace detail

} // namespace attn
