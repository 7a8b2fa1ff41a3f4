// Forgetting gates: what lies between a key and its query makes it count less.
#pragma once

#include "../core/tensor.hpp"
#include "score_function.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// c, a sum for each token. A gate of 0 begins a new era, of which nothing before is seen.
struct gate_sums {
    std::vector<double> sum;
    std::vector<std::int64_t> era;
};

/// Those of one head.
struct forgetting_of_head {
    const double* sum;
    const std::int64_t* era;
    index_t origin; // the position of sum[0]

    double bias(index_t query, index_t key) const {
        const auto i = query - origin, j = key - origin;
        return era[i] == era[j] ? sum[i] - sum[j] : -std::numeric_limits<double>::infinity();
    }
    template <ScoreNumber S>
    S operator()(S score, index_t query, index_t key) const {
        return plus_bias(score, static_cast<S>(bias(query, key)));
    }
    template <Scalar T>
    void bias_row(index_t first, index_t step, index_t count, index_t key, T* to) const {
        for (index_t q = 0; q < count; ++q) to[q] = static_cast<T>(bias(first + q * step, key));
    }
};

} // namespace detail

/// Forgetting gates: score + c[b, h, i] - c[b, h, j], where c is the running sum of the logarithms of a gate for each token, so that a key
/// fades by the gates of all tokens behind it up to its query. With a causal pattern it is the Forgetting Transformer.
/// log_gates: (entries, heads or 1, tokens, 1), any strides, entry b mod entries for batch entry b: logarithms of numbers between 0 and 1,
/// log_sigmoid of what a linear gives. -infinity, a gate of 0, hides what lies before its token from what lies behind it, and the other way
/// round. The gates are summed once, in double, into memory that copies of the score function share. Token 0 has the position `first`; queries
/// and keys elsewhere are refused. Throws shape_error for gates of another shape, argument_error for one that is NaN or above 0.
/// Lin et al. 2025, "Forgetting Transformer: Softmax Attention with a Forget Gate".
class forgetting {
public:
    /// Of a tensor or a view.
    template <TensorLike G>
    explicit forgetting(const G& log_gates, index_t first = 0) : forgetting(tensor_view<const detail::scalar_t<G>>(log_gates), first, 0) {}

    detail::forgetting_of_head at(index_t batch, index_t head) const {
        if (sums_->sum.empty()) return {nullptr, nullptr, first_};
        const auto begin = detail::table_place(size_, batch, head).plane(size_) * size_.tokens;
        return {sums_->sum.data() + begin, sums_->era.data() + begin, first_};
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
        const auto* const era = sums_->era.data() + (entry * size_.heads + head) * size_.tokens;
        return era[token] != (token == 0 ? 0 : era[token - 1]);
    }

    /// That of log_gates, in their shape: summed over whatever they were repeated for. That of a gate of 0 is 0.
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
            throw shape_error("forgetting", "log_gates", "have shape " + to_string(size_) + ", but (batch, heads, tokens, 1) is needed");
        detail::gate_sums sums;
        sums.sum.reserve(static_cast<std::size_t>(size_.size()));
        sums.era.reserve(static_cast<std::size_t>(size_.size()));
        for (index_t b = 0; b < size_.batch; ++b)
            for (index_t h = 0; h < size_.heads; ++h) {
                double sum = 0;
                std::int64_t era = 0;
                for (index_t t = 0; t < size_.tokens; ++t) {
                    const auto gate = static_cast<double>(log_gates(b, h, t, 0));
                    if (!(gate <= 0))
                        throw argument_error("forgetting", "log_gates", "hold " + std::to_string(gate) + " for token " + std::to_string(t) + ": not the logarithm of a gate");
                    if (std::isinf(gate)) sum = 0, ++era;
                    else sum += gate;
                    sums.sum.push_back(sum);
                    sums.era.push_back(era);
                }
            }
        sums_ = std::make_shared<const detail::gate_sums>(std::move(sums));
    }

    shape size_;
    index_t first_;
    std::shared_ptr<const detail::gate_sums> sums_;
};

} // namespace attn
