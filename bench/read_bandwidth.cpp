#include "read_bandwidth.hpp"

#include "measure.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <vector>

namespace attn::bench {

double read_bandwidth(thread_pool& threads) {
    constexpr index_t size = index_t{1} << 26;
    static const std::vector<float> numbers(size, 1);
    const auto count = threads.concurrency();
    volatile float total = 0;
    double best = 0;
    for (int attempt = 0; attempt < 3; ++attempt) {
        const auto seconds = seconds_of([&] {
            threads.parallel_for(count, [&](index_t slice) {
                const auto first = slice * size / count, last = (slice + 1) * size / count;
                const auto sum = Eigen::Map<const Eigen::ArrayXf>(numbers.data() + first, last - first).sum();
                if (slice == 0) total = sum;
            });
        });
        best = std::max(best, static_cast<double>(size * index_t{sizeof(float)}) / seconds);
    }
    return best;
}

} // namespace attn::bench
