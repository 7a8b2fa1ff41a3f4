// BatchNorm: every channel to mean 0 and variance 1, over the tokens.
#pragma once

#include "batch_gradients.hpp"
#include "batch_norm_statistics.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// BatchNorm: channels are normalised by their mean and variance over tokens.
/// For a tensor x (batch, heads, tokens, channels), each channel on its own, over all of batch, heads and tokens:
///     out = (x - mean) / sqrt(variance + eps) * weight + bias
/// Inference (`normalise`): mean and variance are the given ones, (channels) each; with `batch_statistics` instead of them, those of x
/// (biased variance). A norm that has neither is refused: what it gave would depend on what else is in the batch.
/// Training (`train`): those of the batch, with the biased variance; the running ones move, with the unbiased variance.
/// weight, bias: (channels) each, or empty (weight 1, bias 0). The operator refers to its parameters; their owner keeps them.
/// In inference with statistics every number stands for itself: NaN stays where it is. A common offset of a channel costs no digits.
/// Time: one read and one write of the tensor, and one read more where statistics are taken. See `normalise` and `train` for errors.
/// Ioffe and Szegedy 2015, "Batch Normalization".
template <Scalar T>
struct batch_norm {
    using scalar = T;
    static constexpr std::string_view name = "batch_norm";
    static constexpr bool moves_statistics = false, adds_bias = true;

    borrowed<const T> weight = {};
    borrowed<const T> bias = {};
    borrowed<const double> mean = {};
    borrowed<const double> variance = {};
    double eps = 1e-5;
    std::optional<double> momentum = 0.1; ///< of training; none: running statistics are the mean over all batches
    bool batch_statistics = false;        ///< of inference, for a norm that keeps no running statistics: take those of x

    void check(const shape& x) const { check(name, x); }
    void check_apart(const output_memory& out) const {
        out.require_apart("weight", weight);
        out.require_apart("bias", bias);
        out.require_apart("mean", mean);
        out.require_apart("variance", variance);
    }
    std::size_t workspace_bytes(const shape& x, index_t concurrency, bool narrow = false) const {
        return workspace_bytes(x, concurrency, narrow, mean.empty());
    }
    void forward(const stored_view<const T>& x, const stored_view<T>& out, const execution& run) const { forward(x, out, run, 0); }

    using gradients = norm_gradients<T>;
    std::size_t backward_workspace_bytes(const shape& x, index_t concurrency) const {
        return detail::batch_gradients<T>::workspace_bytes(x, concurrency);
    }
    /// The gradient of inference: through the statistics where they are those of x.
    void backward(const tensor_view<const T>& x, const tensor_view<const T>& d_out, const norm_gradients<T>& wanted,
                  const execution& run) const {
        backward(x, d_out, {wanted, {}}, run, 0);
    }
    /// The gradient of BN(x) + eta x.
    void backward(const tensor_view<const T>& x, const tensor_view<const T>& d_out, const rep_norm_gradients<T>& wanted,
                  const execution& run, double eta) const {
        detail::batch_gradients<T>()(*this, {x, d_out, wanted, {}, eta, 1, 0, !mean.empty()}, run);
    }

    /// The map of a channel that inference with statistics applies; eta is RepBN's.
    channel_map map_of(index_t c, double eta = 0) const {
        const auto i = static_cast<std::size_t>(c);
        return map_of(c, mean[i], variance[i], eta);
    }
    /// What the norm does to channel c with such statistics, plus eta times the input.
    channel_map map_of(index_t c, double its_mean, double its_variance, double eta) const {
        const auto i = static_cast<std::size_t>(c);
        return batch_norm_map(its_mean, its_variance, weight.empty() ? 1 : static_cast<double>(weight[i]),
                              bias.empty() ? 0 : static_cast<double>(bias[i]), eps, eta);
    }

    void check(std::string_view operation, const shape& x) const {
        check_parameters(operation, x);
        if (x.channels > 0 && mean.empty() && !batch_statistics)
            detail::raise(argument_error(
                operation, "mean",
                "is missing, and variance: inference needs running statistics, or batch_statistics = true to take those of x"));
        if (!mean.empty() && batch_statistics)
            detail::raise(argument_error(operation, "batch_statistics", "is true, but mean and variance are given too"));
    }
    /// Throws attention_error unless the parameters fit: all that is checked for training, which needs no statistics.
    void check_parameters(std::string_view operation, const shape& x) const {
        detail::check_parameter(operation, "weight", weight, x);
        detail::check_parameter(operation, "bias", bias, x);
        detail::check_parameter(operation, "mean", mean, x);
        detail::check_parameter(operation, "variance", variance, x);
        if (mean.size() != variance.size())
            detail::raise(argument_error(operation, mean.empty() ? "mean" : "variance",
                                         "is missing: mean and variance are given together, or neither"));
        detail::check_eps(operation, eps);
        if (momentum && !(*momentum >= 0 && *momentum <= 1))
            detail::raise(argument_error(operation, "momentum", "is ", *momentum, ", but must lie between 0 and 1"));
    }
    static std::size_t workspace_bytes(const shape& x, index_t concurrency, bool narrow, bool takes_statistics) {
        detail::scratch counted;
        detail::channel_maps<T>::in(counted, x.channels);
        if (takes_statistics) detail::token_statistics<T>::in(counted, x, concurrency, narrow);
        return counted.used_bytes() + (narrow ? detail::rows_in_and_out<T>::narrow_bytes(x, concurrency) : 0);
    }
    /// out = BN(x) + eta x.
    void forward(const stored_view<const T>& x, const stored_view<T>& out, const execution& run, double eta) const {
        const auto& s = x.shape();
        if (s.size() == 0) return;
        detail::scratch memory(run.workspace().bytes().data());
        const auto maps = detail::channel_maps<T>::in(memory, s.channels);
        if (!mean.empty()) {
            maps.set(s.channels, 1, [&](index_t c) { return map_of(c, eta); });
        } else {
            const auto seen = detail::token_statistics<T>::in(memory, s, run.concurrency(), x.is_narrow())(x, {}, run);
            maps.set(s.channels, 1, [&](index_t c) { return map_of(c, seen.mean[c], seen.variance(c, false), eta); });
        }
        detail::map_channels<T>(x, out, maps, run, run.workspace().bytes().data() + memory.used_bytes());
    }
    /// out = kept * out + (1 - kept) (BN(x) + eta x) with the statistics of the tokens that count, by which the running ones move. A token
    /// that does not count is not normalised: x stands for BN(x).
    void train(const tensor_view<const T>& x, const tensor_view<T>& out, batch_norm_statistics& statistics, const execution& run,
               const token_mask& mask, double eta, double kept) const {
        if (x.shape().channels == 0) return;
        detail::scratch memory(run.workspace().bytes().data());
        detail::channel_maps<T>::in(memory, x.shape().channels);
        train_with(detail::token_statistics<T>::in(memory, x.shape(), run.concurrency())(x, mask, run), x, out, statistics, run, mask, eta,
                   kept);
    }
    /// The training step, as train has it, once the statistics of the batch are known.
    void train_with(const moments_view& seen, const tensor_view<const T>& x, const tensor_view<T>& out, batch_norm_statistics& statistics,
                    const execution& run, const token_mask& mask, double eta, double kept) const {
        const auto& s = x.shape();
        detail::scratch memory(run.workspace().bytes().data());
        const auto maps = detail::channel_maps<T>::in(memory, s.channels);
        statistics.update(seen, momentum);
        maps.set(s.channels, 1 - kept, [&](index_t c) { return map_of(c, seen.mean[c], seen.variance(c, false), eta); });
        const auto slope_hidden = static_cast<T>((1 - kept) * (1 + eta)), share = static_cast<T>(kept);
        constexpr index_t rows_of_a_task = 64;
        const auto rows = s.batch * s.heads * s.tokens;
        run.for_each((rows + rows_of_a_task - 1) / rows_of_a_task, [&](index_t task, index_t) {
            for (index_t r = task * rows_of_a_task; r < std::min(rows, (task + 1) * rows_of_a_task); ++r) {
                const auto [b, h, i] = detail::row_place(s, r);
                const auto from = x.rows(b, h, i);
                const auto to = out.rows(b, h, i);
                if (!detail::counts(mask, b, h, i))
                    for (index_t c = 0; c < s.channels; ++c)
                        to.data[c] = simd::unfused(slope_hidden * from.data[c]) + (kept == 0 ? T{0} : simd::unfused(share * to.data[c]));
                else if (kept == 0) detail::map_rows<false, false, 1>(from, to, s.channels, maps, share);
                else detail::map_rows<true, false, 1>(from, to, s.channels, maps, share);
            }
        });
    }
};

/// Deduces a batch_norm of its weight's scalar type.
template <class W, class... Others>
batch_norm(const W&, const Others&...) -> batch_norm<detail::element_t<W>>;

namespace detail {

/// What is checked of a training call, whatever the norm.
template <Scalar T>
void check_training(std::string_view operation, const tensor_view<const T>& x, const tensor_view<T>& out,
                    const batch_norm_statistics& statistics, const token_mask& mask, bool takes_statistics = true) {
    const auto& s = x.shape();
    check_rows<T>(operation, x, out, false);
    check_mask(operation, mask, s);
    const output_memory memory(operation, "out", out);
    memory.require_apart("mask", mask);
    memory.require_apart("statistics.mean", std::span(statistics.mean));
    memory.require_apart("statistics.variance", std::span(statistics.variance));
    if (std::ssize(statistics.mean) != s.channels || std::ssize(statistics.variance) != s.channels)
        detail::raise(shape_error(operation, "statistics", "are of ", statistics.mean.size(), " channels, but x has shape ", s));
    if (takes_statistics) check_tokens_for_variance(operation, mask, s);
}
/// Throws argument_error if gamma is given, but not between 0 and 1.
inline void check_gamma(std::string_view operation, const std::optional<double>& gamma) {
    if (gamma && !(*gamma >= 0 && *gamma <= 1))
        detail::raise(argument_error(operation, "gamma", "is ", *gamma, ", but must lie between 0 and 1"));
}

/// Bytes of workspace that a training call of the norm needs: of a progressive one enough for either norm, which run one after the other.
template <FoldableNorm N>
std::size_t training_bytes(const N& norm, const shape& x, index_t concurrency) {
    const auto bytes = batch_norm<typename N::scalar>::workspace_bytes(x, concurrency, false, true);
    if constexpr (requires { norm.rep; }) return std::max(bytes, norm.norm.workspace_bytes(x, concurrency));
    else return bytes;
}

/// Checks a training call, and sees to its workspace.
template <Scalar T, FoldableNorm N>
void prepare_training(const N& norm, const tensor_view<const T>& x, const tensor_view<T>& out, const batch_norm_statistics& statistics,
                      const execution& run, const token_mask& mask, bool takes_statistics = true) {
    check_training<T>(N::name, x, out, statistics, mask, takes_statistics);
    norm.check_parameters(N::name, x.shape());
    norm.check_apart(output_memory(N::name, "out", out));
    run.reserve(N::name, "x", x.shape(), training_bytes(norm, x.shape(), run.concurrency()));
}

} // namespace detail

/// Bytes of workspace that a training call of a norm for tokens of that shape needs with such an executor or execution.
std::size_t training_workspace_bytes(const FoldableNorm auto& norm, const shape& x, const detail::call_execution& run = {}) {
    return detail::training_bytes(norm, x, run.concurrency());
}

/// Training of a batch_norm: out = BN(x) with the statistics of this batch, by which the running `statistics` move. Tokens that the mask
/// leaves out are no part of the statistics, and are copied. The same bits for any executor and strides; `run` as in `attend`.
/// Throws attention_error, before anything is written: what `normalise` does, an out that is x, statistics or a mask of another shape,
/// fewer than two tokens that count.
template <Scalar T>
void train(const batch_norm<T>& norm, const std::type_identity_t<tensor_view<const T>>& x, const std::type_identity_t<tensor_view<T>>& out,
           batch_norm_statistics& statistics, const detail::call_execution& run = {}, const token_mask& mask = {}) {
    detail::prepare_training<T>(norm, x, out, statistics, run, mask);
    norm.train(x, out, statistics, run, mask, 0, 0);
}

} // namespace attn
