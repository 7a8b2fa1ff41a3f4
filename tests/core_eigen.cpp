#include "catch.hpp"

#include <attn/core/eigen.hpp>

namespace attn::testing {

namespace {

template <class M>
void check_elements(M& m) {
    const auto v = view(m);
    REQUIRE(v.shape() == shape{1, 1, m.rows(), m.cols()});
    for (index_t i = 0; i < m.rows(); ++i)
        for (index_t c = 0; c < m.cols(); ++c) CHECK(&v(0, 0, i, c) == &m.coeffRef(i, c));
}

} // namespace

TEMPLATE_TEST_CASE("view: any matrix that has memory", "[core][portable]", ATTN_TEST_NUMBERS) {
    using column_major = Eigen::Matrix<TestType, Eigen::Dynamic, Eigen::Dynamic>;
    using row_major = Eigen::Matrix<TestType, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    column_major columns = column_major::Random(5, 3);
    row_major rows = row_major::Random(5, 3);

    check_elements(columns);
    check_elements(rows);
    CHECK(view(columns).strides() == strides{0, 0, 1, 5});
    CHECK(view(rows).strides() == strides{0, 0, 3, 1});

    auto block = columns.block(1, 1, 3, 2);
    check_elements(block);
    auto row = rows.row(2);
    check_elements(row);
    Eigen::Ref<row_major, 0, Eigen::OuterStride<>> ref = rows.leftCols(2);
    check_elements(ref);
    Eigen::Map<column_major, 0, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>> map(columns.data(), 2, 3, {5, 2});
    check_elements(map);
    Eigen::Matrix<TestType, 3, 3> fixed;
    check_elements(fixed);
    Eigen::Array<TestType, Eigen::Dynamic, Eigen::Dynamic> array(2, 2);
    check_elements(array);
}

TEST_CASE("view: of a const matrix is a view of const", "[core]") {
    const Eigen::MatrixXf m = Eigen::MatrixXf::Random(4, 2);
    STATIC_REQUIRE(std::is_same_v<decltype(view(m)), tensor_view<const float>>);
    CHECK(view(m).data() == m.data());
}

TEST_CASE("EigenMatrix: not what has no memory, and not numbers attn does not compute in", "[core]") {
    STATIC_REQUIRE(EigenMatrix<Eigen::MatrixXf>);
    STATIC_REQUIRE(EigenMatrix<const Eigen::Matrix3d>);
    STATIC_REQUIRE(EigenMatrix<Eigen::Block<Eigen::MatrixXf>>);
    STATIC_REQUIRE(EigenMatrix<Eigen::Matrix<Eigen::half, 2, 3>>);
    STATIC_REQUIRE_FALSE(EigenMatrix<Eigen::MatrixXi>);
    STATIC_REQUIRE_FALSE(EigenMatrix<decltype(Eigen::MatrixXf() + Eigen::MatrixXf())>);
    STATIC_REQUIRE_FALSE(EigenMatrix<float>);
}

} // namespace attn::testing
