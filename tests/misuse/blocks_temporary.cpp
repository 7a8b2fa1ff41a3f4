// expect: deleted
// Blocks that are gone before the operator reads them.
#include <attn/pattern/block_sparse.hpp>

int main() {
#ifdef ATTN_MISUSE
    const attn::pattern::block_sparse pattern{attn::tensor<bool>({1, 1, 3, 3}), 2};
#else
    const attn::tensor<bool> blocks({1, 1, 3, 3});
    const attn::pattern::block_sparse pattern{blocks, 2};
#endif
    return pattern.blocks.shape().tokens == 3 ? 0 : 1;
}
