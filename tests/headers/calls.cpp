// A call of each operator and norm, whose code is looked at, not run.
#include <attn/attn.hpp>

namespace attn {

void attend_all(const tensor<float>& x) {
    const auto call = [&](const auto& op) { return attend(op, x, x, x); };
    call(softmax_attention{.pattern = causal{}});
    call(pointwise_attention{.weight = sigmoid{}});
    call(talking_heads_attention{});
    call(lsh_attention{});
    call(linformer_attention{.key_projection = linear_projection<float>{.matrix = x}});
    call(linear_attention{});
    call(linear_attention{.pattern = causal{}});
    call(linear_attention<cosformer_features>{{.length = 64}});
    call(simplified_linear_attention<dense, float>{});
    call(focused_linear_attention<dense, float>{});
    call(recurrent_attention{.rule = rule::gated_delta{}});
}

void normalise_all(const tensor<float>& x, const std::vector<float>& numbers, const std::vector<double>& statistics) {
    const auto call = [&](const auto& norm) { return normalise(norm, x); };
    call(layer_norm<float>{.weight = numbers, .bias = numbers});
    call(rms_norm<float>{.weight = numbers});
    call(unit_norm<float>{});
    call(dynamic_tanh<float>{});
    call(batch_norm<float>{.mean = statistics, .variance = statistics});
    call(rep_batch_norm<float>{.batch = {.mean = statistics, .variance = statistics}});
}

void train(const tensor<float>& x, tensor<float>& of_x) { train_backward(batch_norm<float>{.batch_statistics = true}, x, x, {of_x}); }

} // namespace attn
