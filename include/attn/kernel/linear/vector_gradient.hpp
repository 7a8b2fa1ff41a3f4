// The way back through features of whole vectors.
#pragma once

#include "vector_features.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The features of queries or keys, all of them, and their gradients.
template <Scalar T, class M>
class vector_gradient {
    static constexpr index_t block = vector_features<T, M>::block;

public:
    vector_gradient(detail::scratch& memory, const vector_features<T, M>& source, const shape& x, index_t features, index_t concurrency)
        : source_(source), shape_{x.batch, x.heads, x.tokens, features}, width_(source.feature_width()),
          features_(memory.take<T>(x.batch, x.heads, x.tokens, width_)), gradients_(memory.take<T>(x.batch, x.heads, x.tokens, width_)),
          rows_(memory.take<T>(concurrency, 2 * source.staged() + block * width_)) {}

    tensor_view<const T> features() const { return view(features_); }
    /// The gradient of the features, to be written before it is read here.
    tensor_view<T> of_features() const { return view(gradients_); }

    /// Makes the features of what takes part.
    void make(const auto& of, const execution& run) const {
        for_each_vector_task(shape_, run, of, [&](index_t, index_t b, index_t h, const taking_part& part, index_t slice) {
            if (part.first < part.end) source_(b, h, part.first, part.end - part.first, features_ + row(b, h, part.first), memory(slice));
        });
    }
    /// Writes the gradient of x, from that of the features; of what does not take part 0.
    void pull_back(const auto& of, const tensor_view<T>& to, const execution& run) const {
        const auto width = source_.staged() / block;
        for_each_vector_task(shape_, run, of, [&](index_t, index_t b, index_t h, const taking_part& part, index_t slice) {
            T *const staged = memory(slice), *const of_x = staged + source_.staged(), *const begun = of_x + source_.staged();
            for (auto first = part.first; first < part.end; first += block) {
                T maxima[std::size_t{block}];
                const auto rows = source_.begin(b, h, first, std::min(block, part.end - first), begun, staged, maxima);
                source_.map().gradient(rows, maxima, gradients_ + row(b, h, first), of_x);
                for (index_t r = 0; r < rows.count; ++r)
                    write_row<false, T>(of_x + r * width, to.shape().channels, T{1}, T{0}, to.row(b, h, first + r), to.strides().channels);
            }
        });
        for (index_t b = 0; b < shape_.batch; ++b) {
            const taking_part part = of(b);
            detail::fill_zero(to.slice({.batch = {b, 1}, .tokens = {0, part.first}}));
            detail::fill_zero(to.slice({.batch = {b, 1}, .tokens = {part.end, shape_.tokens - part.end}}));
        }
    }

private:
    T* memory(index_t slice) const { return rows_ + slice * (2 * source_.staged() + block * width_); }
    index_t row(index_t b, index_t h, index_t i) const { return ((b * shape_.heads + h) * shape_.tokens + i) * width_; }
    tensor_view<T> view(T* data) const { return {data, shape_, {shape_.heads * row(0, 1, 0), row(0, 1, 0), width_, 1}}; }

    const vector_features<T, M>& source_;
    shape shape_; ///< of the features
    index_t width_;
    T *features_, *gradients_; ///< rows of whole registers
    T* rows_;                  ///< [concurrency][x, of x, features][block]
};

} // namespace attn::kernel
