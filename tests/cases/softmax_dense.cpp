#include "softmax_case.hpp"

#include "attn/pattern/causal.hpp"

namespace attn::testing {

static const auto dense_case = softmax_case("softmax", "2 n m (d_k + d_v)", []<class T>(const problem&) { return made{softmax_attention{}}; });

static const auto causal_case =
    softmax_case("softmax_causal", "n m (d_k + d_v)", []<class T>(const problem&) { return made{softmax_attention{.pattern = causal{}}}; });

} // namespace attn::testing
