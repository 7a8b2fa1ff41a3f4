#include "softmax.hpp"

namespace attn::fuzz {

template <Scalar T>
any_operation<T> softmax_passes(softmax_kind kind, const softmax_drawn<T>& d, const slice& s) {
    if (kind == softmax_kind::stepped) return softmax_of<T>(d, s, d.stepped_of(s), identity_score{});
    if (kind == softmax_kind::passes) return softmax_of<T>(d, s, d.tree_of(s) | d.stepped_of(s), identity_score{});
    if (kind == softmax_kind::sparse) return softmax_of<T>(d, s, sparse_transformer_strided(d.length), identity_score{});
    return softmax_of<T>(d, s, d.stepped_of(s) | d.other_stepped_of(s), identity_score{});
}

template any_operation<float> softmax_passes(softmax_kind, const softmax_drawn<float>&, const slice&);
template any_operation<double> softmax_passes(softmax_kind, const softmax_drawn<double>&, const slice&);

} // namespace attn::fuzz
