// The tiles of the micro-kernel, of every size, for a look at what their loops keep in registers.
#include <attn/kernel/gemm/matrix_tile.hpp>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

struct nothing_ahead {
    static void beside(index_t) {}
};
template void multiply<float>(index_t, index_t, tile_product<float>, nothing_ahead&);
template void multiply<double>(index_t, index_t, tile_product<double>, nothing_ahead&);

} // namespace attn::kernel
