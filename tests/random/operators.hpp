// The families of operators beside softmax attention.
#pragma once

#include "operation.hpp"

namespace attn::fuzz {

template <Scalar T>
trial<T> draw_talking_heads(draw&);
/// Linear attention, causal or not, with feature maps and patterns of the library's.
template <Scalar T>
trial<T> draw_linear(draw&);
/// Simplified and focused linear attention, with their convolution.
template <Scalar T>
trial<T> draw_convolved(draw&);
template <Scalar T>
trial<T> draw_linformer(draw&);

} // namespace attn::fuzz
