// The front door for Eigen matrices: any storage order, maps, blocks and Refs.
#include "answers.hpp"
#include "catch.hpp"

#include <attn/attention/eigen.hpp>
#include <attn/attention/linear_attention.hpp>
#include <attn/attention/linear_backward.hpp>
#include <attn/attention/pointwise_attention.hpp>
#include <attn/attention/pointwise_backward.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/softmax_backward.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/causal.hpp>

namespace attn::testing {

namespace {

template <Scalar T>
using row_major = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <Scalar T>
using column_major = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>;

template <Scalar T>
row_major<T> random_matrix(index_t rows, index_t columns, unsigned seed) {
    const auto numbers = random_tensor<T>({.tokens = rows, .channels = columns}, seed);
    return Eigen::Map<const row_major<T>>(numbers.data(), rows, columns);
}

template <Scalar T>
tensor<T> as_tensor(const row_major<T>& of) {
    tensor<T> result({.tokens = of.rows(), .channels = of.cols()});
    std::copy_n(of.data(), of.size(), result.data());
    return result;
}

/// The views of dq, dk and dv as the gradients that an operator has.
template <class A, Scalar T>
gradients_of<A, T> wanted_by(const tensor_view<T>& dq, const tensor_view<T>& dk, const tensor_view<T>& dv) {
    gradients_of<A, T> wanted;
    wanted.queries = dq, wanted.keys = dk, wanted.values = dv;
    return wanted;
}

/// Gradients of matrices of an order, beside which a matrix of the other order and blocks lie, against those of tensors.
template <Scalar T, int order, DifferentiableAttention A>
void check_gradients_of_matrices(const A& op) {
    const auto q = random_matrix<T>(21, 9, 1), k = random_matrix<T>(30, 9, 2), v = random_matrix<T>(30, 14, 3), given = random_matrix<T>(21, 14, 4);
    const auto of_q = as_tensor<T>(q), of_k = as_tensor<T>(k), of_v = as_tensor<T>(v), of_given = as_tensor<T>(given);
    const inputs<T> in{of_q, of_k, of_v, top_left()};
    constexpr bool has_rows = A::traits.has_log_sum_exp;
    tensor<T> values({1, 1, 21, 14}), rows({1, 1, 21, 1}), tq(of_q.shape()), tk(of_k.shape()), tv(of_v.shape());
    attend(op, in, outputs<T>{values, has_rows ? rows.view() : tensor_view<T>{}});
    backward(op, in, {values, rows}, {of_given}, wanted_by<A, T>(tq, tk, tv));

    using matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, order>;
    const matrix mq = q, mk = k, given_here = given;
    matrix out(21, 14), dq(21, 9), wide = matrix::Constant(40, 60, T(7));
    wide.block(5, 40, 30, 14) = v;
    Eigen::Matrix<T, Eigen::Dynamic, 1> log_sum_exp(21);
    auto dk = wide.block(1, 20, 30, 9);
    std::vector<T> memory(30 * 14);
    Eigen::Map<row_major<T>> dv(memory.data(), 30, 14);
    const outputs<T> written{view(out), has_rows ? view(log_sum_exp) : tensor_view<T>{}};
    attend(op, mq, mk, wide.block(5, 40, 30, 14), written, {}, top_left());
    const auto holds = [](const auto& m, const tensor<T>& expected) {
        const row_major<T> copy = m;
        return same_bits(as_tensor<T>(copy), expected);
    };
    CHECK(holds(out, values));
    if (has_rows) CHECK(holds(log_sum_exp, rows));
    const auto check = [&] {
        CHECK(holds(dq, tq));
        CHECK(holds(dk, tk));
        CHECK(holds(dv, tv));
    };
    const auto wanted = wanted_by<A, T>(view(dq), view(dk), view(dv));
    backward(op, mq, mk, wide.block(5, 40, 30, 14), {view(out), view(log_sum_exp)}, {view(given_here)}, wanted, {}, top_left());
    check();
    CHECK((wide.topRows(1).array() == T(7)).all());
    dq.setZero(), dk.setZero(), dv.setZero();
    thread_pool two(2);
    backward(op, q, mk, v, {view(out), view(log_sum_exp)}, {view(given)}, wanted, two, top_left());
    check();
    dk.setConstant(T(5));
    backward(op, q, mk, v, {view(out), view(log_sum_exp)}, {view(given)}, wanted_by<A, T>(view(dq), {}, {}), {}, top_left());
    CHECK((dk.array() == T(5)).all());
}

} // namespace

TEMPLATE_TEST_CASE("attend: Eigen matrices of any storage", "[attention][portable]", ATTN_TEST_NUMBERS) {
    using rows = row_major<TestType>;
    using columns = column_major<TestType>;
    const softmax_attention op{.pattern = causal{}};
    rows q = random_matrix<TestType>(21, 9, 1), k = random_matrix<TestType>(30, 9, 2), v = random_matrix<TestType>(30, 14, 3);
    const rows expected = attend(op, q, k, v, top_left());
    REQUIRE(expected.rows() == 21);
    REQUIRE(expected.cols() == 14);

    // The formula, with Eigen.
    Eigen::MatrixXd weights = (q.template cast<double>() * k.template cast<double>().transpose() / 3).array().exp();
    weights = weights.triangularView<Eigen::Lower>();
    const Eigen::MatrixXd exact = weights.rowwise().sum().cwiseInverse().asDiagonal() * weights * v.template cast<double>();
    CHECK((expected.template cast<double>() - exact).cwiseAbs().maxCoeff() <= 32 * epsilon<TestType>);

    const columns cq = q, ck = k, cv = v;
    CHECK(attend(op, cq, ck, cv, top_left()) == expected);
    CHECK(attend(op, cq, k, cv, top_left()) == expected);
    STATIC_REQUIRE(!decltype(attend(op, q, k, cv, top_left()))::IsRowMajor);
    STATIC_REQUIRE(decltype(attend(op, cq, ck, v, top_left()))::IsRowMajor);

    columns wide = columns::Zero(40, 60);
    wide.block(3, 2, 21, 9) = q;
    wide.block(1, 20, 30, 9) = k;
    wide.block(5, 40, 30, 14) = v;
    CHECK(attend(op, wide.block(3, 2, 21, 9), wide.block(1, 20, 30, 9), wide.block(5, 40, 30, 14), top_left()) == expected);
    const Eigen::Ref<const columns> ref = wide.block(5, 40, 30, 14);
    CHECK(attend(op, q, k, ref, top_left()) == expected);
    const Eigen::Map<const columns> map(cv.data(), 30, 14);
    CHECK(attend(op, q, k, map, top_left()) == expected);
    const Eigen::Matrix<TestType, 30, 14> fixed = v;
    CHECK(attend(op, q, k, fixed, top_left()) == expected);
}

TEMPLATE_TEST_CASE("attend: positions and errors of matrices", "[attention][portable]", ATTN_TEST_NUMBERS) {
    const auto q = random_matrix<TestType>(5, 8, 1), k = random_matrix<TestType>(12, 8, 2), v = random_matrix<TestType>(12, 3, 3);
    const softmax_attention op{.pattern = causal{}};
    const row_major<TestType> chunk = attend(op, q, k, v, bottom_right(5, 12)), first = attend(op, q, k, v, top_left());
    CHECK(chunk.topRows(2) == attend(op, row_major<TestType>(q.topRows(2)), row_major<TestType>(k.topRows(9)),
                                     row_major<TestType>(v.topRows(9)), {.first_query = 7}));
    CHECK(first.row(0) == v.row(0));
    CHECK_THROWS_AS(attend(op, q, k, v.topRows(11)), shape_error);
    CHECK_THROWS_WITH(attend(op, q, row_major<TestType>(k.leftCols(7)), v),
                      Contains("softmax_attention: k has shape (1, 1, 12, 7)"));
    CHECK(attend(op, row_major<TestType>(0, 8), k, v).rows() == 0);
    CHECK(attend(op, q, row_major<TestType>(0, 8), row_major<TestType>(0, 3)) == row_major<TestType>::Zero(5, 3));
}

TEMPLATE_TEST_CASE("backward: Eigen matrices of any storage have the gradients of tensors", "[attention][portable]", ATTN_TEST_NUMBERS) {
    check_gradients_of_matrices<TestType, Eigen::RowMajor>(softmax_attention{.pattern = causal{}});
    check_gradients_of_matrices<TestType, Eigen::ColMajor>(softmax_attention{.pattern = causal{}});
    check_gradients_of_matrices<TestType, Eigen::RowMajor>(linear_attention{});
    check_gradients_of_matrices<TestType, Eigen::ColMajor>(linear_attention{});
    check_gradients_of_matrices<TestType, Eigen::RowMajor>(pointwise_attention{.weight = sigmoid{.bias = -1}});
    check_gradients_of_matrices<TestType, Eigen::ColMajor>(pointwise_attention{.weight = sigmoid{.bias = -1}});
}

TEST_CASE("backward: matrices are named as a call shows them, and refused as tensors are", "[attention][portable]") {
    const Eigen::MatrixXf q = random_matrix<float>(5, 8, 1), k = random_matrix<float>(12, 8, 2), v = random_matrix<float>(12, 3, 3),
                          d_out = random_matrix<float>(5, 3, 4);
    Eigen::MatrixXf out(5, 3), dq(5, 8), dk(12, 8), dv(12, 3), other(4, 3);
    Eigen::VectorXf log_sum_exp(5);
    const softmax_attention op;
    attend(op, q, k, v, outputs<float>{view(out), view(log_sum_exp)});
    CHECK(out == attend(op, q, k, v));
    backward(op, q, k, v, {view(out), view(log_sum_exp)}, {view(d_out)}, {{view(dq), view(dk), view(dv)}});
    // A weight of the values is a share of d_out: all of its rows' sums are those of d_out.
    CHECK((dv.colwise().sum() - d_out.colwise().sum()).cwiseAbs().maxCoeff() < 1e-5f);
    const linear_attention linear;
    attend(linear, q, k, v, outputs<float>{view(out)});
    backward(linear, q, k, v, {view(out)}, {view(d_out)}, {view(dq), view(dk), view(dv)});

    const auto refused = [&](const auto& call, const char* why) {
        CHECK_THROWS_AS(call(), attention_error);
        CHECK_THROWS_WITH(call(), Contains(why));
    };
    refused([&] { backward(op, q, k, v, {view(out), view(log_sum_exp)}, {view(other)}, {{view(dq)}}); },
            "softmax_attention: d_out.values has shape (1, 1, 4, 3), but the result has (1, 1, 5, 3)");
    refused([&] { backward(op, q, k, v, {view(out)}, {view(d_out)}, {{view(dq)}}); }, "softmax_attention: saved.log_sum_exp");
    refused([&] { backward(op, q, k, v, {view(out), view(log_sum_exp)}, {view(d_out)}, {{view(dk)}}); },
            "softmax_attention: wanted.queries has shape (1, 1, 12, 8)");
    refused([&] { backward(op, q, k, v.topRows(11), {view(out), view(log_sum_exp)}, {view(d_out)}, {{view(dq)}}); },
            "softmax_attention: v has shape (1, 1, 11, 3)");
    refused([&] { backward(op, dq, k, v, {view(out), view(log_sum_exp)}, {view(d_out)}, {{view(dq)}}); }, "overlaps q");
    const Eigen::Matrix<Eigen::half, Eigen::Dynamic, Eigen::Dynamic> narrow = k.cast<Eigen::half>();
    refused([&] { backward(op, q, narrow, v, {view(out), view(log_sum_exp)}, {view(d_out)}, {{view(dq)}}); },
            "softmax_attention: k of shape (1, 1, 12, 8) is stored in 16 bits");
}

TEMPLATE_TEST_CASE("attend: tensors, views and the sequential executor", "[attention][portable]", ATTN_TEST_NUMBERS) {
    auto in = random_given<TestType>({2, 4, 2, 9, 11, 8, 5});
    const softmax_attention op;
    sequential here;
    const auto expected = attn::attend(op, inputs<TestType>(in), here);
    CHECK(same_bits(attn::attend(op, in.queries, in.keys, in.values), expected));
    CHECK(same_bits(attn::attend(op, in.queries.view(), std::as_const(in.keys).view(), in.values), expected));
    const auto temporary = [&] { return random_given<TestType>({2, 4, 2, 9, 11, 8, 5}); };
    CHECK(same_bits(attn::attend(op, temporary().queries, temporary().keys, temporary().values), expected));
    CHECK(same_bits(attn::attend(softmax_attention{.pattern = causal{}}, in.queries, in.keys, in.values, {.first_query = 10}), expected));
}

TEMPLATE_TEST_CASE("attend: 16-bit tensors and matrices beside floats, in every form of call", "[attention][portable]", Eigen::bfloat16, Eigen::half) {
    using S = TestType;
    const auto stored = []<class To, class From>(std::type_identity<To>, const tensor<From>& from) {
        tensor<To> to(from.shape());
        std::transform(from.data(), from.data() + from.shape().size(), to.data(), [](From x) { return static_cast<To>(x); });
        return to;
    };
    const auto narrow = [&](const auto& from) { return stored(std::type_identity<S>{}, from); };
    const auto wide = [&](const auto& from) { return stored(std::type_identity<float>{}, from); };
    const auto all = random_given<float>({2, 4, 2, 11, 11, 8, 5});
    auto q = narrow(all.queries), k = narrow(all.keys), v = narrow(all.values);
    const auto q_wide = wide(q), k_wide = wide(k), v_wide = wide(v);
    const softmax_attention op{.pattern = causal{}};
    const positions where{.first_query = 2};
    const auto expected = attend(op, q_wide, k_wide, v_wide), elsewhere = attend(op, inputs<float>{q_wide, k_wide, v_wide, where});

    STATIC_REQUIRE(std::same_as<decltype(attend(op, q, k, v)), tensor<float>>);
    CHECK(same_bits(attend(op, q, k, v), expected));
    CHECK(same_bits(attend(op, q_wide, std::as_const(k), v.view()), expected));
    CHECK(same_bits(attend(op, stored_view<float>(q), k_wide, v, where), elsewhere));
    CHECK(same_bits(attend(op, q, k, v, thread_pool(2), where), elsewhere));

    thread_pool two(2);
    workspace memory(1 << 20);
    const auto check = [&](auto out) {
        using O = std::remove_cvref_t<decltype(*out.data())>;
        const auto holds = [&](const tensor<float>& result) { return same_bits(out, stored(std::type_identity<O>{}, result)); };
        attend(op, q, k_wide, v, out);
        CHECK(holds(expected));
        attend(op, q, k, v, out.view(), two, where);
        CHECK(holds(elsewhere));
        attend(op, q, k, v_wide, out, execution(two, memory));
        CHECK(holds(expected));
        attend(op, q, k, v_wide, out, execution(two, memory), where);
        CHECK(holds(elsewhere));
    };
    check(tensor<S>(expected.shape()));
    check(tensor<float>(expected.shape()));
    CHECK_THROWS_WITH(attend(op, q, k, v, q), Contains("softmax_attention: out"));

    using narrow_matrix = Eigen::Matrix<S, Eigen::Dynamic, Eigen::Dynamic>;
    const row_major<float> a = random_matrix<float>(9, 8, 1).template cast<S>().template cast<float>();
    const narrow_matrix a_narrow = a.template cast<S>();
    const row_major<float> product = attend(op, a, a, a);
    CHECK(attend(op, a_narrow, a_narrow, a_narrow) == product);
    CHECK(attend(op, a, a_narrow, a) == product);
    narrow_matrix out(9, 8);
    attend(op, a, a, a_narrow, out, two);
    CHECK(out == product.template cast<S>());
    attend(op, a_narrow, a, a, out.topRows(9), execution(two, memory), where);
    CHECK(out == attend(op, a, a, a, where).template cast<S>());
}

} // namespace attn::testing
