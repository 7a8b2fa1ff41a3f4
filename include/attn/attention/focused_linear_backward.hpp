// The gradient of focused linear attention.
#pragma once

#include "../kernel/linear/focused_gradient.hpp"
#include "../kernel/linear/gradient.hpp"
#include "focused_linear_attention.hpp"
#include "local_backward.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

template <Pattern P, Scalar U>
inline constexpr bool detail::includes_backward<focused_linear_attention<P, U>> = true;

/// The memory of the gradient's features, behind the memory of the kernels.
template <Pattern P, Scalar U>
template <class T>
struct focused_linear_attention<P, U>::gradient_work {
    using features = kernel::focused_gradient<T, relu, U>;
    std::byte* kernels;
    features queries, keys;

    gradient_work(detail::scratch& memory, const focused_linear_attention& op, const input_shapes& s, index_t concurrency)
        : kernels(detail::local_backward<T, U>(op).take_memory(
              memory, kernel::linear_gradient<T, identity_features, P>::workspace_bytes(s, concurrency), s, op.output_shape(s),
              concurrency)),
          queries(memory, s.queries, s.queries.heads, !op.scale.empty(), concurrency),
          keys(memory, s.keys, s.queries.heads, !op.scale.empty(), concurrency) {}
};

template <Pattern P, Scalar U>
template <Scalar T>
std::size_t focused_linear_attention<P, U>::gradient_bytes(const input_shapes& s, index_t concurrency) const {
    return detail::bytes_for<gradient_work<T>>(*this, s, concurrency);
}

template <Pattern P, Scalar U>
template <Scalar T>
void focused_linear_attention<P, U>::backward(const inputs<T>& in, const saved_outputs<T>&, const output_gradients<T>& d_out,
                                              const gradients<T>& wanted, const execution& run) const {
    if constexpr (std::same_as<T, U>) {
        detail::scratch memory(run.workspace().bytes().data());
        gradient_work<T> work(memory, *this, shapes_of(in), run.concurrency());
        auto &queries = work.queries, &keys = work.keys;
        queries.prepare({in.queries, relu{}}, power, scale, run);
        keys.prepare({in.keys, relu{}, positional_encoding}, power, scale, run);

        const bool of_scale = wanted.scale.data(), of_encoding = wanted.positional_encoding.data();
        const bool of_queries = wanted.queries.data() || of_scale, of_keys = wanted.keys.data() || of_encoding || of_scale;
        const inputs<T> mapped{queries.features(), keys.features(), in.values, in.positions};
        const tensor_view<T> none;
        const input_gradients<T> of_features{of_queries ? queries.of_features() : none, of_keys ? keys.of_features() : none, wanted.values};
        kernel::linear_gradient<T, identity_features, P>()(
            {mapped, d_out.values, of_features, identity_features{}, pattern, {}, {.eps = eps, .eps_per_key = true}}, run);

        const kernel::linear_order<T, P> order{in, pattern};
        const auto rows = in.queries.shape().tokens;
        const auto seen = [&](index_t b) { return rows == 0 ? 0 : order.seen_by(b, rows - 1); };
        const auto to_keys = wanted.keys.data() || !of_encoding ? wanted.keys : keys.of_features();
        if (of_queries) queries(wanted.queries, of_scale, [&](index_t b) { return seen(b) > 0 ? rows : 0; }, run);
        if (of_keys) keys(to_keys, of_scale, seen, run);
        if (of_scale) queries.write_of_scale(queries, keys, scale, wanted.scale, run);
        detail::local_backward<T, U>(*this).backward(in, pattern, d_out.values, to_keys, wanted, run);
    }
}

} // namespace attn
