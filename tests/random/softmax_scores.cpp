#include "softmax.hpp"

namespace attn::fuzz {

template <Scalar T>
any_operation<T> softmax_scores(softmax_kind kind, const softmax_drawn<T>& d, const slice& s) {
    if (kind == softmax_kind::scored) return softmax_of<T>(d, s, d.tree_of(s), d.steps_of(s));
    return softmax_of<T>(d, s, d.tree_of(s) | d.stepped_of(s), d.steps_of(s));
}

template any_operation<float> softmax_scores(softmax_kind, const softmax_drawn<float>&, const slice&);
template any_operation<double> softmax_scores(softmax_kind, const softmax_drawn<double>&, const slice&);

} // namespace attn::fuzz
