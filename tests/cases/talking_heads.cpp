#include "talking_heads_case.hpp"

#include "attn/pattern/causal.hpp"
#include "attn/pattern/local.hpp"
#include "attn/pattern/on_heads.hpp"
#include "attn/score/additive_bias.hpp"
#include "attn/score/alibi.hpp"
#include "attn/score/soft_cap.hpp"
#include "attn/score/composed_score.hpp"

#include <algorithm>

namespace attn::testing {

using namespace pattern;

std::shared_ptr<mixings> mixings_of(const problem& p, index_t heads, index_t value_heads) {
    const auto near_identity = [](index_t rows, index_t columns, unsigned seed) {
        auto matrix = random_parameters<double>({1, 1, rows, columns}, seed);
        std::for_each_n(matrix.data(), rows * columns, [](double& x) { x *= 0.3; });
        for (index_t r = 0; r < rows && columns > 0; ++r) matrix(0, 0, r, r % columns) += 1; // rounded after the product, by any compiler
        return matrix;
        return matrix;
    };
    const auto bias = [](index_t count, unsigned seed) {
        const auto numbers = random_parameters<double>({1, 1, 1, count}, seed);
        return std::vector<double>(numbers.data(), numbers.data() + count);
    };
    return std::make_shared<mixings>(
        mixings{near_identity(heads, p.heads, 1), near_identity(value_heads, heads, 2), bias(heads, 3), bias(value_heads, 4)});
}

static const auto both_case = talking_heads_case("talking_heads", "2 n m (d_k + d_v + 2 h)", []<class T>(const problem& p) {
    const auto own = mixings_of(p, p.heads, p.heads);
    return made{talking_heads_attention{.logits_mix = own->logits, .weights_mix = own->weights}, own};
});

/// Only after the softmax, to twice as many heads, some keys hidden in some heads, and a bias for those that are seen in any.
static const auto weights_case = talking_heads_case("talking_heads_weights", "n m (d_k + 2 d_v + 2 h)", []<class T>(const problem& p) {
    const auto own = mixings_of(p, p.heads, 2 * p.heads);
    return made{talking_heads_attention{
                    .weights_mix = own->weights, .weights_bias = own->weights_bias, .pattern = causal{} & (on_heads{0, 1} | local{11})},
                own};
});

/// Everything at once: one more head between than before and behind; scale, cap, ALiBi, bias, causal, sinks, and both biases.
static const auto talking_composed_case = talking_heads_case(
    "talking_heads_composed", "n m (d_k + d_v + 2 (h + 1))",
    []<class T>(const problem& p) {
        struct parameters {
            std::shared_ptr<mixings> mix;
            std::vector<double> slopes, sinks;
            tensor<T> bias;
        };
        auto own = std::make_shared<parameters>(parameters{mixings_of(p, p.heads + 1, p.heads), alibi_slopes(p.heads + 1),
                                                           std::vector<double>(static_cast<std::size_t>(p.heads + 1), 0.5),
                                                           random_parameters<T>({1, p.heads + 1, p.queries, p.keys}, 7)});
        const additive_bias<T> bias{own->bias.view(), p.positions.first_query[0], p.positions.first_key[0]};
        return made{talking_heads_attention{.logits_mix = own->mix->logits,
                                            .logits_bias = own->mix->logits_bias,
                                            .weights_mix = own->mix->weights,
                                            .weights_bias = own->mix->weights_bias,
                                            .scale = 0.3,
                                            .score = composed_score{soft_cap{8}, alibi(own->slopes), bias},
                                            .pattern = causal{},
                                            .sinks = own->sinks},
                    own};
    },
    [](const problem& p) { return p.positions.first_query.count() == 0 && p.positions.first_key.count() == 0; });

} // namespace attn::testing
