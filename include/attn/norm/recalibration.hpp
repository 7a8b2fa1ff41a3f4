// The running statistics of BatchNorm, taken anew from data.
#pragma once

#include "batch_norm_statistics.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Gathers the statistics of a norm's inputs, batch after batch, with the weights frozen:
///     recalibration r(channels);
///     for (each batch) r.add(x, run);
///     statistics = r.statistics();
/// The result is that of all tokens together, however they were cut into batches: the mean, and the unbiased variance. (A training call
/// without momentum gives the mean of the batches' instead.)
/// SLAB (Guo et al. 2024) does so in ten passes after training.
class recalibration {
public:
    static constexpr std::string_view name = "recalibration";

    /// Throws attention_error if the channels are fewer than none, or too many.
    explicit recalibration(index_t channels) : mean_(batch_norm_statistics(channels).mean), squares_(mean_) {}

    /// Tokens so far.
    index_t tokens() const { return count_; }

    /// Bytes of workspace that `add` needs for tokens of that shape with such an executor or execution.
    template <Scalar T>
    static std::size_t workspace_bytes(const shape& x, const detail::call_execution& run = {}) {
        return detail::bytes_taken([&](auto& memory) { return detail::token_statistics<T>::in(memory, x, run.concurrency()); });
    }
    /// Adds the tokens of x (batch, heads, tokens, channels) that count. `run` as in `attend`.
    /// Throws attention_error if x or the mask do not fit, or a given workspace is too small.
    template <Scalar T>
    void add(const tensor_view<const T>& x, const detail::call_execution& run = {}, const token_mask& mask = {}) {
        detail::check_rows(name, "x", x);
        detail::check_mask(name, mask, x.shape());
        if (x.shape().channels != std::ssize(mean_))
            detail::raise(shape_error(name, "x", "has shape ", x.shape(), ", but the statistics are of ", mean_.size(), " channels"));
        run.reserve(name, "x", x.shape(), workspace_bytes<T>(x.shape(), run));
        if (x.shape().size() == 0) return;
        detail::scratch memory(run.workspace().bytes().data());
        moments_view all{mean_.data(), squares_.data(), count_};
        all.merge(detail::token_statistics<T>::in(memory, x.shape(), run.concurrency())(x, mask, run), x.shape().channels);
        count_ = all.count;
    }
    /// Throws attention_error if fewer than two tokens were added.
    batch_norm_statistics statistics() const {
        if (count_ < 2) detail::raise(shape_error(name, "x", "has given ", count_, " tokens, but a variance needs two"));
        batch_norm_statistics result;
        result.mean = mean_;
        for (const auto squares : squares_) result.variance.push_back(squares / static_cast<double>(count_ - 1));
        return result;
    }

private:
    std::vector<double> mean_, squares_;
    index_t count_ = 0;
};

} // namespace attn
