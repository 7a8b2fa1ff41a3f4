// attn in PyTorch: causal attention as a function of libtorch's autograd, on torch's own memory, beside the same of torch's operations.
// `cmake --build build/release --target example_torch_function` builds it where CMake finds libtorch (Debian: libtorch-dev).
#include <attn/attention/backward.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/softmax_backward.hpp>
#include <attn/pattern/causal.hpp>

#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

namespace {

/// Four dimensions of any strides: nothing is copied.
template <class T>
attn::tensor_view<T> view(const torch::Tensor& t) {
    return {t.data_ptr<float>(), {t.size(0), t.size(1), t.size(2), t.size(3)}, {t.stride(0), t.stride(1), t.stride(2), t.stride(3)}};
}

const attn::softmax_attention causal_attention{.pattern = attn::causal{}};

struct attention_function : torch::autograd::Function<attention_function> {
    static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v) {
        const auto out = torch::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
        const auto log_sum_exp = torch::empty({q.size(0), q.size(1), q.size(2), 1}, q.options());
        attn::attend(causal_attention, attn::inputs<float>{view<const float>(q), view<const float>(k), view<const float>(v)},
                     attn::outputs<float>{view<float>(out), view<float>(log_sum_exp)});
        context->save_for_backward({q, k, v, out, log_sum_exp});
        return out;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& given) {
        const auto saved = context->get_saved_variables();
        const attn::inputs<float> in{view<const float>(saved[0]), view<const float>(saved[1]), view<const float>(saved[2])};
        const torch::autograd::variable_list gradients{torch::empty_like(saved[0]), torch::empty_like(saved[1]), torch::empty_like(saved[2])};
        attn::backward(causal_attention, in, {view<const float>(saved[3]), view<const float>(saved[4])}, {view<const float>(given[0])},
                       {{view<float>(gradients[0]), view<float>(gradients[1]), view<float>(gradients[2])}});
        return gradients;
    }
};

torch::Tensor formula(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v) {
    const auto hidden = torch::full({q.size(2), k.size(2)}, -std::numeric_limits<float>::infinity()).triu(1);
    const auto scores = torch::matmul(q, k.transpose(-2, -1)) / std::sqrt(static_cast<double>(q.size(3))) + hidden;
    return torch::matmul(torch::softmax(scores, -1), v);
}

} // namespace

int main() {
    torch::manual_seed(1);
    const auto leaf = [] { return torch::randn({2, 50, 4, 32}).requires_grad_(); }; // (batch, tokens, heads, channels)
    const std::vector<torch::Tensor> leaves{leaf(), leaf(), leaf()};
    const auto weights = torch::randn({2, 4, 50, 32});
    const auto heads = [&](std::size_t i) { return leaves[i].transpose(1, 2); };

    const auto ours = attention_function::apply(heads(0), heads(1), heads(2)), theirs = formula(heads(0), heads(1), heads(2));
    const auto our_gradients = torch::autograd::grad({(ours * weights).sum()}, leaves);
    const auto their_gradients = torch::autograd::grad({(theirs * weights).sum()}, leaves);

    bool same = true;
    const auto compare = [&](const char* name, const torch::Tensor& a, const torch::Tensor& b) {
        const auto difference = (a - b).abs().max().item<float>();
        same = same && difference < 1e-5F;
        std::printf("%-9s differs from torch's by at most %.1e\n", name, static_cast<double>(difference));
    };
    compare("attention", ours, theirs);
    compare("d q", our_gradients[0], their_gradients[0]);
    compare("d k", our_gradients[1], their_gradients[1]);
    compare("d v", our_gradients[2], their_gradients[2]);
    return same ? 0 : 1;
}
