// Attention with OpenBLAS's matrix products, as one writes it who knows both: blocks of query rows, whose scores stay in a cache, with
// only the keys that a causal mask shows, and on every thread heads of its own.
#include "serve.hpp"

#include "attn/parallel/thread_pool.hpp"

#include <Eigen/Core>
#include <cblas.h>

#include <cmath>
#include <memory>

namespace attn::bench {

namespace {

struct blocked_attention {
    static constexpr long block_rows = 256;

    peer_problem p;
    std::vector<float> q, k, v, out;
    std::vector<std::vector<float>> scores; // of each thread
    thread_pool threads;

    explicit blocked_attention(const peer_problem& problem)
        : p(problem), q(p.input(0)), k(p.input(1)), v(p.input(2)), out(p.size()),
          scores(static_cast<std::size_t>(p.threads), std::vector<float>(static_cast<std::size_t>(block_rows * p.n))), threads(p.threads) {}

    void operator()() {
        const long heads = p.batch * p.heads;
        threads.parallel_for(p.threads, [&](index_t thread) {
            for (long h = thread; h < heads; h += p.threads)
                for (long first = 0; first < p.n; first += block_rows) block(h, first, scores[static_cast<std::size_t>(thread)].data());
        });
    }

private:
    void block(long head, long first, float* s) {
        using row_array = Eigen::Map<Eigen::Array<float, 1, Eigen::Dynamic>>;
        const auto n = static_cast<int>(p.n), d = static_cast<int>(p.d);
        const auto rows = static_cast<int>(std::min(block_rows, p.n - first));
        const auto keys = p.is_causal() ? static_cast<int>(first) + rows : n;
        const auto at = head * p.n * p.d;
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, keys, d, 1 / std::sqrt(static_cast<float>(d)),
                    q.data() + at + first * p.d, d, k.data() + at, d, 0, s, keys);
        for (int i = 0; i < rows; ++i) {
            const auto seen = p.is_causal() ? first + i + 1 : p.n;
            row_array row(s + static_cast<long>(i) * keys, seen);
            row = (row - row.maxCoeff()).exp();
            row *= 1 / row.sum();
            row_array(row.data() + seen, keys - seen).setZero();
        }
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, d, keys, 1, s, keys, v.data() + at, d, 0,
                    out.data() + at + first * p.d, d);
    }
};

} // namespace

} // namespace attn::bench

int main() {
    using namespace attn::bench;
    openblas_set_num_threads(1); // the heads are what is spread over threads
    return serve("OpenBLAS", std::string(openblas_get_config()).substr(9),
                 [attention = std::unique_ptr<blocked_attention>()](const peer_problem& p) mutable {
                     if (p.is_norm() || p.is_gradient()) return std::vector<peer_way>{};
                     attention = std::make_unique<blocked_attention>(p);
                     return std::vector<peer_way>{{"two sgemm", [&a = *attention] { a(); }, &attention->out}};
                 });
}
