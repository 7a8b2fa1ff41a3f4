// The way back through focused features: from the gradients of the features of all heads of a token to those of its channels and the scale.
#pragma once

#include "../../simd/elementary.hpp"
#include "../tile_loader.hpp"
#include "focused_features.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// Focused features of queries or keys, all of them, and their gradients. With w = u / max u, y = w^p / |w^p|, the gradient g of f, and a
/// sum over all channels of all heads of a token:
///     a = sum g y,      du = a w / |w| + p |w| w^(p - 1) / |w^p| (g - a y),      dx = du / softplus(scale) where x > 0
///     d scale = sigmoid(scale) d softplus,      d softplus = - sum over tokens of du u / softplus
/// The latter is summed by tasks, which only shapes tell, so that threads change no bit.
template <Scalar T, class Relu, class U>
class focused_gradient {
public:
    using map = focused_features<T, Relu, U>;

    /// `heads`: at most so many have a scale of their own.
    focused_gradient(detail::scratch& memory, const shape& s, index_t heads, bool has_scale, index_t concurrency)
        : shape_(s), map_(memory, s, heads, concurrency), features_(memory.take<T>(s.batch, s.heads, s.tokens, map_.padded)),
          of_features_(memory.take<T>(s.size())), d_out_(memory.take<T>(concurrency, map::block, map_.padded)),
          of_scale_(memory.take<T>(has_scale ? map::tasks(s) : 0, std::max<index_t>(heads, 1), map_.padded)) {}

    void prepare(const typename map::source& from, int power, std::span<const U> scale, const execution& run) {
        map_.prepare(from, power, scale, run);
        map_.for_each_task(run, [&](index_t, index_t batch, index_t first, index_t end, index_t) {
            for (index_t h = 0; h < shape_.heads; ++h)
                map_(batch, h, first, end - first, features_ + ((batch * shape_.heads + h) * shape_.tokens + first) * map_.padded);
        });
    }
    tensor_view<const T> features() const {
        const auto row = map_.padded;
        return {features_, shape_, {shape_.heads * shape_.tokens * row, shape_.tokens * row, row, 1}};
    }
    /// The gradient of the features, to be written before it is read here.
    tensor_view<T> of_features() const { return head_major(of_features_, shape_); }

    /// Writes dx, where `to` has memory (it may be of_features), and the sums of d softplus, if they are wanted. Of batch entry b, tokens
    /// from taking_part(b) on give nothing, whatever they hold, and get 0.
    void operator()(const tensor_view<T>& to, bool of_scale, const auto& taking_part, const execution& run) const {
        map_.for_each_task(run, [&](index_t task, index_t batch, index_t first, index_t end, index_t slice) {
            T* const sums = of_scale ? of_scale_ + task * map_.heads_of_scale * map_.padded : nullptr;
            if (sums) std::fill_n(sums, map_.heads_of_scale * map_.padded, T{0});
            const auto present = std::clamp<index_t>(taking_part(batch), first, end);
            for (auto token = first; token < present; token += map::block)
                pull_back(batch, token, std::min(map::block, present - token), to, sums, slice);
            detail::fill_zero(to.slice({.batch = {batch, 1}, .tokens = {present, end - present}}));
        });
    }
    /// Writes the gradient of the scale, of queries and keys together.
    static void write_of_scale(const focused_gradient& queries, const focused_gradient& keys, std::span<const U> scale, std::span<U> to,
                               const execution& run) {
        const auto channels = queries.shape_.channels;
        run.for_each(queries.map_.heads_of_scale, [&](index_t head, index_t) {
            for (index_t c = 0; c < channels; ++c) {
                const auto at = static_cast<std::size_t>(head * channels + c);
                const T of_softplus = queries.sum_over_tasks(head, c) + keys.sum_over_tasks(head, c);
                to[at] = static_cast<U>(of_softplus * static_cast<T>(1 / (1 + simd::exp(-static_cast<double>(scale[at])))));
            }
        });
    }

private:
    using lanes = simd::lanes<T>;

    /// Some tokens, head after head: a of each first.
    void pull_back(index_t batch, index_t first, index_t count, const tensor_view<T>& to, T* of_scale, index_t slice) const {
        const auto padded = map_.padded;
        T *const x = map_.rows + slice * map::block * padded, *const d_out = d_out_ + slice * map::block * padded;
        T inverse_largest[map::block], norm[map::block], inverse_power[map::block], a[map::block];
        for (index_t r = 0; r < count; ++r) {
            const auto at = batch * shape_.tokens + first + r;
            inverse_largest[r] = map_.inverse_largest[at];
            norm[r] = map_.norm[at];
            inverse_power[r] = map_.factor[at] * inverse_largest[r] / norm[r]; // 1 / |w^p|
        }
        // Calls f(row, where, part of a sum, relu(x), 1 / softplus, g, u) with registers of one head.
        const auto each = [&](index_t head, const auto& f) {
            const T* const inverse_scale = map_.scale_of(head);
            map_.x(batch, head, first, count, x);
            copy_rows<T>(tensor_view<const T>(of_features()).rows(batch, head, first), count, shape_.channels, d_out, padded);
            for (index_t r = 0; r < count; ++r)
                simd::for_each_part<T>(padded, [&](index_t c, auto part, index_t) {
                    const auto relu_x = lanes::load(x + r * padded + c), inverse = lanes::load(inverse_scale + c);
                    f(r, c, part, relu_x, inverse, lanes::load(d_out + r * padded + c), map::focus(relu_x, inverse));
                });
        };
        simd::wide_sum<T> sums[map::block];
        for (index_t h = 0; h < shape_.heads; ++h)
            each(h, [&](index_t r, index_t, auto part, lanes, lanes, lanes g, lanes u) {
                sums[r].add(part, g, map::raised(u * lanes(inverse_largest[r]), map_.power));
            });
        for (index_t r = 0; r < count; ++r) a[r] = sums[r].total() * inverse_power[r];

        const lanes power = static_cast<T>(map_.power);
        for (index_t h = 0; h < shape_.heads; ++h) {
            T* const of_scale_here = of_scale ? of_scale + (map_.heads_of_scale == 1 ? 0 : h * padded) : nullptr;
            each(h, [&](index_t r, index_t c, auto, lanes relu_x, lanes inverse, lanes g, lanes u) {
                const auto w = u * lanes(inverse_largest[r]), slope = map::raised(w, map_.power - 1) * lanes(inverse_power[r]);
                const auto of_u = fma(lanes(a[r] / norm[r]), w, power * lanes(norm[r]) * slope * (g - lanes(a[r]) * (slope * w)));
                (of_u * inverse * map_.x.phi.derivative(relu_x)).store(x + r * padded + c);
                if (of_scale_here) (lanes::load(of_scale_here + c) - of_u * u * inverse).store(of_scale_here + c);
            });
            for (index_t r = 0; to.data() && r < count; ++r)
                write_row<false, T>(x + r * padded, shape_.channels, T{1}, T{0}, to.row(batch, h, first + r), to.strides().channels);
        }
    }
    T sum_over_tasks(index_t head, index_t c) const {
        T sum = 0;
        for (index_t task = 0; task < map::tasks(shape_); ++task) sum += of_scale_[(task * map_.heads_of_scale + head) * map_.padded + c];
        return sum;
    }

    shape shape_;
    map map_;
    T* features_;    ///< [batch][heads][tokens][padded]
    T* of_features_; ///< [batch][heads][tokens][channels]
    T* d_out_;       ///< rows of g [concurrency][block][padded]
    T* of_scale_;    ///< sums of d softplus [tasks][heads of the scale][padded]
};

} // namespace attn::kernel
