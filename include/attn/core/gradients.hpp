// What the gradient of a call reads and writes besides the call's inputs.
#pragma once

#include "function_ref.hpp"
#include "output_memory.hpp"

#include <array>
#include <cstring>
#include <string_view>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What a call wrote, to be read again by its gradient: values (batch, heads, n, d_v) and log_sum_exp (batch, heads, n, 1).
template <class T>
struct saved_outputs {
    tensor_view<const T> values;
    tensor_view<const T> log_sum_exp = {};

    /// What a call of a part of the queries wrote.
    constexpr saved_outputs slice(const tensor_part& part) const noexcept { return {values.slice(part), log_sum_exp.slice(part)}; }
};

/// The gradient of a loss with respect to what a call wrote, in the same shapes. Without memory, that of log_sum_exp is 0.
template <class T>
struct output_gradients {
    tensor_view<const T> values;
    tensor_view<const T> log_sum_exp = {};

    /// The gradient with respect to what a call of a part of the queries wrote.
    constexpr output_gradients slice(const tensor_part& part) const noexcept { return {values.slice(part), log_sum_exp.slice(part)}; }
};

/// The gradient of the loss with respect to what a call read, in the same shapes. A view without memory is not wanted, and not computed.
template <class T>
struct input_gradients {
    tensor_view<T> queries = {};
    tensor_view<T> keys = {};
    tensor_view<T> values = {};
};

/// No gradients: what a score function or a projection without parameters has.
struct no_gradients {};

/// The gradient of the loss with respect to what a call reads whose heads are mixed: h_k heads of queries, h mixed heads and h_v heads of
/// the result.
template <class T>
struct mixed_head_gradients : input_gradients<T> {
    tensor_view<T> logits_mix = {};   ///< (1, 1, h, h_k)
    tensor_view<T> logits_bias = {};  ///< (1, h, 1, 1)
    tensor_view<T> weights_mix = {};  ///< (1, 1, h_v, h)
    tensor_view<T> weights_bias = {}; ///< (1, h_v, 1, 1)
    tensor_view<T> sinks = {};        ///< (1, h, 1, 1)
};

/// The gradient of the loss with respect to what recurrent attention reads, in the same shapes: what the rule takes of each token is summed
/// over the batch entries and heads that share it.
template <class T>
struct recurrent_gradients : input_gradients<T> {
    tensor_view<T> log_decay = {};
    tensor_view<T> beta = {};
    tensor_view<T> a = {};
    tensor_view<T> b = {};
    tensor_view<T> first_state = {};
    tensor_view<const T> d_last_state = {}; ///< is read: the gradient of the loss with respect to the last state, 0 if it is not given

    /// Those of one sequence of a ragged batch, which has these tokens.
    recurrent_gradients of_entry(index_t entry, const row_range& tokens) const {
        auto own = *this;
        for (auto* each : {&own.log_decay, &own.beta, &own.a, &own.b}) *each = each->slice({.tokens = tokens});
        own.first_state = first_state.slice({.batch = {entry, 1}});
        own.d_last_state = d_last_state.slice({.batch = {entry, 1}});
        return own;
    }
};

/// The gradients of a loss with respect to what a norm read: x (batch, heads, tokens, channels), weight and bias (channels). What has no
/// memory is not wanted, and not computed.
template <Scalar T>
struct norm_gradients {
    tensor_view<T> x = {};
    std::span<T> weight = {};
    std::span<T> bias = {};
};

/// The gradients of a loss with respect to what a rep_batch_norm read: as norm_gradients, and eta, one number.
template <Scalar T>
struct rep_norm_gradients : norm_gradients<T> {
    std::span<T> eta = {};
};

namespace detail {

/// What computes the gradient of an operator: specialised by the header that has it, with `workspace_bytes` and `run` of the operator and
/// of what its members of that name are given. Without that header nothing does.
template <class Op, class T>
struct backward_of {
    using missing = void;
    static std::size_t workspace_bytes(const auto&...);
    static void run(const auto&...);
};
template <class Op, class T>
concept HasBackward = !requires { typename backward_of<Op, T>::missing; };

/// "wanted.attention.q.weight" of "attention" and "wanted.q.weight", without allocating; a name that is too long is cut.
class nested_name {
public:
    nested_name(std::string_view member, std::string_view inner) {
        for (const auto part : {std::string_view("wanted."), member, std::string_view("."), inner.substr(inner.find('.') + 1)}) {
            const auto count = std::min(part.size(), text_.size() - size_);
            std::memcpy(text_.data() + size_, part.data(), count);
            size_ += count;
        }
    }
    operator std::string_view() const { return {text_.data(), size_}; }

private:
    std::array<char, 120> text_;
    std::size_t size_ = 0;
};

/// Calls f(name, gradient, parameter) for each parameter that has a gradient, of what names them by a member; for none where none has.
template <class P, class G>
void for_each_gradient(const P& of, const G& wanted, const auto& f) {
    if constexpr (!std::same_as<G, no_gradients>) of.for_each_gradient(wanted, f);
}

/// What a gradient is shown to: its argument, its view, the shape of what it is a gradient of, and whether channels must lie side by side.
template <class T>
using gradient_visit = call_ref<std::string_view, const tensor_view<T>&, const shape&, bool>;

/// Throws attention_error unless the gradients that a call writes have the shapes of what they are gradients of, and memory apart from what
/// it reads and from each other. for_each(visit) calls visit for each of them; a view without memory is not wanted. require_apart(memory)
/// compares with what the call reads.
template <class T>
void check_gradients(std::string_view operation, call_ref<const gradient_visit<T>&> for_each,
                     call_ref<const output_memory&> require_apart) {
    index_t number = 0; // there may be any number of them: those of a projection for each head
    const auto check = [&](std::string_view argument, const tensor_view<T>& view, const shape& expected, bool rows) {
        const auto own = number++;
        if (!view.data()) return;
        check_optional(operation, argument, view, expected);
        if (rows) check_rows(operation, argument, view);
        check_writable(operation, argument, view);
        const output_memory memory(operation, argument, view);
        require_apart(memory);
        index_t other = 0;
        const auto compare = [&](std::string_view earlier, const tensor_view<T>& written, const shape&, bool) {
            if (other++ < own) memory.require_apart(earlier, written);
        };
        for_each(compare);
    };
    for_each(check);
}

/// Checks the wanted gradient of what an operator may have, as its check_gradients does.
void check_wanted(std::string_view operation, std::string_view argument, const auto& wanted, bool is_there, const shape& expected,
                  const auto& check) {
    if (wanted.data() && !is_there) detail::raise(argument_error(operation, argument, "is asked for, but the operator has none"));
    check(argument, wanted, expected);
}

} // namespace detail

} // namespace attn
