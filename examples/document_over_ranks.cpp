// A long document over the processes of MPI, each of which has only its own part of it.
//     mpirun -n 2 example_document_over_ranks [TOKENS]
#include <attn/distributed/mpi.hpp>
#include <attn/distributed/sequence_parallel.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace {

using attn::index_t;
constexpr index_t heads = 4, d = 32;

/// Stands for the projections of the tokens that a process has: any number of any token, wherever it is made.
attn::tensor<float> rows_of(const attn::row_range& tokens, int kind) {
    attn::tensor<float> rows({.heads = heads, .tokens = tokens.count, .channels = d});
    for (index_t h = 0; h < heads; ++h)
        for (index_t i = 0; i < tokens.count; ++i)
            for (index_t c = 0; c < d; ++c)
                rows(0, h, i, c) = static_cast<float>(std::sin(0.37 * static_cast<double>((tokens.first + i) % 4099 * (c + 1 + kind)) + static_cast<double>(h)));
    return rows;
}

template <class Op>
void attend_and_tell(const char* name, const Op& op, attn::mpi_communicator& ranks, index_t n) {
    const attn::shape whole{.heads = heads, .tokens = n, .channels = d};
    const attn::sequence_parallel over_ranks{op, attn::partition(op.pattern, {whole, whole, whole}, ranks.size())};
    const auto& parts = over_ranks.partition;
    const auto tokens = parts.queries(ranks.rank()); // the keys of the same tokens, too
    const auto q = rows_of(tokens, 0), k = rows_of(tokens, 1), v = rows_of(tokens, 2);
    attn::thread_pool threads(2);
    const auto out = attn::attend(over_ranks, ranks, attn::inputs<float>{q, k, v}, threads);

    double own = 0, all = 0;
    for (index_t e = 0; e < out.shape().size(); ++e) own += static_cast<double>(std::abs(out.data()[e]));
    MPI_Reduce(&own, &all, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    if (ranks.rank() > 0) return;
    std::printf("%s: mean of all |out| %.4f\n", name, all / static_cast<double>(heads * n * d));
    for (index_t r = 0; r < parts.ranks(); ++r)
        std::printf("  rank %td has tokens %td to %td: %.1f million pairs, sends %.2f MB\n", r, parts.queries(r).first, parts.queries(r).end() - 1,
                    static_cast<double>(parts.pairs(r)) / 1e6, static_cast<double>(parts.bytes_sent(r)) / 1e6);
}

} // namespace

int main(int count, char** arguments) {
    int level = 0;
    MPI_Init_thread(&count, &arguments, MPI_THREAD_FUNNELED, &level); // the calling thread asks MPI, those of thread_pool do not
    try {
        const index_t n = count > 1 ? std::atol(arguments[1]) : 6000;
        attn::mpi_communicator ranks;
        attend_and_tell("causal", attn::softmax_attention{.pattern = attn::causal{}}, ranks, n);
        attend_and_tell("a window of 256", attn::softmax_attention{.pattern = attn::causal{} & attn::pattern::local{255}}, ranks, n);
    } catch (const std::exception& error) { // on all ranks if attn has thrown it, on one alone if the program has
        std::fprintf(stderr, "%s\n", error.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
}
