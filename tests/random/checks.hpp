// What is asked of every operator on every problem.
#pragma once

#include "operation.hpp"

namespace attn::fuzz {

/// The first promise that does not hold, in words; empty if all do.
template <Scalar T>
std::string broken_promise(const trial<T>&, draw&);

} // namespace attn::fuzz
