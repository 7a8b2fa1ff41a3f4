// An attention operator whose type is chosen at run time.
#pragma once

#include "attention.hpp"

#include <memory>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Any attention operator on tensors of T, chosen at run time: a value that holds one and is called as it is, with its bits.
///     any_attention<float> op = softmax_attention{};      if (decoder) op = softmax_attention{.pattern = causal{}};
/// Copies share the operator, which does not change. What that refers to is to live as long as they do. It goes wherever an operator goes
/// but into caches and ranks, which ask for its type; it has no gradient, for which a std::variant is visited. Shapes and parameters that
/// do not fit are refused by the operator's own name, outputs by this one's; log_sum_exp is refused where the operator has none. A call
/// costs a few virtual calls more. Only a ragged call of an operator with something of each token, such as recurrent_attention's decays,
/// allocates: each sequence has an operator of its own.
template <Scalar T>
class any_attention {
public:
    static constexpr std::string_view name = "any_attention";
    static constexpr attention_traits traits{.has_log_sum_exp_shape = true, .has_narrow_workspace = true, .writes_beside_values = true};

    /// Holds the operator.
    template <class A>
        requires(!std::same_as<A, any_attention> && Attention<A>)
    any_attention(const A& op) : held_(std::make_shared<holder<A>>(op)) {}

    /// The name of the operator that is held.
    std::string_view held_name() const { return held_->held_name(); }

    template <Scalar S>
    void check(const inputs<S>& in) const {
        require<S>();
        if constexpr (std::same_as<S, T>) held_->check(in);
    }
    void check_apart(const output_memory& out) const { held_->check_apart(out); }
    shape output_shape(const input_shapes& s) const { return held_->output_shape(s); }
    /// Throws argument_error if the operator has none.
    shape log_sum_exp_shape(const input_shapes& s) const { return held_->log_sum_exp_shape(s); }
    template <Scalar S>
    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const {
        return held_->workspace_bytes(s, concurrency);
    }
    template <Scalar S>
    std::size_t narrow_workspace_bytes(const input_shapes& s, index_t concurrency) const {
        return held_->narrow_workspace_bytes(s, concurrency);
    }
    template <Scalar S>
    void forward(const inputs<S>& in, const outputs<S>& out, const execution& run) const {
        require<S>();
        if constexpr (std::same_as<S, T>) held_->forward(in, out, run);
    }
    /// The operator for one sequence of a ragged batch: see attention/ragged.hpp.
    any_attention of_entry(index_t entry, index_t entries, const row_range& keys, index_t all_keys) const {
        return any_attention(held_->of_entry(held_, entry, entries, keys, all_keys));
    }

private:
    struct held {
        virtual ~held() = default;
        virtual std::string_view held_name() const = 0;
        virtual void check(const inputs<T>& in) const = 0;
        virtual void check_apart(const output_memory& out) const = 0;
        virtual shape output_shape(const input_shapes& s) const = 0;
        virtual shape log_sum_exp_shape(const input_shapes& s) const = 0;
        virtual std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const = 0;
        virtual std::size_t narrow_workspace_bytes(const input_shapes& s, index_t concurrency) const = 0;
        virtual void forward(const inputs<T>& in, const outputs<T>& out, const execution& run) const = 0;
        virtual std::shared_ptr<const held> of_entry(const std::shared_ptr<const held>& self, index_t entry, index_t entries,
                                                     const row_range& keys, index_t all_keys) const = 0;
    };
    template <Attention A>
    struct holder final : held {
        A op;

        explicit holder(const A& held_op) : op(held_op) {}
        std::string_view held_name() const override { return A::name; }
        void check(const inputs<T>& in) const override { op.check(in); }
        void check_apart(const output_memory& out) const override { op.check_apart(out); }
        shape output_shape(const input_shapes& s) const override { return op.output_shape(s); }
        shape log_sum_exp_shape(const input_shapes& s) const override {
            if constexpr (A::traits.has_log_sum_exp) return attn::log_sum_exp_shape(op, s);
            else detail::refuse_log_sum_exp(A::name);
        }
        std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const override {
            return detail::workspace_bytes_for<T>(op, s, concurrency);
        }
        std::size_t narrow_workspace_bytes(const input_shapes& s, index_t concurrency) const override {
            if constexpr (std::same_as<T, float>) return detail::workspace_bytes_for<detail::sixteen_bits>(op, s, concurrency);
            else return workspace_bytes(s, concurrency);
        }
        void forward(const inputs<T>& in, const outputs<T>& out, const execution& run) const override {
            detail::forward_checked(op, in, out, run);
        }
        std::shared_ptr<const held> of_entry(const std::shared_ptr<const held>& self, index_t entry, index_t entries, const row_range& keys,
                                             index_t all_keys) const override {
            if constexpr (requires { op.of_entry(entry, entries, keys, all_keys); }) {
                const auto own = op.of_entry(entry, entries, keys, all_keys);
                return std::make_shared<holder<std::remove_const_t<decltype(own)>>>(own);
            } else return self;
        }
    };

    explicit any_attention(std::shared_ptr<const held> op) : held_(std::move(op)) {}
    template <Scalar S>
    static void require() {
        static_assert(std::same_as<S, T>, "attn: any_attention<T> is called on tensors of T, or any_attention<float> on 16-bit ones");
    }

    std::shared_ptr<const held> held_;
};

} // namespace attn
