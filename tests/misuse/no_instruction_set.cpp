// expect: xsimd has no instruction set here
// flags: -DXSIMD_NO_SUPPORTED_ARCHITECTURE
#include <attn/simd/lane_mask.hpp>
