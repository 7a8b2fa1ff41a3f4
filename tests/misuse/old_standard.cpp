// expect: attn needs C\+\+20
// flags: -std=c++17
#include <attn/core/platform.hpp>
