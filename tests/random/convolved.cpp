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

/// The gradients of an operator's parameters, by name, of those that it has.
template <class T>
struct named_gradients {
    tensor_view<T> encoding, weights, bias, input, scale;

    named_gradients(const auto& op, const testing::wanted_gradients<T>& wanted) {
        std::size_t number = 0;
        const auto take = [&](bool is_there, tensor_view<T>& to) {
            if (is_there) to = wanted.parameter(number++);
        };
        take(op.positional_encoding.data(), encoding);
        take(true, weights);
        take(!op.convolution.bias.empty(), bias);
        take(op.convolution_input.data(), input);
        if constexpr (requires { op.scale; }) take(!op.scale.empty(), scale);
    }
    static std::span<T> row(const tensor_view<T>& numbers) { return {numbers.data(), static_cast<std::size_t>(numbers.shape().size())}; }
};

/// An operator with its definition: reads(inputs, then) calls then(what linear attention reads, eps); find_gradients(operator, inputs, given, wanted, of_scale)
/// writes those of queries, keys and values, but for the convolution's part, and adds to of_scale.
template <Scalar T, class Op, class Reads, class Gradients>
operation<T> convolved_operation(const std::shared_ptr<const convolved_drawn<T>>& d, const Op& op, index_t queries, double feature_error,
                                 const std::function<double(double)>& feature, const Reads& reads, const Gradients& find_gradients) {
    struct owner {
        std::shared_ptr<const convolved_drawn<T>> drawn;
        Op op;
    };
    const auto own = std::make_shared<const owner>(owner{d, op});
    auto result = operation_of<T>(std::shared_ptr<const Op>(own, &own->op));
    const auto g = op.convolution.grid(queries);
    const auto present = [d](const positions& where) {
        std::vector<index_t> tokens;
        for (index_t b = 0; d->has_length && !d->other_input.data() && b < std::ssize(d->length); ++b)
            tokens.push_back(d->length[static_cast<std::size_t>(b)] - where.first_key[b]);
        return tokens;
    };
    result.reference = [=](const inputs<double>& in, const outputs<double>& out) {
        reads(own->op, in, [&](const inputs<double>& mapped, double eps) {
            if (feature) reference::linear_attention<double>(mapped, out, relu{}, own->op.pattern, true, eps, 1);
            else reference::linear_attention<double>(mapped, out, identity_features{}, own->op.pattern, true, eps, 1);
        });
        const auto other = reference::widen(view_of(d->other_input));
        reference::add_depthwise_convolution<double, T>(d->other_input.data() ? other.view() : in.values.numbers(), out.values,
                                                        {g.height, g.width, g.top, g.left}, own->op.convolution.weights,
                                                        own->op.convolution.bias, present(in.positions));
    };
    result.bounds = [=, reference = result.reference](const inputs<T>& in, const outputs<double>& bounds) {
        const auto q = reference::widen(in.queries), k = reference::widen(in.keys), v = reference::widen(in.values);
        const inputs<double> wide{q, k, v, in.positions};
        reads(own->op, wide, [&](const inputs<double>& mapped, double eps) {
            linear_bounds(mapped, bounds.values,
                          {.feature = feature,
                           .sees = [&](index_t b, index_t h, index_t i, index_t j) -> bool { return attn::at(own->op.pattern, b, h).visible(i, j); },
                           .eps = eps,
                           .feature_error = feature_error,
                           .unit = unit_of<T>,
                           .least = static_cast<double>(std::numeric_limits<T>::min())});
        });
        tensor<double> exact(bounds.values.shape());
        reference(wide, {exact.view()});
        const auto other = reference::widen(view_of(d->other_input)), weights = reference::widen(d->weights.view());
        const std::vector<double> bias(d->bias.begin(), d->bias.end());
        add_convolution_bounds(d->other_input.data() ? other.view() : v.view(), std::as_const(exact).view(), bounds.values,
                               {g.height, g.width, g.top, g.left}, weights.view(), bias, present(in.positions), unit_of<T>);
    };
    result.backward = [own](const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given, const testing::wanted_gradients<T>& wanted,
                            const execution& run) {
        const named_gradients<T> named(own->op, wanted);
        gradients_of<Op, T> all;
        static_cast<input_gradients<T>&>(all) = wanted;
        all.positional_encoding = named.encoding;
        all.convolution = {named.input, named.weights, named.row(named.bias)};
        if constexpr (requires { all.scale; }) all.scale = named.row(named.scale);
        attn::backward(own->op, in, saved, given, all, run);
    };
    result.backward_workspace_bytes = [own](const input_shapes& s, index_t concurrency) { return own->op.template backward_workspace_bytes<T>(s, concurrency); };
    result.parameter_shapes = [own](const input_shapes&) {
        const auto row = [](const auto& numbers) { return shape{.batch = 1, .heads = 1, .tokens = 1, .channels = std::ssize(numbers)}; };
        std::vector<shape> shapes;
        if (own->op.positional_encoding.data()) shapes.push_back(own->op.positional_encoding.shape());
        shapes.push_back(own->op.convolution.weights.shape());
        if (!own->op.convolution.bias.empty()) shapes.push_back(row(own->op.convolution.bias));
        if (own->op.convolution_input.data()) shapes.push_back(own->op.convolution_input.shape());
        if constexpr (requires { own->op.scale; })
            if (!own->op.scale.empty()) shapes.push_back(row(own->op.scale));
        return shapes;
    };
    result.reference_gradients = [=](const inputs<bounded<T>>& in, const output_gradients<bounded<T>>& given,
                                     const testing::wanted_gradients<bounded<T>>& wanted) {
        const named_gradients<bounded<T>> named(own->op, wanted);
        find_gradients(own->op, in, given.values, wanted, named.row(named.scale));
        // What the encoding is added to has the gradient of its sum, and what the convolution reads besides gets its part of it.
        add_repeated<bounded<T>>(wanted.keys, named.encoding);
        const auto other = bounded_copy<T>(view_of(d->other_input));
        const bool reads_values = !d->other_input.data();
        tensor<bounded<T>> of_input(reads_values ? in.values.shape() : other.shape());
        reference::depthwise_gradients<bounded<T>, T>(reads_values ? in.values.numbers() : other.view(), given.values, {g.height, g.width, g.top, g.left},
                                                      own->op.convolution.weights, of_input.view(), named.weights, named.row(named.bias), present(in.positions));
        add_repeated<bounded<T>>(std::as_const(of_input).view(), reads_values ? wanted.values : named.input);
    };
    return result;
}

template <Scalar T, class P>
operation<T> simplified(const std::shared_ptr<const convolved_drawn<T>>& d, const by_token<T>& tokens, const P& pattern, index_t queries) {
    const simplified_linear_attention<P, T> op{.convolution = tokens.convolution,
                                               .pattern = pattern,
                                               .positional_encoding = tokens.encoding,
                                               .convolution_input = tokens.input};
    return convolved_operation<T>(d, op, queries, 2 * unit_of<T>, [](double x) { return std::max(x, 0.0); },
                                  [](const auto& o, const inputs<double>& in, const auto& then) {
                                      const auto keys = reference::sum_of<double, T>(in.keys, o.positional_encoding);
                                      then(inputs<double>{in.queries, keys, in.values, in.positions}, o.eps);
                                  },
                                  []<class U>(const auto& o, const inputs<U>& in, const tensor_view<const U>& given, const input_gradients<U>& wanted, std::span<U>) {
                                      const auto keys = reference::sum_of<U, T>(in.keys, o.positional_encoding);
                                      reference::linear_gradients<U>({in.queries, keys, in.values, in.positions}, given, wanted, relu{}, o.pattern, true, o.eps, 1);
                                  });
}

template <Scalar T, class P>
operation<T> focused(const std::shared_ptr<const convolved_drawn<T>>& d, const by_token<T>& tokens, const P& pattern, const sizes& s,
                     index_t queries) {
    const focused_linear_attention<P, T> op{.power = d->power,
                                            .scale = d->scale,
                                            .convolution = tokens.convolution,
                                            .pattern = pattern,
                                            .positional_encoding = tokens.encoding,
                                            .convolution_input = tokens.input};
    // Two norms are sums of all channels of all heads; a power multiplies what rounding its base has done.
    const auto feature_error = unit_of<T> * static_cast<double>(s.heads * s.key_dim + 16 * d->power + 32);
    const auto present = [d](const auto& in, index_t b) {
        const auto m = in.keys.shape().tokens;
        return d->has_length ? std::clamp<index_t>(d->length[static_cast<std::size_t>(b)] - in.positions.first_key[b], 0, m) : m;
    };
    // Keys become means over those that are there.
    const auto divide = [present]<class U>(const inputs<U>& in, tensor<U>& k) {
        const auto each = k.shape().size() / std::max<index_t>(1, k.shape().batch);
        for (index_t b = 0; b < k.shape().batch; ++b)
            for (index_t e = 0; e < each; ++e) k.data()[b * each + e] /= static_cast<U>(std::max<index_t>(1, present(in, b)));
    };
    const auto reads = [divide]<class U>(const auto& o, const inputs<U>& in, const auto& then) {
        const auto sums = reference::sum_of<U, T>(in.keys, o.positional_encoding);
        const auto q = reference::focused_features<U, T>(in.queries, o.power, o.scale);
        auto k = reference::focused_features<U, T>(std::as_const(sums).view(), o.power, o.scale);
        divide(in, k);
        then(inputs<U>{q, k, in.values, in.positions}, o.eps);
    };
    const auto find_gradients = [=]<class U>(const auto& o, const inputs<U>& in, const tensor_view<const U>& given, const input_gradients<U>& wanted,
                                             std::span<U> of_scale) {
        tensor<U> of_queries(in.queries.shape()), of_keys(in.keys.shape());
        reads(o, in, [&](const inputs<U>& mapped, double eps) {
            reference::linear_gradients<U>(mapped, given, {of_queries, of_keys, wanted.values}, identity_features{}, o.pattern, true, eps, 1);
        });
        divide(in, of_keys);
        std::vector<index_t> queries_present, keys_present;
        for (index_t b = 0; b < in.queries.shape().batch; ++b) {
            keys_present.push_back(in.queries.shape().tokens > 0 ? present(in, b) : 0);
            queries_present.push_back(keys_present.back() > 0 ? in.queries.shape().tokens : 0);
        }
        const auto sums = reference::sum_of<U, T>(in.keys, o.positional_encoding);
        reference::focused_gradients<U, T>(in.queries, o.power, o.scale, std::as_const(of_queries).view(), queries_present, wanted.queries, of_scale);
        reference::focused_gradients<U, T>(std::as_const(sums).view(), o.power, o.scale, std::as_const(of_keys).view(), keys_present, wanted.keys, of_scale);
    };
    return convolved_operation<T>(d, op, queries, feature_error, {}, reads, find_gradients);
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
    const auto make = [own, kind, is_focused, s](const by_token<T>& tokens, index_t queries) {
        if (kind == 3) return simplified<T>(own, tokens, causal{}, queries);
        if (kind == 2) return is_focused ? focused<T>(own, tokens, lengths{own->length}, s, queries) : simplified<T>(own, tokens, lengths{own->length}, queries);
        return is_focused ? focused<T>(own, tokens, dense{}, s, queries) : simplified<T>(own, tokens, dense{}, queries);
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
    t.name = std::string(kind == 2 ? "lengths" : kind == 3 ? "causal" : "dense") + (is_focused && kind != 3 ? ", focused, power " + std::to_string(d->power) : "") +
             ", kernel " + to_string(d->weights.shape()) + ", grid " + std::to_string(height) + " x " + std::to_string(width) +
             (d->encoding.data() ? ", encoding" : "") + (other ? ", another input" : "") + (d->bias.empty() ? "" : ", bias");
    return t;
}

outcome check_convolved(draw& random) {
    return check_trial(random, [&]<Scalar T>(std::type_identity<T>) { return draw_convolved<T>(random); });
}

} // namespace attn::fuzz
