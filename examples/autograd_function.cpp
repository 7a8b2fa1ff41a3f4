// Attention in an automatic differentiation of your own: a tape of thirty lines, two layers of attention over the same tokens, and descent.
// torch_function.cpp does the same for PyTorch.
#include <attn/attention/backward.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/softmax_backward.hpp>
#include <attn/pattern/local.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <functional>
#include <random>
#include <ranges>
#include <utility>
#include <vector>

namespace {

using attn::index_t, attn::tensor;

struct variable {
    tensor<float> value, gradient; ///< the gradient is a sum: of one term for each use

    explicit variable(const attn::shape& s) : value(s), gradient(s) { forget(); }
    void forget() { std::fill_n(gradient.data(), gradient.shape().size(), 0.0F); }
    void add(const tensor<float>& term) {
        for (index_t e = 0; e < term.shape().size(); ++e) gradient.data()[e] += term.data()[e];
    }
};

/// What was computed since it began, and for each step how gradients go back through it.
class tape {
public:
    variable& make(const attn::shape& s) { return made_.emplace_back(s); }
    void going_back(std::function<void()> step) { steps_.push_back(std::move(step)); }
    void backward() const {
        for (const auto& step : steps_ | std::views::reverse) step();
    }

private:
    std::deque<variable> made_; // which stay where they are
    std::vector<std::function<void()>> steps_;
};

/// Any operator with a gradient, as a step of the tape: the result and log_sum_exp are kept for the way back.
template <attn::DifferentiableAttention Op>
variable& attend(tape& t, const Op& op, variable& q, variable& k, variable& v) {
    const attn::inputs<float> in{q.value, k.value, v.value};
    auto& out = t.make(op.output_shape(shapes_of(in)));
    auto& log_sum_exp = t.make(attn::log_sum_exp_shape(op, shapes_of(in)));
    attn::attend(op, in, attn::outputs<float>{out.value, log_sum_exp.value});
    t.going_back([=, &q, &k, &v, &out, &log_sum_exp] {
        tensor<float> dq(q.value.shape()), dk(k.value.shape()), dv(v.value.shape());
        attn::backward(op, in, {out.value, log_sum_exp.value}, {out.gradient}, {{dq, dk, dv}});
        q.add(dq), k.add(dk), v.add(dv);
    });
    return out;
}

/// Half the mean of the squares of what is missing to the target: where the way back begins.
double half_mean_square(tape& t, variable& x, const tensor<float>& target) {
    double sum = 0;
    const auto count = x.value.shape().size();
    for (index_t e = 0; e < count; ++e) sum += std::pow(static_cast<double>(x.value.data()[e] - target.data()[e]), 2);
    t.going_back([&x, &target, count] {
        for (index_t e = 0; e < count; ++e) x.gradient.data()[e] += (x.value.data()[e] - target.data()[e]) / static_cast<float>(count);
    });
    return sum / 2 / static_cast<double>(count);
}

} // namespace

int main() {
    const attn::shape s{.batch = 2, .heads = 2, .tokens = 40, .channels = 16};
    const attn::softmax_attention op{.pattern = attn::pattern::local{8}};
    std::mt19937 random(1);
    const auto randomize = [&](tensor<float>& x) {
        for (index_t e = 0; e < s.size(); ++e) x.data()[e] = static_cast<float>(random()) / 0x1p31F - 1;
    };
    variable x(s), keys(s);
    tensor<float> target(s);
    randomize(x.value), randomize(keys.value), randomize(target);

    const auto loss_of = [&](tape& t) {
        auto& first = attend(t, op, x, keys, x); // x is used three times
        return half_mean_square(t, attend(t, op, first, keys, x), target);
    };
    const auto loss = [&] {
        tape t;
        return loss_of(t);
    };

    // The slope in the direction of the gradient is the gradient's squared length.
    const auto step = [&](float length) {
        for (auto* p : {&x, &keys})
            for (index_t e = 0; e < s.size(); ++e) p->value.data()[e] += length * p->gradient.data()[e];
    };
    const auto differentiate = [&] {
        x.forget(), keys.forget();
        tape t;
        const auto value = loss_of(t);
        t.backward();
        return value;
    };
    differentiate();
    double squares = 0;
    for (const auto* p : {&x, &keys})
        for (index_t e = 0; e < s.size(); ++e) squares += std::pow(static_cast<double>(p->gradient.data()[e]), 2);
    step(1);
    const auto above = loss();
    step(-2);
    const auto slope = (above - loss()) / 2;
    step(1);
    std::printf("the gradient is the slope: %s\n", std::abs(slope / squares - 1) < 0.01 ? "yes" : "no");

    for (int n = 0; n <= 300; ++n) {
        const auto value = differentiate();
        if (n % 100 == 0) std::printf("loss after %3d steps: %.3f\n", n, value);
        step(-100);
    }
}
