// expect: compile without -fno-honor-nans
// flags: -fno-honor-nans
// compiler: Clang
#include <attn/core/scalar.hpp>
