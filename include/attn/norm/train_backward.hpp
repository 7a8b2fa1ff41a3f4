// The gradients of training steps: of what `train` computes; and a norm as it is in training, where a layer expects a norm.
#pragma once

#include "progressive_rep_batch_norm.hpp"
#include "row_gradients.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The gradients of a loss with respect to what a rep_batch_norm read: as norm_gradients, and eta, one number.
template <Scalar T>
struct rep_norm_gradients : norm_gradients<T> {
    std::span<T> eta = {};
};

/// The gradients of a loss with respect to what a progressive_rep_batch_norm read: x, and the parameters of both of its norms, whose own x
/// are left empty.
template <Scalar T>
struct progressive_norm_gradients {
    tensor_view<T> x = {};
    norm_gradients<T> norm = {};
    rep_norm_gradients<T> rep = {};
};

namespace detail {

/// What reaches a batch_norm plus eta times its input, and how its gradients are taken.
template <Scalar T>
struct batch_gradient_call {
    const tensor_view<const T>&x, &d_out;
    const rep_norm_gradients<T>& wanted;
    const token_mask& mask;
    double eta, share; ///< what is given counts `share` times,
    double kept;       ///< and wanted.x keeps so much of what it holds
};

/// The gradients of a training step. With the N tokens that count, y = (x - mean) / sqrt(variance + eps) and g = d_out,
///     d bias = sum g,      d weight = sum g y,      d eta = sum over all tokens and channels of g x
///     d x = weight / sqrt(variance + eps) (g - d bias / N - y d weight / N) + eta g;      of a token that does not count (1 + eta) g
/// Rows are summed in parts that depend on their number only, and parts one after the other: so threads change no bit.
template <Scalar T>
class batch_gradients {
public:
    static std::size_t workspace_bytes(const shape& x, index_t concurrency) { return bytes_for<layout>(x, concurrency); }

    void operator()(const batch_norm<T>& norm, const batch_gradient_call<T>& call, const execution& run) const {
        const auto& s = call.x.shape();
        if (s.channels == 0) {
            for (auto& eta : call.wanted.eta) eta = 0;
            return;
        }
        scratch memory(run.workspace().bytes().data());
        const layout own(memory, s, run.concurrency());
        const auto seen = own.statistics(call.x, call.mask, run);
        own.normal.set(s.channels, 1,
                       [&](index_t c) { return channel_map{seen.mean[c], 1 / std::sqrt(seen.variance(c, false) + norm.eps), 0}; });

        const row_parts parts(s);
        run.for_each(parts.count, [&](index_t part, index_t) {
            std::fill_n(own.of_part(part, 0), 3 * own.stride, T{0});
            parts.for_each_row(part, [&](index_t r) { add_row(call, own, part, r); });
        });
        double of_eta = 0;
        for (index_t c = 0; c < s.channels; ++c) {
            double sums[3] = {0, 0, 0};
            for (index_t part = 0; part < parts.count; ++part)
                for (index_t which = 0; which < 3; ++which) sums[which] += static_cast<double>(own.of_part(part, which)[c]);
            const auto at = static_cast<std::size_t>(c);
            const auto weight = norm.weight.empty() ? 1 : static_cast<double>(norm.weight[at]), count = static_cast<double>(seen.count);
            own.slope[c] = static_cast<T>(weight / std::sqrt(seen.variance(c, false) + norm.eps));
            own.mean_bias[c] = static_cast<T>(sums[0] / count);
            own.mean_weight[c] = static_cast<T>(sums[1] / count);
            if (!call.wanted.bias.empty()) call.wanted.bias[at] = static_cast<T>(call.share * sums[0]);
            if (!call.wanted.weight.empty()) call.wanted.weight[at] = static_cast<T>(call.share * sums[1]);
            of_eta += sums[2];
        }
        for (auto& eta : call.wanted.eta) eta = static_cast<T>(call.share * of_eta);
        if (!call.wanted.x.data()) return;
        run.for_each(parts.count, [&](index_t part, index_t) { parts.for_each_row(part, [&](index_t r) { write_row(call, own, r); }); });
    }

private:
    using lanes = simd::lanes<T>;

    struct layout {
        token_statistics<T> statistics;
        channel_maps<T> normal;             ///< y = (x - centre) scale + offset
        T *slope, *mean_bias, *mean_weight; ///< weight / sqrt(variance + eps), d bias / N, d weight / N
        T* sums;                            ///< [part][g, g y, g x][channels]
        index_t stride;

        layout(scratch& memory, const shape& x, index_t concurrency)
            : statistics(token_statistics<T>::in(memory, x, concurrency)), normal(channel_maps<T>::in(memory, x.channels)),
              slope(memory.take<T>(x.channels)), mean_bias(memory.take<T>(x.channels)), mean_weight(memory.take<T>(x.channels)),
              sums(memory.take<T>(3 * row_parts(x).count, x.channels)), stride(x.channels) {}
        T* of_part(index_t part, index_t which) const { return sums + (3 * part + which) * stride; }
    };
    static void add_row(const batch_gradient_call<T>& call, const layout& own, index_t part, index_t row) {
        const auto [b, h, i] = row_place(call.x.shape(), row);
        const T *const x = call.x.row(b, h, i), *const d_out = call.d_out.row(b, h, i);
        T *const of_bias = own.of_part(part, 0), *const of_weight = own.of_part(part, 1), *const of_eta = own.of_part(part, 2);
        const bool is_counted = counts(call.mask, b, h, i);
        simd::for_each_register<T>(call.x.shape().channels, [&](index_t c, const auto& load, const auto& store) {
            const auto value = load(x + c), g = load(d_out + c);
            store(fma(g, value, load(of_eta + c)), of_eta + c);
            if (!is_counted) return;
            store(load(of_bias + c) + g, of_bias + c);
            store(fma(g, normal(own, value, c, load), load(of_weight + c)), of_weight + c);
        });
    }
    static void write_row(const batch_gradient_call<T>& call, const layout& own, index_t row) {
        const auto [b, h, i] = row_place(call.x.shape(), row);
        const T *const x = call.x.row(b, h, i), *const d_out = call.d_out.row(b, h, i);
        T* const to = call.wanted.x.row(b, h, i);
        const lanes share(static_cast<T>(call.share)), kept(static_cast<T>(call.kept)), eta(static_cast<T>(call.eta));
        const bool is_counted = counts(call.mask, b, h, i);
        simd::for_each_register<T>(call.x.shape().channels, [&](index_t c, const auto& load, const auto& store) {
            const auto g = load(d_out + c);
            auto sum = eta * g;
            if (is_counted) {
                const auto y = normal(own, load(x + c), c, load);
                sum = fma(load(own.slope + c), fma(-y, load(own.mean_weight + c), g - load(own.mean_bias + c)), sum);
            } else {
                sum += g;
            }
            sum = share * sum;
            if (call.kept != 0) sum = fma(kept, load(to + c), sum);
            store(sum, to + c);
        });
    }
    [[gnu::always_inline]] static lanes normal(const layout& own, lanes x, index_t c, const auto& load) {
        return fma(x - load(own.normal.centre + c), load(own.normal.scale + c), load(own.normal.offset + c));
    }
};

/// What is checked of the gradient of a training step, and of its norm: for_each(visit) visits the gradients of the parameters.
template <Norm N, Scalar T>
void check_train_backward(const N& norm, const tensor_view<const T>& x, const tensor_view<const T>& d_out, const tensor_view<T>& wanted_x,
                          const auto& for_each_parameter, const token_mask& mask, bool takes_statistics = true) {
    check_mask(N::name, mask, x.shape());
    const auto for_each = [&](const auto& visit) {
        visit("wanted.x", wanted_x, x.shape(), true);
        for_each_parameter(visit);
    };
    check_norm_gradients<T>(N::name, x, d_out, for_each, [&](const output_memory& memory) {
        memory.require_apart("mask", mask);
        norm.check_apart(memory);
    });
    if (takes_statistics) check_tokens_for_variance(N::name, mask, x.shape());
    norm.check_parameters(N::name, x.shape());
}
/// Visits the gradients of the parameters of a rep_batch_norm.
template <Scalar T>
void visit_rep_parameters(std::string_view operation, std::array<std::string_view, 3> names, const rep_norm_gradients<T>& wanted,
                          index_t channels, const auto& visit) {
    visit_parameters(operation, {names[0], names[1]}, wanted, channels, true, visit);
    visit(names[2], as_row(wanted.eta), shape{.tokens = 1, .channels = 1}, true);
}

/// Bytes of workspace that the gradient of a training step of a norm needs.
template <FoldableNorm N>
std::size_t train_backward_bytes(const N&, const shape& x, index_t concurrency) {
    return batch_gradients<typename N::scalar>::workspace_bytes(x, concurrency);
}
/// Enough for either norm, which run one after the other.
template <DifferentiableNorm N>
std::size_t train_backward_bytes(const progressive_rep_batch_norm<N>& norm, const shape& x, index_t concurrency) {
    return std::max(norm.norm.backward_workspace_bytes(x, concurrency), train_backward_bytes(norm.rep, x, concurrency));
}

/// The gradient of a training step of a norm that is a batch_norm plus eta times its input.
template <Scalar T, FoldableNorm N>
void train_backward_of(const N& norm, const batch_norm<T>& batch, double eta, const tensor_view<const T>& x,
                       const tensor_view<const T>& d_out, const rep_norm_gradients<T>& wanted, const execution& run,
                       const token_mask& mask) {
    const auto for_each_parameter = [&](const auto& visit) {
        visit_rep_parameters<T>(N::name, {"wanted.weight", "wanted.bias", "wanted.eta"}, wanted, x.shape().channels, visit);
    };
    check_train_backward(norm, x, d_out, wanted.x, for_each_parameter, mask);
    run.reserve(N::name, "the gradient for x", x.shape(), train_backward_bytes(norm, x.shape(), run.concurrency()));
    batch_gradients<T>()(batch, {x, d_out, wanted, mask, eta, 1, 0}, run);
}

template <Scalar T>
norm_gradients<T> training_gradients_of(const batch_norm<T>&);
template <Scalar T>
rep_norm_gradients<T> training_gradients_of(const rep_batch_norm<T>&);
template <class N>
progressive_norm_gradients<typename N::scalar> training_gradients_of(const progressive_rep_batch_norm<N>&);

} // namespace detail

/// Bytes of workspace that the gradient of a training step of a norm over tokens of that shape needs with such an executor or execution.
std::size_t train_backward_workspace_bytes(const FoldableNorm auto& norm, const shape& x, const detail::call_execution& run = {}) {
    return detail::train_backward_bytes(norm, x, run.concurrency());
}

/// The gradient of a training step of a batch_norm, out = BN(x) with the statistics of this batch, through these statistics: from x and the
/// gradient of the loss by out, a pure function. A token that the mask leaves out was copied, and passes on what it is given.
/// Gives the same bits for every executor, number of threads and strides. `run` as in `attend`.
/// Throws attention_error, before anything is read or written: what `train` refuses, shapes that do not fit, a gradient that overlaps what
/// is read or another gradient, a given workspace too small.
template <Scalar T>
void train_backward(const batch_norm<T>& norm, const std::type_identity_t<tensor_view<const T>>& x,
                    const std::type_identity_t<tensor_view<const T>>& d_out, const std::type_identity_t<norm_gradients<T>>& wanted,
                    const detail::call_execution& run = {}, const token_mask& mask = {}) {
    detail::train_backward_of<T>(norm, norm, 0, x, d_out, {wanted, {}}, run, mask);
}

/// The gradient of a training step of a rep_batch_norm, out = BN(x) + eta x, as that of a batch_norm, out = BN(x).
template <Scalar T>
void train_backward(const rep_batch_norm<T>& norm, const std::type_identity_t<tensor_view<const T>>& x,
                    const std::type_identity_t<tensor_view<const T>>& d_out, const std::type_identity_t<rep_norm_gradients<T>>& wanted,
                    const detail::call_execution& run = {}, const token_mask& mask = {}) {
    detail::train_backward_of<T>(norm, norm.batch, norm.eta, x, d_out, wanted, run, mask);
}

/// The gradient of a training step of a progressive_rep_batch_norm, out = gamma N(x) + (1 - gamma) RepBN(x): gamma of the gradient goes
/// through N and 1 - gamma through RepBN. Without gamma, as in the warm-up, N alone; then the gradients of RepBN's parameters are 0.
template <DifferentiableNorm N>
void train_backward(const progressive_rep_batch_norm<N>& norm, const tensor_view<const typename N::scalar>& x,
                    const tensor_view<const typename N::scalar>& d_out, const progressive_norm_gradients<typename N::scalar>& wanted,
                    std::optional<double> gamma, const detail::call_execution& run = {}, const token_mask& mask = {}) {
    using T = typename N::scalar;
    rep_norm_gradients<T> of_rep = wanted.rep;
    norm_gradients<T> of_norm = wanted.norm;
    of_rep.x = of_norm.x = wanted.x;
    const auto for_each_parameter = [&](const auto& visit) {
        const auto channels = x.shape().channels;
        detail::visit_parameters<T>(norm.name, {"wanted.norm.weight", "wanted.norm.bias"}, of_norm, channels, N::adds_bias, visit);
        detail::visit_rep_parameters<T>(norm.name, {"wanted.rep.weight", "wanted.rep.bias", "wanted.rep.eta"}, of_rep, channels, visit);
    };
    detail::check_train_backward(norm, x, d_out, wanted.x, for_each_parameter, mask, gamma.has_value());
    detail::check_gamma(norm.name, gamma);
    run.reserve(norm.name, "the gradient for x", x.shape(), train_backward_workspace_bytes(norm, x.shape(), run));

    norm.norm.backward(x, d_out, of_norm, run);
    if (!gamma) {
        for (const auto numbers : {of_rep.weight, of_rep.bias, of_rep.eta}) std::ranges::fill(numbers, T{0});
        return;
    }
    for (const auto numbers : {of_norm.weight, of_norm.bias})
        for (auto& number : numbers) number = static_cast<T>(*gamma * static_cast<double>(number));
    detail::batch_gradients<T>()(norm.rep.batch, {x, d_out, of_rep, mask, norm.rep.eta, 1 - *gamma, *gamma}, run);
}

/// A training step of a batch_norm, rep_batch_norm or progressive_rep_batch_norm, for layers that take any norm: what they call `forward`
/// is `train`, with the statistics of the batch, and their gradient is `train_backward`. Each forward moves the running statistics, which
/// is why two of them must not run at a time. A block trains as transformer_block<in_training<N>, ...>, and is then used as
/// transformer_block<N, ...> with the same weights. gamma is what the schedule of a progressive norm says for this step; other norms know
/// none. See `train`.
template <FoldableNorm N>
struct in_training {
    using scalar = typename N::scalar;
    /// Those of the norm's training step.
    using gradients = decltype(detail::training_gradients_of(std::declval<const N&>()));
    static constexpr std::string_view name = N::name;
    static constexpr bool moves_statistics = true, adds_bias = true;
    static constexpr bool is_progressive = std::same_as<gradients, progressive_norm_gradients<scalar>>;

    N norm;
    batch_norm_statistics* statistics;
    std::optional<double> gamma = {};

    void check(const shape& x) const {
        if (!statistics) throw argument_error(name, "statistics", "are missing");
        if (std::ssize(statistics->mean) != x.channels)
            throw shape_error(name, "statistics", "have ", statistics->mean.size(), " channels, but x has shape ", x);
        norm.check_parameters(name, x);
        if (gamma && !is_progressive) throw argument_error(name, "gamma", "is given, but only a progressive norm has one");
        detail::check_gamma(name, gamma);
        if (const auto tokens = x.batch * x.heads * x.tokens; (gamma || !is_progressive) && tokens < 2)
            throw shape_error(name, "x", "of shape ", x, " has fewer than two tokens, but training needs two for a variance");
    }
    void check_apart(const output_memory& out) const { norm.check_apart(out); }
    std::size_t workspace_bytes(const shape& x, index_t concurrency, bool = false) const {
        return detail::training_bytes(norm, x, concurrency);
    }
    void forward(const tensor_view<const scalar>& x, const tensor_view<scalar>& out, const execution& run) const {
        if constexpr (is_progressive) train(norm, x, out, *statistics, gamma, run);
        else train(norm, x, out, *statistics, run);
    }
    std::size_t backward_workspace_bytes(const shape& x, index_t concurrency) const {
        return detail::train_backward_bytes(norm, x, concurrency);
    }
    void backward(const tensor_view<const scalar>& x, const tensor_view<const scalar>& d_out, const gradients& wanted,
                  const execution& run) const {
        if constexpr (is_progressive) train_backward(norm, x, d_out, wanted, gamma, run);
        else train_backward(norm, x, d_out, wanted, run);
    }
};

} // namespace attn
