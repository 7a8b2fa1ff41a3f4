// More patterns and score functions. Only where the whole suite runs: the other cases have what they are made of, and each costs seconds of
// compiling.
#include "softmax_case.hpp"
#include "../problems.hpp"

#include "attn/pattern/causal.hpp"
#include "attn/pattern/local.hpp"
#include "attn/pattern/predicate.hpp"
#include "attn/pattern/segments.hpp"
#include "attn/score/alibi.hpp"
#include "attn/score/forgetting.hpp"
#include "attn/score/kerple.hpp"
#include "attn/score/relative_buckets.hpp"
#include "attn/score/soft_cap.hpp"

namespace attn::testing {

using namespace pattern;

static const auto local_case =
    softmax_case("softmax_local", "2 n (2 w + 1) (d_k + d_v)", []<class T>(const problem&) { return made{softmax_attention{.pattern = local{128}}}; });

/// Packed sequences, causal in each.
static const auto segments_case = softmax_case("softmax_segments", "2 sum of squared lengths (d_k + d_v) / 2", []<class T>(const problem& p) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(std::max(p.queries, p.keys)));
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i / 37);
    return made{softmax_attention{.pattern = causal{} & segments(ids)}};
}, [](const problem& p) {
    return p.positions.first_query.count() == 0 && p.positions.first_key.count() == 0 && p.positions.first_query[0] == 0 && p.positions.first_key[0] == 0;
});

/// The user's own pattern, and one that no range can decide.
static const auto predicate_case = softmax_case("softmax_predicate", "2 n m (d_k + d_v)", []<class T>(const problem&) {
    return made{softmax_attention{.pattern = predicate{[](auto i, auto j) { return (i + j) % 3 != 0 || j <= 4; }}}};
});

static const auto soft_cap_case = softmax_case("softmax_soft_cap", "2 n m (d_k + d_v)", []<class T>(const problem&) {
    return made{softmax_attention{.score = soft_cap{5}}};
});

static const auto alibi_case = softmax_case("softmax_alibi", "2 n m (d_k + d_v)", []<class T>(const problem& p) {
    auto slopes = std::make_shared<std::vector<double>>(alibi_slopes(p.heads));
    return made{softmax_attention{.score = alibi(*slopes)}, slopes};
});

static const auto relative_case = softmax_case("softmax_relative_buckets", "2 n m (d_k + d_v)", []<class T>(const problem& p) {
    return made{softmax_attention{.score = relative_buckets(random_tensor<T>({1, p.heads, 1, 32}, 50, 1))}};
});

static const auto kerple_case = softmax_case("softmax_kerple", "2 n m (d_k + d_v)", []<class T>(const problem& p) {
    auto slopes = std::make_shared<std::vector<double>>(alibi_slopes(p.heads));
    return made{softmax_attention{.score = kerple_logarithmic{*slopes, *slopes}}, slopes};
});

static const auto forgetting_case = softmax_case("softmax_forgetting", "n m (d_k + d_v)", []<class T>(const problem& p) {
    const auto first = std::min(p.positions.first_query[0], p.positions.first_key[0]);
    const auto end = std::max(p.positions.first_query[0] + p.queries, p.positions.first_key[0] + p.keys);
    auto gates = random_tensor<T>({p.batch, p.heads, end - first, 1}, 51, 1);
    for (auto& g : std::span(gates.data(), static_cast<std::size_t>(gates.shape().size()))) g = -std::abs(g) / 8;
    return made{softmax_attention{.score = forgetting(gates, first), .pattern = causal{}}};
}, [](const problem& p) { return p.positions.first_query.count() == 0 && p.positions.first_key.count() == 0; });

} // namespace attn::testing
