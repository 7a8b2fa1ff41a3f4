#include "case.hpp"

#include "attn/attention/lsh_attention.hpp"
#include "attn/attention/lsh_backward.hpp"
#include "attn/attention/random_projection.hpp"
#include "attn/reference/lsh_attention.hpp"

namespace attn::testing {

namespace {

/// Its tokens are the problem's keys, whatever the queries are. Buckets are those of T everywhere, for a vector between two may be rounded to
/// either.
template <Scalar T>
class lsh_instance final : public instance<T> {
public:
    lsh_instance(const problem& p, const lsh_pattern& pattern) : rotations_({2, p.heads, p.key_dim, std::max<index_t>(1, p.queries / 64)}) {
        fill_random_projection<T>(rotations_, 5);
        op_ = {.rotations = rotations_, .chunk = 64, .pattern = pattern};
    }

    void attend(const inputs<T>& in, const outputs<T>& out, const execution& run) const override { attn::attend(op_, of_keys(in), out, run); }
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const override { return op_.template workspace_bytes<T>(s, concurrency); }
    std::size_t narrow_workspace_bytes(const input_shapes& s, index_t concurrency) const override {
        return op_.template narrow_workspace_bytes<T>(s, concurrency);
    }
    shape output_shape(const input_shapes& s) const override { return op_.output_shape(s); }
    void reference(const inputs<double>& in, const outputs<double>& out) const override { define(in, out); }
    void plain(const inputs<T>& in, const outputs<T>& out) const override { define(in, out); }
    void naive(const naive_forms<T>& by, const inputs<T>& in, const outputs<T>& out) const override {
        by.softmax(of_keys(in), out, static_cast<T>(scale(in)), {}, {}); // all pairs: what the hash saves
    }

    /// That of the tokens is the keys'; the queries, which are not looked at, have one of 0.
    bool has_gradient() const override { return true; }
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const override {
        return op_.template backward_workspace_bytes<T>({s.keys, s.keys, s.values}, concurrency);
    }
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given, const wanted_gradients<T>& wanted,
                  const execution& run) const override {
        attn::backward(op_, of_keys(in), saved, given, {wanted.keys, {}, wanted.values}, run);
        clear(wanted.queries);
    }
    void reference_gradients(const inputs<double>& in, const output_gradients<double>& given, const wanted_gradients<double>& wanted) const override {
        define_gradients(in, given, wanted);
    }
    void plain_gradients(const inputs<T>& in, const output_gradients<T>& given, const wanted_gradients<T>& wanted) const override {
        define_gradients(in, given, wanted);
    }

    /// As if buckets were equally full: two chunks hold four buckets.
    double useful_flops(const problem& p) const override {
        const auto& r = rotations_.shape();
        const auto seen = static_cast<double>(p.queries) / static_cast<double>(2 * r.channels) * (op_.pattern.is_causal ? 0.5 : 1);
        return 2.0 * static_cast<double>(p.batch * p.heads * p.queries * r.batch) * seen * static_cast<double>(p.key_dim + p.value_dim);
    }

private:
    template <Scalar S>
    static inputs<S> of_keys(const inputs<S>& in) {
        return {in.keys, in.keys, in.values, in.positions};
    }
    template <Scalar S>
    double scale(const inputs<S>& in) const {
        return op_.scale.value_or(1 / std::sqrt(static_cast<double>(in.keys.shape().channels)));
    }
    static void for_each(const shape& size, const auto& f) {
        for (index_t b = 0; b < size.batch; ++b)
            for (index_t h = 0; h < size.heads; ++h)
                for (index_t i = 0; i < size.tokens; ++i)
                    for (index_t c = 0; c < size.channels; ++c) f(b, h, i, c);
    }
    template <Scalar S>
    static void clear(const tensor_view<S>& view) {
        if (view.data()) for_each(view.shape(), [&](auto b, auto h, auto i, auto c) { view(b, h, i, c) = 0; });
    }
    template <Scalar S>
    tensor<index_t> buckets_of(const inputs<S>& in) const {
        tensor<T> tokens(in.keys.shape());
        for_each(tokens.shape(), [&](auto b, auto h, auto i, auto c) { tokens(b, h, i, c) = static_cast<T>(in.keys(b, h, i, c)); });
        return lsh_buckets(tokens, rotations_);
    }
    template <Scalar S>
    void define_gradients(const inputs<S>& in, const output_gradients<S>& given, const wanted_gradients<S>& wanted) const {
        const auto buckets = buckets_of(in);
        reference::lsh_gradients<S>(of_keys(in), given, {wanted.keys, {}, wanted.values}, buckets.view(),
                                    op_.chunk_of(in.keys.shape().tokens), op_.pattern.is_causal, scale(in));
        clear(wanted.queries);
    }
    /// Of some of the rows, if asked for some of them only.
    template <Scalar S>
    void define(const inputs<S>& in, const outputs<S>& out) const {
        const auto& s = in.keys.shape();
        tensor<S> values({s.batch, s.heads, s.tokens, in.values.shape().channels}), log_sum_exp({s.batch, s.heads, s.tokens, 1});
        const auto buckets = buckets_of(in);
        reference::lsh_attention<S>(of_keys(in), {values, log_sum_exp}, buckets.view(), op_.chunk_of(s.tokens), op_.pattern.is_causal, scale(in));
        const auto first = in.queries.shape().tokens == s.tokens ? 0 : in.positions.first_query[0];
        for_each(out.values.shape(), [&](auto b, auto h, auto i, auto c) { out.values(b, h, i, c) = values(b, h, first + i, c); });
        if (out.log_sum_exp.data())
            for_each(out.log_sum_exp.shape(), [&](auto b, auto h, auto i, auto c) { out.log_sum_exp(b, h, i, c) = log_sum_exp(b, h, first + i, c); });
    }

    tensor<T> rotations_;
    lsh_attention<T> op_;
};

registered lsh_case(std::string name, std::string cost, const lsh_pattern& pattern) {
    return registered({.name = std::move(name),
                       .cost = std::move(cost),
                       .rows_stand_alone = false, // where a token is sorted to depends on the others
                       .supports = [](const problem& p) { return p.queries == p.keys && p.heads == p.kv_heads && p.positions.first_query.count() == 0 &&
                                                                 p.positions.first_key.count() == 0 && p.positions.first_query[0] == p.positions.first_key[0]; }},
                      [pattern]<class T>(const problem& p, T) -> std::unique_ptr<instance<T>> { return std::make_unique<lsh_instance<T>>(p, pattern); });
}

const auto all_case = lsh_case("lsh", "rounds n (d_k b + 2 n / b (d_k + d_v))", dense{});
const auto causal_case = lsh_case("lsh_causal", "rounds n (d_k b + n / b (d_k + d_v))", causal{});

} // namespace

} // namespace attn::testing
