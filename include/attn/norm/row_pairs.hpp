// Walks the token rows of two tensors side by side.
#pragma once

#include "../parallel/executor.hpp"

#include <array>
#include <cstdlib>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Whether to write a result past the caches: it is too large for much of it to be still there when it is read, and memory does not send
/// what is to be overwritten. Not in place, where the caches hold it already.
template <Scalar T>
bool worth_streaming(const tensor_view<const T>& x, const tensor_view<T>& out) {
    constexpr index_t many_bytes = index_t{8} << 20, size = sizeof(T);
    const auto aligned = [](index_t bytes) { return bytes % static_cast<index_t>(alignment) == 0; };
    const auto& s = out.strides();
    return out.shape().size() * size >= many_bytes && out.data() != x.data() && aligned(static_cast<index_t>(reinterpret_cast<std::intptr_t>(out.data()))) &&
           aligned(s.batch * size) && aligned(s.heads * size) && aligned(s.tokens * size);
}

/// Calls f with std::bool_constant for each of some conditions, known when the program runs.
template <class F>
void with_conditions(const F& f) {
    f();
}
template <class F, class... Rest>
void with_conditions(const F& f, bool first, Rest... rest) {
    if (first) with_conditions([&](auto... known) { f(std::true_type{}, known...); }, rest...);
    else with_conditions([&](auto... known) { f(std::false_type{}, known...); }, rest...);
}

/// Rows of an input and of an output at constant distances.
template <Scalar T>
struct row_run {
    const T* x;
    T* out;
    index_t x_stride, out_stride, count;
};

/// The token rows of x and out (batch, heads, tokens, channels) in the order in which x lies in memory, for work that treats every row
/// alike: the heads of a token-major tensor are neighbours then, and a contiguous tensor is a single run.
template <Scalar T>
class row_pairs {
public:
    row_pairs(const tensor_view<const T>& x, const tensor_view<T>& out) : x_(x.data()), out_(out.data()), channels_(x.shape().channels) {
        const auto& n = x.shape();
        const auto &from = x.strides(), &to = out.strides();
        loops_ = {{{n.batch, from.batch, to.batch}, {n.heads, from.heads, to.heads}, {n.tokens, from.tokens, to.tokens}}};
        for (auto& l : loops_)
            if (l.extent <= 1) l.x = l.out = 0;
        std::ranges::sort(loops_, [](const loop& a, const loop& b) { return std::abs(a.x) > std::abs(b.x); });
        // Outer loops that continue the next one: fewer, longer runs. Loops of one turn end up innermost, so they join first.
        for (const std::size_t outer : {1U, 0U, 1U}) {
            auto &a = loops_[outer], &b = loops_[outer + 1];
            if (b.extent != 1 && (a.x != b.extent * b.x || a.out != b.extent * b.out)) continue;
            if (b.extent == 1) b = a;
            else b.extent *= a.extent;
            a = {1, 0, 0};
        }
    }

    index_t count() const { return loops_[0].extent * loops_[1].extent * loops_[2].extent; }

    /// Calls f(row_run) until rows [first, first + count) are done.
    template <class F>
    void for_each_run(index_t first, index_t count, const F& f) const {
        const auto& [a, b, c] = loops_;
        while (count > 0) {
            const auto i = first / (b.extent * c.extent), j = first / c.extent % b.extent, k = first % c.extent;
            const auto here = std::min(count, c.extent - k);
            f(row_run<T>{x_ + i * a.x + j * b.x + k * c.x, out_ + i * a.out + j * b.out + k * c.out, c.x, c.out, here});
            first += here;
            count -= here;
        }
    }

    /// Calls f(row_run) on pieces of all rows, in parallel. The pieces do not depend on the number of threads.
    template <class F>
    void for_each_run(const execution& run, const F& f) const {
        constexpr index_t bytes_of_a_task = 64 * 1024;
        const auto rows = count();
        const auto rows_of_a_task = std::max<index_t>(1, bytes_of_a_task / (std::max<index_t>(1, channels_) * static_cast<index_t>(sizeof(T))));
        if (channels_ == 0) return;
        run.for_each((rows + rows_of_a_task - 1) / rows_of_a_task, [&](index_t task, index_t) {
            const auto first = task * rows_of_a_task;
            for_each_run(first, std::min(rows_of_a_task, rows - first), f);
        });
    }

private:
    struct loop {
        index_t extent, x, out;
    };
    const T* x_;
    T* out_;
    index_t channels_;
    std::array<loop, 3> loops_;
};

} // namespace attn::detail
