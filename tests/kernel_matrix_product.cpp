// The blocked matrix product against a plain loop, on whole numbers, whose sums are exact in any order; and its promises about bits.
#include "allocations.hpp"
#include "answers.hpp"
#include "catch.hpp"
#include "executors.hpp"

#include <attn/kernel/gemm/matrix_product.hpp>

namespace attn::testing {

namespace {

enum class order { rows_first, columns_first };

/// A matrix in some layout inside memory that is otherwise guards.
template <Scalar T>
struct placed_matrix {
    index_t rows, columns, row_stride, channel_stride;
    std::vector<T> memory;

    placed_matrix(index_t rows_, index_t columns_, order o = order::rows_first, index_t padding = 0)
        : rows(rows_), columns(columns_), row_stride(o == order::rows_first ? columns + padding : 1),
          channel_stride(o == order::rows_first ? 1 : rows + padding),
          memory(static_cast<std::size_t>((rows + padding) * (columns + padding) + 16), guard<T>) {}

    T& operator()(index_t r, index_t c) { return memory[static_cast<std::size_t>(8 + r * row_stride + c * channel_stride)]; }
    row_block<T> block() { return {memory.data() + 8, row_stride, channel_stride}; }
    operator row_block<const T>() const { return {memory.data() + 8, row_stride, channel_stride}; }
    operator stored_rows<const T>() const { return static_cast<row_block<const T>>(*this); }
};

template <Scalar T, class Number>
placed_matrix<T> filled(placed_matrix<T> m, Number number) {
    for (index_t r = 0; r < m.rows; ++r)
        for (index_t c = 0; c < m.columns; ++c) m(r, c) = static_cast<T>(number());
    return m;
}

auto whole_numbers(unsigned seed) {
    return [random = std::mt19937(seed)]() mutable { return static_cast<float>(static_cast<int>(random() % 11) - 5); };
}
auto any_numbers(unsigned seed) {
    return [random = std::mt19937(seed)]() mutable { return std::uniform_real_distribution<float>(-1, 1)(random); };
}

template <Scalar T>
using product = kernel::matrix_product<T>;

template <Scalar T, class Executor>
void multiply(const row_block<const T>& a, const row_block<const T>& b, const row_block<const T>& start,
              placed_matrix<T>& c, index_t depth, Executor& executor) {
    const product<T> p(c.rows, depth, c.columns);
    workspace memory(p.workspace_bytes(executor.concurrency()));
    fill(memory, std::byte{0xff});
    p(a, b, start, c.block(), memory.bytes().data(), execution(executor, memory));
}

/// c = start + a b on whole numbers, every matrix in a layout of its own.
template <Scalar T>
void check_product(index_t rows, index_t depth, index_t columns, unsigned layouts) {
    INFO(rows << " x " << depth << " x " << columns << ", layouts " << layouts);
    const auto order_of = [&](unsigned bit) { return layouts & bit ? order::columns_first : order::rows_first; };
    const index_t padding = layouts & 4 ? 5 : 0;
    auto a = filled(placed_matrix<T>(rows, depth, order_of(1), padding), whole_numbers(1));
    auto b = filled(placed_matrix<T>(depth, columns, order_of(2), padding), whole_numbers(2));
    auto c = filled(placed_matrix<T>(rows, columns, order::rows_first, padding), whole_numbers(3));
    auto bias = filled(placed_matrix<T>(1, std::max(rows, columns)), whole_numbers(4));
    sequential here;

    const auto sums = [&](auto begin) {
        auto expected = c;
        for (index_t i = 0; i < rows; ++i)
            for (index_t n = 0; n < columns; ++n) {
                T sum = begin(i, n);
                for (index_t k = 0; k < depth; ++k) sum += a(i, k) * b(k, n);
                expected(i, n) = sum;
            }
        return expected.memory;
    };
    const auto same = [](const std::vector<T>& x, const std::vector<T>& y) {
        return std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0;
    };
    auto plain = c, column_bias = c, row_bias = c, added = c;
    multiply<T>(a, b, {nullptr, 0, 0}, plain, depth, here);
    multiply<T>(a, b, {bias.block().data, 0, 1}, column_bias, depth, here);
    multiply<T>(a, b, {bias.block().data, 1, 0}, row_bias, depth, here);
    multiply<T>(a, b, added, added, depth, here);
    CHECK(same(plain.memory, sums([](index_t, index_t) { return T{0}; })));
    CHECK(same(column_bias.memory, sums([&](index_t, index_t n) { return bias(0, n); })));
    CHECK(same(row_bias.memory, sums([&](index_t i, index_t) { return bias(0, i); })));
    CHECK(same(added.memory, sums([&](index_t i, index_t n) { return c(i, n); })));
}

} // namespace

TEMPLATE_TEST_CASE("matrix_product: shapes at the edges of registers, tiles and blocks, in every layout", "[kernel][portable]", ATTN_TEST_NUMBERS) {
    unsigned layouts = 0;
    for (const index_t rows : {0, 1, 2, 5, 6, 7, 16, 17})
        for (const index_t depth : {0, 1, 2, 17, 63, 64, 65, 130})
            for (const index_t columns : {0, 1, 3, 4, 15, 16, 17, 33, 64, 66}) check_product<TestType>(rows, depth, columns, layouts++ % 8);
    for (unsigned l = 0; l < 8; ++l) {
        check_product<TestType>(391, 70, 20, l);
        check_product<TestType>(3, 300, 530, l);
        check_product<TestType>(13, 1024, 200, l); // rows that share a set of the cache
    }
}

TEMPLATE_TEST_CASE("matrix_product: a row's bits do not depend on other rows, other columns, layouts or threads",
                   "[kernel][portable][parallel]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const index_t rows = 403, depth = 301, columns = 531;
    const auto a = filled(placed_matrix<T>(rows, depth), any_numbers(1)), b = filled(placed_matrix<T>(depth, columns), any_numbers(2));
    const auto bias = filled(placed_matrix<T>(1, columns), any_numbers(3));
    const row_block<const T> left = a, right = b, start{row_block<const T>(bias).data, 0, 1};
    sequential here;
    placed_matrix<T> whole(rows, columns);
    multiply<T>(left, right, start, whole, depth, here);

    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        placed_matrix<T> again(rows, columns);
        multiply<T>(left, right, start, again, depth, executor);
        CHECK(std::memcmp(again.memory.data(), whole.memory.data(), again.memory.size() * sizeof(T)) == 0);
    });
    auto columns_first = placed_matrix<T>(columns, depth); // as a linear layer's weights lie
    for (index_t k = 0; k < depth; ++k)
        for (index_t c = 0; c < columns; ++c) columns_first(c, k) = right.data[k * right.row_stride + c];
    const auto turned = row_block<const T>(columns_first).transposed();
    index_t different = 0;
    for (const index_t count : {1, 2, 3, 4, 7, 50})
        for (const index_t width : {1, 18, 100})
            for (const auto& of : {right, turned}) {
                const index_t row = 100, column = 31;
                placed_matrix<T> part(count, width);
                multiply<T>({left.data + row * left.row_stride, left.row_stride, 1}, of.from(0, column), {start.data + column, 0, 1}, part, depth,
                            here);
                for (index_t r = 0; r < count; ++r)
                    for (index_t c = 0; c < width; ++c) different += !same_bits(part(r, c), whole(row + r, column + c));
            }
    CHECK(different == 0);

    placed_matrix<T> linear(rows, columns);
    multiply<T>(left, turned, start, linear, depth, here);
    CHECK(std::memcmp(linear.memory.data(), whole.memory.data(), whole.memory.size() * sizeof(T)) == 0);
}

TEMPLATE_TEST_CASE("matrix_product: terms that are left out are not multiplied", "[kernel][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const index_t rows = 20, depth = 300, columns = 37;
    const auto missing = [](index_t k) { return k % 7 == 3 || (k > 120 && k < 260); };
    auto a = filled(placed_matrix<T>(rows, depth), whole_numbers(1)), b = filled(placed_matrix<T>(depth, columns), whole_numbers(2));
    placed_matrix<T> expected(rows, columns), c(rows, columns);
    for (index_t i = 0; i < rows; ++i)
        for (index_t n = 0; n < columns; ++n) {
            expected(i, n) = 0;
            for (index_t k = 0; k < depth; ++k) expected(i, n) += missing(k) ? 0 : a(i, k) * b(k, n);
        }
    for (index_t k = 0; k < depth; ++k)
        if (missing(k)) {
            for (index_t i = 0; i < rows; ++i) a(i, k) = std::numeric_limits<T>::quiet_NaN();
            for (index_t n = 0; n < columns; ++n) b(k, n) = std::numeric_limits<T>::infinity();
        }
    const product<T> p(rows, depth, columns);
    workspace memory(p.task_bytes());
    for (index_t task = 0; task < p.task_count(); ++task) {
        detail::scratch own(memory.bytes().data());
        p.run_task(task, own, a, b, {nullptr, 0, 0}, c.block(), [&](index_t first, index_t count, auto&& emit) {
            for (index_t k = first; k < first + count; ++k)
                if (!missing(k)) emit(k, index_t{1});
        });
    }
    CHECK(std::memcmp(c.memory.data(), expected.memory.data(), c.memory.size() * sizeof(T)) == 0);
}

TEMPLATE_TEST_CASE("matrix_product: pieces of the depth in several calls give the bits of one, which reads no others", "[kernel][portable]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const index_t rows = 30, columns = 41;
    sequential here;
    for (const index_t depth : {1, 127, 129, 700, 1001}) {
        INFO("depth " << depth);
        const auto a = filled(placed_matrix<T>(rows, depth), any_numbers(1)), b = filled(placed_matrix<T>(depth, columns), any_numbers(2));
        const auto start = filled(placed_matrix<T>(rows, columns), any_numbers(3));
        placed_matrix<T> whole(rows, columns), c(rows, columns);
        multiply<T>(a, b, start, whole, depth, here);
        const product<T> p(rows, depth, columns);
        const auto pieces = product<T>::depth_pieces(depth);
        workspace memory(p.task_bytes());
        for (index_t first = 0; first < pieces;) {
            const auto count = std::min(pieces - first, 1 + first % 3);
            auto of_call_a = a, of_call_b = b; // nothing but their terms
            const auto begin = product<T>::depth_piece(depth, first), last = product<T>::depth_piece(depth, first + count - 1);
            for (index_t k = 0; k < depth; ++k) {
                if (k >= begin.first && k < last.first + last.count) continue;
                for (index_t i = 0; i < rows; ++i) of_call_a(i, k) = guard<T>;
                for (index_t n = 0; n < columns; ++n) of_call_b(k, n) = guard<T>;
            }
            const row_block<const T> before = first == 0 ? start : c;
            for (index_t task = 0; task < p.task_count(); ++task) {
                detail::scratch own(memory.bytes().data());
                p.run_task(task, own, of_call_a, of_call_b, before, c.block(), [](index_t k, index_t terms, auto&& emit) { emit(k, terms); }, {first, count});
            }
            first += count;
        }
        CHECK(std::memcmp(c.memory.data(), whole.memory.data(), c.memory.size() * sizeof(T)) == 0);
    }
}

TEMPLATE_TEST_CASE("matrix_product: long sums are more exact than one chain", "[kernel]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    const index_t depth = 50'000, columns = 12;
    auto a = filled(placed_matrix<T>(1, depth), any_numbers(1)), b = filled(placed_matrix<T>(depth, columns), any_numbers(2));
    placed_matrix<T> c(1, columns);
    sequential here;
    multiply<T>(a, b, {nullptr, 0, 0}, c, depth, here);
    long double our_errors = 0, chain_errors = 0;
    for (index_t n = 0; n < columns; ++n) {
        long double exact = 0;
        T chain = 0;
        for (index_t k = 0; k < depth; ++k) {
            exact += static_cast<long double>(a(0, k)) * static_cast<long double>(b(k, n));
            chain += a(0, k) * b(k, n);
        }
        our_errors += std::abs(static_cast<long double>(c(0, n)) - exact);
        chain_errors += std::abs(static_cast<long double>(chain) - exact);
    }
    CHECK(3 * our_errors < chain_errors);
}

#ifdef ATTN_COUNTS_ALLOCATIONS
TEST_CASE("matrix_product: allocates nothing", "[kernel][portable]") {
    const auto a = filled(placed_matrix<float>(60, 90, order::columns_first), any_numbers(1)),
               b = filled(placed_matrix<float>(90, 70), any_numbers(2));
    placed_matrix<float> c(60, 70);
    const product<float> p(60, 90, 70);
    thread_pool pool(2);
    workspace memory(p.workspace_bytes(2));
    const execution run(pool, memory);
    p(a, b, {nullptr, 0, 0}, c.block(), memory.bytes().data(), run);
    CHECK(allocations_in([&] { p(a, b, {nullptr, 0, 0}, c.block(), memory.bytes().data(), run); }) == 0);
}
#endif

} // namespace attn::testing
