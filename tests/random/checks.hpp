// What is asked of every operator on every problem.
#pragma once

#include "operation.hpp"

namespace attn::fuzz {

/// Whether a row's bits are asked to be the same under any cut of the queries into calls, and without keys that nobody sees. The engine
/// does not promise it yet.
struct check_options {
    bool rows = false;
};

/// The first promise that does not hold, in words; empty if all do.
template <Scalar T>
std::string broken_promise(const trial<T>&, draw&, const check_options&);

} // namespace attn::fuzz
