// What a norm is, and the front door through which all of them are called.
#pragma once

#include "../core/output_memory.hpp"
#include "../parallel/executor.hpp"

#include <cmath>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A const value that maps token rows to token rows of the same shape (batch, heads, tokens, channels): inference.
/// - `scalar`, `name`: what it computes in, and what errors call it.
/// - `check(shape)`: throws attention_error if its parameters do not fit tensors of that shape. Reads no element.
/// - `check_apart(out)`: throws, by out.require_apart, if an output overlaps what the norm refers to; nothing if it refers to nothing.
/// - `workspace_bytes(shape, concurrency, narrow = false)`: the scratch memory that `forward` needs; narrow: where tokens, or what they
///   become, are stored in 16 bits.
/// - `forward(x, out, run)`: computes. Everything has been checked; it allocates nothing and writes only to `out`, which may be `x`.
/// - `moves_statistics`: whether `forward` is a step of training that moves statistics, which is not done in place, nor by two threads.
/// Training is another call, `train`, of the norms that have it; nothing here changes any state.
template <class N>
concept Norm = requires(const N& norm, const shape& s, const stored_view<const typename N::scalar>& x,
                        const stored_view<typename N::scalar>& out, const output_memory& memory, const execution& run) {
    requires Scalar<typename N::scalar>;
    { N::name } -> std::convertible_to<std::string_view>;
    norm.check(s);
    { N::moves_statistics } -> std::convertible_to<bool>;
    norm.check_apart(memory);
    { norm.workspace_bytes(s, index_t{1}) } -> std::same_as<std::size_t>;
    { norm.workspace_bytes(s, index_t{1}, true) } -> std::same_as<std::size_t>;
    norm.forward(x, out, run);
};

namespace detail {

/// Where a row of a tensor is, of rows numbered over batch, heads and tokens.
struct row_place {
    index_t batch, head, token;

    constexpr row_place(const shape& s, index_t row)
        : batch(row / (s.heads * s.tokens)), head(row / s.tokens % s.heads), token(row % s.tokens) {}
};

/// Parts that rows are summed in, one after the other: enough for many threads, few enough to be summed at the end.
struct row_parts {
    index_t rows, count;

    explicit constexpr row_parts(const shape& s) : rows(s.batch * s.heads * s.tokens), count(std::clamp<index_t>(rows / 16, 1, 64)) {}
    /// Calls f(row) for the rows of a part.
    void for_each_row(index_t part, const auto& f) const {
        for (auto r = rows * part / count; r < rows * (part + 1) / count; ++r) f(r);
    }
};

/// An input and an output: of one shape, and either exactly one memory, where that is allowed, or apart.
template <class T>
void check_same_or_apart(std::string_view operation, const stored_view<const T>& x, const stored_view<T>& out, bool in_place_allowed) {
    if (out.shape() != x.shape()) detail::raise(shape_error(operation, "out", "has shape ", out.shape(), ", but x has ", x.shape()));
    check_writable(operation, "out", out);
    if (in_place_allowed && out.data() == x.data() && out.strides() == x.strides() && out.format() == x.format()) return;
    if (overlap(out, x)) {
        detail::raise(shape_error(operation, "out", "of shape ", out.shape(), " overlaps x of shape ", x.shape(),
                                  (in_place_allowed ? " without being the same rows" : ": training is not done in place")));
    }
}

/// The rows that a norm reads and writes: of one shape, and either exactly one memory, where that is allowed, or apart.
template <class T>
void check_rows(std::string_view operation, const stored_view<const T>& x, const stored_view<T>& out, bool in_place_allowed) {
    check_rows(operation, "x", x);
    check_rows(operation, "out", out);
    check_same_or_apart<T>(operation, x, out, in_place_allowed);
}

/// Throws shape_error unless a parameter has one number per channel, or none.
template <class T>
void check_parameter(std::string_view operation, std::string_view argument, std::span<const T> parameter, const shape& x) {
    if (!parameter.empty() && std::ssize(parameter) != x.channels)
        detail::raise(shape_error(operation, argument, "has ", parameter.size(), " entries, but x has shape ", x));
}

inline void check_eps(std::string_view operation, double eps) {
    if (!(eps > 0) || std::isinf(eps)) detail::raise(argument_error(operation, "eps", "is ", eps, ", but must be above 0 and finite"));
}

} // namespace detail

/// Bytes of workspace that `normalise` needs for tokens of that shape with such an executor or execution, if they, and what they become,
/// are stored in S. Throws shape_error if no tensor has that shape.
template <Storage S, Norm N>
    requires std::same_as<computed_in<S>, typename N::scalar>
std::size_t workspace_bytes(const N& norm, const shape& x, const detail::call_execution& run = {}) {
    detail::check_shape<S>(N::name, "x", x);
    return norm.workspace_bytes(x, run.concurrency(), Narrow<S>);
}

/// Normalises tokens: out = norm(x) for x and out (batch, heads, tokens, channels), of any row strides, channels side by side; out may be
/// x itself. Where the norm computes in float, each may be stored in 16 bits: x is widened first, out is rounded to the nearest last.
/// Checks everything once, then computes; `run` as in `attend`. The result is the same, bit by bit, for every executor, number of threads
/// and strides.
/// Throws attention_error, before anything is read or written, naming norm, argument and shapes: shapes or parameters that do not fit,
/// channels apart, an out that overlaps the parameters, or x but is not x, a given workspace too small.
template <Norm N>
void normalise(const N& norm, const detail::read_stored<typename N::scalar>& x, const stored_view<typename N::scalar>& out,
               const detail::call_execution& run = {}) {
    detail::check_rows<typename N::scalar>(N::name, x, out, true);
    norm.check(x.shape());
    norm.check_apart(output_memory(N::name, "out", out));
    detail::with_storage(
        x.is_narrow() ? stored_view<const typename N::scalar>(x) : stored_view<const typename N::scalar>(out),
        [&]<Storage S>(std::type_identity<S>) { run.reserve(N::name, "x", x.shape(), workspace_bytes<S>(norm, x.shape(), run)); });
    norm.forward(x, out, run);
}

/// The norm of x, to a new tensor of what the norm computes in: see normalise(norm, x, out, run).
template <Norm N>
[[nodiscard]] tensor<typename N::scalar> normalise(const N& norm, const detail::read_stored<typename N::scalar>& x,
                                                   const detail::call_execution& run = {}) {
    detail::check_rows(N::name, "x", x);
    tensor<typename N::scalar> out(x.shape());
    normalise(norm, x, stored_view<typename N::scalar>(out), run);
    return out;
}

/// No norm: out = x, for x (batch, heads, tokens, channels). A transformer_block with it reads its tokens where they are.
template <Scalar T>
struct identity_norm {
    using scalar = T;
    static constexpr std::string_view name = "identity_norm";
    static constexpr bool moves_statistics = false;

    void check(const shape&) const {}
    void check_apart(const output_memory&) const {}
    std::size_t workspace_bytes(const shape&, index_t, bool = false) const { return 0; }
    void forward(const stored_view<const T>& x, const stored_view<T>& out, const execution&) const {
        if (out.data() == x.data()) return;
        detail::for_each_number(x.shape(), [&](index_t b, index_t h, index_t i, index_t c) { out(b, h, i, c) = x(b, h, i, c); });
    }
};

} // namespace attn
