// Walks the token rows of two tensors side by side.
#pragma once

#include "../kernel/tile_loader.hpp"
#include "../parallel/executor.hpp"

#include <array>
#include <cstdlib>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Whether a kernel is to write its result, in such a format, past the caches: it is too large for much of it to be still there when it is
/// read, and memory does not send what is to be overwritten. Not in place, where the caches hold it already, nor if it is rounded by
/// another.
template <Scalar T>
bool worth_streaming(const stored_view<const T>& x, const stored_view<T>& out, narrow_format written = narrow_format::none) {
    constexpr index_t many_bytes = index_t{8} << 20;
    const index_t size = out.element_bytes();
    const auto aligned = [](index_t bytes) { return bytes % static_cast<index_t>(alignment) == 0; };
    const auto& s = out.strides();
    return out.format() == written && out.shape().size() * size >= many_bytes && out.data() != x.data() &&
           aligned(static_cast<index_t>(reinterpret_cast<std::intptr_t>(out.data()))) && aligned(s.batch * size) &&
           aligned(s.heads * size) && aligned(s.tokens * size);
}

/// Calls f(std::bool_constant) of a condition, known when the program runs.
void with_condition(bool condition, const auto& f) {
    if (condition) f(std::true_type{});
    else f(std::false_type{});
}

/// The token rows of x and out (batch, heads, tokens, channels) in the order in which x lies in memory, for work that treats every row
/// alike: the heads of a token-major tensor are neighbours then, and a contiguous tensor is a single run. Rows that are stored in 16 bits
/// are widened to the memory of a thread, some at a time, and rounded from there, unless the work is done in their format.
template <Scalar T>
class rows_in_and_out {
public:
    /// memory: narrow_bytes, where one of them is stored in 16 bits.
    rows_in_and_out(const stored_view<const T>& x, const stored_view<T>& out, std::byte* memory = nullptr)
        : x_(x.rows(0, 0)), out_(out.rows(0, 0)), memory_(reinterpret_cast<T*>(memory)), channels_(x.shape().channels) {
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

    static std::size_t narrow_bytes(const shape& x, index_t concurrency) {
        return bytes_taken([&](scratch& memory) { return memory.take<T>(concurrency, thread_size(x.channels)); });
    }

    index_t count() const { return loops_[0].extent * loops_[1].extent * loops_[2].extent; }

    /// Calls f(rows of x, rows of out, count) until rows [first, first + count) are done.
    void for_each_run(index_t first, index_t count, const auto& f) const {
        const auto& [a, b, c] = loops_;
        while (count > 0) {
            const auto i = first / (b.extent * c.extent), j = first / c.extent % b.extent, k = first % c.extent;
            const auto here = std::min(count, c.extent - k);
            f(at(x_, i * a.x + j * b.x + k * c.x, c.x), at(out_, i * a.out + j * b.out + k * c.out, c.out), here);
            first += here;
            count -= here;
        }
    }

    /// Calls f(rows of x, rows of out, count) on pieces of all rows, a row_block of each, in parallel: of E, which all are stored as, or of
    /// T, which others are widened to. The pieces do not depend on the number of threads.
    template <class E, class F>
    void for_each_run_in(const execution& run, const F& f) const {
        constexpr index_t bytes_of_a_task = 64 * 1024;
        const auto rows = count();
        const auto rows_of_a_task =
            std::max<index_t>(1, bytes_of_a_task / (std::max<index_t>(1, channels_) * static_cast<index_t>(sizeof(T))));
        if (channels_ == 0) return;
        run.for_each((rows + rows_of_a_task - 1) / rows_of_a_task, [&](index_t task, index_t slice) {
            const auto first = task * rows_of_a_task;
            for_each_run(first, std::min(rows_of_a_task, rows - first),
                         [&](const stored_rows<const T>& x, const stored_rows<T>& out, index_t in_run) {
                             if (x.format == narrow_format_of<E> && out.format == narrow_format_of<E>)
                                 return f(x.template as<const E>(), out.template as<E>(), in_run);
                             if constexpr (std::same_as<E, T>) widened(x, out, in_run, memory_ + slice * thread_size(channels_), f);
                         });
        });
    }

private:
    struct loop {
        index_t extent, x, out;
    };
    template <class U>
    static stored_rows<U> at(stored_rows<U> rows, index_t offset, index_t row_stride) {
        rows.data += offset * rows.element();
        rows.row_stride = row_stride;
        return rows;
    }
    /// Rows that are widened together: what fills half of the first-level cache, or one.
    static index_t rows_at_once(index_t channels) {
        constexpr index_t numbers = 16384 / sizeof(T);
        return std::max<index_t>(1, numbers / std::max<index_t>(1, channels));
    }
    static index_t padded(index_t channels) { return kernel::whole_registers<T>(channels); }
    static index_t thread_size(index_t channels) { return rows_at_once(channels) * padded(channels); }
    void widened(const stored_rows<const T>& x, const stored_rows<T>& out, index_t count, T* memory, const auto& f) const {
        const auto size = rows_at_once(channels_), width = padded(channels_);
        for (index_t first = 0; first < count; first += size) {
            const auto rows = std::min(size, count - first);
            const auto from = x.from(first);
            const auto to = out.from(first);
            const auto in_memory = [&]<class U>(const stored_rows<U>& rows_there) {
                return rows_there.is_narrow() ? row_block<U>{memory, width, 1} : rows_there.numbers();
            };
            if (from.is_narrow()) kernel::copy_rows<T>(from, rows, channels_, memory, width);
            for (auto r = rows; r < std::min(rows + size, count - first); ++r) // the next, while these are computed
                for (index_t c = 0; c < channels_; c += static_cast<index_t>(alignment) / from.element())
                    simd::prefetch(from.address(r, c));
            f(in_memory(from), in_memory(to), rows);
            for (index_t r = 0; to.is_narrow() && r < rows; ++r) kernel::store_row<T>(memory + r * width, channels_, to.from(r));
        }
    }

    stored_rows<const T> x_;
    stored_rows<T> out_;
    T* memory_;
    index_t channels_;
    std::array<loop, 3> loops_;
};

} // namespace attn::detail
