#include "softmax.hpp"

namespace attn::fuzz {

template <Scalar T>
any_operation<T> softmax_bias(softmax_kind kind, const softmax_drawn<T>& d, const slice& s) {
    if (kind == softmax_kind::biased) return softmax_of<T>(d, s, dense{}, d.bias_of(s));
    if (kind == softmax_kind::biased_composed) return softmax_of<T>(d, s, d.tree_of(s), d.bias_of(s));
    return softmax_of<T>(d, s, d.tree_of(s) | d.stepped_of(s), d.bias_of(s));
}

template any_operation<float> softmax_bias(softmax_kind, const softmax_drawn<float>&, const slice&);
template any_operation<double> softmax_bias(softmax_kind, const softmax_drawn<double>&, const slice&);

} // namespace attn::fuzz
