// Holding the gradients of layers to finite differences.
#pragma once

#include "allocations.hpp"
#include "layer_checks.hpp"

#include <attn/layer/transformer_block.hpp>
#include <attn/layer/windowed.hpp>
#include <attn/norm/train_backward.hpp>
#include <attn/norm/layer_norm.hpp>

#include <functional>
#include <map>
#include <memory>

namespace attn::testing {

/// Tensors of gradients by the names of the weights, made as they are asked for.
template <Scalar T>
class gradient_store {
public:
    explicit gradient_store(const parameters& like) {
        for (const auto& name : like.names()) views_.emplace(name, store_.add<T>(name, like.size(name)));
        clear();
    }
    void clear() const {
        for (const auto& [name, view] : views_) std::fill_n(view.data(), view.shape().size(), guard<T>);
    }
    tensor_view<T> view(const std::string& name) const { return contains(name) ? views_.at(name) : tensor_view<T>{}; }
    std::span<T> row(const std::string& name) const {
        const auto v = view(name);
        return {v.data(), static_cast<std::size_t>(v.data() ? v.shape().size() : 0)};
    }
    bool contains(const std::string& name) const { return views_.contains(name); }
    const std::map<std::string, tensor_view<T>>& views() const { return views_; }

private:
    parameters store_;
    std::map<std::string, tensor_view<T>> views_;
};

template <Scalar T>
tensor<T> copy_of(const tensor_view<T>& view) {
    tensor<T> t(view.shape());
    std::copy_n(view.data(), view.shape().size(), t.data());
    return t;
}
template <Scalar T>
bool same_bits(const gradient_store<T>& a, const gradient_store<T>& b) {
    return std::ranges::all_of(a.views(), [&](const auto& entry) { return same_bits(copy_of(entry.second), copy_of(b.view(entry.first))); });
}
/// Whether all numbers are as they were before.
template <Scalar T>
bool is_untouched(const tensor_view<T>& view) {
    return std::all_of(view.data(), view.data() + view.shape().size(), [](T x) { return same_bits(x, guard<T>); });
}

// The gradients of a layer whose weights have such names: those of its members, with a dot.

template <Scalar T>
typename linear<T>::gradients named(const gradient_store<T>& store, const std::string& name, const linear<T>&) {
    return {store.view(name + ".weight"), store.row(name + ".bias")};
}
template <Scalar T, class N>
auto named_norm(const gradient_store<T>& store, const std::string& name, const N&) {
    detail::parameter_gradients<N> g{};
    if constexpr (requires { g.rep; }) {
        g.norm = {{}, store.row(name + ".norm.weight"), store.row(name + ".norm.bias")};
        g.rep = {{{}, store.row(name + ".weight"), store.row(name + ".bias")}, store.row(name + ".eta")};
    } else if constexpr (requires { g.weight; }) {
        g.weight = store.row(name + ".weight");
        g.bias = store.row(name + ".bias");
        if constexpr (requires { g.eta; }) g.eta = store.row(name + ".eta");
        if constexpr (requires { g.alpha; }) g.alpha = store.row(name + ".alpha");
        if constexpr (requires { g.shift; }) g.shift = store.row(name + ".shift");
    }
    return g;
}
template <Scalar T, class F>
typename feed_forward<T, F>::gradients named(const gradient_store<T>& store, const std::string& name, const feed_forward<T, F>& l) {
    return {named(store, name + ".up", l.up), named(store, name + ".down", l.down), named(store, name + ".gate", l.gate)};
}
template <Scalar T, class N>
typename spatial_reduction<T, N>::gradients named(const gradient_store<T>& store, const std::string& name, const spatial_reduction<T, N>& l) {
    return {named(store, name + ".projection", l.projection), named_norm<T>(store, name + ".norm", l.norm)};
}
template <Scalar T, class A, class R, class N>
typename multi_head<T, A, R, N>::gradients named(const gradient_store<T>& store, const std::string& name, const multi_head<T, A, R, N>& l) {
    typename multi_head<T, A, R, N>::gradients g{.q = named(store, name + ".q", l.q),
                                                 .k = named(store, name + ".k", l.k),
                                                 .v = named(store, name + ".v", l.v),
                                                 .out = named(store, name + ".out", l.out),
                                                 .gate = named(store, name + ".gate", l.gate)};
    if constexpr (multi_head<T, A, R, N>::reduces) g.reduce = named(store, name + ".reduce", l.reduce);
    if constexpr (requires { g.attention.score.bias; }) g.attention.score.bias = store.view(name + ".attention.bias");
    g.query_norm = named_norm<T>(store, name + ".query_norm", l.query_norm);
    g.key_norm = named_norm<T>(store, name + ".key_norm", l.key_norm);
    return g;
}
template <Scalar T, class L>
auto named(const gradient_store<T>& store, const std::string& name, const windowed<L>& l) {
    return named(store, name, l.layer);
}
template <Scalar T, class N, class M, class F>
typename transformer_block<N, M, F>::gradients named(const gradient_store<T>& store, const std::string& name, const transformer_block<N, M, F>& l) {
    return {named_norm<T>(store, name + ".attention_norm", l.attention_norm), named(store, name + ".attention", l.attention),
            named_norm<T>(store, name + ".feed_forward_norm", l.feed_forward_norm), named(store, name + ".feed_forward", l.feed_forward)};
}

/// Tokens and contexts of a call; or their gradients, or directions.
template <Scalar T>
struct layer_tensors {
    tensor<T> tokens, context, value_context;

    std::array<tensor<T>*, 3> each() { return {&tokens, &context, &value_context}; }
    std::array<const tensor<T>*, 3> each() const { return {&tokens, &context, &value_context}; }
    /// The same, moved along others.
    layer_tensors moved(const layer_tensors& along, T step) const {
        layer_tensors to;
        for (std::size_t t = 0; t < 3; ++t) {
            const auto& from = *each()[t];
            *to.each()[t] = tensor<T>(from.shape());
            for (index_t e = 0; e < from.shape().size(); ++e) to.each()[t]->data()[e] = from.data()[e] + step * along.each()[t]->data()[e];
        }
        return to;
    }
    layer_inputs<T> in() const {
        const auto there = [](const tensor<T>& t) { return t.shape().size() > 0 ? t.view() : tensor_view<const T>{}; };
        return {.tokens = tokens, .context = there(context), .value_context = there(value_context)};
    }
};

inline tensor<float> narrowed(const tensor<double>& from) {
    tensor<float> t(from.shape());
    std::transform(from.data(), from.data() + from.shape().size(), t.data(), [](double x) { return static_cast<float>(x); });
    return t;
}
inline layer_tensors<float> narrowed(const layer_tensors<double>& from) {
    return {narrowed(from.tokens), narrowed(from.context), narrowed(from.value_context)};
}

/// The same weights, moved along a direction, if there is one of that name.
inline parameters moved(const parameters& weights, const std::map<std::string, std::vector<double>>& along, double step) {
    parameters to;
    for (const auto& name : weights.names()) {
        const tensor_view<const double> from = weights.get<double>(name, weights.size(name));
        const auto copy = to.add<double>(name, weights.size(name));
        const auto direction = along.find(name);
        for (index_t e = 0; e < from.shape().size(); ++e)
            copy.data()[e] = from.data()[e] + (direction == along.end() ? 0 : step * direction->second[static_cast<std::size_t>(e)]);
    }
    return to;
}

/// A layer of any type, with the names of its weights: what checks its gradients is compiled once.
template <Scalar T>
class any_layer {
public:
    template <class L>
    any_layer(L layer) : layer_(std::make_shared<held<L>>(std::move(layer))) {}
    const auto* operator->() const { return layer_.get(); }

private:
    struct held_layer {
        virtual ~held_layer() = default;
        virtual shape output_shape(const shape& tokens) const = 0;
        virtual std::size_t kept_bytes(const layer_inputs<T>& in) const = 0;
        virtual std::size_t workspace_bytes(const layer_inputs<T>& in, index_t concurrency) const = 0;
        virtual void forward(const layer_inputs<T>& in, const tensor_view<T>& out, const execution& run) const = 0;
        virtual void forward(const layer_inputs<T>& in, const tensor_view<T>& out, workspace& kept, const execution& run) const = 0;
        virtual std::size_t backward_workspace_bytes(const layer_inputs<T>& in, index_t concurrency) const = 0;
        /// Wanted of what was read: tokens, context, value_context; and of the weights, if there is a store for them. How often it allocated.
        virtual std::size_t backward(const layer_inputs<T>& in, const workspace& kept, const tensor_view<const T>& given,
                                     const std::array<tensor_view<T>, 3>& wanted, const gradient_store<T>* weights, const execution& run) const = 0;
    };
    template <class L>
    struct held : held_layer {
        L layer;
        explicit held(L own) : layer(std::move(own)) {}

        shape output_shape(const shape& tokens) const override { return layer.output_shape(tokens); }
        std::size_t kept_bytes(const layer_inputs<T>& in) const override { return attn::kept_bytes(layer, in); }
        std::size_t workspace_bytes(const layer_inputs<T>& in, index_t concurrency) const override {
            return layer.workspace_bytes(in.tokens.shape(), in.context.shape(), concurrency);
        }
        void forward(const layer_inputs<T>& in, const tensor_view<T>& out, const execution& run) const override { attn::forward(layer, in, out, run); }
        void forward(const layer_inputs<T>& in, const tensor_view<T>& out, workspace& kept, const execution& run) const override {
            attn::forward(layer, in, out, kept, run);
        }
        std::size_t backward_workspace_bytes(const layer_inputs<T>& in, index_t concurrency) const override {
            return layer.backward_workspace_bytes(in.tokens.shape(), in.context.shape(), concurrency);
        }
        std::size_t backward(const layer_inputs<T>& in, const workspace& kept, const tensor_view<const T>& given,
                             const std::array<tensor_view<T>, 3>& wanted, const gradient_store<T>* weights, const execution& run) const override {
            layer_gradients<L> all{.tokens = wanted[0], .context = wanted[1], .value_context = wanted[2]};
            if (weights) all.parameters = named(*weights, "layer", layer);
            return allocations_in([&] { attn::backward(layer, in, kept, given, all, run); });
        }
    };
    std::shared_ptr<const held_layer> layer_;
};

/// What makes the same layer of weights in float and in double.
struct layer_maker {
    std::function<any_layer<float>(parameters&)> in_float;
    std::function<any_layer<double>(parameters&)> in_double;
};

/// One call of a layer that keeps, and its gradients.
template <Scalar T>
class trained_call {
public:
    gradient_store<T> store;
    layer_tensors<T> gradients;
    tensor<T> out;

    template <Executor E>
    trained_call(const any_layer<T>& layer, const parameters& weights, const layer_tensors<T>& in, const tensor<T>& given, E& executor)
        : store(weights), out(given.shape()), layer_(layer), given_(&given), in_(&in), kept_(layer->kept_bytes(in.in())) {
        const auto concurrency = std::max<index_t>(1, static_cast<index_t>(executor.concurrency()));
        workspace memory(std::max(layer->workspace_bytes(in.in(), concurrency), layer->backward_workspace_bytes(in.in(), concurrency)));
        for (auto* bytes : {&kept_, &memory}) fill(*bytes, std::byte{0xff}); // NaN
        std::fill_n(out.data(), out.shape().size(), guard<T>);
        const execution run(executor, memory);
        layer->forward(in.in(), out, kept_, run);
        for (std::size_t t = 0; t < 3; ++t) *gradients.each()[t] = tensor<T>(in.each()[t]->shape());
        backward(true, true, run);
    }
    /// The gradients again, of what is wanted only. How often it allocated.
    std::size_t backward(bool of_inputs, bool of_weights, const execution& run) {
        store.clear();
        std::array<tensor_view<T>, 3> wanted;
        for (std::size_t t = 0; t < 3; ++t) {
            auto& g = *gradients.each()[t];
            std::fill_n(g.data(), g.shape().size(), guard<T>);
            if (of_inputs && g.shape().size() > 0) wanted[t] = g;
        }
        return layer_->backward(in_->in(), kept_, *given_, wanted, of_weights ? &store : nullptr, run);
    }
    friend bool operator==(const trained_call& a, const trained_call& b) {
        for (std::size_t t = 0; t < 3; ++t)
            if (!same_bits(*a.gradients.each()[t], *b.gradients.each()[t])) return false;
        return same_bits(a.store, b.store);
    }

private:
    any_layer<T> layer_;
    const tensor<T>* given_;
    const layer_tensors<T>* in_;
    workspace kept_;
};

/// One layer with random weights.
class layer_gradient_check {
public:
    layer_gradient_check(const parameters& weights, layer_maker maker, const shape& tokens, const shape& context, const shape& value_context)
        : weights_(moved(weights, {}, 0)), maker_(std::move(maker)) {
        in_.tokens = random_rows<double>(tokens, 31);
        if (context.size() > 0) in_.context = random_rows<double>(context, 32);
        if (value_context.size() > 0) in_.value_context = random_rows<double>(value_context, 33);
        for (auto* t : in_.each()) // the same numbers in float
            for (index_t e = 0; e < t->shape().size(); ++e) t->data()[e] = static_cast<double>(static_cast<float>(t->data()[e]));
    }

    /// <g, t> is the derivative of the loss <out, given> along t, for random directions of everything at once; in float, it is what it is in double.
    void against_differences() {
        sequential here;
        const auto made = maker_.in_double(weights_);
        const auto given = random_rows<double>(made->output_shape(in_.tokens.shape()), 34);
        const trained_call<double> exact(made, weights_, in_, given, here);
        for (unsigned direction = 0; direction < 3; ++direction) {
            double expected = 0;
            auto along = in_.moved(in_, 0);
            std::mt19937 random(direction);
            std::normal_distribution<double> normal;
            const auto draw = [&](double* to, const double* gradient, index_t count) {
                for (index_t e = 0; e < count; ++e) expected += gradient[e] * (to[e] = normal(random));
            };
            for (std::size_t t = 0; t < 3; ++t) draw(along.each()[t]->data(), exact.gradients.each()[t]->data(), along.each()[t]->shape().size());
            std::map<std::string, std::vector<double>> of_weights;
            for (const auto& [name, g] : exact.store.views()) {
                of_weights[name].resize(static_cast<std::size_t>(g.shape().size()));
                draw(of_weights[name].data(), g.data(), g.shape().size());
            }
            const auto loss = [&](double step) {
                auto weights = moved(weights_, of_weights, step);
                const auto in = in_.moved(along, step);
                const auto out = forward(maker_.in_double(weights), in.in());
                double sum = 0;
                for (index_t e = 0; e < out.shape().size(); ++e) sum += out.data()[e] * given.data()[e];
                return sum;
            };
            constexpr double step = 1e-4; // the error is of the fourth power of it
            const auto slope = (8 * (loss(step) - loss(-step)) - (loss(2 * step) - loss(-2 * step))) / (12 * step);
            CHECK(std::abs(slope - expected) <= 1e-8 * (1 + std::abs(loss(0)) + std::abs(expected)));
        }
        const auto narrow = narrowed(in_);
        const auto narrow_given = narrowed(given);
        const trained_call<float> ours(maker_.in_float(weights_), weights_, narrow, narrow_given, here);
        const auto near = [](const auto& a, const auto& b) { return largest_error(a, b) <= 200 * epsilon<float> * std::max(1.0, largest_magnitude(b)); };
        for (std::size_t t = 0; t < 3; ++t) CHECK(near(*ours.gradients.each()[t], *exact.gradients.each()[t]));
        for (const auto& [name, view] : ours.store.views()) {
            INFO(name);
            CHECK(near(copy_of(view), copy_of(exact.store.view(name))));
        }
    }
    /// The same bits for every executor, of whatever is wanted; and the forward has those of the one that keeps nothing.
    void bits() {
        const auto in = narrowed(in_);
        const auto made = maker_.in_float(weights_);
        const auto given = random_rows<float>(made->output_shape(in_.tokens.shape()), 34);
        sequential here;
        const trained_call<float> expected(made, weights_, in, given, here);
        CHECK(same_bits(expected.out, forward(made, in.in())));
        for_each_executor([&](auto& executor, const std::string& name) {
            INFO(name);
            const trained_call<float> ours(made, weights_, in, given, executor);
            CHECK(ours == expected);
            CHECK(same_bits(ours.out, expected.out));
        });
        trained_call<float> some(made, weights_, in, given, here);
        workspace memory(made->backward_workspace_bytes(in.in(), 1));
        const execution run(here, memory);
        CHECK(some.backward(true, false, run) == 0);
        for (std::size_t t = 0; t < 3; ++t) CHECK(same_bits(*some.gradients.each()[t], *expected.gradients.each()[t]));
        for (const auto& [name, view] : some.store.views()) CHECK(is_untouched(view));
        CHECK(some.backward(false, true, run) == 0);
        CHECK(same_bits(some.store, expected.store));
        for (auto* g : some.gradients.each()) CHECK((g->shape().size() == 0 || is_untouched(tensor_view<float>(*g))));
    }

private:
    template <Scalar T>
    static tensor<T> forward(const any_layer<T>& layer, const layer_inputs<T>& in) {
        sequential here;
        workspace memory(layer->workspace_bytes(in, 1));
        tensor<T> out(layer->output_shape(in.tokens.shape()));
        layer->forward(in, out, execution(here, memory));
        return out;
    }
    parameters weights_;
    layer_maker maker_;
    layer_tensors<double> in_;
};

/// make.operator()<T>(parameters&) makes a layer of weights, the same in float and double.
template <class Make>
void check_layer_gradients(const parameters& weights, Make make, const shape& tokens, const shape& context = {}, const shape& value_context = {}) {
    layer_gradient_check check(weights,
                               {[=](parameters& w) { return any_layer<float>(make.template operator()<float>(w)); },
                                [=](parameters& w) { return any_layer<double>(make.template operator()<double>(w)); }},
                               tokens, context, value_context);
    check.against_differences();
    check.bits();
}

/// Random weights by names that end in ".weight" and ".bias".
class random_weights {
public:
    random_weights& linear(const std::string& name, index_t outputs, index_t inputs, bool has_bias = true) {
        random_linear<double>(*weights_, "layer" + name, outputs, inputs, has_bias);
        return *this;
    }
    random_weights& norm(const std::string& name, index_t channels, bool has_bias = true) {
        const auto seed = static_cast<unsigned>(std::hash<std::string>()(name));
        add_random<double>(*weights_, "layer" + name + ".weight", {channels}, seed);
        if (has_bias) add_random<double>(*weights_, "layer" + name + ".bias", {channels}, seed + 1);
        return *this;
    }
    random_weights& tensor(const std::string& name, const parameters::extents& size) {
        add_random<double>(*weights_, "layer" + name, size, 5);
        return *this;
    }
    random_weights& attention(const std::string& name, index_t channels, index_t heads, index_t kv_heads, index_t d_k, index_t d_v, index_t context_channels = 0) {
        const auto from = context_channels > 0 ? context_channels : channels;
        linear(name + ".q", heads * d_k, channels).linear(name + ".k", kv_heads * d_k, from).linear(name + ".v", kv_heads * d_v, from);
        return linear(name + ".out", channels, heads * d_v);
    }
    random_weights& feed_forward(const std::string& name, index_t channels, index_t hidden, bool gated = false) {
        linear(name + ".up", hidden, channels).linear(name + ".down", channels, hidden);
        return gated ? linear(name + ".gate", hidden, channels) : *this;
    }
    operator const parameters&() const { return *weights_; }

private:
    std::shared_ptr<parameters> weights_ = std::make_shared<parameters>();
};

// Layers of such weights.

template <Scalar T>
linear<T> linear_of(parameters& weights, const std::string& name) {
    const auto& size = weights.size(name + ".weight");
    return weights.get_linear<T>(name, size[0], size[1]);
}
template <Scalar T, class F = gelu>
feed_forward<T, F> feed_forward_of(parameters& weights, const std::string& name) {
    feed_forward<T, F> layer{.up = linear_of<T>(weights, name + ".up"), .down = linear_of<T>(weights, name + ".down")};
    if (weights.contains(name + ".gate.weight")) layer.gate = linear_of<T>(weights, name + ".gate");
    return layer;
}
template <Scalar T, class A = softmax_attention<>, class R = identity_reduction, class N = identity_norm<T>>
multi_head<T, A, R, N> multi_head_of(parameters& weights, const std::string& name, index_t heads, index_t kv_heads, const A& attention = {}) {
    return {.heads = heads,
            .kv_heads = kv_heads,
            .q = linear_of<T>(weights, name + ".q"),
            .k = linear_of<T>(weights, name + ".k"),
            .v = linear_of<T>(weights, name + ".v"),
            .out = linear_of<T>(weights, name + ".out"),
            .attention = attention};
}
template <Scalar T>
layer_norm<T> layer_norm_of(parameters& weights, const std::string& name) {
    const auto channels = weights.size(name + ".weight")[0];
    return {weights.get_vector<T>(name + ".weight", channels), weights.get_vector<T>(name + ".bias", channels)};
}

} // namespace attn::testing
