// The usual operators and norms, compiled for the instruction sets of an architecture: a program that links attn::compiled calls the widest
// one that its processor runs, and its own files compile as fast as files without kernels do.
#pragma once

#include "core/gradients.hpp"
#include "core/inputs.hpp"
#include "parallel/executor.hpp"
#include "pattern/block_diagonal.hpp"
#include "pattern/causal.hpp"
#include "pattern/dilated_window.hpp"
#include "pattern/lengths.hpp"
#include "pattern/local.hpp"
#include "pattern/prefix.hpp"
#include "pattern/strided.hpp"
#include "score/additive_bias.hpp"
#include "score/alibi.hpp"
#include "score/kerple.hpp"
#include "score/soft_cap.hpp"

#include <algorithm>
#include <optional>
#include <type_traits>
#include <variant>

/// What crosses from a program to the library, which have different instruction sets: so this namespace is not named after one.
namespace attn::compiled_library {

/// An instruction set that the library holds: SSE2, AVX2 with FMA or AVX-512 on x86-64, Advanced SIMD on AArch64.
enum class target { sse2, avx2, avx512, neon };

/// The widest target that this processor runs.
target widest();

/// Whether this processor runs a target: none of another architecture.
bool runs(target);

/// The operators, then the norms.
enum class operation {
    softmax_attention,
    linear_attention,
    linformer_attention,
    lsh_attention,
    layer_norm,
    rms_norm,
    batch_norm,
    rep_batch_norm
};

/// A call. What it refers to of the program's has the library's layout, but is of other types: the library copies the bytes.
struct call {
    operation asked;
    bool is_double;
    const void* op;    ///< the operator or norm
    const void* in;    ///< its inputs, or a norm's x
    const void* saved; ///< of an operator's gradient: what the call wrote
    const void* d_out; ///< of a gradient: the gradient of what the call wrote; null asks for the call itself
    const void* out;   ///< the outputs; of a gradient, the gradients that are wanted
    void* executor;
    std::ptrdiff_t concurrency;
    /// The executor's parallel_for.
    void (*parallel_for)(void* executor, std::ptrdiff_t count, const void* work, void (*body)(const void* work, std::ptrdiff_t i));
};

/// Runs a call with a target's code. Throws std::invalid_argument if this processor does not run it.
void run(const call&, target);

} // namespace attn::compiled_library

/// Operators and norms for `attn::compiled`: the parameters of those of the same name in attn, which say what they mean.
namespace attn::inline ATTN_INSTRUCTION_SET::compiled {

using compiled_library::operation, compiled_library::runs, compiled_library::target, compiled_library::widest;

/// The patterns that the library holds: others need the headers.
using pattern =
    std::variant<dense, causal, attn::pattern::local, attn::pattern::both<causal, attn::pattern::local>, attn::pattern::strided,
                 attn::pattern::both<causal, attn::pattern::strided>, attn::pattern::either<attn::pattern::local, attn::pattern::strided>,
                 attn::pattern::both<causal, attn::pattern::either<attn::pattern::local, attn::pattern::strided>>, attn::pattern::lengths,
                 attn::pattern::both<causal, attn::pattern::lengths>, attn::pattern::prefix, attn::pattern::dilated_window,
                 attn::pattern::both<causal, attn::pattern::dilated_window>, attn::pattern::block_diagonal>;

/// The score functions that the library holds.
template <Scalar T>
using score = std::variant<identity_score, soft_cap, alibi, additive_bias<T>, kerple_logarithmic, kerple_power>;

/// The gradients of a score function's parameters: those of the operator's score function, or no_gradients if none are wanted.
template <Scalar T>
using score_gradients =
    std::variant<no_gradients, soft_cap::gradients<T>, alibi::gradients<T>, typename additive_bias<T>::template gradients<T>,
                 kerple_logarithmic::gradients<T>, kerple_power::gradients<T>>;

/// The gradients of softmax attention: of the inputs, of the sinks, (1, heads, 1, 1), and of the score function.
template <Scalar T>
struct softmax_gradients : input_gradients<T> {
    tensor_view<T> sinks = {};
    score_gradients<T> score = {};
};

/// Softmax attention of one of those patterns and score functions: see attn::softmax_attention.
template <Scalar T>
struct softmax_attention {
    static constexpr auto asked = operation::softmax_attention;

    std::optional<double> scale = {};
    compiled::score<T> score = {};
    compiled::pattern pattern = {};
    borrowed<const double> sinks = {};

    using gradients = softmax_gradients<T>;
};

/// Linear attention with elu_plus_one for its features: see attn::linear_attention.
template <Scalar T>
struct linear_attention {
    static constexpr auto asked = operation::linear_attention;

    std::variant<dense, causal, attn::pattern::lengths, attn::pattern::prefix> pattern = {};
    bool normalise = true;
    double eps = 1e-6;
    double scale = 1;

    using gradients = input_gradients<T>;
};

/// The gradients of Linformer: of the inputs and of the matrices; of one that keys and values share, in key_matrix.
template <Scalar T>
struct linformer_gradients : input_gradients<T> {
    tensor_view<T> key_matrix = {};
    tensor_view<T> value_matrix = {};
};

/// Linformer with learned matrices for its projections, one for both if the values have none of their own: see attn::linformer_attention.
template <Scalar T>
struct linformer_attention {
    static constexpr auto asked = operation::linformer_attention;

    tensor_view<const T> key_matrix;        ///< (1, kv_heads or 1, projected, m)
    tensor_view<const T> value_matrix = {}; ///< the same
    std::optional<double> scale = {};

    using gradients = linformer_gradients<T>;
};

/// LSH attention: see attn::lsh_attention.
template <Scalar T>
struct lsh_attention {
    static constexpr auto asked = operation::lsh_attention;

    tensor_view<const T> rotations; ///< (rounds, heads or 1, d_k, buckets / 2)
    std::optional<index_t> chunk = {};
    std::variant<dense, causal> pattern = {};
    std::optional<double> scale = {};

    using gradients = input_gradients<T>;
};

/// LayerNorm: see attn::layer_norm.
template <Scalar T>
struct layer_norm {
    static constexpr auto asked = operation::layer_norm;

    borrowed<const T> weight = {};
    borrowed<const T> bias = {};
    double eps = 1e-5;

    using gradients = norm_gradients<T>;
};

/// RMSNorm: see attn::rms_norm.
template <Scalar T>
struct rms_norm {
    static constexpr auto asked = operation::rms_norm;

    borrowed<const T> weight = {};
    double eps = 1e-5;

    using gradients = norm_gradients<T>;
};

/// BatchNorm, inference: see attn::batch_norm.
template <Scalar T>
struct batch_norm {
    static constexpr auto asked = operation::batch_norm;

    borrowed<const T> weight = {};
    borrowed<const T> bias = {};
    borrowed<const double> mean = {};
    borrowed<const double> variance = {};
    double eps = 1e-5;
    bool batch_statistics = false;

    using gradients = norm_gradients<T>;
};

/// RepBN, inference: see attn::rep_batch_norm.
template <Scalar T>
struct rep_batch_norm {
    static constexpr auto asked = operation::rep_batch_norm;

    batch_norm<T> batch = {};
    double eta = 1;

    using gradients = rep_norm_gradients<T>;
};

namespace detail {

template <Scalar T, class Op, class In, class Out, Executor E>
void run(const Op& op, const In& in, const Out& out, E& executor, target where, const void* d_out = nullptr, const void* saved = nullptr) {
    static_assert(std::is_trivially_copyable_v<Op> && std::is_trivially_copyable_v<In> && std::is_trivially_copyable_v<Out>);
    static_assert(std::is_trivially_copyable_v<saved_outputs<T>> && std::is_trivially_copyable_v<output_gradients<T>>);
    const auto parallel_for = [](void* e, index_t count, const void* work, void (*body)(const void*, index_t)) {
        static_cast<E*>(e)->parallel_for(count, [&](index_t i) { body(work, i); });
    };
    compiled_library::run({.asked = Op::asked,
                           .is_double = std::same_as<T, double>,
                           .op = &op,
                           .in = &in,
                           .saved = saved,
                           .d_out = d_out,
                           .out = &out,
                           .executor = const_cast<void*>(static_cast<const void*>(std::addressof(executor))),
                           .concurrency = attn::detail::concurrency_of(executor),
                           .parallel_for = parallel_for},
                          where);
}

/// An operator, not a norm.
template <class Op>
concept Operator = Op::asked <= operation::lsh_attention;

} // namespace detail

/// Calls the library's operator: softmax_attention, linear_attention, linformer_attention or lsh_attention. q, k, v and out may be stored
/// in 16 bits, as everywhere. Allocates its workspace for the call. Throws std::invalid_argument where attn's own call throws
/// attention_error, which is one, and if this processor does not run `where`.
template <template <class> class Op, Scalar T, Executor E = const sequential>
    requires detail::Operator<Op<T>>
void attend(const Op<T>& op, const std::type_identity_t<inputs<T>>& in, const std::type_identity_t<outputs<T>>& out, E&& executor = {},
            target where = widest()) {
    detail::run<T>(op, in, out, executor, where);
}

/// The gradient of a loss with respect to what such a call read, from what it wrote (`saved`) and the gradient of the loss with respect to
/// that (`d_out`): see attn::backward. What has no memory in `wanted` is not computed. Allocates and throws as the call does; also refused
/// are gradients in `wanted` of another score function than the operator's, and of a matrix that it has not.
template <template <class> class Op, Scalar T, Executor E = const sequential>
    requires detail::Operator<Op<T>>
void backward(const Op<T>& op, const std::type_identity_t<inputs<T>>& in, const std::type_identity_t<saved_outputs<T>>& saved,
              const std::type_identity_t<output_gradients<T>>& d_out, const typename Op<T>::gradients& wanted, E&& executor = {},
              target where = widest()) {
    detail::run<T>(op, in, wanted, executor, where, &d_out, &saved);
}

/// Calls the library's norm: layer_norm, rms_norm, batch_norm or rep_batch_norm. As above; out may be x itself.
template <template <class> class Norm, Scalar T, Executor E = const sequential>
    requires(!detail::Operator<Norm<T>>)
void normalise(const Norm<T>& norm, const std::type_identity_t<stored_view<const T>>& x, const std::type_identity_t<stored_view<T>>& out,
               E&& executor = {}, target where = widest()) {
    detail::run<T>(norm, x, out, executor, where);
}

/// The gradient of a loss with respect to what such a call read, from x and the gradient of the loss with respect to what it wrote. As
/// above.
template <template <class> class Norm, Scalar T, Executor E = const sequential>
    requires(!detail::Operator<Norm<T>>)
void backward(const Norm<T>& norm, const std::type_identity_t<tensor_view<const T>>& x,
              const std::type_identity_t<tensor_view<const T>>& d_out, const typename Norm<T>::gradients& wanted, E&& executor = {},
              target where = widest()) {
    detail::run<T>(norm, x, wanted, executor, where, &d_out);
}

} // namespace attn::compiled
