#include "softmax.hpp"

namespace attn::fuzz {

template <Scalar T>
any_operation<T> softmax_then(softmax_kind kind, const softmax_drawn<T>& d, const slice& s) {
    if (kind == softmax_kind::scored_biased) return softmax_of<T>(d, s, d.tree_of(s), composed_score{d.steps_of(s), d.bias_of(s)});
    if (kind == softmax_kind::relative) return softmax_of<T>(d, s, d.tree_of(s), d.relative_of(s));
    return softmax_of<T>(d, s, d.tree_of(s), composed_score{d.bias_of(s), d.steps_of(s)});
}

template any_operation<float> softmax_then(softmax_kind, const softmax_drawn<float>&, const slice&);
template any_operation<double> softmax_then(softmax_kind, const softmax_drawn<double>&, const slice&);

} // namespace attn::fuzz
