// The running statistics of BatchNorm.
#pragma once

#include "../simd/unfused.hpp"
#include "token_moments.hpp"

#include <optional>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What training remembers of the tokens it has seen, for inference to use: the owner's, who passes it to every training call. In double: a
/// million small steps lose no digits.
struct batch_norm_statistics {
    std::vector<double> mean;     ///< (channels): the running mean
    std::vector<double> variance; ///< (channels): the running unbiased variance
    std::int64_t batches = 0;     ///< how many training calls have moved them

    batch_norm_statistics() = default;
    /// Throws attention_error if the channels are fewer than none, or too many.
    explicit batch_norm_statistics(index_t channels) {
        detail::check_shape<double>("batch_norm_statistics", "channels", {.tokens = 1, .channels = channels});
        mean.assign(static_cast<std::size_t>(channels), 0.0);
        variance.assign(static_cast<std::size_t>(channels), 1.0);
    }

    /// Moves by one batch: running = (1 - momentum) running + momentum * batch; without momentum, to the mean over all batches.
    void update(const moments_view& batch, std::optional<double> momentum) {
        ++batches;
        const auto part = momentum.value_or(1 / static_cast<double>(batches));
        for (std::size_t c = 0; c < mean.size(); ++c) {
            mean[c] += simd::unfused(part * (batch.mean[c] - mean[c]));
            variance[c] += simd::unfused(part * (batch.variance(static_cast<index_t>(c), true) - variance[c]));
        }
    }
};

} // namespace attn
