// expect: attn/attention/softmax_backward.hpp.*talking_heads_backward.hpp.*linformer_backward.hpp.*lsh_backward.hpp.*/linear_backward.hpp.*simplified_linear_backward.hpp.*focused_linear_backward.hpp.*pointwise_backward.hpp
// alone: attn.hpp has what is missing here
// Gradients of operators whose headers for the forward call alone are included.
#ifdef ATTN_MISUSE
#include <attn/attention/focused_linear_attention.hpp>
#include <attn/attention/linear_attention.hpp>
#include <attn/attention/linformer_attention.hpp>
#include <attn/attention/lsh_attention.hpp>
#include <attn/attention/pointwise_attention.hpp>
#include <attn/attention/simplified_linear_attention.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/talking_heads_attention.hpp>
#else
#include <attn/attention/focused_linear_backward.hpp>
#include <attn/attention/linear_backward.hpp>
#include <attn/attention/linformer_backward.hpp>
#include <attn/attention/lsh_backward.hpp>
#include <attn/attention/pointwise_backward.hpp>
#include <attn/attention/simplified_linear_backward.hpp>
#include <attn/attention/softmax_backward.hpp>
#include <attn/attention/talking_heads_backward.hpp>
#endif

void backward(const attn::inputs<float>& in, const attn::saved_outputs<float>& saved, const attn::output_gradients<float>& d_out) {
    attn::backward(attn::softmax_attention{}, in, saved, d_out, {});
    attn::backward(attn::talking_heads_attention{}, in, saved, d_out, {});
    attn::backward(attn::linformer_attention{.key_projection = attn::identity_projection{}}, in, saved, d_out, {});
    attn::backward(attn::lsh_attention<float>{}, in, saved, d_out, {});
    attn::backward(attn::linear_attention{}, in, saved, d_out, {});
    attn::backward(attn::simplified_linear_attention<>{}, in, saved, d_out, {});
    attn::backward(attn::focused_linear_attention<>{}, in, saved, d_out, {});
    attn::backward(attn::pointwise_attention{.weight = attn::squared_relu{}}, in, saved, d_out, {});
}
