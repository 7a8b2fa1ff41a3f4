// Features of whole vectors, a block of rows at a time, as linear attention reads them.
#pragma once

#include "../../parallel/executor.hpp"
#include "../tile_loader.hpp"
#include "order.hpp"
#include "state.hpp"

#include <limits>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Some rows of one head, and their features: rows of whole registers, of which x is 0 past its channels, and so are to be the features.
template <Scalar T>
struct vector_rows {
    const T* x;
    index_t width;
    T* features;
    index_t feature_width;
    index_t count, position; ///< how many, and where the first of them is
};

/// A map that says what it does with one token, as a map of rows. What such a map is:
/// - made in scratch memory for vectors of so many channels; `prepare()` fills what it took;
/// - `begin(rows, maxima)` writes the features; or, where it `has_maxima`, what they are made of, and a number for each row, and `finish`
///   makes the features, from the largest number of all rows that count, of each row again;
/// - `gradient(rows, maxima, of_features, to)` writes that of x, rows like x, after `begin`; it may write to of_features.
template <class F, Scalar T>
class token_map {
public:
    static constexpr bool has_maxima = false;

    token_map(detail::scratch&, const F& phi, index_t channels)
        : phi_(phi), channels_(static_cast<std::size_t>(channels)), features_(static_cast<std::size_t>(phi.features(channels))) {}

    void prepare() const {}
    void begin(const vector_rows<T>& rows, T*) const {
        for (index_t r = 0; r < rows.count; ++r) {
            T* const to = rows.features + r * rows.feature_width;
            std::fill_n(to, rows.feature_width, T{0});
            phi_(std::span<const T>(rows.x + r * rows.width, channels_), rows.position + r, std::span<T>(to, features_));
        }
    }
    void gradient(const vector_rows<T>& rows, const T*, T* of_features, T* to) const {
        for (index_t r = 0; r < rows.count; ++r)
            phi_.gradient(std::span<const T>(rows.x + r * rows.width, channels_), rows.position + r,
                          std::span<const T>(of_features + r * rows.feature_width, features_),
                          std::span<T>(to + r * rows.width, channels_));
    }

private:
    const F& phi_;
    std::size_t channels_, features_;
};

/// How the rows of a map are made: by the map's own `rows`, or token by token.
template <class F, Scalar T>
struct map_of_rows {
    using type = token_map<F, T>;
};
template <class F, Scalar T>
    requires requires { typename F::template rows<T>; }
struct map_of_rows<F, T> {
    using type = typename F::template rows<T>;
};

/// The rows of a head that take part: the others give nothing and get nothing, whatever they hold.
struct taking_part {
    index_t first = 0, end = 0;
};

/// How many tasks the rows of a head make, which only shapes tell, so that threads change no bit.
constexpr index_t vector_rows_of_a_task = 256;
constexpr index_t vector_tasks(const shape& s) { return (s.tokens + vector_rows_of_a_task - 1) / vector_rows_of_a_task; }
/// Calls f(task, batch, head, the rows of the task that take part, slice) in parallel; of(batch) says what takes part of a head.
void for_each_vector_task(const shape& s, const execution& run, const auto& of, const auto& f) {
    const auto of_head = vector_tasks(s);
    run.for_each(s.batch * s.heads * of_head, [&](index_t task, index_t slice) {
        const auto b = task / of_head / s.heads, h = task / of_head % s.heads, first = task % of_head * vector_rows_of_a_task;
        const taking_part all = of(b);
        f(task, b, h, taking_part{std::max(all.first, first), std::min(all.end, first + vector_rows_of_a_task)}, slice);
    });
}

/// The features of queries or keys, a block of rows at a time, as linear attention reads them.
template <Scalar T, class M>
class vector_features {
public:
    using on_reading = std::identity;
    static constexpr index_t block = 16;

    /// first: the position of the first row of each batch entry. share_maxima: there is memory for one of each head.
    vector_features(detail::scratch& memory, const M& map, const shape& x, index_t features, bool share_maxima, index_t concurrency)
        : map_(map), width_(linear_state<T>::whole(x.channels)), feature_width_(linear_state<T>::whole(features)),
          maxima_(share_maxima ? memory.take<T>(x.batch * x.heads) : nullptr),
          of_tasks_(share_maxima ? memory.take<T>(x.batch * x.heads, vector_tasks(x)) : nullptr),
          rows_(share_maxima ? memory.take<T>(concurrency, block, width_ + feature_width_) : nullptr) {}

    /// Reads x from now on. without: 0 stands in the place of any maximum.
    void read(const stored_view<const T>& x, const per_batch& first, bool without) {
        x_ = x;
        first_ = &first;
        without_ = without;
    }
    /// Takes the maxima of what takes part, where they are shared.
    void find_maxima(const auto& of, const execution& run) {
        if constexpr (M::has_maxima) {
            if (!maxima_) return;
            const auto& s = x_.shape();
            for_each_vector_task(s, run, of, [&](index_t task, index_t b, index_t h, const taking_part& part, index_t slice) {
                T largest = -std::numeric_limits<T>::infinity(), maxima[block];
                T *const staged = rows_ + slice * block * (width_ + feature_width_), *const features = staged + block * width_;
                for (auto row = part.first; row < part.end; row += block) {
                    const auto rows = load(b, h, row, std::min(block, part.end - row), features, staged);
                    map_.begin(rows, maxima);
                    for (index_t r = 0; r < rows.count; ++r) largest = maxima[r] > largest ? maxima[r] : largest;
                }
                of_tasks_[task] = largest;
            });
            std::fill_n(maxima_, s.batch * s.heads, -std::numeric_limits<T>::infinity());
            for (index_t head = 0; head < s.batch * s.heads && s.tokens > 0; ++head)
                maxima_[head] = *std::max_element(of_tasks_ + head * vector_tasks(s), of_tasks_ + (head + 1) * vector_tasks(s));
        }
    }
    /// Those of the heads, where they are shared.
    std::span<T> maxima() const {
        const auto& s = x_.shape();
        return {maxima_, maxima_ ? static_cast<std::size_t>(s.batch * s.heads) : 0};
    }
    /// Numbers that a call needs to lay rows down in.
    index_t staged() const { return block * width_; }
    /// to: `count` rows of whole registers, what lies past the features zero.
    void operator()(index_t batch, index_t head, index_t first, index_t count, T* to, T* staged) const {
        for (index_t r = 0; r < count; r += block) {
            T maxima[block];
            const auto rows = begin(batch, head, first + r, std::min(block, count - r), to + r * feature_width_, staged, maxima);
            if constexpr (M::has_maxima) map_.finish(rows, maxima);
        }
    }
    /// The rows of x, laid down in `staged`, and what the map begins with, for at most `block` of them.
    vector_rows<T> begin(index_t batch, index_t head, index_t first, index_t count, T* features, T* staged, T* maxima) const {
        const auto rows = load(batch, head, first, count, features, staged);
        map_.begin(rows, maxima);
        if (without_) std::fill_n(maxima, block, T{0});
        if (maxima_) std::fill_n(maxima, block, maxima_[batch * x_.shape().heads + head]);
        return rows;
    }
    vector_rows<T> load(index_t batch, index_t head, index_t first, index_t count, T* features, T* staged) const {
        copy_rows<T>(x_.rows(batch, head, first), count, x_.shape().channels, staged, width_);
        return {staged, width_, features, feature_width_, count, (*first_)[batch] + first};
    }
    /// The map.
    const M& map() const { return map_; }
    /// What a row of features takes.
    index_t feature_width() const { return feature_width_; }

private:
    const M& map_;
    stored_view<const T> x_;
    const per_batch* first_ = nullptr;
    bool without_ = false;
    index_t width_, feature_width_;
    T *maxima_, *of_tasks_; ///< of each head, and of each task; or null
    T* rows_;               ///< [concurrency][x, features][block], to find them
};

} // namespace attn::kernel
