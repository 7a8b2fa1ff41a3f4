#include "softmax_case.hpp"

#include "attn/pattern/causal.hpp"
#include "attn/score/additive_bias.hpp"
#include "attn/score/alibi.hpp"
#include "attn/score/soft_cap.hpp"
#include "attn/score/composed_score.hpp"

namespace attn::testing {

namespace {

/// A random bias (batch or 1, heads or 1, queries, keys) whose rows reach every position of the problem.
template <class T>
std::shared_ptr<tensor<T>> random_bias(const problem& p, index_t batch, index_t heads) {
    return std::make_shared<tensor<T>>(random_parameters<T>({batch, heads, p.queries, p.keys}, 7));
}

template <class T>
additive_bias<T> bias_of(const tensor<T>& bias, const problem& p) {
    return {bias.view(), p.positions.first_query[0], p.positions.first_key[0]};
}

/// A bias has one origin, so positions must not differ over the batch.
bool one_origin(const problem& p) { return p.positions.first_query.count() == 0 && p.positions.first_key.count() == 0; }

} // namespace

static const auto bias_case = softmax_case("softmax_bias", "2 n m (d_k + d_v)", []<class T>(const problem& p) {
    auto bias = random_bias<T>(p, 1, 1);
    return made{softmax_attention{.score = bias_of(*bias, p)}, bias};
}, one_origin);

static const auto bias_per_head_case = softmax_case("softmax_bias_per_head", "2 n m (d_k + d_v)", []<class T>(const problem& p) {
    auto bias = random_bias<T>(p, p.batch, p.heads);
    return made{softmax_attention{.score = bias_of(*bias, p)}, bias};
}, one_origin);

/// The user's own function, on numbers and on lanes alike.
static const auto user_score_case = softmax_case("softmax_user_score", "2 n m (d_k + d_v)", []<class T>(const problem&) {
    return made{softmax_attention{.score = []<class S>(S score, auto query, auto key) { return score + S(0.01) * S(key - query); }}};
});

/// Everything at once: scale, cap, ALiBi, bias, causal, sinks.
static const auto composed_case = softmax_case("softmax_composed", "n m (d_k + d_v)", []<class T>(const problem& p) {
    struct parameters {
        std::vector<double> slopes, sinks;
        std::shared_ptr<tensor<T>> bias;
    };
    auto own = std::make_shared<parameters>(parameters{alibi_slopes(p.heads), std::vector<double>(static_cast<std::size_t>(p.heads), 0.5), random_bias<T>(p, 1, p.heads)});
    return made{softmax_attention{.scale = 0.3, .score = composed_score{soft_cap{8}, alibi(own->slopes), bias_of(*own->bias, p)}, .pattern = causal{}, .sinks = own->sinks}, own};
}, one_origin);

} // namespace attn::testing
