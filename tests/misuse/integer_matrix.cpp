// expect: attn: view\(m\) is of an Eigen matrix with memory, of float, double or 16-bit numbers
// A view of an Eigen matrix holds numbers that attn computes in.
#include <attn/core/eigen.hpp>

#ifdef ATTN_MISUSE
using matrix = Eigen::MatrixXi;
#else
using matrix = Eigen::MatrixXf;
#endif

attn::index_t tokens(matrix& m) { return attn::view(m).shape().tokens; }
