// A linear layer: every token row times a matrix.
#pragma once

#include "../attention/products.hpp"
#include "../kernel/gemm/matrix_product.hpp"
#include "../norm/fold.hpp"
#include "backward.hpp"

#include <array>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A linear layer: weight and bias, applied to every token.
/// For each token row x (inputs):
///     out = W x + b (+ residual)
/// weight: W (1, 1, outputs, inputs), of any strides, and of a linear of float perhaps stored in 16 bits: the result, and the gradient, are
/// those of the widened weight, bit by bit, and it is widened as its blocks are packed. bias: b (outputs), or empty. products:
/// bf16_products{} rounds W and x. Time: 2 inputs outputs flops a token. Memory: packed blocks, a quarter of a megabyte a thread. A row's
/// bits do not depend on the other rows.
template <Scalar T>
struct linear {
    using scalar = T;
    static constexpr std::string_view name = "linear";
    static constexpr bool in_place = false, moves_statistics = false;

    stored_view<const T> weight;
    borrowed<const T> bias = {};
    products_of<T> products = {}; ///< what operands of products are rounded to

    /// Channels that go in.
    index_t inputs() const { return weight.shape().channels; }
    /// Channels that come out.
    index_t outputs() const { return weight.shape().tokens; }
    /// Weight and bias, as `fold` reads them.
    linear_view<const T> view() const { return {weight, bias}; }

    /// Throws shape_error, in the name of a larger layer, unless the matrix has such sizes.
    void check(std::string_view operation, std::string_view argument, index_t needed_outputs, index_t needed_inputs) const {
        detail::check_linear(operation, argument, view());
        if (inputs() != needed_inputs || outputs() != needed_outputs)
            detail::raise(shape_error(operation, argument, "has a weight of shape ", weight.shape(), ", but ", needed_outputs,
                                      " outputs of ", needed_inputs, " inputs are needed"));
    }
    void check(const layer_inputs<T>& in) const {
        detail::check_linear(name, "weight", view());
        detail::check_tokens(name, "tokens", in.tokens, inputs());
        detail::check_no_context(name, in);
    }
    void check_apart(const output_memory& out) const {
        out.require_apart("the weight of a linear", weight);
        out.require_apart("the bias of a linear", bias);
    }
    shape output_shape(const shape& tokens) const { return {tokens.batch, 1, tokens.tokens, outputs()}; }
    std::size_t workspace_bytes(const shape& tokens, const shape&, index_t concurrency) const {
        return products.with_operand([&]<class E>(std::type_identity<E>) {
            return kernel::matrix_product<T, E>(tokens.batch * tokens.tokens, inputs(), outputs()).workspace_bytes(concurrency);
        });
    }
    void forward(const layer_inputs<T>& in, const tensor_view<T>& out, const execution& run) const {
        const auto &x = in.tokens, &residual = in.residual;
        const detail::row_matrices matrices(x.shape(), x, residual, out);
        products.with_operand([&]<class E>(std::type_identity<E>) {
            const kernel::matrix_product<T, E> product(matrices.rows, inputs(), outputs());
            for (index_t b = 0; b < matrices.count; ++b) {
                const auto to = out.rows(b, 0);
                const auto start = residual.data() ? residual.rows(b, 0) : row_block<const T>{bias.empty() ? nullptr : bias.data(), 0, 1};
                product(x.rows(b, 0), weight.rows(0, 0).transposed(), {start.data, start.row_stride, 1}, {to.data, to.row_stride, 1},
                        run.workspace().bytes().data(), run);
            }
        });
        if (!residual.data() || bias.empty()) return;
        detail::for_each_row(out, run, [&](T* row, index_t, index_t) { detail::add_rows(row, bias.data(), row, outputs()); });
    }

    /// The gradients of the weight, (1, 1, outputs, inputs), and the bias, (outputs).
    struct gradients {
        tensor_view<T> weight = {}; ///< channels side by side
        std::span<T> bias = {};     ///< also where the layer has none
    };
    void for_each_gradient(const layer_inputs<T>&, const gradients& wanted, const auto& visit) const {
        if (products.rounded()) detail::raise(argument_error(name, "products", "are of numbers that are rounded, which has no gradient"));
        visit("wanted.weight", wanted.weight, weight.shape(), true);
        visit("wanted.bias", detail::as_row(wanted.bias), shape{.tokens = 1, .channels = outputs()}, true);
    }
    /// Bytes that the gradient needs kept: none, for it needs the tokens alone.
    std::size_t kept_bytes(const shape&, const shape&) const { return 0; }
    void forward(const layer_inputs<T>& in, const tensor_view<T>& out, std::byte*, const execution& run) const { forward(in, out, run); }
    std::size_t backward_workspace_bytes(const shape& tokens, const shape&, index_t concurrency) const {
        return gradient_products(tokens.batch * tokens.tokens, *this).workspace_bytes(concurrency);
    }
    /// The gradients of a linear layer:
    ///     d x = W^T d_out,      d W = sum over tokens of d_out x^T,      d b = sum over tokens of d_out
    void backward(const layer_inputs<T>& in, const std::byte*, const tensor_view<const T>& d_out, const layer_gradients<linear>& wanted,
                  const execution& run) const {
        backward(in.tokens, d_out, wanted.tokens, false, wanted.parameters, run);
    }

    /// The gradient of the layer; that of the tokens is added to what is there if it `adds`.
    void backward(const tensor_view<const T>& x, const tensor_view<const T>& d_out, const tensor_view<T>& of_tokens, bool adds,
                  const gradients& wanted, const execution& run) const {
        const detail::row_matrices matrices(x.shape(), x, d_out, of_tokens);
        const gradient_products product(matrices.rows, *this);
        auto* const memory = run.workspace().bytes().data();
        const auto add = [&](const auto& factors, const auto& a, const auto& b, const row_block<T>& sums) {
            factors(a, b, {sums.data, sums.row_stride, 1}, {sums.data, sums.row_stride, 1}, memory, run);
        };
        static constexpr T one = 1;
        for (index_t o = 0; wanted.weight.data() && o < outputs(); ++o) std::fill_n(wanted.weight.row(0, 0, o), inputs(), T{0});
        std::ranges::fill(wanted.bias, T{0});
        for (index_t b = 0; b < matrices.count; ++b) {
            if (of_tokens.data()) {
                const auto to = of_tokens.rows(b, 0);
                product.of_tokens(d_out.rows(b, 0), weight.rows(0, 0), {adds ? to.data : nullptr, to.row_stride, 1},
                                  {to.data, to.row_stride, 1}, memory, run);
            }
            if (wanted.weight.data()) add(product.of_weight, d_out.rows(b, 0).transposed(), x.rows(b, 0), wanted.weight.rows(0, 0));
            if (!wanted.bias.empty())
                add(product.of_bias, row_block<const T>{&one, 0, 0}, d_out.rows(b, 0), row_block<T>{wanted.bias.data(), 0, 1});
        }
    }

private:
    /// The matrix products of the gradient on so many tokens at a time.
    struct gradient_products {
        kernel::matrix_product<T> of_tokens, of_weight, of_bias;

        gradient_products(index_t rows, const linear& l)
            : of_tokens(rows, l.outputs(), l.inputs()), of_weight(l.outputs(), rows, l.inputs()), of_bias(1, rows, l.outputs()) {}
        std::size_t workspace_bytes(index_t concurrency) const {
            return std::max(
                {of_tokens.workspace_bytes(concurrency), of_weight.workspace_bytes(concurrency), of_bias.workspace_bytes(concurrency)});
        }
    };
};

/// Deduces a linear of its weight's scalar type; of a 16-bit one, float.
template <StoredTensor W, class... Others>
linear(const W&, const Others&...) -> linear<detail::computed_t<W>>;

/// The linears that one holds side by side, of the same inputs: views of its weight's rows, one after the other, and of its bias.
///     const auto [q, k, v] = split_outputs<3>(weights.get_linear<float>("attn.qkv"));
/// outputs: of each; as many for all if none are given. Throws shape_error unless they add up to those of the one.
template <std::size_t count, Scalar T>
[[nodiscard]] std::array<linear<T>, count> split_outputs(const linear<T>& all, std::array<index_t, count> outputs = {}) {
    const auto given = all.outputs(), parts = static_cast<index_t>(count);
    if (outputs == std::array<index_t, count>{} && given % parts == 0) outputs.fill(given / parts);
    index_t left = given;
    for (const auto part : outputs) left = part < 0 || part > left ? -1 : left - part;
    if (left != 0) detail::raise(shape_error("split_outputs", "outputs", "do not add up to the ", given, " of the linear"));
    std::array<linear<T>, count> result;
    index_t first = 0;
    for (std::size_t i = 0; i < count; first += outputs[i++]) {
        result[i] = {.weight = all.weight.slice({.tokens = {first, outputs[i]}}), .products = all.products};
        if (!all.bias.empty())
            result[i].bias = std::span<const T>(all.bias).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(outputs[i]));
    }
    return result;
}

} // namespace attn
