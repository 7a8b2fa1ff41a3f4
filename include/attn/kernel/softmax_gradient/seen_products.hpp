// Products that add rows of channels, weighted by the numbers of a tile, and leave out what is hidden.
#pragma once

#include "../gemm/tile_product.hpp"
#include "../prefetch.hpp"
#include "../tile_loader.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// `rows` rows of a product that adds to C, of so many channels in whole registers. seen: null if numbers are finite; else one bit per
/// query for each key, and hidden pairs, 0 in A, are not touched: beside NaN 0 would be NaN. The bits are the same. by_query: rows are
/// queries and the depth is keys, or the other way round.
template <Scalar T>
void add_products(tile_product<T> product, index_t rows, index_t channels, const std::uint64_t* seen, bool by_query) {
    using lanes = simd::lanes<T>;
    if (seen) {
        for (index_t i = 0; i < rows; ++i)
            for (index_t c = 0; c < channels; c += lanes::size) {
                T* const at = product.c.address(i, c);
                auto sum = lanes::load(at);
                for (index_t d = 0; d < product.depth; ++d)
                    if (by_query ? seen[d] >> i & 1 : seen[i] >> d & 1)
                        sum = fma(lanes(product.a(i, d)), lanes::load(product.b.address(d, c)), sum);
                sum.store(at);
            }
        return;
    }
    no_prefetch ahead;
    multiply_wide<T>(rows, channels / lanes::size, product, ahead);
}

} // namespace attn::kernel
