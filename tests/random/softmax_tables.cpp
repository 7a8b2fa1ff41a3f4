#include "softmax.hpp"

namespace attn::fuzz {

template <Scalar T>
any_operation<T> softmax_tables(softmax_kind kind, const softmax_drawn<T>& d, const slice& s) {
    if (kind == softmax_kind::packed) return softmax_of<T>(d, s, causal{} & *d.documents, identity_score{});
    if (kind == softmax_kind::masked) return softmax_of<T>(d, s, *d.mask, identity_score{});
    if (kind == softmax_kind::neighbors) return softmax_of<T>(d, s, *d.neighbors, identity_score{});
    if (kind == softmax_kind::listed) return softmax_of<T>(d, s, causal{} & *d.lists, identity_score{});
    return softmax_of<T>(d, s, block_sparse{std::as_const(*d.blocks).view(), d.length}, identity_score{});
}

template any_operation<float> softmax_tables(softmax_kind, const softmax_drawn<float>&, const slice&);
template any_operation<double> softmax_tables(softmax_kind, const softmax_drawn<double>&, const slice&);

} // namespace attn::fuzz
