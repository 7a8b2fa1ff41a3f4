// A program of the single header: layers and files of weights are in it, as the operators are.
#include <attn/attn.hpp>

#include <algorithm>

int main(int, char** arguments) {
    attn::parameters weights;
    const auto scale = weights.add<float>("scale.weight", {4, 4});
    for (attn::index_t c = 0; c < 4; ++c) scale(0, 0, c, c) = 2;
    const auto path = std::string(arguments[0]) + ".safetensors";
    write_safetensors(path, weights);

    auto read = attn::read_safetensors(path);
    const auto twice = read.get_linear<float>("scale", 4, 4);
    const attn::multi_head<float> attention{.heads = 2, .q = twice, .k = twice, .v = twice, .out = twice};
    attn::tensor<float> tokens({.tokens = 10, .channels = 4});
    std::fill_n(tokens.data(), tokens.shape().size(), 1.0f);
    const auto out = forward(attention, {.tokens = tokens});
    const auto is_four = [](float x) { return x > 3.999f && x < 4.001f; }; // an average of fours
    return std::all_of(out.data(), out.data() + out.shape().size(), is_four) ? 0 : 1;
}
