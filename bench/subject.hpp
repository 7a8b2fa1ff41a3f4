// One operator on one problem, ready to be timed: inputs, output, workspace and threads, beside naive Eigen and the reference.
#pragma once

#include "attn/parallel/thread_pool.hpp"
#include "cases/case.hpp"

#include <cmath>
#include <limits>

namespace attn::bench {

/// Queries, keys and values of a problem, contiguous.
template <Storage S>
struct tensors {
    tensor<S> queries, keys, values;

    operator inputs<computed_in<S>>() const { return {queries, keys, values, top_left()}; }
};

/// Independent standard normal numbers, the queries times `query_factor`; the same in every run, rounded where they are stored in 16 bits.
template <Storage S>
tensors<S> random_tensors(const testing::problem& p, double query_factor = 1);

/// max |a - b|; infinite where one of them is not a number.
template <class A, class B>
double largest_difference(const tensor_view<A>& a, const tensor_view<B>& b) {
    double largest = 0;
    const auto& s = a.shape();
    for (index_t n = 0; n < s.batch; ++n)
        for (index_t h = 0; h < s.heads; ++h)
            for (index_t i = 0; i < s.tokens; ++i)
                for (index_t c = 0; c < s.channels; ++c) {
                    const auto difference = std::abs(static_cast<double>(a(n, h, i, c)) - static_cast<double>(b(n, h, i, c)));
                    largest = std::isnan(difference) ? std::numeric_limits<double>::infinity() : std::max(largest, difference);
                }
    return largest;
}

/// The largest error of an answer against the reference in double, and the largest that passes as right.
struct accuracy {
    double error = 0, bound = 0;
    index_t queries = 0; ///< how many of the queries of each head were compared

    bool right() const { return error <= bound && error < std::numeric_limits<double>::infinity(); }
};

/// What is known of a case on a problem, whatever its scalar type.
class subject {
public:
    virtual ~subject() = default;

    /// The operator's kernel. Allocates nothing.
    virtual void attend() = 0;
    /// The same by naive Eigen, which holds an n x m matrix of scores for a head.
    virtual void naive() = 0;
    /// Computes, and compares with the reference: all queries of a small problem, else the first ones, the last ones and some between; few
    /// of a long one, which would take the reference as many steps as there are pairs.
    virtual accuracy check() = 0;
    /// How far the answer of naive Eigen is from the last that was computed here.
    virtual double naive_difference() = 0;
    /// How far somebody else's answer is from the last that was computed here.
    virtual double difference(const tensor_view<const float>& answer) const = 0;
    /// Of a gradient in float: the gradient of the result, which it begins with. `difference` then takes those of the queries, the keys and the
    /// values, all of one shape, one after the other along the batch.
    virtual tensor_view<const float> given() const { return {}; }
    /// What the machine can do, on as many threads, in flops a second.
    virtual double peak() = 0;
    /// How fast it reads memory, on as many threads, in bytes a second.
    virtual double bandwidth() = 0;

    double useful_flops() const { return useful_flops_; }
    double visited_flops() const { return visited_flops_; }
    double workspace_bytes() const { return workspace_bytes_; }
    double matrix_bytes() const { return matrix_bytes_; }
    /// Of queries, keys, values and the answer, as they are stored.
    double tensor_bytes() const { return tensor_bytes_; }
    /// Whether memory may bound it: where each byte of its tensors is worth less than a hundred flops. Dense attention does n / 4 of them.
    bool counts_bandwidth() const { return useful_flops_ < 100 * tensor_bytes_; }
    /// Whether the n x m matrices of naive Eigen are of a size that one would hold.
    bool has_naive() const { return naive_is_written_ && matrix_bytes_ <= 300e6; }

protected:
    bool naive_is_written_ = true;
    double useful_flops_ = 0, visited_flops_ = 0, workspace_bytes_ = 0, matrix_bytes_ = 0, tensor_bytes_ = 0;
};

/// The case on the problem, which it supports, with the given inputs and a result that is stored as they are.
template <Storage S>
std::unique_ptr<subject> make_subject(const testing::attention_case& c, const testing::problem& p, std::shared_ptr<const tensors<S>> in,
                                      index_t threads);

/// The gradients of all of its inputs and parameters instead: five products on visible pairs, where the call itself has two.
template <Scalar T>
std::unique_ptr<subject> make_gradient_subject(const testing::attention_case& c, const testing::problem& p, std::shared_ptr<const tensors<T>> in,
                                               index_t threads);

} // namespace attn::bench
