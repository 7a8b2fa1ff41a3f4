// oneDNN's primitives: matmul, softmax, matmul over all heads at once, a causal mask added between; layer normalisation.
#include "serve.hpp"

#include <oneapi/dnnl/dnnl.hpp>

#include <cmath>
#include <limits>
#include <memory>

namespace attn::bench {

namespace {

using dnnl::memory;
using tag = memory::format_tag;
using arguments = std::unordered_map<int, memory>;

struct step {
    dnnl::primitive primitive;
    arguments with;
};

/// The primitives of a problem, in order, and their memory.
struct chain {
    dnnl::engine engine{dnnl::engine::kind::cpu, 0};
    dnnl::stream stream{engine};
    std::vector<step> steps;
    std::vector<std::vector<float>> numbers;

    void operator()() {
        for (auto& s : steps) s.primitive.execute(stream, s.with);
        stream.wait();
    }
    memory hold(const memory::desc& desc, std::vector<float> values) {
        numbers.push_back(std::move(values));
        return {desc, engine, numbers.back().data()};
    }
    static memory::desc described(const memory::dims& dims, tag order) { return {dims, memory::data_type::f32, order}; }
};

// Version 3 describes a primitive by its engine and its tensors at once, where version 2 has an operation's own description first.
#if DNNL_VERSION_MAJOR >= 3
dnnl::matmul product(const chain& c, const memory::desc& a, const memory::desc& b, const memory::desc& out, float scale = 1) {
    dnnl::post_ops then;
    if (scale != 1) then.append_eltwise(dnnl::algorithm::eltwise_linear, scale, 0);
    dnnl::primitive_attr scaled;
    scaled.set_post_ops(then);
    return dnnl::matmul({c.engine, a, b, out, scaled});
}
dnnl::binary sum(const chain& c, const memory::desc& a, const memory::desc& b) {
    return dnnl::binary({c.engine, dnnl::algorithm::binary_add, a, b, a});
}
dnnl::softmax_forward softmax(const chain& c, const memory::desc& scores) {
    return dnnl::softmax_forward({c.engine, dnnl::prop_kind::forward_inference, dnnl::algorithm::softmax_accurate, scores, scores, 2});
}
dnnl::layer_normalization_forward layer_norm(const chain& c, const memory::desc& rows, float eps, dnnl::normalization_flags flags) {
    return dnnl::layer_normalization_forward({c.engine, dnnl::prop_kind::forward_inference, rows, rows, eps, flags});
}
#else
dnnl::matmul product(const chain& c, const memory::desc& a, const memory::desc& b, const memory::desc& out, float scale = 1) {
    dnnl::primitive_attr scaled;
    scaled.set_output_scales(0, {scale});
    return dnnl::matmul({{a, b, out}, scaled, c.engine});
}
dnnl::binary sum(const chain& c, const memory::desc& a, const memory::desc& b) {
    return dnnl::binary({{dnnl::algorithm::binary_add, a, b, a}, c.engine});
}
dnnl::softmax_forward softmax(const chain& c, const memory::desc& scores) {
    return dnnl::softmax_forward({dnnl::softmax_forward::desc(dnnl::prop_kind::forward_inference, scores, 2), c.engine});
}
dnnl::layer_normalization_forward layer_norm(const chain& c, const memory::desc& rows, float eps, dnnl::normalization_flags flags) {
    return dnnl::layer_normalization_forward({dnnl::layer_normalization_forward::desc(dnnl::prop_kind::forward_inference, rows, eps, flags), c.engine});
}
#endif

void add_attention(chain& c, const peer_problem& p) {
    const auto heads = p.batch * p.heads;
    const auto tokens = chain::described({heads, p.n, p.d}, tag::abc), turned = chain::described({heads, p.d, p.n}, tag::acb),
               square = chain::described({heads, p.n, p.n}, tag::abc), row = chain::described({1, p.n, p.n}, tag::abc);
    const auto q = c.hold(tokens, p.input(0)), k = c.hold(turned, p.input(1)), v = c.hold(tokens, p.input(2));
    const auto scores = c.hold(square, std::vector<float>(static_cast<std::size_t>(heads * p.n * p.n)));
    c.steps.push_back({product(c, tokens, turned, square, 1 / std::sqrt(static_cast<float>(p.d))),
                       {{DNNL_ARG_SRC, q}, {DNNL_ARG_WEIGHTS, k}, {DNNL_ARG_DST, scores}}});
    if (p.is_causal()) { // as a term of the product it would send oneDNN to its reference implementation
        std::vector<float> hidden(static_cast<std::size_t>(p.n * p.n));
        for (long i = 0; i < p.n; ++i)
            for (long j = i + 1; j < p.n; ++j) hidden[static_cast<std::size_t>(i * p.n + j)] = std::numeric_limits<float>::lowest() / 2;
        const auto mask = c.hold(row, std::move(hidden));
        c.steps.push_back({sum(c, square, row), {{DNNL_ARG_SRC_0, scores}, {DNNL_ARG_SRC_1, mask}, {DNNL_ARG_DST, scores}}});
    }
    c.steps.push_back({softmax(c, square), {{DNNL_ARG_SRC, scores}, {DNNL_ARG_DST, scores}}});
    const auto out = c.hold(tokens, std::vector<float>(p.size()));
    c.steps.push_back({product(c, square, tokens, tokens), {{DNNL_ARG_SRC, scores}, {DNNL_ARG_WEIGHTS, v}, {DNNL_ARG_DST, out}}});
}

void add_layer_norm(chain& c, const peer_problem& p) {
    const auto rows = chain::described({p.n, p.d}, tag::ab), parameter = chain::described({p.d}, tag::a);
    using flags = dnnl::normalization_flags;
    const auto x = c.hold(rows, p.input(0)), weight = c.hold(parameter, p.input(1)), bias = c.hold(parameter, p.input(2));
    c.steps.push_back({layer_norm(c, rows, 1e-5F, flags::use_scale | flags::use_shift),
                       {{DNNL_ARG_SRC, x},
                        {DNNL_ARG_SCALE, weight},
                        {DNNL_ARG_SHIFT, bias},
                        {DNNL_ARG_DST, c.hold(rows, std::vector<float>(p.size()))}}});
}

} // namespace

} // namespace attn::bench

int main() {
    using namespace attn::bench;
    const auto& version = *dnnl_version();
    const auto number = std::to_string(version.major) + "." + std::to_string(version.minor) + "." + std::to_string(version.patch);
    return serve("oneDNN", number, [held = std::unique_ptr<chain>()](const peer_problem& p) mutable {
        if (p.is_gradient()) return std::vector<peer_way>{};
        held = std::make_unique<chain>();
        held->numbers.reserve(8); // memory objects point into them
        if (p.is_norm())
            add_layer_norm(*held, p);
        else
            add_attention(*held, p);
        return std::vector<peer_way>{
            {p.is_norm() ? "layer_normalization" : "matmul, softmax, matmul", [&c = *held] { c(); }, &held->numbers.back()}};
    });
}
