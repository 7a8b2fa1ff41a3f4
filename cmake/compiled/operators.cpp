// The operators of attn::compiled for one instruction set: this file is compiled once for each, and ATTN_COMPILED_RUN names its function.
#include <attn/attn.hpp>
#include <attn/compiled.hpp>

#include <cstring>

namespace attn::inline ATTN_INSTRUCTION_SET {
namespace {

using compiled_library::call, compiled_library::operation;

/// A value of the program's, whose type is named after another instruction set.
template <class V>
V received(const void* from) {
    static_assert(std::is_trivially_copyable_v<V>);
    alignas(V) std::byte bytes[sizeof(V)];
    std::memcpy(bytes, from, sizeof(V));
    return std::bit_cast<V>(bytes);
}

/// The program's executor.
struct caller {
    const call& c;

    index_t concurrency() const { return c.concurrency; }
    void parallel_for(index_t count, function_ref body) const {
        c.parallel_for(c.executor, count, &body, [](const void* work, index_t i) { (*static_cast<const function_ref*>(work))(i); });
    }
};

/// wanted(): the gradients that are wanted of it.
template <Scalar T>
void attend_with(const DifferentiableAttention auto& op, const call& c, const auto& wanted) {
    const auto in = received<inputs<T>>(c.in);
    if (!c.d_out) return attend(op, in, received<outputs<T>>(c.out), caller{c});
    backward(op, in, received<saved_outputs<T>>(c.saved), received<output_gradients<T>>(c.d_out), wanted(), caller{c});
}

template <DifferentiableNorm N>
void normalise_with(const N& norm, const call& c) {
    using T = typename N::scalar;
    if (!c.d_out) return normalise(norm, received<stored_view<const T>>(c.in), received<stored_view<T>>(c.out), caller{c});
    backward(norm, received<tensor_view<const T>>(c.in), received<tensor_view<const T>>(c.d_out), received<typename N::gradients>(c.out), caller{c});
}

/// The wanted gradients of a score function. Throws argument_error if they are another's.
template <ScoreFunction S, Scalar T>
score_gradients<S, T> gradients_of_score(const compiled::score_gradients<T>& wanted) {
    if (const auto* own = std::get_if<score_gradients<S, T>>(&wanted)) return *own;
    if (!std::holds_alternative<no_gradients>(wanted))
        detail::raise(argument_error("softmax_attention", "wanted.score", "is of another score function than the operator's"));
    return {};
}

/// softmax_attention of a pattern and a score function that a call chooses. The kernel sees both behind interfaces, so each is compiled
/// here, and not every pair of them. A: what is asked for, compiled::softmax_attention of the scalar type.
template <class A>
struct chosen_softmax_attention {
    static constexpr std::string_view name = softmax_attention<>::name;
    static constexpr attention_traits traits{.has_narrow_workspace = true};

    const A& asked;

    template <Scalar T>
    void check(const inputs<T>& in) const {
        with_pattern(
            [&]<class P>(const P& p) { softmax_attention<P>{.scale = asked.scale, .pattern = p, .sinks = asked.sinks}.check(in); });
        const auto context = detail::pattern_context_of(name, in.positions, shapes_of(in), in.queries.shape().heads);
        with_score([&](const auto& score) { attn::check(score, context); });
    }
    void check_apart(const output_memory& out) const {
        out.require_apart("sinks", asked.sinks);
        with_pattern([&](const auto& pattern) { attn::check_apart(pattern, out); });
        with_score([&](const auto& score) { attn::check_apart(score, out); });
    }
    shape output_shape(const input_shapes& s) const { return softmax_attention<>().output_shape(s); }
    template <Scalar T>
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const {
        return kernel::softmax_scheduler<T>::workspace_bytes(s, resumes(), concurrency, false);
    }
    template <Scalar T>
    std::size_t narrow_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        return kernel::softmax_scheduler<T>::workspace_bytes(s, resumes(), concurrency, true);
    }
    template <Scalar T>
    void forward(const inputs<T>& in, const outputs<T>& out, const execution& run) const {
        with_visible_keys(in, [&](const kernel::visible_keys& visible) {
            with_score([&]<class S>(const S& score) {
                const kernel::score_adjustment_of<T, S> adjustment(score);
                kernel::softmax_scheduler<T>::attend(detail::softmax_call_of(asked, in, out, visible, adjustment), run);
            });
        });
    }

    template <Scalar T>
    using gradients = compiled::softmax_gradients<T>;
    template <Scalar T>
    void check_gradients(const inputs<T>& in, const compiled::softmax_gradients<T>& wanted, const auto& check) const {
        softmax_attention{.sinks = asked.sinks}.check_gradients(in, {wanted, wanted.sinks}, check);
        with_score([&]<class S>(const S& score) { detail::check_score_gradients(score, gradients_of_score<S, T>(wanted.score), check); });
    }
    template <Scalar T>
    std::size_t backward_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        const bool has_parameters = std::visit([]<class S>(const S&) { return detail::has_gradients<S, T>; }, asked.score);
        return kernel::softmax_gradient_scheduler<T>::workspace_bytes(s, concurrency, has_parameters);
    }
    template <Scalar T>
    void backward(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out,
                  const compiled::softmax_gradients<T>& wanted, const execution& run) const {
        const auto scale = detail::score_scale<T>(asked.scale, in.queries.shape().channels);
        with_visible_keys(in, [&](const kernel::visible_keys& visible) {
            with_score([&]<class S>(const S& score) {
                const auto of_score = gradients_of_score<S, T>(wanted.score);
                const kernel::score_slopes_of<T, S> slopes(score, of_score);
                constexpr bool adjusts = !std::same_as<S, identity_score>;
                kernel::softmax_gradient_scheduler<T>()({in, saved, d_out, wanted, visible, adjusts ? &slopes : nullptr, scale},
                                                        asked.sinks, wanted.sinks, detail::has_gradients<S, T>, run);
            });
        });
    }

private:
    void with_pattern(const auto& f) const { std::visit(f, asked.pattern); }
    void with_score(const auto& f) const { std::visit(f, asked.score); }
    template <Scalar T>
    void with_visible_keys(const inputs<T>& in, detail::call_ref<const kernel::visible_keys&> f) const {
        with_pattern([&]<class P>(const P& pattern) { f(kernel::visible_keys_of<T, P>(pattern, shapes_of(in), in.positions)); });
    }
    /// Whether the keys of a query may come in several passes.
    bool resumes() const {
        return std::visit([]<class P>(const P&) { return max_passes<P> > 1; }, asked.pattern);
    }
};

template <Scalar T>
batch_norm<T> batch_norm_of(const compiled::batch_norm<T>& n) {
    return {
        .weight = n.weight, .bias = n.bias, .mean = n.mean, .variance = n.variance, .eps = n.eps, .batch_statistics = n.batch_statistics};
}

template <Scalar T>
void run_as(const call& c) {
    switch (c.asked) {
    case operation::softmax_attention: {
        const auto asked = received<compiled::softmax_attention<T>>(c.op);
        return attend_with<T>(chosen_softmax_attention<compiled::softmax_attention<T>>{asked}, c,
                              [&] { return received<compiled::softmax_gradients<T>>(c.out); });
    }
    case operation::linear_attention: {
        const auto asked = received<compiled::linear_attention<T>>(c.op);
        const auto with = [&]<class P>(const P& pattern) {
            const linear_attention<elu_plus_one, P> op{
                .pattern = pattern, .normalise = asked.normalise, .eps = asked.eps, .scale = asked.scale};
            attend_with<T>(op, c, [&] { return received<input_gradients<T>>(c.out); });
        };
        return std::visit(with, asked.pattern);
    }
    case operation::linformer_attention: {
        const auto asked = received<compiled::linformer_attention<T>>(c.op);
        const auto with = [&]<class F>(const F& values) {
            using op_type = linformer_attention<linear_projection<T>, F>;
            const op_type op{.key_projection = {asked.key_matrix}, .value_projection = values, .scale = asked.scale};
            attend_with<T>(op, c, [&] {
                const auto wanted = received<compiled::linformer_gradients<T>>(c.out);
                gradients_of<op_type, T> own{wanted, {.matrix = wanted.key_matrix}};
                if constexpr (!op_type::shares_projection) own.value_projection.matrix = wanted.value_matrix;
                else if (wanted.value_matrix.data())
                    detail::raise(
                        argument_error(op.name, "wanted.value_matrix", "is asked for, but the values have no matrix of their own"));
                return own;
            });
        };
        return asked.value_matrix.data() ? with(linear_projection<T>{asked.value_matrix}) : with(shared_projection());
    }
    case operation::lsh_attention: {
        const auto asked = received<compiled::lsh_attention<T>>(c.op);
        const auto pattern = std::visit([](const auto& p) { return lsh_pattern(p); }, asked.pattern);
        const lsh_attention<T> op{.rotations = asked.rotations, .chunk = asked.chunk, .pattern = pattern, .scale = asked.scale};
        return attend_with<T>(op, c, [&] { return received<input_gradients<T>>(c.out); });
    }
    case operation::layer_norm: {
        const auto asked = received<compiled::layer_norm<T>>(c.op);
        return normalise_with(layer_norm<T>{.weight = asked.weight, .bias = asked.bias, .eps = asked.eps}, c);
    }
    case operation::rms_norm: {
        const auto asked = received<compiled::rms_norm<T>>(c.op);
        return normalise_with(rms_norm<T>{.weight = asked.weight, .eps = asked.eps}, c);
    }
    case operation::batch_norm: return normalise_with(batch_norm_of(received<compiled::batch_norm<T>>(c.op)), c);
    case operation::rep_batch_norm: {
        const auto asked = received<compiled::rep_batch_norm<T>>(c.op);
        return normalise_with(rep_batch_norm<T>{.batch = batch_norm_of(asked.batch), .eta = asked.eta}, c);
    }
    }
}

} // namespace
} // namespace attn

extern "C" void ATTN_COMPILED_RUN(const attn::compiled_library::call& c) {
    return c.is_double ? attn::run_as<double>(c) : attn::run_as<float>(c);
}
