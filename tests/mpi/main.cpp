// What ranks over MPI do that ranks of threads do too: the communicator's own checks, and calls that have the bits of those on one machine. Run by
// mpirun with any number of ranks; prints which of them failed, on every rank that knows.
#include "../communicator_checks.hpp"
#include "../sequence_checks.hpp"

#include <attn/attn.hpp>
#include <attn/distributed/backward.hpp>
#include <attn/distributed/batch_statistics.hpp>
#include <attn/distributed/mpi.hpp>
#include <attn/distributed/thread_communicator.hpp>

#include <cstdio>

namespace attn::testing {

namespace {

template <Scalar T, class Op>
void check_call(mpi_communicator& ranks, const Op& op, index_t n, index_t threads) {
    constexpr bool with_log_sum_exp = Op::traits.has_log_sum_exp;
    const auto in = random_given<T>({1, 4, 2, n, n, 16, 8});
    const auto s = shapes_of(inputs<T>(in));
    auto whole = no_answer<T>(op.output_shape(s), with_log_sum_exp);
    attend(op, inputs<T>(in), whole.out());
    check_rank(op, ranks, partition(op.pattern, s, ranks.size()), inputs<T>(in), whole.out(), threads);
}

/// The gradient is that over as many threads, bit by bit.
void check_backward(mpi_communicator& ranks, const auto& op, index_t n) {
    const auto given = random_given<float>({1, 2, 1, n, n, 8, 4});
    const inputs<float> in(given);
    const shape row_shape{1, 2, n, 1};
    tensor<float> out({1, 2, n, 4}), log_sum_exp(row_shape);
    attend(op, in, outputs<float>{out, log_sum_exp});
    const auto d_out = random_tensor<float>(out.shape(), 17);
    const partition parts(op.pattern, shapes_of(in), ranks.size());
    const auto gradients_on = [&](auto& communicator, tensor<float>& dq, tensor<float>& dk, tensor<float>& dv) {
        const auto own = parts.queries(communicator.rank());
        const tensor_part part{.tokens = own};
        dq = tensor<float>({1, 2, own.count, 8}), dk = tensor<float>({1, 1, own.count, 8}), dv = tensor<float>({1, 1, own.count, 4});
        backward(sequence_parallel{op, parts}, communicator, in.slice(part, part), saved_outputs<float>{out, log_sum_exp}.slice(part), {d_out.slice(part)},
                 {{dq, dk, dv}});
    };
    tensor<float> expected[3], found[3];
    on_thread_ranks(ranks.size(), [&](auto& threads) {
        tensor<float> own[3];
        gradients_on(threads, own[0], own[1], own[2]);
        if (threads.rank() == ranks.rank()) std::ranges::move(own, expected);
    });
    gradients_on(ranks, found[0], found[1], found[2]);
    for (int i = 0; i < 3; ++i) require(same_bits(found[i], expected[i]), "gradients over MPI have the bits of those over threads");
}

/// Recurrent attention and its gradient are those of one machine, bit by bit.
void check_recurrent(mpi_communicator& ranks, index_t n) {
    const auto given = random_given<float>({1, 4, 2, n, n, 8, 4});
    const inputs<float> in(given);
    const auto decays = retention_log_decays<float>(2, n);
    const auto of = [&](const row_range& rows) { return recurrent_attention{.rule = rule::gated<float>{decays.slice({.tokens = rows})}}; };
    const auto d_out = random_tensor<float>({1, 4, n, 4}, 17);
    tensor<float> dq(in.queries.shape()), dk(in.keys.shape()), dv(in.values.shape()), d_decays(decays.shape());
    const auto whole = of({0, n});
    const auto out = attend(whole, in);
    backward(whole, in, {out}, {d_out}, {{dq, dk, dv}, d_decays});

    const partition parts(causal{}, shapes_of(in), ranks.size());
    const auto rows = parts.keys(ranks.rank());
    const tensor_part part{.tokens = rows};
    const auto over = sequence_parallel{of(rows), parts};
    const auto own_out = attend(over, ranks, in.slice(part, part));
    tensor<float> own_dq({1, 4, rows.count, 8}), own_dk({1, 2, rows.count, 8}), own_dv({1, 2, rows.count, 4}), own_d_decays({1, 2, rows.count, 1});
    backward(over, ranks, in.slice(part, part), {own_out}, {d_out.slice(part)}, {{own_dq, own_dk, own_dv}, own_d_decays});
    const auto same = [&](const tensor<float>& own, const tensor<float>& all) { return same_bits(own, rows_of(all, rows.first, rows.count)); };
    require(same(own_out, out) && same(own_dq, dq) && same(own_dk, dk) && same(own_dv, dv) && same(own_d_decays, d_decays), "recurrent attention and its gradient have the bits of one machine");
}

void check_errors(mpi_communicator& ranks) {
    const index_t n = 100;
    const auto in = random_given<float>({1, 1, 1, n, n, 8, 4});
    const partition parts(dense{}, shapes_of(inputs<float>(in)), ranks.size());
    const auto last = ranks.size() - 1, rank = ranks.rank();
    const auto q = parts.queries(rank), k = parts.keys(rank);
    auto own = inputs<float>(in).slice({.tokens = q}, {.tokens = k});
    if (rank == last) own.values = own.values.slice({.tokens = {0, k.count - 1}});
    const auto failure = detail::failure_of([&] { static_cast<void>(attend(sequence_parallel{softmax_attention{}, parts}, ranks, own)); });
    require(failure != nullptr, "all ranks throw where one is given a wrong shape");
    const auto reason = detail::reason_of(failure);
    require(reason.find("v has shape") != reason.npos, "they say why: " + reason);
    require(rank == last || reason.find("rank " + std::to_string(last) + " has failed") != reason.npos, "they say who: " + reason);
}

void check_batch_norm(mpi_communicator& ranks) {
    const shape s{2, 1, 3001, 17};
    const auto x = random_tensor<float>(s, 5);
    tensor<float> whole(s);
    batch_norm_statistics expected(s.channels), statistics(s.channels);
    const batch_norm<float> norm;
    sequential one;
    workspace memory(training_workspace_bytes(norm, s));
    train(norm, x, whole, expected, execution(one, memory));
    const partition parts(dense{}, {s, s, s}, ranks.size());
    const auto own = parts.queries(ranks.rank());
    tensor<float> out({s.batch, s.heads, own.count, s.channels});
    train(norm, parts, ranks, x.slice({.tokens = own}), out, statistics, execution(one, memory));
    require(statistics.mean == expected.mean && statistics.variance == expected.variance, "statistics are those of all tokens");
    for (index_t b = 0; b < s.batch; ++b)
        require(std::equal(out.view().row(b, 0, 0), out.view().row(b, 0, 0) + own.count * s.channels, whole.view().row(b, 0, own.first)), "rows of BatchNorm are the same");
}

void check_all() {
    mpi_communicator ranks, short_messages(MPI_COMM_WORLD, 1001);
    check_communicator(ranks);
    check_communicator(short_messages); // most messages in parts
    using namespace pattern;
    for (const index_t n : {0, 3, 1000, 9'500}) {
        check_call<float>(ranks, softmax_attention{.pattern = causal{}}, n, 1);
        check_call<float>(short_messages, softmax_attention{}, n, 2);
        check_call<double>(ranks, softmax_attention{.score = soft_cap{5}, .pattern = causal{} & local{300}}, n, 2);
        check_call<float>(ranks, softmax_attention{.pattern = causal{} & (local{50} | strided{3})}, n, 1);
    }
    check_call<float>(ranks, linear_attention{}, 5'000, 1);
    check_call<double>(ranks, linear_attention{.pattern = causal{}}, 700, 2);
    tensor<float> directions({1, 1, 40, 16});
    fill_orthogonal_directions(directions.view(), 3);
    check_call<float>(ranks, linear_attention{.feature_map = performer_features{directions}}, 700, 2);
    const auto weights = random_tensor<float>({1, 8, 3, 5}, 3);
    check_call<float>(ranks, simplified_linear_attention{.convolution = {.weights = weights, .height = 50, .width = 60}}, 3'000, 2);
    check_backward(ranks, softmax_attention{.pattern = causal{}}, 9'500);
    check_backward(short_messages, softmax_attention{.pattern = local{400}}, 1'000);
    check_recurrent(ranks, 1'001);
    check_recurrent(short_messages, 37);
    const auto mix = random_tensor<double>({1, 1, 4, 4}, 3);
    check_call<float>(short_messages, talking_heads_attention<local>{.logits_mix = mix, .weights_mix = mix, .pattern = local{300}}, 900, 2);
    const auto matrix = random_tensor<float>({1, 2, 30, 3'001}, 4);
    check_call<float>(short_messages, linformer_attention{.key_projection = linear_projection<float>{matrix.view()}}, 3'001, 2);
    check_call<float>(ranks, linformer_attention{.key_projection = max_pooling{70}}, 3'001, 1);
    check_batch_norm(ranks);
    check_errors(ranks);
    check_call<float>(ranks, softmax_attention{}, 200, 1); // and go on afterwards
}

} // namespace

} // namespace attn::testing

int main(int argc, char** argv) {
    const auto early = attn::detail::failure_of([] { attn::mpi_communicator(); });
    int has = 0, rank = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &has);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const auto failure = attn::detail::failure_of([&] {
        attn::testing::require(early && attn::detail::reason_of(early).find("MPI is not running") != std::string::npos, "before MPI_Init there is no communicator");
        attn::testing::check_all();
    });
    if (failure) {
        std::fprintf(stderr, "rank %d: %s\n", rank, attn::detail::reason_of(failure).c_str());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
    if (rank == 0) std::puts("all ranks are well");
}
