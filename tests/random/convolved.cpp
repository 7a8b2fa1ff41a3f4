// Problems of simplified and focused linear attention.
#include "linear_bounds.hpp"
#include "others.hpp"

#include <attn/attention/backward.hpp>
#include <attn/attention/focused_linear_attention.hpp>
#include <attn/attention/focused_linear_backward.hpp>
#include <attn/attention/simplified_linear_attention.hpp>
#include <attn/attention/simplified_linear_backward.hpp>
#include <attn/pattern/lengths.hpp>
#include <attn/reference/depthwise_convolution.hpp>
#include <attn/reference/linear_attention.hpp>
#include <attn/reference/number.hpp>

#include <algorithm>

namespace attn::fuzz {

using namespace pattern;

namespace {

template <Scalar T>
struct convolved_drawn {
    tensor<T> weights, encoding, other_input; ///< the last two without memory for none
    tensor<T> read;                           ///< what the convolution reads: values that are not there are 0
    std::vector<T> bias, scale;
    std::vector<index_t> length;
    bool has_length = false;
    int power = 3;
};

template <Scalar T>
tensor_view<const T> view_of(const tensor<T>& t) {
    return t.data() ? t.view() : tensor_view<const T>();
}

/// What is given by token, for all of them or some.
template <Scalar T>
struct by_token {
    depthwise_convolution<T> convolution;
    tensor_view<const T> encoding, input; ///< without memory for none
};

/// Adds to what is there once for all batch entries, or heads, if it is at all.
template <class T>
void add_repeated(const tensor_view<const T>& from, const tensor_view<T>& to) {
    const auto &all = from.shape(), &s = to.shape();
    for (index_t b = 0; to.data() && b < all.batch; ++b)
        for (index_t h = 0; h < all.heads; ++h)
            for (index_t i = 0; i < all.tokens; ++i)
                for (index_t c = 0; c < all.channels; ++c) to(s.batch == 1 ? 0 : b, s.heads == 1 ? 0 : h, i, c) += from(b, h, i, c);
}

/// The gradients of an operator's parameters.
template <class T>
struct named_gradients {
    tensor_view<T> encoding, weights, bias, input, scale;

    static std::span<T> row(const tensor_view<T>& numbers) { return {numbers.data(), static_cast<std::size_t>(numbers.shape().size())}; }
};

/// Simplified or focused linear attention: what is asked of it whatever its pattern is.
template <Scalar T>
class convolved_attention : public operation<T> {
public:
    template <class Op>
    convolved_attention(const Op& op, const std::shared_ptr<const convolved_drawn<T>>& drawn, index_t queries)
        : operation<T>(op), drawn_(drawn), tokens_{op.convolution, op.positional_encoding, op.convolution_input}, eps_(op.eps), is_focused_(requires { op.power; }) {
        const auto g = op.convolution.grid(queries);
        grid_ = {g.height, g.width, g.top, g.left};
    }

    void reference(const inputs<double>& in, const outputs<double>& out) const override {
        read(in, [&](const inputs<double>& mapped) {
            if (is_focused_) reference::linear_attention<double>(mapped, out, identity_features{}, pattern(), true, eps_, 1);
            else reference::linear_attention<double>(mapped, out, relu{}, pattern(), true, eps_, 1);
        });
        const auto other = reference::widen(tokens_.input);
        reference::add_depthwise_convolution<double, T>(reads_values() ? in.values.numbers() : other.view(), out.values, grid_, tokens_.convolution.weights,
                                                        tokens_.convolution.bias, present(in.positions));
    }
    void bounds(const inputs<double>& in, const outputs<double>& bounds) const override {
        linear_terms terms{.feature = {}, .sees = pattern(), .eps = eps_, .feature_error = 2 * unit_of<T>, .unit = unit_of<T>, .least = static_cast<double>(std::numeric_limits<T>::min())};
        // Two norms are sums of all channels of all heads; a power multiplies what rounding its base has done.
        if (is_focused_) terms.feature_error = unit_of<T> * static_cast<double>(in.queries.shape().heads * in.queries.shape().channels + 16 * drawn_->power + 32);
        else terms.feature = [](double x) { return std::max(x, 0.0); };
        read(in, [&](const inputs<double>& mapped) { linear_bounds(mapped, bounds.values, terms); });
        tensor<double> exact(bounds.values.shape());
        reference(in, {exact.view()});
        const auto other = reference::widen(tokens_.input), weights = reference::widen(tokens_.convolution.weights);
        const std::vector<double> bias(drawn_->bias.begin(), drawn_->bias.end());
        add_convolution_bounds(reads_values() ? in.values.numbers() : other.view(), std::as_const(exact).view(), bounds.values, grid_, weights.view(), bias,
                               present(in.positions), unit_of<T>);
    }
    std::vector<shape> parameter_shapes(const input_shapes&) const override {
        const auto row = [](const auto& numbers) { return shape{.batch = 1, .heads = 1, .tokens = 1, .channels = std::ssize(numbers)}; };
        std::vector<shape> shapes;
        if (tokens_.encoding.data()) shapes.push_back(tokens_.encoding.shape());
        shapes.push_back(tokens_.convolution.weights.shape());
        if (!tokens_.convolution.bias.empty()) shapes.push_back(row(tokens_.convolution.bias));
        if (!reads_values()) shapes.push_back(tokens_.input.shape());
        if (!scale().empty()) shapes.push_back(row(scale()));
        return shapes;
    }
    void reference_gradients(const inputs<bounded<T>>& in, const output_gradients<bounded<T>>& given, const testing::wanted_gradients<bounded<T>>& wanted) const override {
        const auto named = this->named(wanted);
        if (is_focused_) find_gradients(in, given.values, wanted, named.row(named.scale));
        else read(in, [&](const inputs<bounded<T>>& mapped) { reference::linear_gradients<bounded<T>>(mapped, given.values, wanted, relu{}, pattern(), true, eps_, 1); });
        // What the encoding is added to has the gradient of its sum, and what the convolution reads besides gets its part of it.
        add_repeated<bounded<T>>(wanted.keys, named.encoding);
        const auto other = bounded_copy<T>(tokens_.input);
        tensor<bounded<T>> of_input(reads_values() ? in.values.shape() : other.shape());
        reference::depthwise_gradients<bounded<T>, T>(reads_values() ? in.values.numbers() : other.view(), given.values, grid_, tokens_.convolution.weights, of_input.view(),
                                                      named.weights, named.row(named.bias), present(in.positions));
        add_repeated<bounded<T>>(std::as_const(of_input).view(), reads_values() ? wanted.values : named.input);
    }

protected:
    virtual reference::detail::visible_pairs pattern() const = 0;
    /// Those that it has, in this order.
    template <class U>
    named_gradients<U> named(const testing::wanted_gradients<U>& wanted) const {
        named_gradients<U> all;
        std::size_t number = 0;
        const auto take = [&](bool is_there, tensor_view<U>& to) {
            if (is_there) to = wanted.parameter(number++);
        };
        take(tokens_.encoding.data(), all.encoding);
        take(true, all.weights);
        take(!tokens_.convolution.bias.empty(), all.bias);
        take(!reads_values(), all.input);
        take(!scale().empty(), all.scale);
        return all;
    }

private:
    bool reads_values() const { return !tokens_.input.data(); }
    std::span<const T> scale() const { return is_focused_ ? std::span<const T>(drawn_->scale) : std::span<const T>(); }
    std::vector<index_t> present(const positions& where) const {
        std::vector<index_t> tokens;
        for (index_t b = 0; drawn_->has_length && !drawn_->other_input.data() && b < std::ssize(drawn_->length); ++b)
            tokens.push_back(drawn_->length[static_cast<std::size_t>(b)] - where.first_key[b]);
        return tokens;
    }
    template <class U>
    index_t present(const inputs<U>& in, index_t b) const {
        const auto m = in.keys.shape().tokens;
        return drawn_->has_length ? std::clamp<index_t>(drawn_->length[static_cast<std::size_t>(b)] - in.positions.first_key[b], 0, m) : m;
    }
    /// Keys become means over those that are there.
    template <class U>
    void divide(const inputs<U>& in, tensor<U>& k) const {
        const auto each = k.shape().size() / std::max<index_t>(1, k.shape().batch);
        for (index_t b = 0; b < k.shape().batch; ++b)
            for (index_t e = 0; e < each; ++e) k.data()[b * each + e] /= static_cast<U>(std::max<index_t>(1, present(in, b)));
    }
    /// then(what linear attention reads)
    template <class U>
    void read(const inputs<U>& in, const auto& then) const {
        const auto sums = reference::sum_of<U, T>(in.keys, tokens_.encoding);
        if (!is_focused_) return then(inputs<U>{in.queries, sums, in.values, in.positions});
        const auto q = reference::focused_features<U, T>(in.queries, drawn_->power, scale());
        auto k = reference::focused_features<U, T>(std::as_const(sums).view(), drawn_->power, scale());
        divide(in, k);
        then(inputs<U>{q, k, in.values, in.positions});
    }
    /// Writes those of queries, keys and values, but for the convolution's part, and adds to of_scale: of a focused one.
    template <class U>
    void find_gradients(const inputs<U>& in, const tensor_view<const U>& given, const input_gradients<U>& wanted, std::span<U> of_scale) const {
        tensor<U> of_queries(in.queries.shape()), of_keys(in.keys.shape());
        read(in, [&](const inputs<U>& mapped) {
            reference::linear_gradients<U>(mapped, given, {of_queries, of_keys, wanted.values}, identity_features{}, pattern(), true, eps_, 1);
        });
        divide(in, of_keys);
        std::vector<index_t> queries_present, keys_present;
        for (index_t b = 0; b < in.queries.shape().batch; ++b) {
            keys_present.push_back(in.queries.shape().tokens > 0 ? present(in, b) : 0);
            queries_present.push_back(keys_present.back() > 0 ? in.queries.shape().tokens : 0);
        }
        const auto sums = reference::sum_of<U, T>(in.keys, tokens_.encoding);
        reference::focused_gradients<U, T>(in.queries, drawn_->power, scale(), std::as_const(of_queries).view(), queries_present, wanted.queries, of_scale);
        reference::focused_gradients<U, T>(std::as_const(sums).view(), drawn_->power, scale(), std::as_const(of_keys).view(), keys_present, wanted.keys, of_scale);
    }

    std::shared_ptr<const convolved_drawn<T>> drawn_;
    by_token<T> tokens_;
    double eps_;
    bool is_focused_;
    reference::grid grid_;
};

template <Scalar T, class Op>
class convolved_operation final : public operation_of<T, Op, convolved_attention<T>> {
public:
    using convolved_operation::operation_of::operation_of;

private:
    reference::detail::visible_pairs pattern() const override { return this->op_.pattern; }
    gradients_of<Op, T> gradients(const testing::wanted_gradients<T>& wanted) const override {
        const auto named = this->named(wanted);
        gradients_of<Op, T> all;
        static_cast<input_gradients<T>&>(all) = wanted;
        all.positional_encoding = named.encoding;
        all.convolution = {named.input, named.weights, named.row(named.bias)};
        if constexpr (requires { all.scale; }) all.scale = named.row(named.scale);
        return all;
    }
};

template <Scalar T, class P>
any_operation<T> convolved_of(bool is_focused, const std::shared_ptr<const convolved_drawn<T>>& d, const by_token<T>& tokens, const P& pattern, index_t queries) {
    const auto with = [&]<class Op>(Op op) -> any_operation<T> {
        op.convolution = tokens.convolution, op.pattern = pattern, op.positional_encoding = tokens.encoding, op.convolution_input = tokens.input;
        return std::make_unique<convolved_operation<T, Op>>(op, d, queries);
    };
    if constexpr (!std::same_as<P, causal>)
        if (is_focused) return with(focused_linear_attention<P, T>{.power = d->power, .scale = d->scale});
    return with(simplified_linear_attention<P, T>{});
}

} // namespace

template <Scalar T>
trial<T> draw_convolved(draw& random) {
    trial<T> t;
    auto& s = t.size = draw_sizes(random);
    const auto kind = random.number(0, 4); // 0, 1: dense; 2: lengths; 3: causal; 4: focused
    const bool is_focused = kind == 4 || (kind < 3 && random.one_in(3)), other = random.one_in(4);
    if (!other) s.keys = s.queries = std::min(s.queries, s.keys);
    draw_positions(random, s);
    auto d = std::make_shared<convolved_drawn<T>>();
    const auto number = [&] { return random.real(-1, 1); };
    static constexpr index_t kernels[] = {1, 3, 5, 7};
    const bool causal_kernel = kind == 3;
    index_t height = 0, width = 0;
    if (!causal_kernel && random.one_in(2)) {
        for (index_t h = 1; h * h <= s.queries; ++h)
            if (s.queries % h == 0 && random.one_in(2)) height = h;
        if (height > 0) width = s.queries / height;
    }
    const auto kernel_height = causal_kernel || height == 0 ? 1 : random.one_of(kernels);
    const auto kernel_width = causal_kernel ? random.number(1, 6) : random.one_of(kernels);
    d->weights = filled<T>({random.one_in(2) ? s.heads : 1, s.value_dim, kernel_height, kernel_width}, number);
    if (d->weights.shape().batch == 0) d->weights = filled<T>({1, s.value_dim, kernel_height, kernel_width}, number);
    if (random.one_in(2)) {
        d->bias.resize(static_cast<std::size_t>(s.value_dim * (random.one_in(2) ? s.heads : 1)));
        std::ranges::generate(d->bias, [&] { return static_cast<T>(number()); });
    }
    if (random.one_in(2)) d->encoding = filled<T>({random.one_in(2) ? s.batch : 1, random.one_in(2) ? s.kv_heads : 1, s.keys, s.key_dim}, number);
    if (other) d->other_input = filled<T>({s.batch, s.kv_heads, s.queries, s.value_dim}, number);
    for (index_t b = 0; b < s.batch; ++b)
        d->length.push_back(std::max<index_t>(0, s.first_key[s.first_key.size() == 1 ? 0 : static_cast<std::size_t>(b)] + random.number(0, s.keys)));
    d->has_length = kind == 2;
    d->power = static_cast<int>(random.one_in(4) ? random.number(5, 40) : random.number(1, 4));
    if (random.one_in(2)) {
        d->scale.resize(static_cast<std::size_t>(s.heads == s.kv_heads && random.one_in(2) ? s.heads * s.key_dim : s.key_dim));
        std::ranges::generate(d->scale, [&] { return static_cast<T>(number()); });
    }
    t.in = draw_given<T>(random, s, numbers::usual);
    const T* const read = other ? d->other_input.data() : t.in.values.data();
    d->read = filled<T>({s.batch, s.kv_heads, s.queries, s.value_dim}, [&, e = index_t{0}]() mutable {
        const auto row = e / s.value_dim, b = row / (s.kv_heads * s.queries);
        const bool there = other || !d->has_length || row % s.queries + t.in.positions.first_key[b] < d->length[static_cast<std::size_t>(b)];
        const T x = read[e++];
        return there ? x : T{0};
    });
    const std::shared_ptr<const convolved_drawn<T>> own = d;
    const auto make = [own, kind, is_focused](const by_token<T>& tokens, index_t queries) {
        if (kind == 3) return convolved_of<T>(is_focused, own, tokens, causal{}, queries);
        if (kind == 2) return convolved_of<T>(is_focused, own, tokens, lengths{own->length}, queries);
        return convolved_of<T>(is_focused, own, tokens, dense{}, queries);
    };
    t.op = make({{d->weights.view(), d->bias, height, width, causal_kernel}, view_of(d->encoding), view_of(d->other_input)}, s.queries);
    // A cut is one of the grid's rows, and takes along those that the convolution reads.
    t.cuts = {.unit = height > 0 ? width : 1,
              .before = causal_kernel ? kernel_width - 1 : height > 0 ? kernel_height / 2 : kernel_width / 2,
              .after = causal_kernel ? 0 : height > 0 ? kernel_height / 2 : kernel_width / 2};
    t.within = [=](index_t first, index_t queries, index_t first_key, index_t keys) {
        return make({{own->weights.view(), own->bias, height > 0 ? queries / width : 0, width, causal_kernel},
                     view_of(own->encoding).slice({.tokens = {first_key, keys}}), view_of(own->read).slice({.tokens = {first, queries}})}, queries);
    };
    t.name = joined(kind == 2 ? "lengths" : kind == 3 ? "causal" : "dense", is_focused && kind != 3 ? joined(", focused, power ", d->power) : "", ", kernel ", d->weights.shape(),
                    ", grid ", height, " x ", width, d->encoding.data() ? ", encoding" : "", other ? ", another input" : "", d->bias.empty() ? "" : ", bias");
    return t;
}

outcome check_convolved(draw& random) {
    return check_trial(random, [&]<Scalar T>(std::type_identity<T>) { return draw_convolved<T>(random); });
}

} // namespace attn::fuzz
