// The gradients of projections' parameters by finite differences; that threads change no bit where heads come in parts; and what is refused.
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"
#include "own_projection.hpp"

#include <attn/attention/linformer_attention.hpp>
#include <attn/attention/linformer_backward.hpp>
#include <attn/attention/pooling.hpp>
#include <attn/attention/softmax_backward.hpp>
#include <attn/attention/strided_convolution.hpp>
#include <attn/pattern/lengths.hpp>
#include <attn/pattern/predicate.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

/// Every other token, with a gradient; every_other has none.
struct differentiable_every_other : every_other {
    template <Scalar>
    using gradients = no_gradients;
    template <Scalar>
    std::size_t backward_workspace_bytes(index_t, index_t) const {
        return 0;
    }
    template <Scalar T>
    void add_token_gradients(const kernel::token_rows<T>& x, index_t, index_t first, index_t count, const row_block<const T>& given,
                             const row_block<T>& to, detail::scratch&) const {
        for (index_t r = 0; r < count; ++r)
            for (index_t c = 0; c < x.channels; ++c) to.data[2 * (first + r) * to.row_stride + c * to.channel_stride] += given.data[r * given.row_stride + c];
    }
};

static_assert(Projection<every_other, float> && !DifferentiableProjection<every_other, float>);
static_assert(Attention<linformer_attention<every_other>> && !DifferentiableAttention<linformer_attention<every_other>>);
static_assert(!DifferentiableAttention<linformer_attention<projection_per_head<every_other>>>);
static_assert(DifferentiableAttention<linformer_attention<differentiable_every_other>>);
static_assert(DifferentiableAttention<linformer_attention<linear_projection<double>, mean_pooling>>);
static_assert(DifferentiableProjection<projection_per_head<mixing_convolution<float>>, float>);

template <Scalar T>
tensor<T> zeros(const shape& s) {
    tensor<T> t(s);
    std::fill_n(t.data(), s.size(), T{0});
    return t;
}

/// The gradients of a loss by the parameters that `op` refers to, each with what `wanted` writes, against differences of the loss.
template <class Op>
void check_parameters(const Op& op, const problem& p, const std::vector<std::pair<tensor<double>*, const tensor<double>*>>& parameters, const gradients_of<Op, double>& wanted) {
    INFO(describe(p));
    const auto in = random_given<double>(p);
    auto saved = no_answer<double>(op.output_shape(p.shapes()), {p.batch, p.heads, p.queries, 1});
    attend(op, inputs<double>(in), saved.out());
    const auto d_out = random_tensor<double>(saved.values.shape(), 7), d_rows = random_tensor<double>(saved.log_sum_exp.shape(), 8);
    backward(op, inputs<double>(in), {saved.values, saved.log_sum_exp}, {d_out, d_rows}, wanted);
    const auto loss = [&] {
        auto result = no_answer<double>(saved.values.shape(), saved.log_sum_exp.shape());
        attend(op, inputs<double>(in), result.out());
        double sum = 0;
        for (index_t e = 0; e < d_out.shape().size(); ++e) sum += result.values.data()[e] * d_out.data()[e];
        for (index_t e = 0; e < d_rows.shape().size(); ++e)
            if (std::isfinite(result.log_sum_exp.data()[e])) sum += result.log_sum_exp.data()[e] * d_rows.data()[e];
        return sum;
    };
    for (std::size_t g = 0; g < parameters.size(); ++g)
        for (index_t e = 0; e < parameters[g].first->shape().size(); ++e) {
            INFO("parameter " << g << ", number " << e);
            double& number = parameters[g].first->data()[e];
            const auto kept = number;
            constexpr double step = 1e-4;
            const auto moved = [&](double by) {
                number = kept + by;
                return loss();
            };
            const auto slope = (8 * (moved(step) - moved(-step)) - (moved(2 * step) - moved(-2 * step))) / (12 * step);
            number = kept;
            CHECK(std::abs(parameters[g].second->data()[e] - slope) <= 1e-8 * (1 + std::abs(loss()) + std::abs(slope)));
        }
}

/// A call and its gradients, of which everything is right, for tests to spoil one thing of.
struct good_call {
    tensor<float> q = random_tensor<float>({2, 4, 9, 8}, 1), k = random_tensor<float>({2, 2, 11, 8}, 2), v = random_tensor<float>({2, 2, 11, 5}, 3);
    tensor<float> matrix = random_tensor<float>({1, 1, 3, 12}, 4), bias = random_tensor<float>({1, 2, 3, 1}, 5);
    tensor<float> of_matrix{matrix.shape()}, of_bias{bias.shape()}, dk{k.shape()};
    tensor<float> out{shape{2, 4, 9, 5}}, log_sum_exp{shape{2, 4, 9, 1}}, d_out = random_tensor<float>({2, 4, 9, 5}, 6);
    linformer_attention<linear_projection<float>> op{.key_projection = {matrix, bias}};
    gradients_of<linformer_attention<linear_projection<float>>, float> wanted{{{}, dk, {}}, {of_matrix, of_bias}, {}};

    std::string refusal() const {
        return error_of([&] { backward(op, inputs<float>{q, k, v}, {out, log_sum_exp}, {d_out}, wanted); });
    }
};

} // namespace

TEST_CASE("linformer gradient: matrices and biases are what finite differences say, shared or not", "[linformer][portable][arithmetic]") {
    for (const index_t heads : {1, 2}) { // of the matrices; there are two of keys
        auto e = random_tensor<double>({1, heads, 5, 14}, 1), f = random_tensor<double>({1, 1, 5, 12}, 2), bias = random_tensor<double>({1, 3 - heads, 5, 1}, 3);
        auto of_e = zeros<double>(e.shape()), of_f = zeros<double>(f.shape()), of_bias = zeros<double>(bias.shape());
        const problem p{2, 4, 2, 7, 12, 3, 4};
        using linear = linear_projection<double>;
        check_parameters(linformer_attention<linear, linear>{.key_projection = {e, bias}, .value_projection = {f}}, p,
                         {{&e, &of_e}, {&bias, &of_bias}, {&f, &of_f}}, {{}, {of_e, of_bias}, {of_f}});
        check_parameters(linformer_attention<linear>{.key_projection = {e, bias}}, p, {{&e, &of_e}, {&bias, &of_bias}}, {{}, {of_e, of_bias}, {}});
        const std::vector<index_t> present{0, 9};
        check_parameters(linformer_attention<linear, shared_projection, lengths>{.key_projection = {e, bias}, .pattern = lengths{present}}, p,
                         {{&e, &of_e}, {&bias, &of_bias}}, {{}, {of_e, of_bias}, {}});
        // Rows that the pooling of the values lacks are left out: those between them are runs of the matrix' rows.
        const auto some = predicate{[](auto, auto j) { return j < 3 || j >= 6; }};
        check_parameters(linformer_attention<linear, mean_pooling, std::remove_const_t<decltype(some)>>{.key_projection = {e}, .value_projection = {5}, .pattern = some},
                         p, {{&e, &of_e}}, {{}, {of_e}, {}});
    }
}

TEST_CASE("linformer gradient: convolutions and projections of each head are what finite differences say", "[linformer][portable]") {
    const problem p{2, 4, 2, 7, 14, 3, 4};
    auto w = random_tensor<double>({1, 2, 3, 3}, 1), b = random_tensor<double>({1, 1, 1, 3}, 2), x = random_tensor<double>({3, 1, 4, 4}, 3),
         c = random_tensor<double>({1, 2, 1, 4}, 4);
    auto of_w = zeros<double>(w.shape()), of_b = zeros<double>(b.shape()), of_x = zeros<double>(x.shape()), of_c = zeros<double>(c.shape());
    const auto some = predicate{[](auto, auto j) { return j % 5 != 2; }};
    check_parameters(linformer_attention<channel_convolution<double>, mixing_convolution<double>, std::remove_const_t<decltype(some)>>{
                         .key_projection = {w, b}, .value_projection = {x, c}, .pattern = some},
                     p, {{&w, &of_w}, {&b, &of_b}, {&x, &of_x}, {&c, &of_c}}, {{}, {of_w, of_b}, {of_x, of_c}});

    auto first = random_tensor<double>({1, 1, 5, 14}, 5), second = random_tensor<double>({1, 1, 2, 15}, 6);
    auto of_first = zeros<double>(first.shape()), of_second = zeros<double>(second.shape());
    const std::vector<linear_projection<double>> each{{first}, {second}};
    using of_each = linear_projection<double>::gradients<double>;
    const std::vector<of_each> of{{of_first}, {of_second}};
    check_parameters(linformer_attention<projection_per_head<linear_projection<double>>>{.key_projection = {each}}, p,
                     {{&first, &of_first}, {&second, &of_second}}, {{}, {of}, {}});
}

TEST_CASE("linformer gradient: a user's own projection", "[linformer][portable]") {
    const problem p{2, 4, 2, 7, 14, 3, 4};
    const auto in = random_given<double>(p);
    tensor<double> keys({2, 2, 7, 3}), values({2, 2, 7, 4});
    for (index_t row = 0; row < 2 * 2 * 7; ++row) {
        std::copy_n(in.keys.data() + 2 * row * 3, 3, keys.data() + row * 3);
        std::copy_n(in.values.data() + 2 * row * 4, 4, values.data() + row * 4);
    }
    auto saved = no_answer<double>({2, 4, 7, 4}, {2, 4, 7, 1});
    attend(softmax_attention{}, inputs<double>{in.queries, keys, values}, saved.out());
    const auto d_out = random_tensor<double>({2, 4, 7, 4}, 7);
    tensor<double> dq(in.queries.shape()), dk(in.keys.shape()), dv(in.values.shape()), few_q(in.queries.shape()), few_k(keys.shape()), few_v(values.shape());
    backward(linformer_attention{.key_projection = differentiable_every_other{}}, inputs<double>(in), {saved.values, saved.log_sum_exp}, {d_out}, {{dq, dk, dv}, {}, {}});
    backward(softmax_attention{}, inputs<double>{in.queries, keys, values}, {saved.values, saved.log_sum_exp}, {d_out}, {{few_q, few_k, few_v}, {}, {}});
    CHECK(same_bits(dq, few_q));
    for (index_t g = 0; g < 4; ++g)
        for (index_t j = 0; j < 14; ++j) {
            for (index_t c = 0; c < 3; ++c) CHECK(dk(g / 2, g % 2, j, c) == (j % 2 == 0 ? few_k(g / 2, g % 2, j / 2, c) : 0));
            for (index_t c = 0; c < 4; ++c) CHECK(dv(g / 2, g % 2, j, c) == (j % 2 == 0 ? few_v(g / 2, g % 2, j / 2, c) : 0));
        }
}

// More heads than are projected at once, of which there are as many as threads: the sums over heads and batch entries have one order.
TEST_CASE("linformer gradient: parts of the heads and threads change no bit", "[linformer][parallel]") {
    const auto in = random_given<float>({3, 6, 6, 40, 520, 64, 64});
    const auto matrix = random_tensor<float>({1, 1, 320, 520}, 4), d_out = random_tensor<float>({3, 6, 40, 64}, 6);
    const linformer_attention<linear_projection<float>> op{.key_projection = {matrix}};
    auto saved = no_answer<float>({3, 6, 40, 64}, {3, 6, 40, 1});
    attend(op, inputs<float>(in), saved.out());
    const auto find = [&](auto& executor) {
        auto of_matrix = zeros<float>(matrix.shape());
        backward(op, inputs<float>(in), {saved.values, saved.log_sum_exp}, {d_out}, {{}, {of_matrix}, {}}, executor);
        return of_matrix;
    };
    sequential here;
    const auto expected = find(here);
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        CHECK(same_bits(find(executor), expected));
    });
}

TEST_CASE("linformer gradient: no queries, no keys, no batch entries give 0", "[linformer][portable]") {
    for (const auto& p : std::vector<problem>{{1, 2, 1, 0, 5, 4, 3}, {1, 2, 1, 5, 0, 4, 3}, {0, 2, 1, 5, 5, 4, 3}}) {
        INFO(describe(p));
        const auto in = random_given<float>(p);
        const auto matrix = random_tensor<float>({1, 1, 3, 6}, 4), bias = random_tensor<float>({1, 1, 3, 1}, 4);
        const linformer_attention<linear_projection<float>> op{.key_projection = {matrix, bias}};
        auto saved = no_answer<float>(op.output_shape(p.shapes()), {p.batch, p.heads, p.queries, 1});
        attend(op, inputs<float>(in), saved.out());
        const auto d_out = random_tensor<float>(saved.values.shape(), 7);
        tensor<float> dq(p.shapes().queries), dk(p.shapes().keys), dv(p.shapes().values), of_matrix(matrix.shape()), of_bias(bias.shape());
        for (auto* t : {&dq, &dk, &dv, &of_matrix, &of_bias}) std::fill_n(t->data(), t->shape().size(), guard<float>);
        backward(op, inputs<float>(in), {saved.values, saved.log_sum_exp}, {d_out}, {{dq, dk, dv}, {of_matrix, of_bias}, {}});
        for (const auto* t : {&dq, &dk, &dv, &of_matrix, &of_bias})
            CHECK(std::all_of(t->data(), t->data() + t->shape().size(), [](float x) { return x == 0; }));
    }
}

TEST_CASE("linformer gradient: what is wrong is refused, by name", "[linformer][portable]") {
    CHECK(good_call().refusal() == nothing_thrown);
    const auto refused = [](auto spoil, const std::vector<std::string>& parts) {
        good_call call;
        spoil(call);
        check_says(call.refusal(), parts);
    };
    tensor<float> small({1, 1, 3, 11}), columns({1, 1, 12, 3});
    refused([&](auto& c) { c.wanted.key_projection.matrix = small; }, {"linformer_attention: wanted.key_projection.matrix has shape (1, 1, 3, 11)", "(1, 1, 3, 12)"});
    refused([&](auto& c) { c.wanted.key_projection.matrix = columns.view().transposed(); }, {"wanted.key_projection.matrix", "contiguous channels"});
    refused([&](auto& c) { c.op.key_projection.bias = {}; }, {"wanted.key_projection.bias is asked for, but there is no such parameter"});
    refused([&](auto& c) { c.wanted.key_projection.matrix = c.matrix; }, {"wanted.key_projection.matrix", "overlaps the matrix of a projection"});
    refused([&](auto& c) { c.wanted.key_projection.bias = head_major(c.of_matrix.data(), {1, 2, 3, 1}); }, {"wanted.key_projection.bias", "overlaps wanted.key_projection.matrix"});
    refused([&](auto& c) { c.wanted.key_projection.matrix = head_major(c.k.data(), {1, 1, 3, 12}); }, {"wanted.key_projection.matrix", "overlaps k"});

    const good_call call;
    const std::vector<linear_projection<float>> each{{call.matrix}, {call.matrix}};
    const linformer_attention<projection_per_head<linear_projection<float>>> op{.key_projection = {each}};
    const std::vector<linear_projection<float>::gradients<float>> of_one(1);
    check_says(error_of([&] { backward(op, inputs<float>{call.q, call.k, call.v}, {call.out, call.log_sum_exp}, {call.d_out}, {{}, {of_one}, {}}); }),
               {"wanted.each has 1 entries, but there are 2 projections"});
}

} // namespace attn::testing
