// The transformer block, with its norms in front or behind, over any attention layer, norm and feed-forward layer.
#pragma once

#include "feed_forward.hpp"
#include "multi_head.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A transformer block: attention and a feed-forward network, each added to its input, with a norm in front of each or behind.
/// For tokens x (batch, 1, n, c):
///     y   = x + attention(attention_norm(x)),       out = y + feed_forward(feed_forward_norm(y))
/// and with post_norm, as in the first Transformer and in BERT,
///     y   = attention_norm(x + attention(x)),       out = feed_forward_norm(y + feed_forward(y))
/// attention: a multi_head, a windowed one, or any layer that keeps the shape; a context, from which it takes keys and values, is not
/// normalised. A learned scale of a branch (CaiT's LayerScale) is the last linear with its rows scaled. out may be the tokens themselves.
/// The residuals are its own: it adds no other. Memory: one more copy of the tokens, and what attention and feed_forward need. Vaswani et
/// al. 2017, "Attention Is All You Need"; the norm in front: Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture".
template <Norm N, Layer M, Layer F>
struct transformer_block {
    using scalar = typename M::scalar;
    static constexpr std::string_view name = "transformer_block";
    static constexpr bool has_norms = !std::same_as<N, identity_norm<scalar>>;
    static_assert(has_norms || (M::in_place && F::in_place),
                  "attn: without norms, attention and feed_forward must be able to write where they read");
    static constexpr bool in_place = true;
    static constexpr bool moves_statistics = N::moves_statistics || M::moves_statistics || F::moves_statistics;
    /// Whether all that is inside has a gradient.
    static constexpr bool is_differentiable = DifferentiableLayer<M> && DifferentiableLayer<F> && detail::TrainableNorm<N>;

    N attention_norm = {};
    M attention;
    N feed_forward_norm = {};
    F feed_forward;
    bool post_norm = false; ///< whether the norms come behind the sums

    void check(const layer_inputs<scalar>& in) const {
        check(in, [&](const layer_inputs<scalar>& to_attention) { attention.check(to_attention); });
    }
    void check_apart(const output_memory& out) const {
        attention_norm.check_apart(out);
        attention.check_apart(out);
        feed_forward_norm.check_apart(out);
        feed_forward.check_apart(out);
    }
    shape output_shape(const shape& tokens) const { return tokens; }
    std::size_t workspace_bytes(const shape& tokens, const shape& context, index_t concurrency) const {
        return detail::bytes_taken([&](detail::scratch& memory) { return take_normal(memory, tokens, context, concurrency); });
    }
    void forward(const layer_inputs<scalar>& in, const tensor_view<scalar>& out, const execution& run) const {
        detail::scratch memory(run.workspace().bytes().data());
        const auto normal = take_normal(memory, in.tokens.shape(), in.context.shape(), run.concurrency());
        compute(in, {normal, out, has_norms ? normal : out}, out, run);
    }

    // On the next tokens of a sequence, beside a cache of its keys and values, or of a context's, or a state: see cached.hpp.
    void check_cached(const layer_inputs<scalar>& in, const auto& cache) const {
        check(in, [&](const layer_inputs<scalar>& to_attention) { attention.check_cached(to_attention, cache); });
    }
    std::size_t cached_workspace_bytes(const shape& tokens, const shape& context, const auto& cache, index_t concurrency) const {
        return detail::bytes_taken([&](detail::scratch& memory) { return take_cached(memory, tokens, context, cache, concurrency); });
    }
    void forward_cached(const layer_inputs<scalar>& in, auto& cache, const tensor_view<scalar>& out, const execution& run) const {
        detail::scratch memory(run.workspace().bytes().data());
        const auto normal = take_cached(memory, in.tokens.shape(), in.context.shape(), cache, run.concurrency());
        compute(in, {normal, out, has_norms ? normal : out}, out, run, [&](const layer_inputs<scalar>& to_attention, const auto& between) {
            attention.forward_cached(to_attention, cache, between, run);
        });
    }

    /// The gradients of all parts' parameters. The norms' own x are left empty.
    struct gradients {
        detail::parameter_gradients<N> attention_norm = {};    ///< of attention_norm
        detail::parameter_gradients<M> attention = {};         ///< of attention
        detail::parameter_gradients<N> feed_forward_norm = {}; ///< of feed_forward_norm
        detail::parameter_gradients<F> feed_forward = {};      ///< of feed_forward
    };
    void for_each_gradient(const layer_inputs<scalar>& in, const gradients& wanted, const auto& visit) const {
        const auto channels = in.tokens.shape().channels;
        detail::for_each_norm_gradient<N>(wanted.attention_norm, channels, detail::visit_member("attention_norm", visit));
        attention.for_each_gradient(in, wanted.attention, detail::visit_member("attention", visit));
        detail::for_each_norm_gradient<N>(wanted.feed_forward_norm, channels, detail::visit_member("feed_forward_norm", visit));
        feed_forward.for_each_gradient(in, wanted.feed_forward, detail::visit_member("feed_forward", visit));
    }
    /// What the norms make, y, and what attention and feed_forward keep.
    std::size_t kept_bytes(const shape& tokens, const shape& context) const {
        return detail::bytes_for<kept_tensors>(*this, tokens, context);
    }
    void forward(const layer_inputs<scalar>& in, const tensor_view<scalar>& out, std::byte* kept, const execution& run) const {
        detail::scratch memory(kept);
        compute(in, kept_tensors(memory, *this, in.tokens.shape(), in.context.shape()), out, run);
    }
    std::size_t backward_workspace_bytes(const shape& tokens, const shape& context, index_t concurrency) const {
        return detail::bytes_for<gradient_work>(*this, tokens, context, concurrency);
    }
    void backward(const layer_inputs<scalar>& in, const std::byte* kept, const tensor_view<const scalar>& d_out,
                  const layer_gradients<transformer_block>& wanted, const execution& run) const
        requires is_differentiable
    {
        detail::scratch memory(run.workspace().bytes().data()), held(const_cast<std::byte*>(kept));
        const kept_tensors k(held, *this, in.tokens.shape(), in.context.shape());
        const gradient_work g(memory, *this, in.tokens.shape(), in.context.shape(), run.concurrency());
        const auto& p = wanted.parameters;
        const auto add = [&](const tensor_view<scalar>& branch, const tensor_view<const scalar>& skipped, const tensor_view<scalar>& to) {
            if (!to.data()) return;
            detail::for_each_row(to, run, [&](scalar* row, index_t b, index_t i) {
                detail::add_rows(skipped.row(b, 0, i), branch.row(b, 0, i), row, to.shape().channels);
            });
        };
        const auto of_feed_forward = [&](const tensor_view<const scalar>& tokens, const tensor_view<const scalar>& d) {
            feed_forward.backward({.tokens = tokens}, k.feed_forward, d, {.tokens = g.of_branch, .parameters = p.feed_forward}, run);
        };
        const auto of_attention = [&](const tensor_view<const scalar>& d) {
            attention.backward(
                inputs_of_attention(in, k), k.attention, d,
                {.tokens = g.of_branch, .context = wanted.context, .value_context = wanted.value_context, .parameters = p.attention}, run);
        };
        if (is_post()) {
            if constexpr (has_norms) {
                detail::backward_inside(feed_forward_norm, p.feed_forward_norm, k.feed_forward_tokens, d_out, g.of_norm, run);
                of_feed_forward(k.between, g.of_norm);
                add(g.of_branch, g.of_norm, g.of_between);
                detail::backward_inside(attention_norm, p.attention_norm, k.attention_tokens, g.of_between, g.of_norm, run);
                of_attention(g.of_norm);
                add(g.of_branch, g.of_norm, wanted.tokens);
            }
            return;
        }
        of_feed_forward(k.feed_forward_tokens, d_out);
        if constexpr (has_norms) detail::backward_inside(feed_forward_norm, p.feed_forward_norm, k.between, g.of_branch, g.of_norm, run);
        add(has_norms ? g.of_norm : g.of_branch, d_out, g.of_between);
        of_attention(g.of_between);
        if constexpr (has_norms)
            detail::backward_inside(attention_norm, p.attention_norm, in.tokens, g.of_branch,
                                    wanted.tokens.data() ? g.of_norm : wanted.tokens, run);
        add(has_norms ? g.of_norm : g.of_branch, g.of_between, wanted.tokens);
    }

private:
    bool is_post() const { return has_norms && post_norm; }
    /// check_attention: checks the attention's inputs.
    void check(const layer_inputs<scalar>& in, const auto& check_attention) const {
        if (detail::is_given(in.residual)) detail::raise(argument_error(name, "residual", "is given, but a block adds its own tokens"));
        detail::check_tokens(name, "tokens", in.tokens, in.tokens.shape().channels);
        const auto& s = in.tokens.shape();
        attention_norm.check(s);
        feed_forward_norm.check(s);
        const auto within = inside(in);
        check_attention(within);
        feed_forward.check({.tokens = within.tokens});
        check_kept("attention", attention.output_shape(s), s);
        check_kept("feed_forward", feed_forward.output_shape(s), s);
    }
    /// What attention reads, where norms write it if they come first.
    layer_inputs<scalar> inside(const layer_inputs<scalar>& in) const {
        return {.tokens = has_norms && !post_norm ? head_major(in.tokens.data(), in.tokens.shape()) : in.tokens,
                .context = in.context,
                .value_context = in.value_context,
                .positions = in.positions};
    }
    /// The normalised tokens, behind the memory of what is inside, if attention has a cache.
    tensor_view<scalar> take_cached(detail::scratch& memory, const shape& s, const shape& context, const auto& cache,
                                    index_t concurrency) const {
        memory.take<std::byte>(
            std::max(inner_bytes<false>(s, {}, concurrency), attention.cached_workspace_bytes(s, context, cache, concurrency)));
        return head_major(has_norms ? memory.take<scalar>(s.size()) : nullptr, s);
    }
    /// What the norms make, or with post_norm what they read, and y between; and what attention and feed_forward keep, if there is memory
    /// for that.
    struct inner_tensors {
        tensor_view<scalar> attention_tokens, between, feed_forward_tokens; ///< without norms, the last are those between
        std::byte *attention = nullptr, *feed_forward = nullptr;
    };
    struct kept_tensors : inner_tensors {
        kept_tensors(detail::scratch& memory, const transformer_block& block, const shape& s, const shape& context) {
            const auto take = [&] { return head_major(memory.take<scalar>(s.size()), s); };
            this->between = this->feed_forward_tokens = take();
            if (has_norms) this->attention_tokens = take(), this->feed_forward_tokens = take();
            this->attention = memory.take<std::byte>(static_cast<index_t>(block.attention.kept_bytes(s, context)));
            this->feed_forward = memory.take<std::byte>(static_cast<index_t>(block.feed_forward.kept_bytes(s, {})));
        }
    };
    void compute(const layer_inputs<scalar>& in, const inner_tensors& t, const tensor_view<scalar>& out, const execution& run) const {
        compute(in, t, out, run, [&](const layer_inputs<scalar>& to_attention, const tensor_view<scalar>& between) {
            detail::forward_inside(attention, to_attention, between, t.attention, run);
        });
    }
    /// attends: runs the attention on its inputs.
    void compute(const layer_inputs<scalar>& in, const inner_tensors& t, const tensor_view<scalar>& out, const execution& run,
                 const auto& attends) const {
        if constexpr (has_norms)
            if (!post_norm) attention_norm.forward(in.tokens, t.attention_tokens, run);
        auto to_attention = inputs_of_attention(in, t);
        to_attention.residual = in.tokens;
        attends(to_attention, is_post() ? t.attention_tokens : t.between);
        if constexpr (has_norms) {
            if (post_norm) attention_norm.forward(t.attention_tokens, t.between, run);
            else feed_forward_norm.forward(t.between, t.feed_forward_tokens, run);
        }
        detail::forward_inside(feed_forward, {.tokens = is_post() ? t.between : t.feed_forward_tokens, .residual = t.between},
                               is_post() ? t.feed_forward_tokens : out, t.feed_forward, run);
        if constexpr (has_norms)
            if (post_norm) feed_forward_norm.forward(t.feed_forward_tokens, out, run);
    }
    layer_inputs<scalar> inputs_of_attention(const layer_inputs<scalar>& in, const inner_tensors& k) const {
        auto inner = in;
        if (has_norms && !post_norm) inner.tokens = k.attention_tokens;
        return inner;
    }
    /// The memory of a gradient, behind that of what is inside.
    struct gradient_work {
        tensor_view<scalar> of_branch, of_between, of_norm;

        gradient_work(detail::scratch& memory, const transformer_block& block, const shape& s, const shape& context, index_t concurrency) {
            memory.take<std::byte>(block.inner_bytes<true>(s, context, concurrency));
            const auto take = [&] { return head_major(memory.take<scalar>(s.size()), s); };
            of_branch = take();
            of_between = take();
            if (has_norms) of_norm = take();
        }
    };
    template <bool backward>
    std::size_t inner_bytes(const shape& s, const shape& context, index_t concurrency) const {
        const auto of = [&](const auto& inner, const shape& y) { return detail::inner_bytes<backward>(inner, s, y, concurrency); };
        return std::max({of(attention_norm, {}), of(attention, context), of(feed_forward_norm, {}), of(feed_forward, {})});
    }
    static void check_kept(std::string_view argument, const shape& result, const shape& tokens) {
        if (result != tokens) detail::raise(shape_error(name, argument, "makes ", result, " of tokens of shape ", tokens));
    }
    /// The normalised tokens, behind the memory of what is inside.
    tensor_view<scalar> take_normal(detail::scratch& memory, const shape& s, const shape& context, index_t concurrency) const {
        memory.take<std::byte>(inner_bytes<false>(s, context, concurrency));
        return head_major(has_norms ? memory.take<scalar>(s.size()) : nullptr, s);
    }
};

} // namespace attn
