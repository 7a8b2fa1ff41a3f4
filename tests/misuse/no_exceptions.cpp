// expect: compile without -fno-exceptions
// flags: -fno-exceptions
#include <attn/core/scalar.hpp>
