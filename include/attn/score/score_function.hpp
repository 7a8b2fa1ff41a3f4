// Score functions: what happens to a scaled score before the softmax.
#pragma once

#include "../core/gradients.hpp"
#include "../pattern/pattern.hpp"

#include <cmath>
#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What a score function is about to be used on: as for patterns, with errors that speak of the score.
struct score_context : pattern_context {
    /// Throws argument_error. `function` is the score function with its numbers, "soft_cap{0}".
    [[noreturn, gnu::cold]] void refuse(std::string_view function, const auto&... problem) const {
        detail::raise(argument_error(operation, "score", function, " ", problem...));
    }
    /// Throws argument_error unless a table of that many batch entries and heads serves all: its batch entries are repeated, image after
    /// image, and its heads are 1 or the context's number.
    void require_broadcast(const shape& table, const auto& name) const {
        if (!repeats(table.batch)) refuse(name(), "has ", table.batch, " batch entries, which do not divide ", batch);
        if (table.heads != 1 && table.heads != heads) refuse(name(), "has ", table.heads, " heads, where 1 or ", heads, " are needed");
    }
    /// Throws argument_error unless the positions that occur lie in a table for `count` of them from `first` on. `what`: "query" or "key".
    void require_covered(const auto& name, const std::string& what, index_t first, index_t count, index_t needed_first,
                         index_t needed_end) const {
        if (first < -farthest_position || first > farthest_position)
            refuse(name(), "begins at ", what, " position ", first, ", but positions lie between -2^60 and 2^60 (attn::farthest_position)");
        const auto end = detail::saturating_sum(first, count);
        if (needed_first >= needed_end || (first <= needed_first && needed_end <= end)) return;
        refuse(name(), "covers ", what, " positions ", first, " to ", end - 1, ", where ", needed_first, " to ", needed_end - 1, " occur");
    }

    /// Calls f(context, b) for each batch entry b, or once for all of them if a table lies at the same positions for all. Throws
    /// argument_error unless the positions are one for all, or as many as divide the batch entries.
    void for_each_entry(const auto& name, const per_batch& queries_from, const per_batch& keys_from, auto&& f) const {
        for (const auto* first : {&queries_from, &keys_from})
            if (!first->shared() && !repeats(first->count()))
                refuse(name(), "has ", first->count(), " positions, which do not divide ", batch, " batch entries");
        if (queries_from.shared() && keys_from.shared()) return f(*this, 0);
        for (index_t b = 0; b < batch; ++b) f(score_context{entry(b)}, b);
    }

private:
    using pattern_context::require_at_least; // it would blame the pattern
};

/// Apart, so that calls with dual numbers find their functions and nothing that attn has for others.
namespace dual_numbers {

template <class V>
struct dual;

} // namespace dual_numbers

using dual_numbers::dual;

namespace detail {

/// What products of queries and keys of so many channels are multiplied by: 1 / sqrt(channels), if nothing is given.
template <Scalar T>
T score_scale(const std::optional<double>& given, index_t channels) {
    return static_cast<T>(given.value_or(1 / std::sqrt(static_cast<double>(channels))));
}

template <class F, class T>
concept HasBiasRowOf = requires(const F& f, index_t i, T* to) { f.bias_row(i, i, i, i, to); };

/// A score function that adds a bias that it has in a table.
template <class F>
concept HasBiasRow = HasBiasRowOf<F, float> || HasBiasRowOf<F, double>;

template <class S>
inline constexpr bool is_score_number = std::floating_point<S>;
template <class V>
inline constexpr bool is_score_number<dual<V>> = is_score_number<V>;

/// A number, or one with its derivative: what a definition evaluates score functions on.
template <class S>
concept ScoreNumber = is_score_number<S>;

/// score + bias; -infinity wherever the bias is, also for a score that is NaN or infinite: what hides a key does not ask what it holds.
template <ScoreNumber S>
constexpr S plus_bias(S score, S bias) {
    const auto hidden = static_cast<S>(-std::numeric_limits<float>::infinity());
    return bias == hidden ? hidden : score + bias;
}

template <class S, class T>
no_gradients gradients_of_score();
template <class S, class T>
    requires requires { typename S::template gradients<T>; }
typename S::template gradients<T> gradients_of_score();

/// A score function, not a chain of them, with parameters that have gradients.
template <class F, class T>
concept HasGradients = requires(const F& f, const typename F::template gradients<T>& wanted) {
    f.check_gradients(wanted, [](const char*, const tensor_view<T>&, const shape&) {});
};

/// What is left of it for a head, with numbers that are no tables.
template <class F>
concept HasParameterSlopes = requires(const F& f, double score, index_t i) { f.parameter_slope(i, score, i, i); };

/// Calls check(name, view, shape) for each of a score function's gradients.
void check_score_gradients(const auto& score, const auto& wanted, const auto& check) {
    if constexpr (requires { score.check_gradients(wanted, check); }) score.check_gradients(wanted, check);
}

} // namespace detail

/// The score function that is left for one batch entry and head: `f.at(batch, head)`, or f itself if it is the same everywhere.
template <class F>
constexpr auto score_at(const F& f, index_t batch, index_t head) {
    if constexpr (detail::HasAt<F>) return f.at(batch, head);
    else return f;
}

/// A value with one generic call (score, query, key) -> the new score, on scaled scores before the softmax:
///     []<class S>(S score, auto query, auto key) {
///         using std::abs;
///         return score - S(0.1) * abs(S(query - key));
///     }
/// query and key are absolute positions; `S(query - key)` makes a score of them. The same text is evaluated on
///   numbers   score is double or float, query and key are `index_t`: the definition
///   lanes     score is a register of scores, query as many positions, key an `index_t`: the kernel
/// What it returns must convert to the type of the score. -infinity hides the key from the query, whatever it holds; NaN makes the
/// row NaN. abs, exp, fma, log, max, min, pow, sqrt and tanh are found unqualified on lanes, and on numbers after `using std::abs;` and so
/// on: without it, C's abs is found and rounds to an int. Lanes have no `if`: `using attn::select; select(score > 0, a, b)` chooses.
/// Optional members:
///   at(batch, head)   the score function for one batch entry and head (the call may then be that function's only)
///   compares_positions  a static constant, false as a promise: it does not matter how queries stand beside keys; see Pattern
///   check(context)    throws, by context.refuse, if the parameters do not fit what the score function is used on
///   check_apart(out)  throws, by out.require_apart, if an output overlaps memory that the function refers to: see output_memory
///   bias_row(first, step, count, key, to)   for one that adds a bias from a table, where lanes would have to look up many numbers: instead
///                     of the call on lanes, writes to[q], the bias of key `key` for the query at position first + q step, q < count. The
///                     call on numbers adds the same; a bias of -infinity hides the key, whatever its score
/// And for parameters that have gradients, all of
///   gradients<T>      the gradients, views that may have no memory, which means not wanted
///   check_gradients(wanted, check)  calls check("wanted.score.slope", wanted.slope, shape) for each of them
///   find_gradients(wanted, sums)    finds those that are wanted, from sums of the gradients of pairs (kernel::parameter_sums):
///                     sums.of_number(number, wanted.slope) for a number for each head, (1, heads, 1, 1), or one for all, (1, 1, 1, 1)
///   parameter_slope(number, score, query, key)   for these, beside the call and as generic: the call's derivative by parameter `number`
/// Score functions are copied freely and called from all threads: they hold numbers and views.
template <class F>
concept ScoreFunction = std::copy_constructible<F> && requires(const F& f, double score, index_t i) {
    { score_at(f, i, i)(score, i, i) } -> std::convertible_to<double>;
};

namespace detail {

/// True, or the program is not compiled, and one sentence says why.
template <class S>
consteval bool require_score_function() {
    constexpr bool is_score = ScoreFunction<S>;
    static_assert(is_score,
                  "attn: a score function makes a number of a score and two positions: [](auto score, auto query, auto key) { ... }");
    return true;
}

} // namespace detail

/// The gradients of a score function's parameters: its member template `gradients<T>`, of views that may have no memory; or none.
template <class S, class T>
using score_gradients = decltype(detail::gradients_of_score<S, T>());

namespace detail {

/// Whether a score function or a weight has parameters with gradients.
template <class F, class T>
inline constexpr bool has_gradients = !std::same_as<score_gradients<F, T>, no_gradients>;

} // namespace detail

/// No score function: scores as they are.
struct identity_score {
    static constexpr bool compares_positions = false;
    constexpr auto operator()(auto score, auto, auto) const { return score; }
};

/// Throws argument_error if a parameter of the score function, or of one that it is made of, is wrong or does not fit the context, or if it
/// compares positions that nobody gave.
template <ScoreFunction F>
void check(const F& f, const pattern_context& context) {
    if constexpr (requires(const score_context& c) { f.check(c); }) f.check(score_context{context});
    if constexpr (compares_positions<F>) context.require_positions("score");
}

/// condition ? yes : no, for numbers. Lanes have a `select` of their own, so that one text serves both.
template <class A, class B>
    requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
constexpr std::common_type_t<A, B> select(bool condition, A yes, B no) {
    return condition ? static_cast<std::common_type_t<A, B>>(yes) : static_cast<std::common_type_t<A, B>>(no);
}

} // namespace attn
