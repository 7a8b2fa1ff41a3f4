// expect: attn: view\(m\) is of an Eigen matrix .*; a tensor t has t.view\(\)
// A view of a tensor, by the function that is of Eigen matrices.
#include <attn/core/eigen.hpp>
#include <attn/core/tensor.hpp>

#ifdef ATTN_MISUSE
auto view_of(attn::tensor<float>& t) { return attn::view(t); }
#else
auto view_of(attn::tensor<float>& t) { return t.view(); }
#endif
