// More of talking heads: see softmax_ready_made.cpp.
#include "talking_heads_case.hpp"

#include "attn/pattern/causal.hpp"

namespace attn::testing {

static const auto talking_causal_case = talking_heads_case("talking_heads_causal", "n m (d_k + d_v + 2 h)", []<class T>(const problem& p) {
    const auto own = mixings_of(p, p.heads, p.heads);
    return made{talking_heads_attention{.logits_mix = own->logits, .weights_mix = own->weights, .pattern = causal{}}, own};
});

/// Su's variant: one pass is enough.
static const auto logits_case = talking_heads_case("talking_heads_logits", "n m (d_k + d_v + h)", []<class T>(const problem& p) {
    const auto own = mixings_of(p, p.heads, p.heads);
    return made{talking_heads_attention{.logits_mix = own->logits, .logits_bias = own->logits_bias, .pattern = causal{}}, own};
});

} // namespace attn::testing
