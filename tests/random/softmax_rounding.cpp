#include "softmax.hpp"

#include <attn/attention/products.hpp>

namespace attn::fuzz {

any_operation<float> softmax_rounding(softmax_kind kind, const softmax_drawn<float>& d, const slice& s) {
    if (kind == softmax_kind::rounding) return softmax_of<float, bf16_products>(d, s, d.tree_of(s), d.steps_of(s));
    return softmax_of<float, bf16_products>(d, s, d.stepped_of(s) | d.other_stepped_of(s), identity_score{});
}

} // namespace attn::fuzz
