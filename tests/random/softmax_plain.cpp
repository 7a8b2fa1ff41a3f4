#include "softmax.hpp"

namespace attn::fuzz {

template <Scalar T>
any_operation<T> softmax_plain(softmax_kind kind, const softmax_drawn<T>& d, const slice& s) {
    if (kind == softmax_kind::all) return softmax_of<T>(d, s, dense{}, identity_score{});
    if (kind == softmax_kind::past) return softmax_of<T>(d, s, causal{}, identity_score{});
    if (kind == softmax_kind::window) return softmax_of<T>(d, s, sliding_window(d.length), identity_score{});
    return softmax_of<T>(d, s, d.tree_of(s), identity_score{});
}

template any_operation<float> softmax_plain(softmax_kind, const softmax_drawn<float>&, const slice&);
template any_operation<double> softmax_plain(softmax_kind, const softmax_drawn<double>&, const slice&);

} // namespace attn::fuzz
