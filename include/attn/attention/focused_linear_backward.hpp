// The gradient of focused linear attention.
#pragma once

#include "../kernel/linear/focused_gradient.hpp"
#include "../kernel/linear/gradient.hpp"
#include "focused_linear_attention.hpp"
#include "local_backward.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <Pattern P, Scalar U, Scalar T>
struct detail::backward_of<focused_linear_attention<P, U>, T> {
    using kernel_type = kernel::linear_gradient<T, identity_features, P>;

    /// The memory of the gradient's features, behind the memory of the kernels.
    struct work {
        std::byte* kernels;
        kernel::focused_gradient<T, relu, U> queries, keys;

        work(scratch& memory, const auto& op, const input_shapes& s, index_t concurrency)
            : kernels(local_backward<T, U>(op).take_memory(memory, kernel_type::workspace_bytes(s, concurrency), s, op.output_shape(s),
                                                           concurrency)),
              queries(memory, s.queries, s.queries.heads, !op.scale.empty(), concurrency),
              keys(memory, s.keys, s.queries.heads, !op.scale.empty(), concurrency) {}
    };

    static std::size_t workspace_bytes(const auto& op, const input_shapes& s, index_t concurrency) {
        return bytes_for<work>(op, s, concurrency);
    }
    static void run(const auto& op, const inputs<T>& in, const auto&, const output_gradients<T>& d_out, const auto& wanted,
                    const execution& run) {
        if constexpr (std::same_as<T, U>) {
            scratch memory(run.workspace().bytes().data());
            work own(memory, op, shapes_of(in), run.concurrency());
            auto &queries = own.queries, &keys = own.keys;
            queries.prepare({in.queries, relu{}}, op.power, op.scale, run);
            keys.prepare({in.keys, relu{}, op.positional_encoding}, op.power, op.scale, run);

            const bool of_scale = wanted.scale.data(), of_encoding = wanted.positional_encoding.data();
            const bool of_queries = wanted.queries.data() || of_scale, of_keys = wanted.keys.data() || of_encoding || of_scale;
            const inputs<T> mapped{queries.features(), keys.features(), in.values, in.positions};
            const tensor_view<T> none;
            const input_gradients<T> of_features{of_queries ? queries.of_features() : none, of_keys ? keys.of_features() : none,
                                                 wanted.values};
            kernel_type()({mapped, d_out.values, of_features, identity_features{}, op.pattern, {}, {.eps = op.eps, .eps_per_key = true}},
                          run);

            const kernel::linear_order<T, P> order{in, op.pattern};
            const auto rows = in.queries.shape().tokens;
            const auto seen = [&](index_t b) { return rows == 0 ? 0 : order.seen_by(b, rows - 1); };
            const auto to_keys = wanted.keys.data() || !of_encoding ? wanted.keys : keys.of_features();
            if (of_queries) queries(wanted.queries, of_scale, [&](index_t b) { return seen(b) > 0 ? rows : 0; }, run);
            if (of_keys) keys(to_keys, of_scale, seen, run);
            if (of_scale) queries.write_of_scale(queries, keys, op.scale, wanted.scale, run);
            local_backward<T, U>(op).backward(in, op.pattern, d_out.values, to_keys, wanted, run);
        }
    }
};

} // namespace attn
