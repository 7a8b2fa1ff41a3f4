#include "catch.hpp"

#include <attn/core/output_memory.hpp>
#include <attn/core/stored_view.hpp>

#include <numeric>
#include <random>
#include <set>
#include <vector>

namespace attn::testing {

namespace {

template <class T, class F>
void for_each_element(const tensor_view<T>& v, const F& f) {
    for (index_t b = 0; b < v.shape().batch; ++b)
        for (index_t h = 0; h < v.shape().heads; ++h)
            for (index_t i = 0; i < v.shape().tokens; ++i)
                for (index_t c = 0; c < v.shape().channels; ++c) f(v(b, h, i, c));
}

/// The definition that overlap and overlaps_itself decide without enumerating.
struct bytes_of {
    std::set<std::uintptr_t> bytes;
    bool repeats = false;

    template <class T>
    explicit bytes_of(const tensor_view<T>& v) {
        for_each_element(v, [&](T& x) {
            for (std::size_t k = 0; k < sizeof(T); ++k) repeats |= !bytes.insert(reinterpret_cast<std::uintptr_t>(&x) + k).second;
        });
    }
    bool meets(const bytes_of& other) const {
        return std::ranges::any_of(bytes, [&](auto byte) { return other.bytes.contains(byte); });
    }
};

template <class A, class B>
void check_disjoint(const tensor_view<A>& a, const tensor_view<B>& b) {
    CHECK_FALSE(bytes_of(a).meets(bytes_of(b)));
    CHECK_FALSE(overlap(a, b));
    CHECK_FALSE(overlap(b, a));
}

/// Whether a view has exactly these elements of another.
template <class View>
void check_is_part(const View& part, const View& whole, const shape& first, const shape& extents) {
    REQUIRE(part.shape() == extents);
    CHECK(part.strides() == whole.strides());
    for (index_t b = 0; b < extents.batch; ++b)
        for (index_t h = 0; h < extents.heads; ++h)
            for (index_t i = 0; i < extents.tokens; ++i)
                for (index_t c = 0; c < extents.channels; ++c)
                    REQUIRE(part(b, h, i, c) == whole(first.batch + b, first.heads + h, first.tokens + i, first.channels + c));
}

/// Slices of a view whose elements differ from each other.
template <class View>
void check_slices(const View& whole) {
    const auto& s = whole.shape();
    check_is_part(whole.slice({}), whole, {0, 0, 0, 0}, s);
    CHECK(whole.slice({}).data() == whole.data());
    check_is_part(whole.slice({.batch = {1, 1}}), whole, {1, 0, 0, 0}, {1, s.heads, s.tokens, s.channels});
    check_is_part(whole.slice({.heads = {1, 2}}), whole, {0, 1, 0, 0}, {s.batch, 2, s.tokens, s.channels});
    check_is_part(whole.slice({.tokens = {2, 2}}), whole, {0, 0, 2, 0}, {s.batch, s.heads, 2, s.channels});
    check_is_part(whole.slice({.channels = {3, 2}}), whole, {0, 0, 0, 3}, {s.batch, s.heads, s.tokens, 2});
    const auto inner = whole.slice({.batch = {1, 1}, .heads = {1, 1}, .tokens = {1, 3}, .channels = {1, 4}});
    check_is_part(inner, whole, {1, 1, 1, 1}, {1, 1, 3, 4});
    check_is_part(inner.slice({.tokens = {1, 1}, .channels = {2, 1}}), whole, {1, 1, 2, 3}, {1, 1, 1, 1});
    CHECK(whole.slice({.tokens = {4, 0}}).shape() == shape{s.batch, s.heads, 0, s.channels});
    CHECK(whole.slice({.heads = {}}).shape() == shape{s.batch, 0, s.tokens, s.channels});
    // What surrounds a part may be named, and has the elements of the part where they were.
    const auto around = inner.slice({.tokens = {-1, 4}});
    CHECK(around(0, 0, 2, 1) == inner(0, 0, 1, 1));

    const auto columns = whole.transposed();
    REQUIRE(columns.shape() == shape{s.batch, s.heads, s.channels, s.tokens});
    for (index_t b = 0; b < s.batch; ++b)
        for (index_t h = 0; h < s.heads; ++h)
            for (index_t i = 0; i < s.tokens; ++i)
                for (index_t c = 0; c < s.channels; ++c) REQUIRE(columns(b, h, c, i) == whole(b, h, i, c));
    check_is_part(columns.transposed(), whole, {0, 0, 0, 0}, s);
    CHECK(columns.transposed().data() == whole.data());
}

/// Slices of a view without memory.
template <class View>
void check_slices_of_none(const View& none) {
    const auto part = none.slice({.batch = {1, 1}, .heads = {2, 1}, .tokens = {1, 3}, .channels = {1, 2}});
    CHECK(part.data() == nullptr);
    CHECK(part.shape() == shape{1, 1, 3, 2});
    CHECK(none.transposed().data() == nullptr);
    CHECK(none.transposed().shape() == none.shape().transposed());
}

/// 0, 1, 2, ... as floats, and as 16 bits.
template <narrow_format format>
std::pair<std::vector<float>, std::vector<std::uint16_t>> numbered(const shape& s) {
    std::vector<float> memory(static_cast<std::size_t>(s.size()));
    std::iota(memory.begin(), memory.end(), 0.0F);
    std::vector<std::uint16_t> bits(memory.size());
    std::ranges::transform(memory, bits.begin(), detail::narrowed<format>);
    return {memory, bits};
}

} // namespace

TEST_CASE("slice, transposed: the elements of a part, where they lie", "[core][portable]") {
    const shape s{2, 3, 4, 5};
    auto [memory, bits] = numbered<narrow_format::bfloat16>(s);
    const tensor_view backwards(memory.data() + s.size() - 1, s, strides{-60, -20, -5, -1});
    for (const auto& view : {head_major(memory.data(), s), token_major(memory.data(), s), backwards}) {
        check_slices(view);
        check_slices(tensor_view<const float>(view));
        check_slices(stored_view<float>(view));
        check_slices(stored_view<const float>(view));
    }
    for (const auto& view : {head_major(bits.data(), s), token_major(bits.data(), s)}) {
        const stored_view<float> stored(view.data(), narrow_format::bfloat16, s, view.strides());
        check_slices(stored);
        CHECK(stored.slice({.tokens = {1, 2}}).format() == narrow_format::bfloat16);
        CHECK(stored.transposed().format() == narrow_format::bfloat16);
    }
    const auto none = head_major<float>(nullptr, s);
    check_slices_of_none(none);
    check_slices_of_none(stored_view<float>(none));
    check_slices_of_none(stored_view<float>(nullptr, narrow_format::half, s, none.strides()));
    // A call's tensors are cut by the same words.
    const row_range rows{1, 2};
    CHECK(head_major(memory.data(), s).slice({.tokens = rows}).shape().tokens == rows.count);
}

/// Rows of a view against its elements; of none, `from` is none.
template <class View>
void check_rows(const View& view) {
    const auto& s = view.shape();
    const auto rows = view.rows(1, 2, 1);
    for (index_t i = 0; i + 1 < s.tokens; ++i)
        for (index_t c = 0; c < s.channels; ++c) {
            REQUIRE(rows(i, c) == view(1, 2, 1 + i, c));
            REQUIRE(rows.transposed()(c, i) == rows(i, c));
        }
    for (index_t i = 0; i + 2 < s.tokens; ++i) CHECK(rows.from(1, 2)(i, 1) == rows(i + 1, 3));
    CHECK(rows.every(2)(1, 4) == rows(2, 4));
    CHECK(rows.every(2).from(1)(0, 4) == rows(2, 4));
}

TEST_CASE("rows: those of a batch entry and head, from one on, stepped and transposed", "[core][portable]") {
    const shape s{2, 3, 4, 5};
    auto [memory, bits] = numbered<narrow_format::half>(s);
    for (const auto& view : {head_major(memory.data(), s), token_major(memory.data(), s)}) {
        check_rows(view);
        check_rows(stored_view<const float>(view));
        const stored_view<const float> narrow(bits.data(), narrow_format::half, s, view.strides());
        check_rows(narrow);
        const auto own = narrow.rows(1, 2, 1).as<const detail::narrow_number<narrow_format::half>>();
        CHECK(own(2, 4) == view(1, 2, 3, 4));
    }
    const row_block<const float> none{nullptr, 5, 1};
    CHECK(none.from(3, 2).data == nullptr);
    const stored_rows<const float> stored = head_major(memory.data(), s).rows(0, 1);
    CHECK(stored(2, 3) == memory[20 + 2 * 5 + 3]);
    CHECK(stored.numbers().data == memory.data() + 20);
}

TEST_CASE("tensor_view: head_major and token_major find the elements of their layout", "[core][portable]") {
    std::vector<int> memory(2 * 3 * 4 * 5);
    for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<int>(i);
    const shape s{2, 3, 4, 5};

    const auto heads_first = head_major(memory.data(), s);
    CHECK(heads_first.strides() == strides{60, 20, 5, 1});
    CHECK(heads_first(1, 2, 3, 4) == 119);
    CHECK(heads_first(1, 0, 2, 3) == 60 + 2 * 5 + 3);

    const auto tokens_first = token_major(memory.data(), s);
    CHECK(tokens_first.strides() == strides{60, 5, 15, 1});
    CHECK(tokens_first(1, 2, 3, 4) == 119);
    CHECK(tokens_first(1, 2, 0, 3) == 60 + 2 * 5 + 3);
    CHECK(tokens_first.row(0, 1, 2) == memory.data() + 2 * 15 + 5);
}

TEST_CASE("tensor_view: zero strides repeat, negative ones walk back", "[core]") {
    std::vector<int> memory{1, 2, 3};
    const tensor_view repeated(memory.data(), shape{2, 2, 2, 3}, strides{0, 0, 0, 1});
    for_each_element(tensor_view(memory.data() + 1, shape{4, 3, 2, 1}, strides{0, 0, 0, 1}), [](int x) { CHECK(x == 2); });
    CHECK(repeated(1, 1, 1, 2) == 3);
    const tensor_view backwards(memory.data() + 2, shape{.tokens = 1, .channels = 3}, strides{0, 0, 0, -1});
    CHECK(backwards(0, 0, 0, 0) == 3);
    CHECK(backwards(0, 0, 0, 2) == 1);
}

TEST_CASE("stored_view: types tell whether anything may be stored in 16 bits", "[core]") {
    using detail::sixteen_bits, detail::storage_of;
    STATIC_REQUIRE(std::same_as<storage_of<float, tensor<float>, tensor_view<float>, tensor_view<const float>>, unnarrowed_storage>);
    STATIC_REQUIRE(std::same_as<storage_of<double, tensor<double>>, unnarrowed_storage>);
    STATIC_REQUIRE(std::same_as<storage_of<float, tensor<float>, tensor<sixteen_bits>>, any_storage>);
    STATIC_REQUIRE(std::same_as<storage_of<float, tensor_view<const sixteen_bits>, tensor<float>>, any_storage>);
    STATIC_REQUIRE(std::same_as<storage_of<float, tensor<float>, stored_view<const float>>, any_storage>);
    STATIC_REQUIRE(std::same_as<storage_of<float, stored_view<float>>, any_storage>);
}

TEST_CASE("tensor_view: converts to a view of const, and not back", "[core]") {
    using to_const = tensor_view<const float>;
    STATIC_REQUIRE(std::is_convertible_v<tensor_view<float>, to_const>);
    STATIC_REQUIRE_FALSE(std::is_constructible_v<tensor_view<float>, to_const>);
    STATIC_REQUIRE_FALSE(std::is_constructible_v<to_const, tensor_view<double>>);
    float x = 7;
    const to_const view = head_major(&x, shape{1, 1, 1, 1});
    CHECK(&view(0, 0, 0, 0) == &x);
}

TEST_CASE("overlap: what interleaves without touching is disjoint", "[core][portable]") {
    constexpr index_t batch = 2, heads = 3, tokens = 7, d = 4;
    std::vector<float> memory(batch * tokens * 4 * heads * d);
    const shape s{batch, heads, tokens, d};

    SECTION("q, k, v and out columns of one token-major buffer") {
        const strides columns{tokens * 4 * heads * d, d, 4 * heads * d, 1};
        for (index_t x = 0; x < 4; ++x)
            for (index_t y = 0; y < 4; ++y) {
                const tensor_view a(memory.data() + x * heads * d, s, columns), b(memory.data() + y * heads * d, s, columns);
                if (x == y)
                    CHECK(overlap(a, b));
                else
                    check_disjoint(a, b);
            }
    }
    SECTION("every head holds its q, k, v and out") {
        const strides grouped{tokens * 4 * heads * d, 4 * d, 4 * heads * d, 1};
        check_disjoint(tensor_view(memory.data(), s, grouped), tensor_view(memory.data() + d, s, grouped));
        check_disjoint(tensor_view(memory.data() + 3 * d, s, grouped), tensor_view(memory.data() + d, s, grouped));
    }
    SECTION("one token's out beside all keys") {
        const strides columns{tokens * 4 * heads * d, d, 4 * heads * d, 1};
        const tensor_view keys(memory.data() + heads * d, shape{1, heads, tokens, d}, columns);
        const tensor_view out(memory.data() + (3 * 4 + 3) * heads * d, shape{1, heads, 1, d}, columns);
        check_disjoint(keys, out);
    }
    SECTION("heads of one tensor, tokens of one tensor, even and odd channels") {
        const auto whole = head_major(memory.data(), s);
        check_disjoint(whole.slice({.heads = {0, 1}}), whole.slice({.heads = {2, 1}}));
        check_disjoint(whole.slice({.tokens = {0, 3}}), whole.slice({.tokens = {3, 4}}));
        check_disjoint(tensor_view(memory.data(), shape{1, 1, 5, 2}, strides{0, 0, 4, 2}),
                       tensor_view(memory.data() + 1, shape{1, 1, 5, 2}, strides{0, 0, 4, 2}));
    }
    SECTION("neighbours, one of them backwards") {
        check_disjoint(head_major(memory.data(), shape{1, 1, 2, 4}), head_major(memory.data() + 8, shape{1, 1, 2, 4}));
        check_disjoint(tensor_view(memory.data() + 4, shape{1, 1, 2, 4}, strides{0, 0, -4, 1}),
                       head_major(memory.data() + 8, shape{1, 1, 2, 4}));
    }
}

TEST_CASE("overlap: shared bytes are found", "[core][portable]") {
    std::vector<double> memory(64);
    const auto a = head_major(memory.data(), shape{1, 2, 3, 4});
    CHECK(overlap(a, a));
    CHECK(overlap(a, head_major(memory.data() + 23, shape{1, 1, 1, 1})));
    CHECK_FALSE(overlap(a, head_major(memory.data() + 24, shape{1, 1, 1, 1})));
    CHECK(overlap(a, tensor_view(memory.data() + 40, shape{1, 1, 6, 1}, strides{0, 0, -4, 1})));
    CHECK(overlap(a, tensor_view(memory.data() + 5, shape{9, 9, 9, 1}, strides{0, 0, 0, 1})));
    // Of another type: the second half of the double before the end.
    CHECK(overlap(a, head_major(reinterpret_cast<float*>(memory.data() + 24) - 1, shape{1, 1, 1, 1})));
}

TEST_CASE("overlap: an empty view meets nothing", "[core]") {
    std::vector<float> memory(24);
    const auto a = head_major(memory.data(), shape{1, 2, 3, 4});
    for (const auto& empty : {shape{0, 2, 3, 4}, shape{1, 0, 3, 4}, shape{1, 2, 0, 4}, shape{1, 2, 3, 0}}) {
        CHECK_FALSE(overlap(a, head_major(memory.data(), empty)));
        CHECK_FALSE(overlap(head_major(memory.data(), empty), a));
        CHECK_FALSE(overlaps_itself(tensor_view(memory.data(), empty, strides{0, 0, 0, 0})));
    }
    CHECK_FALSE(overlap(a, tensor_view<float>()));
}

TEST_CASE("overlaps_itself: layouts do not, broadcasts and windows do", "[core][portable]") {
    std::vector<float> memory(256);
    const shape s{2, 3, 4, 5};
    CHECK_FALSE(overlaps_itself(head_major(memory.data(), s)));
    CHECK_FALSE(overlaps_itself(token_major(memory.data(), s)));
    CHECK_FALSE(overlaps_itself(tensor_view(memory.data() + 119, s, strides{-60, -20, -5, -1})));
    CHECK_FALSE(overlaps_itself(tensor_view(memory.data(), s, strides{1, 2, 6, 24}))); // channels outermost
    CHECK_FALSE(overlaps_itself(tensor_view(memory.data(), shape{1, 1, 4, 5}, strides{0, 0, 5, 1})));
    CHECK(overlaps_itself(tensor_view(memory.data(), s, strides{0, 20, 5, 1})));
    CHECK(overlaps_itself(tensor_view(memory.data(), s, strides{60, 20, 4, 1})));
    CHECK(overlaps_itself(tensor_view(memory.data(), s, strides{60, 20, 20, 1})));
    CHECK(overlaps_itself(tensor_view(memory.data(), s, strides{60, 20, -20, 1})));
}

TEST_CASE("overlap, overlaps_itself: never miss a shared byte, on random views", "[core][portable]") {
    std::mt19937 random(2024);
    const auto pick = [&](index_t low, index_t high) { return std::uniform_int_distribution<index_t>(low, high)(random); };
    std::vector<float> memory(4096);
    const auto random_view = [&] {
        const shape s{pick(1, 2), pick(1, 3), pick(1, 4), pick(1, 4)};
        const auto unit = pick(1, 3);
        const strides t{unit * pick(-20, 20), unit * pick(-10, 10), unit * pick(-8, 8), unit * pick(-2, 2)};
        return tensor_view(memory.data() + 2048 + pick(-30, 30), s, t);
    };
    int disjoint = 0, injective = 0, missed = 0, asymmetric = 0;
    for (int round = 0; round < 4000; ++round) {
        const auto a = random_view(), b = random_view();
        const bytes_of bytes_a(a), bytes_b(b);
        missed += bytes_a.meets(bytes_b) && !overlap(a, b);
        missed += bytes_a.repeats && !overlaps_itself(a);
        asymmetric += overlap(a, b) != overlap(b, a);
        disjoint += !overlap(a, b);
        injective += !overlaps_itself(a);
    }
    CHECK(missed == 0);
    CHECK(asymmetric == 0);
    CHECK(disjoint > 400); // the answer is not always "may"
    CHECK(injective > 400);
}

} // namespace attn::testing
