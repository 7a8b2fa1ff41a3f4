// expect: -ffinite-math-only takes NaN and infinity for impossible
// flags: -ffinite-math-only
#include <attn/core/scalar.hpp>
