// Forgetting gates: what lies between a key and its query makes it count less.
#pragma once

#include "../core/tensor.hpp"
#include "score_function.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// Sums of the logarithms of gates between any two tokens of one head. A running sum forgets small numbers behind a large one, which closes
/// a gate all the same; so it begins anew, with an era, at each large gate and before it grows large. Numbers of one sign are added, which
/// loses no digits, but within an era, where the difference of two sums does: of those below 2^20, in double.
class gate_sums {
public:
    /// gates: 0 or less, of each token.
    explicit gate_sums(const std::vector<double>& gates) : closed_(gates.size()) {
        std::vector<double> steps; // from the first token of an era to that of the next
        double sum = 0;
        for (std::size_t t = 0; t < gates.size(); ++t) {
            constexpr double large_gate = -0x1p10, large_sum = -0x1p20;
            closed_[t] = std::isinf(gates[t]);
            if (t > 0) {
                const bool begins = gates[t] < large_gate || sum + gates[t] < large_sum;
                if (begins) steps.push_back(total(sum, gates[t]));
                sum = begins ? 0 : sum + gates[t];
            }
            sums_.push_back({sum, std::ssize(steps)});
        }
        steps_.push_back(std::move(steps));
        for (std::size_t size = 1; 2 * size <= steps_[0].size(); size *= 2) {
            const auto& half = steps_.back();
            std::vector<double> doubled(half.size() - size);
            for (std::size_t e = 0; e < doubled.size(); ++e) doubled[e] = total(half[e], half[e + size]);
            steps_.push_back(std::move(doubled));
        }
    }
    /// c[i] - c[j], or -infinity where a gate of 0 lies between the tokens.
    double between(index_t i, index_t j) const {
        const auto &a = sums_[static_cast<std::size_t>(i)], &b = sums_[static_cast<std::size_t>(j)];
        if (a.era == b.era) [[likely]]
            return a.sum - b.sum;
        const auto sum = i > j ? over_eras(b, a) : over_eras(a, b);
        return i > j || std::isinf(sum) ? sum : -sum;
    }
    bool closed(index_t token) const { return closed_[static_cast<std::size_t>(token)]; }

private:
    /// The sum of the gates behind the first of the era, and which era that is.
    struct token_sum {
        double sum;
        index_t era;
    };

    /// The sum of two numbers, infinite only if one of them is.
    static double total(double a, double b) {
        return std::isinf(a) || std::isinf(b) ? a + b : std::max(a + b, std::numeric_limits<double>::lowest());
    }
    double over_eras(const token_sum& from, const token_sum& to) const {
        auto sum = total(steps_[0][static_cast<std::size_t>(from.era)] - from.sum, to.sum);
        auto era = static_cast<std::size_t>(from.era) + 1;
        for (auto left = static_cast<std::size_t>(to.era) - era; left > 0;) {
            const auto level = static_cast<std::size_t>(std::bit_width(left) - 1);
            sum = total(sum, steps_[level][era]);
            era += std::size_t{1} << level;
            left -= std::size_t{1} << level;
        }
        return sum;
    }

    std::vector<token_sum> sums_;
    std::vector<char> closed_;
    std::vector<std::vector<double>> steps_; ///< [level][era]: those of 2^level eras from one on
};

/// The score function that the forgetting gates of one head make.
struct forgetting_of_head {
    const gate_sums* sums;
    index_t origin; ///< the position of token 0

    /// The sum of the gates between query and key, as a finite number of S if it is finite.
    template <class S>
    S bias(index_t query, index_t key) const {
        const auto exact = sums->between(query - origin, key - origin);
        if (std::isinf(exact)) return static_cast<S>(exact);
        constexpr auto most = static_cast<double>(std::numeric_limits<S>::max());
        return static_cast<S>(std::clamp(exact, -most, most));
    }
    template <ScoreNumber S>
    S operator()(S score, index_t query, index_t key) const {
        if constexpr (std::floating_point<S>) return plus_bias(score, bias<S>(query, key));
        else return plus_bias(score, static_cast<S>(bias<double>(query, key)));
    }
    template <Scalar T>
    void bias_row(index_t first, index_t step, index_t count, index_t key, T* to) const {
        for (index_t q = 0; q < count; ++q) to[q] = bias<T>(first + q * step, key);
    }
};

} // namespace detail

/// Forgetting gates: score + c[b, h, i] - c[b, h, j], where c is the running sum of the logarithms of a gate for each token, so that a key
/// fades by the gates of all tokens behind it up to its query. With a causal pattern it is the Forgetting Transformer.
/// log_gates: (entries, heads or 1, tokens, 1), any strides, entry b mod entries for batch entry b: logarithms of numbers between 0 and 1,
/// log_sigmoid of what a linear gives. -infinity, a gate of 0, hides what lies before its token from what lies behind it, and the other way
/// round. The gates are summed once, in double, into memory that copies of the score function share. Token 0 has the position `first`;
/// queries and keys elsewhere are refused. Throws shape_error for gates of another shape, argument_error for one that is NaN or above 0.
/// Lin et al. 2025, "Forgetting Transformer: Softmax Attention with a Forget Gate".
class forgetting {
public:
    /// Forgetting with the logarithms of gates in a tensor or a view; token 0 has the position `first`.
    template <TensorLike G>
    explicit forgetting(const G& log_gates, index_t first = 0) : forgetting(tensor_view<const detail::scalar_t<G>>(log_gates), first, 0) {}

    detail::forgetting_of_head at(index_t batch, index_t head) const {
        if (sums_->empty()) return {nullptr, first_};
        return {&(*sums_)[static_cast<std::size_t>(detail::table_place(size_, batch, head).plane(size_))], first_};
    }
    void check(const score_context& context) const {
        const auto text = [&] { return "forgetting with gates of shape " + to_string(size_); };
        context.require_broadcast(size_, text);
        context.require_covered(text, "query", first_, size_.tokens, context.first_query, context.end_query);
        context.require_covered(text, "key", first_, size_.tokens, context.first_key, context.end_key);
    }

    /// The position of token 0.
    index_t first() const noexcept { return first_; }
    /// Whether a token's gate, of an entry and a head of the gates, is 0.
    bool begins_anew(index_t entry, index_t head, index_t token) const {
        return (*sums_)[static_cast<std::size_t>(entry * size_.heads + head)].closed(token);
    }

    /// The gradient of log_gates, in their shape: summed over whatever they were repeated for. For a gate of 0 it is 0.
    template <class T>
    struct gradients {
        tensor_view<T> log_gates = {}; ///< not wanted without memory
    };
    template <Scalar T>
    void check_gradients(const gradients<T>& wanted, const auto& check) const {
        check("wanted.score.log_gates", wanted.log_gates, size_);
    }
    /// A gate is in the sums c of its token and of all behind it in its era:
    ///     dc_p = sum_j dx_pj - sum_i dx_ip,      dlog_gates_t = sum over p >= t of dc_p
    template <Scalar T>
    void find_gradients(const gradients<T>& wanted, const auto& sums) const {
        const auto& to = wanted.log_gates;
        if (!to.data()) return;
        sums.clear(to);
        const auto at = [&](index_t b, index_t h, index_t position) -> T& {
            const detail::table_place place(size_, b, h);
            return to(place.entry, place.head, position - first_, 0);
        };
        sums.for_each_query([&](index_t b, index_t h, index_t position, T sum) { at(b, h, position) += sum; });
        sums.for_each_key([&](index_t b, index_t h, index_t position, T sum) { at(b, h, position) -= sum; });
        for (index_t b = 0; b < size_.batch; ++b)
            for (index_t h = 0; h < size_.heads; ++h) {
                double behind = 0;
                for (auto t = size_.tokens - 1; t >= 0; --t) {
                    behind = begins_anew(b, h, t) ? 0 : behind + static_cast<double>(to(b, h, t, 0));
                    to(b, h, t, 0) = static_cast<T>(behind);
                }
            }
    }

private:
    template <Scalar T>
    forgetting(const tensor_view<const T>& log_gates, index_t first, int) : size_(log_gates.shape()), first_(first) {
        detail::check_view("forgetting", "log_gates", log_gates);
        detail::check_positions("forgetting", "first", first, size_.tokens);
        if (size_.channels != 1)
            detail::raise(shape_error("forgetting", "log_gates", "have shape ", size_, ", but (batch, heads, tokens, 1) is needed"));
        std::vector<detail::gate_sums> sums;
        std::vector<double> gates(static_cast<std::size_t>(size_.tokens));
        for (index_t b = 0; b < size_.batch; ++b)
            for (index_t h = 0; h < size_.heads; ++h) {
                for (index_t t = 0; t < size_.tokens; ++t) {
                    const auto gate = gates[static_cast<std::size_t>(t)] = static_cast<double>(log_gates(b, h, t, 0));
                    if (!(gate <= 0))
                        detail::raise(
                            argument_error("forgetting", "log_gates", "hold ", gate, " for token ", t, ": not the logarithm of a gate"));
                }
                sums.emplace_back(gates);
            }
        sums_ = std::make_shared<const std::vector<detail::gate_sums>>(std::move(sums));
    }

    shape size_;
    index_t first_;
    std::shared_ptr<const std::vector<detail::gate_sums>> sums_; ///< of each batch entry and head of the gates
};

} // namespace attn
