// The usual operators and norms, compiled for the instruction sets of an architecture: a program that links attn::compiled calls the widest
// one that its processor runs, and its own files compile as fast as files without kernels do.
#pragma once

#include "core/inputs.hpp"
#include "parallel/executor.hpp"
#include "pattern/causal.hpp"
#include "pattern/local.hpp"
#include "pattern/strided.hpp"
#include "score/additive_bias.hpp"
#include "score/alibi.hpp"
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
enum class operation { softmax_attention, linear_attention, linformer_attention, layer_norm, rms_norm, batch_norm, rep_batch_norm };

/// A call. The program's operator, inputs and outputs have the library's layout, but are other types: the library copies their bytes.
struct call {
    operation asked;
    bool is_double;
    const void *op, *in, *out;
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
                 attn::pattern::both<causal, attn::pattern::either<attn::pattern::local, attn::pattern::strided>>>;

/// The score functions that the library holds.
template <Scalar T>
using score = std::variant<identity_score, soft_cap, alibi, additive_bias<T>>;

/// Softmax attention of one of those patterns and score functions: see attn::softmax_attention.
template <Scalar T>
struct softmax_attention {
    static constexpr auto asked = operation::softmax_attention;

    std::optional<double> scale = {};
    compiled::score<T> score = {};
    compiled::pattern pattern = {};
    borrowed<const double> sinks = {};
};

/// Linear attention with elu_plus_one for its features: see attn::linear_attention.
template <Scalar T>
struct linear_attention {
    static constexpr auto asked = operation::linear_attention;

    std::variant<dense, causal> pattern = {};
    bool normalise = true;
    double eps = 1e-6;
    double scale = 1;
};

/// Linformer with learned matrices for its projections, one for both if the values have none of their own: see attn::linformer_attention.
template <Scalar T>
struct linformer_attention {
    static constexpr auto asked = operation::linformer_attention;

    tensor_view<const T> key_matrix;        ///< (1, kv_heads or 1, projected, m)
    tensor_view<const T> value_matrix = {}; ///< the same
    std::optional<double> scale = {};
};

/// LayerNorm: see attn::layer_norm.
template <Scalar T>
struct layer_norm {
    static constexpr auto asked = operation::layer_norm;

    borrowed<const T> weight = {};
    borrowed<const T> bias = {};
    double eps = 1e-5;
};

/// RMSNorm: see attn::rms_norm.
template <Scalar T>
struct rms_norm {
    static constexpr auto asked = operation::rms_norm;

    borrowed<const T> weight = {};
    double eps = 1e-5;
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
};

/// RepBN, inference: see attn::rep_batch_norm.
template <Scalar T>
struct rep_batch_norm {
    static constexpr auto asked = operation::rep_batch_norm;

    batch_norm<T> batch = {};
    double eta = 1;
};

namespace detail {

template <Scalar T, class Op, class In, class Out, Executor E>
void run(const Op& op, const In& in, const Out& out, E& executor, target where) {
    static_assert(std::is_trivially_copyable_v<Op> && std::is_trivially_copyable_v<In> && std::is_trivially_copyable_v<Out>);
    const auto parallel_for = [](void* e, index_t count, const void* work, void (*body)(const void*, index_t)) {
        static_cast<E*>(e)->parallel_for(count, [&](index_t i) { body(work, i); });
    };
    compiled_library::run({.asked = Op::asked,
                           .is_double = std::same_as<T, double>,
                           .op = &op,
                           .in = &in,
                           .out = &out,
                           .executor = const_cast<void*>(static_cast<const void*>(std::addressof(executor))),
                           .concurrency = attn::detail::concurrency_of(executor),
                           .parallel_for = parallel_for},
                          where);
}

} // namespace detail

/// Calls the library's operator: softmax_attention, linear_attention or linformer_attention. Allocates its workspace for the call. Throws
/// std::invalid_argument where attn's own call throws attention_error, which is one, and if this processor does not run `where`.
template <template <class> class Op, Scalar T, Executor E = const sequential>
    requires(Op<T>::asked <= operation::linformer_attention)
void attend(const Op<T>& op, const std::type_identity_t<inputs<T>>& in, const std::type_identity_t<outputs<T>>& out, E&& executor = {},
            target where = widest()) {
    detail::run<T>(op, in, out, executor, where);
}

/// Calls the library's norm: layer_norm, rms_norm, batch_norm or rep_batch_norm. As above; out may be x itself.
template <template <class> class Norm, Scalar T, Executor E = const sequential>
    requires(Norm<T>::asked >= operation::layer_norm)
void normalise(const Norm<T>& norm, const std::type_identity_t<tensor_view<const T>>& x, const std::type_identity_t<tensor_view<T>>& out,
               E&& executor = {}, target where = widest()) {
    detail::run<T>(norm, x, out, executor, where);
}

} // namespace attn::compiled
