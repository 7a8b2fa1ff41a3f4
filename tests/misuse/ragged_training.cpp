// expect: a ragged batch is no step of training
#include <attn/attn.hpp>
#include <attn/layer/ragged.hpp>
#include <attn/layer/transformer_block.hpp>

int main() {
    using namespace attn;
#ifdef ATTN_MISUSE
    using norm = in_training<batch_norm<float>>;
#else
    using norm = batch_norm<float>;
#endif
    transformer_block<norm, multi_head<float>, feed_forward<float>> block;
    const std::vector<index_t> starts{0, 2, 5};
    tensor<float> x({1, 1, 5, 8}), out(x.shape());
    forward(block, ragged{starts}, {.tokens = x}, out);
}
