// BatchNorm's training over ranks has the bits of the step on one machine.
#include "answers.hpp"
#include "catch.hpp"
#include "communicator_checks.hpp"
#include "norm_checks.hpp"
#include "rank_checks.hpp"

#include <attn/distributed/batch_statistics.hpp>
#include <attn/distributed/thread_communicator.hpp>
#include <attn/parallel/thread_pool.hpp>

namespace attn::testing {

namespace {

/// Two steps of training on ranks, beside two on one machine.
template <Scalar T>
void check_training(const auto& norm, const shape& s, const std::vector<index_t>& cuts, const tensor<bool>* mask) {
    CAPTURE(s.batch, s.heads, s.tokens, s.channels, cuts.size());
    const auto x = random_rows<T>(s, 3, 5, 2);
    tensor<T> whole(s);
    batch_norm_statistics expected(s.channels);
    thread_pool two(2);
    const token_mask all_count = mask ? token_mask(mask->view()) : token_mask{};
    workspace memory(training_workspace_bytes(norm, s, two));
    for (int step = 0; step < 2; ++step) train(norm, x, whole, expected, execution(two, memory), all_count);

    const partition parts(dense{}, {s, s, s}, cuts, cuts);
    CHECK_NOTHROW(on_thread_ranks(parts.ranks(), [&](auto& ranks) {
        const auto own = parts.queries(ranks.rank());
        auto part = s;
        part.tokens = own.count;
        tensor<T> out(part);
        batch_norm_statistics statistics(s.channels);
        thread_pool threads(1 + ranks.rank() % 2);
        workspace of_rank(training_workspace_bytes(norm, part, threads));
        const token_mask own_count = mask ? mask->view().slice({.tokens = own}) : token_mask{};
        for (int step = 0; step < 2; ++step)
            train(norm, parts, ranks, x.slice({.tokens = own}), out, statistics, execution(threads, of_rank), own_count);
        require(statistics.mean == expected.mean && statistics.variance == expected.variance && statistics.batches == expected.batches, "the statistics are the same");
        for (index_t b = 0; b < s.batch; ++b)
            for (index_t h = 0; h < s.heads; ++h)
                for (index_t i = 0; i < own.count; ++i)
                    require(std::equal(out.view().row(b, h, i), out.view().row(b, h, i) + s.channels, whole.view().row(b, h, own.first + i),
                                       [](T a, T c) { return same_bits(a, c); }),
                            "the rows have the bits of the step on one machine");
    }));
}

std::vector<index_t> even_cuts(index_t tokens, index_t ranks) {
    std::vector<index_t> cuts;
    for (index_t r = 0; r <= ranks; ++r) cuts.push_back(tokens * r / ranks);
    return cuts;
}

} // namespace

TEMPLATE_TEST_CASE("ranks: BatchNorm's training takes the statistics of all", "[distributed][norm]", ATTN_TEST_NUMBERS) {
    using T = TestType;
    for (const shape s : {shape{1, 1, 2, 3}, shape{1, 1, 97, 5}, shape{1, 1, 5000, 19}, shape{1, 1, 40'000, 2}, shape{3, 2, 311, 33}}) {
        const auto weight = random_numbers<T>(s.channels, 2), bias = random_numbers<T>(s.channels, 3);
        const batch_norm<T> norm{.weight = weight, .bias = bias, .momentum = {}};
        tensor<bool> mask({s.batch, 1, s.tokens, 1});
        std::mt19937 random(1);
        std::generate_n(mask.data(), mask.shape().size(), [&] { return random() % 3 > 0 || s.tokens < 3; });
        for (index_t ranks = 1; ranks <= 7; ++ranks) check_training<T>(norm, s, even_cuts(s.tokens, ranks), ranks % 2 ? nullptr : &mask);
        const auto n = s.tokens;
        check_training<T>(norm, s, {0, 0, n / 3, n / 3, n / 3 + (n > 20 ? 7 : 0), n, n}, &mask);
        check_training<T>(rep_batch_norm<T>{norm, 0.6}, s, {0, n / 2, n}, nullptr);
    }
    check_training<T>(batch_norm<T>{}, {1, 1, 10, 0}, {0, 5, 10}, nullptr);
    tensor<bool> none({1, 1, 2000, 1});
    std::fill_n(none.data() + 1500, 2, true); // whole pieces and ranks of which nothing counts
    check_training<T>(batch_norm<T>{}, {1, 1, 2000, 4}, even_cuts(2000, 5), &none);
}

TEST_CASE("ranks: BatchNorm that fails on one rank fails on all", "[distributed][norm]") {
    const shape s{1, 1, 5'000, 4};
    const partition parts(dense{}, {s, s, s}, 3);
    const auto x = random_rows<float>(s, 1);
    const batch_norm<float> norm;
    check_failures("batch_norm", 3, [&](auto& communicator, auto& executor) {
        const auto own = parts.queries(communicator.rank());
        tensor<float> out({1, 1, own.count, 4});
        batch_norm_statistics statistics(4);
        train(norm, parts, communicator, x.slice({.tokens = own}), out, statistics, executor);
    });
}

TEST_CASE("ranks: what BatchNorm refuses, all refuse, and nothing is written", "[distributed][norm]") {
    const shape s{1, 1, 10, 4};
    const partition parts(dense{}, {s, s, s}, std::vector<index_t>{0, 4, 10}, std::vector<index_t>{0, 4, 10});
    const auto x = random_rows<float>(s, 1);
    const auto heard = [&](index_t tokens_of_last, bool nothing_counts) {
        std::vector<std::string> errors(2);
        on_thread_ranks(2, [&](auto& ranks) {
            const auto own = parts.queries(ranks.rank());
            const auto count = ranks.rank() == 1 ? tokens_of_last : own.count;
            auto out = random_rows<float>({1, 1, count, 4}, 7);
            const tensor<bool> none({1, 1, count, 1});
            batch_norm_statistics statistics(4);
            sequential here;
            const batch_norm<float> norm;
            workspace memory(training_workspace_bytes(norm, s));
            errors[static_cast<std::size_t>(ranks.rank())] = error_of<std::exception>([&] {
                train(norm, parts, ranks, x.slice({.tokens = {own.first, count}}), out, statistics, execution(here, memory), nothing_counts ? token_mask(none) : token_mask{});
            });
            require(same_bits(out, random_rows<float>({1, 1, count, 4}, 7)) && statistics.batches == 0, "nothing is written");
        });
        return errors;
    };
    const auto wrong = heard(5, false);
    CHECK(wrong[1] == "batch_norm: x has shape (1, 1, 5, 4), but rank 1 of the partition holds 6 tokens");
    CHECK(wrong[0] == "batch_norm: rank 1 has failed: " + wrong[1]);
    for (const auto& error : heard(6, true)) CHECK(error == "batch_norm: x of all ranks has 0 tokens that count, but training needs two for a variance");
}

} // namespace attn::testing
