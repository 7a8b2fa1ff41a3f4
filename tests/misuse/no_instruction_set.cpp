// expect: xsimd knows no instruction set of this processor
// flags: -DXSIMD_NO_SUPPORTED_ARCHITECTURE
#include <attn/simd/lane_mask.hpp>
