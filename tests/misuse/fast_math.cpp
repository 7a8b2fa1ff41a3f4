// expect: -ffast-math removes the rounding and the NaN rules
// flags: -ffast-math
#include <attn/core/scalar.hpp>
