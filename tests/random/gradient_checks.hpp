// What is asked of every gradient on every problem.
#pragma once

#include "bounded.hpp"
#include "draw.hpp"

#include <attn/parallel/executor.hpp>

#include <functional>
#include <string>
#include <vector>

namespace attn::fuzz {

/// What a gradient may lie like.
enum class lies { anyhow, in_rows, in_one_piece };

/// What the definition makes of one gradient.
template <Scalar T>
struct defined_gradient {
    const char* name;
    tensor<bounded<T>> exact;
    attn::fuzz::lies lies = attn::fuzz::lies::anyhow;
};

/// A call of the kernel: what is wanted, in the order of the definition's, what is not having no memory, and whether its inputs lie elsewhere
/// than in the first call.
template <Scalar T>
using gradient_call = std::function<void(const std::vector<tensor_view<T>>& wanted, bool elsewhere, const execution&)>;

/// The first promise that does not hold, in words, empty if all do: numbers near the definition's; the same bits, and nothing beside them,
/// for other layouts, other executors, and whichever of them are wanted.
template <Scalar T>
std::string broken_gradient(draw&, const std::vector<defined_gradient<T>>&, const std::function<std::size_t(index_t concurrency)>& workspace_bytes,
                            const gradient_call<T>&);

} // namespace attn::fuzz
