// The operators of attn::compiled for one instruction set: this file is compiled once for each, and ATTN_COMPILED_RUN names its function.
#include <attn/attn.hpp>
#include <attn/compiled.hpp>

#include <cstring>

namespace attn::inline ATTN_INSTRUCTION_SET {
namespace {

using compiled_library::call, compiled_library::operation;

/// A value of the program's, whose type is named after another instruction set.
template <class V>
V received(const void* from) {
    static_assert(std::is_trivially_copyable_v<V>);
    alignas(V) std::byte bytes[sizeof(V)];
    std::memcpy(bytes, from, sizeof(V));
    return std::bit_cast<V>(bytes);
}

/// The program's executor.
struct caller {
    const call& c;

    index_t concurrency() const { return c.concurrency; }
    void parallel_for(index_t count, function_ref body) const {
        c.parallel_for(c.executor, count, &body, [](const void* work, index_t i) { (*static_cast<const function_ref*>(work))(i); });
    }
};

template <Scalar T>
void attend_with(const Attention auto& op, const call& c) {
    attend(op, received<inputs<T>>(c.in), received<outputs<T>>(c.out), caller{c});
}

template <Norm N>
void normalise_with(const N& norm, const call& c) {
    using T = typename N::scalar;
    normalise(norm, received<tensor_view<const T>>(c.in), received<tensor_view<T>>(c.out), caller{c});
}

template <Scalar T>
batch_norm<T> batch_norm_of(const compiled::batch_norm<T>& n) {
    return {
        .weight = n.weight, .bias = n.bias, .mean = n.mean, .variance = n.variance, .eps = n.eps, .batch_statistics = n.batch_statistics};
}

template <Scalar T>
void run_as(const call& c) {
    switch (c.asked) {
    case operation::softmax_attention: {
        const auto asked = received<compiled::softmax_attention<T>>(c.op);
        const auto with = [&]<class S, class P>(const S& score, const P& pattern) {
            attend_with<T>(softmax_attention<P, S>{.scale = asked.scale, .score = score, .pattern = pattern, .sinks = asked.sinks}, c);
        };
        return std::visit(with, asked.score, asked.pattern);
    }
    case operation::linear_attention: {
        const auto asked = received<compiled::linear_attention<T>>(c.op);
        const auto with = [&]<class P>(const P& pattern) {
            const linear_attention<elu_plus_one, P> op{
                .pattern = pattern, .normalise = asked.normalise, .eps = asked.eps, .scale = asked.scale};
            attend_with<T>(op, c);
        };
        return std::visit(with, asked.pattern);
    }
    case operation::linformer_attention: {
        const auto asked = received<compiled::linformer_attention<T>>(c.op);
        const linear_projection<T> keys{asked.key_matrix}, values{asked.value_matrix.data() ? asked.value_matrix : asked.key_matrix};
        return attend_with<T>(linformer_attention{.key_projection = keys, .value_projection = values, .scale = asked.scale}, c);
    }
    case operation::layer_norm: {
        const auto asked = received<compiled::layer_norm<T>>(c.op);
        return normalise_with(layer_norm<T>{.weight = asked.weight, .bias = asked.bias, .eps = asked.eps}, c);
    }
    case operation::rms_norm: {
        const auto asked = received<compiled::rms_norm<T>>(c.op);
        return normalise_with(rms_norm<T>{.weight = asked.weight, .eps = asked.eps}, c);
    }
    case operation::batch_norm: return normalise_with(batch_norm_of(received<compiled::batch_norm<T>>(c.op)), c);
    case operation::rep_batch_norm: {
        const auto asked = received<compiled::rep_batch_norm<T>>(c.op);
        return normalise_with(rep_batch_norm<T>{.batch = batch_norm_of(asked.batch), .eta = asked.eta}, c);
    }
    }
}

} // namespace
} // namespace attn

extern "C" void ATTN_COMPILED_RUN(const attn::compiled_library::call& c) {
    return c.is_double ? attn::run_as<double>(c) : attn::run_as<float>(c);
}
