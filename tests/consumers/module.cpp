// A program of the module: operators, patterns, scores, gradients and layers by one import.
import attn;

int main() {
    const auto x = attn::tensor<float>::random({1, 2, 40, 16}, 1);
    const attn::inputs<float> in{x, x, x};
    const attn::softmax_attention op{.score = attn::soft_cap{20}, .pattern = attn::causal{} & attn::pattern::local{8}};
    attn::tensor<float> out(x.shape()), rows({1, 2, 40, 1}), of_x(x.shape());
    attn::attend(op, in, {out, rows});
    attn::backward(op, in, {out, rows}, {x}, {{of_x}});

    const auto weight = attn::tensor<float>::random({1, 1, 16, 16}, 2);
    const attn::linear<float> matrix{.weight = weight};
    const attn::multi_head<float> layer{.heads = 2, .q = matrix, .k = matrix, .v = matrix, .out = matrix};
    const auto tokens = attn::tensor<float>::random({1, 1, 10, 16}, 3);
    const attn::tensor<float> result = attn::forward(layer, {.tokens = tokens});

    // The first token sees itself alone.
    const bool is_right = out(0, 0, 0, 5) == x(0, 0, 0, 5) && of_x(0, 0, 1, 0) != 0 && result(0, 0, 3, 3) != 0;
    return is_right ? 0 : 1;
}
