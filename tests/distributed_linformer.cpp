// Linformer over ranks has the bits of the call on one machine.
#include "catch.hpp"
#include "errors.hpp"
#include "rank_checks.hpp"
#include "sequence_checks.hpp"

#include <attn/attention/pooling.hpp>
#include <attn/attention/random_projection.hpp>
#include <attn/attention/strided_convolution.hpp>
#include <attn/distributed/thread_communicator.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/on_heads.hpp>
#include <attn/pattern/predicate.hpp>
#include <attn/pattern/lengths.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

/// And cuts that leave a rank without queries, but with keys.
template <Scalar T>
void check_linformer(const auto& op, const inputs<T>& in, const std::vector<index_t>& some_ranks = {2, 3, 7}, bool with_log_sum_exp = true) {
    const auto s = shapes_of(in);
    const auto n = s.queries.tokens, m = s.keys.tokens;
    auto parts = partitions(op.pattern, in, some_ranks);
    parts.emplace_back(op.pattern, s, std::vector<index_t>{0, n / 2, n, n, n}, std::vector<index_t>{0, m / 5, m / 5 + m / 9, m / 2, m}, in.positions);
    check_over(op, in, parts, with_log_sum_exp);
}

template <Scalar T>
tensor<T> random_projection(const shape& s, std::uint64_t seed) {
    tensor<T> matrix(s);
    fill_random_projection(matrix.view(), seed);
    return matrix;
}

/// A user's own projection, which says nothing of parts: each row is the sum of a token and of one from the other end.
struct folded {
    index_t size(index_t head, index_t tokens) const { return (tokens + head) / 2; }
    kernel::token_range range(index_t, index_t row, index_t tokens) const { return {std::min(row, tokens - 1 - row), std::max(row, tokens - 1 - row) + 1}; }
    template <Scalar>
    std::size_t workspace_bytes(index_t, index_t) const {
        return 0;
    }
    void check_apart(const output_memory&) const {}
    void check(const projection_context& context) const {
        if (context.tokens % 2 != 0) context.refuse("folds an even number of tokens"); // of all, not of a rank's
    }
    template <Scalar T>
    void project(const kernel::token_rows<T>& x, index_t, index_t first, index_t count, const row_block<T>& to, detail::scratch&) const {
        for (index_t r = first; r < first + count; ++r)
            for (index_t c = 0; c < x.channels; ++c) {
                T sum = 0;
                for (const auto token : {r, x.count - 1 - r})
                    if (x.visible(token)) sum += x(token, c);
                to.data[(r - first) * to.row_stride + c] = sum;
            }
    }
};

/// A user's own that is continued, in parts of 10 tokens: each row is a product of sums, so that a part that is missing or taken twice is seen.
struct rolled {
    index_t size(index_t, index_t) const { return 3; }
    kernel::token_range range(index_t, index_t, index_t tokens) const { return {0, tokens}; }
    template <Scalar>
    std::size_t workspace_bytes(index_t, index_t) const {
        return 0;
    }
    void check(const projection_context&) const {}
    void check_apart(const output_memory&) const {}
    index_t parts(index_t, index_t tokens) const { return (tokens + 9) / 10; }
    kernel::token_range part(index_t, index_t number, index_t tokens) const { return {10 * number, std::min(tokens, 10 * number + 10)}; }
    template <Scalar T>
    void project(const kernel::token_rows<T>& x, index_t head, index_t first, index_t count, const row_block<T>& to, detail::scratch& memory) const {
        project_parts(x, head, first, count, 0, parts(head, x.count), to, memory);
    }
    template <Scalar T>
    void project_parts(const kernel::token_rows<T>& x, index_t, index_t first, index_t count, index_t first_part, index_t end_part, const row_block<T>& to,
                       detail::scratch&) const {
        for (index_t r = 0; r < count; ++r)
            for (index_t c = 0; c < x.channels; ++c) {
                T& sum = to.data[r * to.row_stride + c];
                if (first_part == 0) sum = 0;
                for (index_t token = 10 * first_part; token < std::min(x.count, 10 * end_part); ++token)
                    if (x.visible(token)) sum = T(0.9) * sum + T(first + r + 1) * x(token, c);
            }
    }
};

/// Counts the bytes that a rank sends.
struct counting {
    using request = thread_communicator::request;
    thread_communicator& of;
    index_t sent = 0;

    index_t rank() const { return of.rank(); }
    index_t size() const { return of.size(); }
    request send(index_t to, index_t tag, std::span<const std::byte> bytes) {
        sent += std::ssize(bytes);
        return of.send(to, tag, bytes);
    }
    request receive(index_t from, index_t tag, std::span<std::byte> bytes) { return of.receive(from, tag, bytes); }
    bool test(request& asked) { return of.test(asked); }
    void wait(request& asked) { of.wait(asked); }
};

static_assert(ResumableProjection<linear_projection<float>, float> && ResumableProjection<projection_per_head<linear_projection<double>>, double>);
static_assert(ResumableProjection<rolled, float> && !ResumableProjection<folded, float> && !ResumableProjection<mean_pooling, float>);
static_assert(!ResumableProjection<projection_per_head<mean_pooling>, float> && !ResumableProjection<linear_projection<float>, double>);

/// Matrices, pooling, convolutions and users' own, of some tokens, heads and channels; 5 rows, or what the tokens give.
template <Scalar T>
struct projections {
    index_t tokens, heads;
    tensor<T> of_all{random_projection<T>({1, 1, 400, std::max<index_t>(1, tokens)}, 1)}, of_each{random_projection<T>({1, heads, 5, tokens + 9}, 2)};
    tensor<T> bias{random_tensor<T>({1, heads, 5, 1}, 3)};

    linear_projection<T> shared() const { return {of_all.view()}; }
    linear_projection<T> biased() const { return {of_each.view(), bias.view()}; }
};

} // namespace

TEST_CASE("ranks: Linformer of any projection, n that nothing divides", "[distributed]") {
    using T = float;
    const std::vector<index_t> ranks{1, 2, 3, 4, 5, 6, 7};
    for (const index_t n : {0, 1, 6, 97, 1500}) {
        CAPTURE(n);
        const auto in = random_given<T>({2, 4, 2, n, n, 9, 17});
        const inputs<T> all(in);
        const projections<T> of{n, 2};
        check_linformer(linformer_attention{.key_projection = of.biased()}, all, ranks);
        check_linformer(linformer_attention{.key_projection = of.shared(), .scale = 0.2}, all, {2, 5});
        check_linformer(linformer_attention{.key_projection = mean_pooling{5}}, all, ranks);
        check_linformer(linformer_attention{.key_projection = of.biased(), .value_projection = max_pooling{5}}, all, {2, 3});
        check_linformer(linformer_attention{.key_projection = rolled{}}, all, {3, 7});
        check_linformer(linformer_attention{.key_projection = identity_projection{}}, all, {3, 4});
        if (n % 2 == 0) check_linformer(linformer_attention{.key_projection = folded{}}, all, {3, 5});
        const auto taps = random_tensor<T>({1, 2, 3, 9}, 4);
        const linformer_attention<channel_convolution<T>, mean_pooling> op{.key_projection = {taps.view()}, .value_projection = {n / 3}};
        if (n >= 3) check_linformer(op, all, {2, 3, 7});
    }
}

TEST_CASE("ranks: Linformer, convolutions that mix channels, and a projection for each head", "[distributed]") {
    const index_t n = 500, m = 2'003;
    const auto in = random_given<float>({2, 6, 3, n, m, 16, 16});
    const inputs<float> all(in);
    const auto taps = random_tensor<float>({37, 1, 16, 16}, 4, 0.2f), bias = random_tensor<float>({1, 1, 1, 16}, 5);
    check_linformer(linformer_attention{.key_projection = mixing_convolution<float>{taps.view(), bias.view()}}, all);
    std::vector<tensor<float>> matrices;
    std::vector<linear_projection<float>> each;
    for (const index_t rows : {5, 401, 9}) matrices.push_back(random_projection<float>({1, 1, rows, m}, static_cast<std::uint64_t>(rows)));
    for (const auto& matrix : matrices) each.push_back({matrix.view()});
    using per_head = projection_per_head<linear_projection<float>>;
    using pools_per_head = projection_per_head<mean_pooling>;
    check_linformer(linformer_attention<per_head>{.key_projection = {each}}, all, {1, 2, 3, 4, 5, 6, 7});
    const std::vector<mean_pooling> pools{{5}, {401}, {9}};
    check_linformer(linformer_attention<per_head, pools_per_head>{.key_projection = {each}, .value_projection = {pools}}, all);
}

TEST_CASE("ranks: Linformer, tokens that are hidden may be anything", "[distributed]") {
    using T = float;
    const index_t n = 700, m = 1'733;
    const std::vector<index_t> lengths_of{300, 1'500};
    for (const auto where : {top_left(), positions{.first_query = -4'000, .first_key = 0}}) {
        auto in = random_given<T>({2, 4, 2, n, m, 8, 12, where});
        for (index_t b = 0; b < 2; ++b)
            for (index_t g = 0; g < 2; ++g)
                for (auto j = lengths_of[static_cast<std::size_t>(b)]; j < m; ++j) {
                    std::fill_n(in.keys.view().row(b, g, j), 8, std::numeric_limits<T>::quiet_NaN());
                    std::fill_n(in.values.view().row(b, g, j), 12, std::numeric_limits<T>::infinity());
                }
        const projections<T> of{m, 2};
        const auto check_pattern = [&](const auto& pattern) {
            using P = std::remove_cvref_t<decltype(pattern)>;
            const inputs<T> all(in);
            check_linformer(linformer_attention<linear_projection<T>, shared_projection, P>{.key_projection = of.biased(), .pattern = pattern}, all, {1, 3, 7});
            // Of pools, some have no token.
            check_linformer(linformer_attention<mean_pooling, shared_projection, P>{.key_projection = {400}, .pattern = pattern}, all, {2, 5});
            const linformer_attention<mean_pooling, linear_projection<T>, P> both{.key_projection = {400}, .value_projection = of.shared(), .pattern = pattern};
            check_linformer(both, all, {2, 3});
        };
        check_pattern(lengths{lengths_of});
        check_pattern(lengths{lengths_of} & predicate{[](auto, auto j) { return j > 200; }} & (on_heads{0, 2} | predicate{[](auto, auto j) { return j < 290; }}));
        check_pattern(predicate{[](auto, auto) { return false; }});
    }
}

TEST_CASE("ranks: Linformer, sums travel, not tokens", "[distributed]") {
    const index_t n = 20'000, rows = 5, ranks = 4;
    const auto in = random_given<float>({1, 2, 2, n, n, 32, 32});
    const inputs<float> all(in);
    const projections<float> of{n, 2};
    const partition parts(dense{}, shapes_of(all), ranks);
    const auto most_sent = [&](const auto& op) {
        std::vector<index_t> sent(static_cast<std::size_t>(ranks));
        on_thread_ranks(ranks, [&](auto& communicator) {
            counting own{communicator};
            const auto q = parts.queries(own.rank()), k = parts.keys(own.rank());
            const auto of_rank = all.slice({.tokens = q}, {.tokens = k});
            static_cast<void>(attend(sequence_parallel{op, parts}, own, of_rank));
            sent[static_cast<std::size_t>(own.rank())] = own.sent;
        });
        return *std::ranges::max_element(sent);
    };
    // Of a rank: tokens of a bin or part that begins on the rank before, and projected rows, to the next and in a broadcast to two.
    const index_t bytes_of_row = 2 * (32 + 32) * 4, reports = 2 * ranks * static_cast<index_t>(sizeof(detail::rank_report));
    CHECK(most_sent(linformer_attention{.key_projection = of.biased()}) <= (127 + 3 * rows) * bytes_of_row + reports);
    CHECK(most_sent(linformer_attention{.key_projection = mean_pooling{400}}) <= (49 + 3 * 400) * bytes_of_row + reports);
}

TEST_CASE("ranks: Linformer, layouts and kinds of storage", "[distributed]") {
    const index_t n = 400, m = 1'300;
    const auto in = random_given<float>({1, 4, 2, n, m, 16, 8});
    const projections<float> of{m, 2};
    const linformer_attention matrices{.key_projection = of.biased()};
    const linformer_attention pools{.key_projection = max_pooling{77}};
    auto rows = inputs<float>(in); // token after token
    rows.keys = token_major(in.keys.data(), in.keys.shape());
    rows.values = tensor_view<const float>(in.values.data(), in.values.shape(), {m * 16, 1, 16, 2}); // channels apart
    check_linformer(matrices, rows);
    check_linformer(pools, rows);
    tensor<Eigen::bfloat16> k(in.keys.shape()), out(shape{1, 4, n, 8});
    tensor<Eigen::half> v(in.values.shape());
    std::transform(in.keys.data(), in.keys.data() + in.keys.shape().size(), k.data(), [](float x) { return Eigen::bfloat16(x); });
    std::transform(in.values.data(), in.values.data() + in.values.shape().size(), v.data(), [](float x) { return Eigen::half(x); });
    const inputs<float> narrow{in.queries, k, v};
    check_linformer(matrices, narrow);
    check_linformer(pools, narrow);
    attend(matrices, narrow, outputs<float>{out});
    const partition parts(dense{}, shapes_of(narrow), 3);
    CHECK_NOTHROW(on_thread_ranks(3, [&](auto& ranks) {
        check_rank(matrices, ranks, parts, narrow, outputs<float>{out}, 1);
    }));
}

TEST_CASE("ranks: Linformer, who throws makes all throw", "[distributed]") {
    const index_t n = 1'000, ranks = 4;
    const auto in = random_given<float>({1, 2, 2, n, n, 8, 4});
    const inputs<float> all(in);
    const partition parts(dense{}, shapes_of(all), ranks);
    const auto own = [&](index_t rank) {
        return all.slice({.tokens = parts.queries(rank)}, {.tokens = parts.keys(rank)});
    };
    const projections<float> of{n, 2};
    const linformer_attention op{.key_projection = of.biased()};
    check_failures("sequence_parallel", ranks, [&](auto& communicator, auto& executor) {
        static_cast<void>(attend(sequence_parallel{op, parts}, communicator, own(communicator.rank()), executor));
    });
    /// What each rank hears where rank 2 makes another call.
    const auto heard = [&](const auto& call) {
        std::vector<std::string> errors(static_cast<std::size_t>(ranks));
        on_thread_ranks(ranks, [&](auto& communicator) {
            errors[static_cast<std::size_t>(communicator.rank())] = error_of<std::exception>([&] {
                if (communicator.rank() == 2) call(communicator);
                else static_cast<void>(attend(sequence_parallel{op, parts}, communicator, own(communicator.rank())));
            });
        });
        return errors;
    };
    const auto all_say = [](const std::vector<std::string>& errors, const std::string& what) {
        for (const auto& error : errors) check_says(error, {what});
    };
    const auto with = [&](const auto& other) {
        return heard([&](auto& communicator) { static_cast<void>(attend(sequence_parallel{other, parts}, communicator, own(2))); });
    };

    for (const index_t calls : {0, 1, 2}) {
        all_say(heard([&](auto& communicator) {
                    failing_executor executor{calls};
                    static_cast<void>(attend(sequence_parallel{op, parts}, communicator, own(2), executor));
                }),
                "no threads left");
    }
    all_say(heard([&](auto& communicator) {
                workspace none;
                sequential one;
                tensor<float> out({1, 2, 250, 4});
                attend(sequence_parallel{op, parts}, communicator, own(2), outputs<float>{out}, execution(one, none));
            }),
            "workspace has 0 bytes, but q of shape ");
    all_say(heard([&](auto& communicator) {
                auto wrong = own(2);
                wrong.keys = stored_view<const float>(nullptr, narrow_format::none, wrong.keys.shape(), wrong.keys.strides());
                static_cast<void>(attend(sequence_parallel{op, parts}, communicator, wrong));
            }),
            "linformer_attention: k has shape (1, 2, 250, 8) but no memory");
    const auto narrow = random_projection<float>({1, 1, 5, n - 1}, 4); // wide enough for the rank's own tokens
    all_say(with(linformer_attention{.key_projection = linear_projection<float>{narrow.view()}}), "linformer_attention: key_projection matrix has shape (1, 1, 5, 999)");
    all_say(with(linformer_attention<linear_projection<float>, shared_projection, causal>{.key_projection = of.biased()}), "causal attention cannot be projected");
    const auto last_row = predicate{[](auto i, auto j) { return i < 999 || j < 999; }}; // the same to all queries of the rank
    using hides_last = linformer_attention<linear_projection<float>, shared_projection, std::remove_const_t<decltype(last_row)>>;
    all_say(with(hides_last{.key_projection = of.biased(), .pattern = last_row}),
            "shows key 999 of batch entry 0 to some queries and hides it from others");
    all_say(with(linformer_attention{.key_projection = of.shared()}), "ranks 0 and 2 differ in their cuts or patterns");
    all_say(with(linformer_attention{.key_projection = mean_pooling{5}}), "ranks 0 and 2 differ in their cuts or patterns");
}

} // namespace attn::testing
