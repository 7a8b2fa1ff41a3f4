// Score functions composed at run time, and how far rounding may take a score on its way through them.
#pragma once

#include "sizes.hpp"

#include <attn/score/additive_bias.hpp>
#include <attn/score/alibi.hpp>
#include <attn/score/soft_cap.hpp>
#include <attn/score/composed_score.hpp>
#include <attn/score/forgetting.hpp>
#include <attn/score/kerple.hpp>
#include <attn/score/relative_buckets.hpp>

namespace attn::fuzz {

/// What one step does to a score.
enum class score_kind { cap, alibi, times, plus, distance, logarithm, power, beyond };

struct score_step {
    score_kind kind;
    double number;             ///< the cap, the factor, the summand, r1, what is returned beyond a distance
    double rate = 1;             ///< r2
    index_t reach = 0;           ///< of that distance
    std::vector<double> slopes = {};
};

/// A number and how far from it the kernel's may be.
struct rounded {
    double value, error;
};

/// The steps of a problem, at most a few.
struct score_steps {
    std::vector<score_step> each;

    std::string name() const;
    /// What the steps make of a score that is known with an error, where every operation rounds by `unit`, relatively.
    rounded operator()(rounded score, index_t head, index_t query, index_t key, double unit) const;
};

score_steps draw_score(draw&, const sizes&, double lowest);

struct bound_score {
    const score_steps* steps;
    index_t head;

    template <class S>
    S operator()(S score, auto query, auto key) const {
        using attn::select, std::abs;
        constexpr index_t here{};
        for (const auto& step : steps->each) {
            const auto number = static_cast<S>(step.number);
            switch (step.kind) {
            case score_kind::cap:
                score = soft_cap{step.number}(score, here, here);
                break;
            case score_kind::alibi:
                score = attn::detail::alibi_of_head{step.slopes[static_cast<std::size_t>(head)]}(score, query, key);
                break;
            case score_kind::times:
                score = number * score;
                break;
            case score_kind::plus:
                score = score + number;
                break;
            case score_kind::distance:
                score = score - number * abs(S(query - key));
                break;
            case score_kind::logarithm:
                score = attn::detail::kerple_of_head<true>{step.number, step.rate}(score, query, key);
                break;
            case score_kind::power:
                score = attn::detail::kerple_of_head<false>{step.number, step.rate}(score, query, key);
                break;
            case score_kind::beyond:
                score = select(abs(S(query - key)) > S(static_cast<double>(step.reach)), number, score);
                break;
            }
        }
        return score;
    }
};

/// The steps as a score function: the user's lambda, as far as a kernel knows.
struct random_score {
    const score_steps* steps;
    index_t first_head = 0;

    constexpr bound_score at(index_t, index_t head) const { return {steps, first_head + head}; }
};

/// A bias that is broadcast over batch, heads, queries or keys; -infinity here and there, or the lowest number.
template <Scalar T>
struct drawn_bias {
    tensor<T> numbers;
    index_t first_query = 0, first_key = 0;

    /// For the batch entries from one on, and the heads.
    additive_bias<T> part(index_t batch, index_t batches, index_t head, index_t heads) const {
        const tensor_view<const T> all = numbers.view();
        auto s = numbers.shape();
        const auto* const data = all.row(s.batch == 1 ? 0 : batch, s.heads == 1 ? 0 : head, 0);
        if (s.batch != 1) s.batch = batches;
        if (s.heads != 1) s.heads = heads;
        return {{data, s, all.strides()}, first_query, first_key};
    }
    double at(index_t batch, index_t head, index_t query, index_t key) const {
        const auto& s = numbers.shape();
        return static_cast<double>(numbers(s.batch == 1 ? 0 : batch, s.heads == 1 ? 0 : head, s.tokens == 1 ? 0 : query - first_query,
                                           s.channels == 1 ? 0 : key - first_key));
    }
};

template <Scalar T>
drawn_bias<T> draw_bias(draw&, const sizes&);

/// Biases that functions know row by row: by distance, and by gates.
template <Scalar T>
using drawn_relative = composed_score<relative_buckets<T>, forgetting>;

template <Scalar T>
drawn_relative<T> draw_relative(draw&, const sizes&);

/// A score function for the batch entries and heads from some on.
template <class F>
struct part_of {
    const F* all;
    index_t first_batch, first_head;

    auto at(index_t batch, index_t head) const { return all->at(first_batch + batch, first_head + head); }
};

} // namespace attn::fuzz
