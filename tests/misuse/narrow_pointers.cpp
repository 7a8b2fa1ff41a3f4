// expect: attn needs a 64-bit processor
// flags: -U__SIZEOF_POINTER__ -D__SIZEOF_POINTER__=4
#include <attn/core/platform.hpp>
