// The blocked matrix product on the micro-kernel, for linear layers and projections.
#pragma once

#include "../../parallel/executor.hpp"
#include "../prefetch.hpp"
#include "../transposed_columns.hpp"
#include "matrix_tile.hpp"

#include <limits>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// C = start + A B for A (rows, depth), B (depth, columns), C and start (rows, columns); C is row-major, the others lie anyhow. What is
/// added is a matrix, C itself, or with a stride of 0 a bias: of each column with {bias, 0, 1}, of each row with {bias, 1, 0}; or
/// nothing, without data. B may be stored in 16 bits. For a linear layer y = x W^T + b, with W (out, in), B is W.transposed(). E: what the
/// micro-kernel multiplies, T or what A and B are rounded to.
///
/// Every element is a sum of chains of multiply-adds over at most `max_block_depth` terms, cut by the depth alone: its bits do not
/// depend on the number of rows and columns, on layouts or threads. Blocks of B are packed for the micro-kernel, once in each block of
/// rows; so are those of A where it cannot read them as they lie.
template <Scalar T, class E = T>
class matrix_product {
public:
    matrix_product(index_t rows, index_t depth, index_t columns) : rows_(rows), depth_(depth), columns_(columns) {}

    /// All tasks on an executor. memory: workspace_bytes(run.concurrency()).
    void operator()(const row_block<const T>& a, const stored_rows<const T>& b, const row_block<const T>& start, const row_block<T>& c,
                    std::byte* memory, const execution& run) const {
        run.for_each(task_count(), [&](index_t task, index_t slice) {
            auto slice_memory = detail::slices(memory, task_bytes())[slice];
            run_task(task, slice_memory, a, b, start, c);
        });
    }
    std::size_t workspace_bytes(index_t concurrency) const { return detail::bytes_for_threads(concurrency, task_bytes()); }

    struct extent {
        index_t first, count;
    };
    /// All terms of a piece of the depth.
    struct all_terms {
        void operator()(index_t first, index_t count, const auto& visit) const { visit(first, count); }
    };
    /// How many pieces a depth is cut into, each a chain that is added when it is complete, in order: one at least.
    static index_t depth_pieces(index_t depth) { return std::max<index_t>(1, (depth + max_block_depth - 1) / max_block_depth); }
    /// The terms of one piece of a depth.
    static extent depth_piece(index_t depth, index_t number) { return piece(depth, depth_pieces(depth), number); }

    /// Blocks of C that are computed independently, in any order.
    index_t task_count() const { return row_blocks() * column_blocks(); }
    /// Memory of one running task.
    std::size_t task_bytes() const { return detail::bytes_for<blocks>(*this); }
    /// terms(first, count, visit) calls visit(first, count) for each run of terms of a piece of the depth that take part: all of them if it
    /// is not given. The others are not multiplied, if an operand is one term. pieces: of the depth; the others are added before, to what
    /// is the start here, or afterwards: that reads no other terms.
    template <class Terms = all_terms>
    void run_task(index_t task, detail::scratch& memory, const row_block<const T>& a, const stored_rows<const T>& b,
                  const row_block<const T>& start, const row_block<T>& c, const Terms& terms = {},
                  const extent& pieces = {0, std::numeric_limits<index_t>::max()}) const {
        const blocks block(memory, *this);
        const auto [first_row, rows] = piece(rows_, row_blocks(), task % row_blocks());
        const auto [first_column, columns] = piece(columns_, column_blocks(), task / row_blocks());
        const row_block<T> to{c.data + first_row * c.row_stride + first_column, c.row_stride, 1};
        begin(start.from(first_row, first_column), to, rows, columns);
        if constexpr (std::same_as<E, T> && std::same_as<Terms, all_terms>)
            if (rows_ <= max_few && !b.is_narrow() && b.row_stride == 1 && b.channel_stride != 1)
                return multiply_few(a, b.numbers().from(0, first_column).transposed(), to, columns, pieces);
        std::array<depth_run, static_cast<std::size_t>(max_block_depth)> runs;
        for (auto p = pieces.first; p < std::min(depth_pieces(depth_), pieces.first + pieces.count); ++p) {
            const auto within = depth_piece(depth_, p);
            std::size_t count = 0;
            terms(within.first, within.count, [&](index_t first, index_t in_run) {
                runs[count++] = {(first - within.first) / simd::terms_of<E>, (in_run + simd::terms_of<E> - 1) / simd::terms_of<E>};
            });
            block.multiply(a.from(first_row, within.first), b.from(within.first, first_column), to, rows, within.count, columns,
                           std::span(runs.data(), count));
        }
    }

    /// All tasks, one after the other.
    void run_all(const detail::scratch& memory, const row_block<const T>& a, const stored_rows<const T>& b, const row_block<const T>& start,
                 const row_block<T>& c, const auto&... terms) const {
        for (index_t task = 0; task < task_count(); ++task) {
            auto own = memory;
            run_task(task, own, a, b, start, c, terms...);
        }
    }

private:
    using lanes = simd::lanes<T>;
    using traits = tile_traits<T>;
    using rows_of_a = typename operand_rows<T, E>::of_channels;
    using rows_of_b = typename operand_rows<T, E>::of_rows;
    static constexpr index_t lane_count = lanes::size;
    /// A panel of B is max_columns registers wide, or one at the end: max_block_depth rows of it stay in the first-level cache, and
    /// max_block_rows rows of A, of that depth, in the second.
    static constexpr index_t panel_width = traits::max_columns * lane_count, max_block_depth = 128 * 4 / sizeof(T), max_block_rows = 384,
                             max_block_columns = 512;

    /// A run of the depth, counted in operands.
    struct depth_run {
        index_t first, count;
    };
    static extent piece(index_t count, index_t pieces, index_t number) {
        const auto first = count * number / pieces;
        return {first, count * (number + 1) / pieces - first};
    }
    index_t row_blocks() const { return (rows_ + max_block_rows - 1) / max_block_rows; }
    index_t column_blocks() const { return (columns_ + max_block_columns - 1) / max_block_columns; }

    /// The packed blocks of one task.
    struct blocks {
        E *packed_a, *packed_b;

        blocks(detail::scratch& memory, const matrix_product& p)
            : packed_a(memory.take<E>(std::min(max_block_rows, p.rows_) * rows_of_a::width(std::min(max_block_depth, p.depth_)))),
              packed_b(memory.take<E>(rows_of_b::rows(std::min(max_block_depth, p.depth_)) * panel_width)) {}

        void multiply(const row_block<const T>& numbers, const stored_rows<const T>& b, const row_block<T>& c, index_t rows, index_t depth,
                      index_t columns, std::span<const depth_run> runs) const {
            const auto a = operands_of(numbers, rows, depth, columns);
            for (index_t first = 0; first < columns;) {
                const auto left = columns - first, width = left < panel_width ? std::min(lane_count, left) : panel_width;
                const row_block<T> to{c.data + first, c.row_stride, 1};
                if (width == panel_width) multiply_panel<traits::max_columns>(a, b.from(0, first), to, rows, depth, width, runs);
                else multiply_panel<1>(a, b.from(0, first), to, rows, depth, width, runs);
                first += width;
            }
        }

    private:
        row_block<const E> operands_of(const row_block<const T>& a, index_t rows, index_t depth, index_t columns) const {
            if constexpr (!rows_of_a::are_copies) // rows that evict each other are copied if they are read again and again
                if (a.channel_stride == 1 && (columns <= 2 * panel_width || readable_in_place(a))) return a;
            rows_of_a::copy(a, rows, 0, depth, packed_a, rows_of_a::width(depth));
            return {packed_a, rows_of_a::width(depth), 1};
        }
        /// A panel of `present` columns; the registers' other columns are zero.
        template <int Columns>
        void multiply_panel(const row_block<const E>& a, const stored_rows<const T>& b, const row_block<T>& c, index_t rows, index_t depth,
                            index_t present, std::span<const depth_run> runs) const {
            rows_of_b::copy(b, depth, 0, present, packed_b, Columns * lane_count);
            constexpr int max_rows = traits::max_rows(Columns);
            index_t row = 0;
            const auto multiply = [&]<int Rows>(std::integral_constant<int, Rows>) {
                multiply_runs<Rows, Columns>(a.data + row * a.row_stride, a.row_stride, packed_b, runs, c.data + row * c.row_stride,
                                             c.row_stride, present);
                row += Rows;
            };
            if constexpr (Columns > 1) {
                for_each_piece(rows, max_rows, [&](index_t, index_t count) { with_constant<max_rows>(count, multiply); });
            } else { // of the tall tiles of a narrow panel not every height is worth an instance
                while (row < rows)
                    if (const auto left = std::min<index_t>(rows - row, max_rows); left < 4) with_constant<3>(left, multiply);
                    else
                        with_constant<max_rows / 4>(left / 4, [&]<int Quarters>(std::integral_constant<int, Quarters>) {
                            multiply(std::integral_constant<int, 4 * Quarters>{});
                        });
            }
        }
    };

    /// What the sums begin with.
    static void begin(const row_block<const T>& start, const row_block<T>& c, index_t rows, index_t columns) {
        if (start.data == c.data && start.channel_stride == 1) return;
        for (index_t r = 0; r < rows; ++r) {
            T* const to = c.data + r * c.row_stride;
            if (!start.data) {
                std::fill_n(to, columns, T{0});
                continue;
            }
            const T* const from = start.data + r * start.row_stride;
            if (start.channel_stride == 1) std::copy_n(from, columns, to);
            else
                for (index_t n = 0; n < columns; ++n) to[n] = from[n * start.channel_stride];
        }
    }

    /// Rows of A at most that are few: blocks of B that were packed for them would be read but once.
    static constexpr index_t max_few = 4;
    /// C += A B for few rows, from the columns of B, whose numbers lie side by side: a square of them after the other is transposed in
    /// registers, down the whole depth, so that memory is read in order.
    void multiply_few(const row_block<const T>& a, const row_block<const T>& columns_of_b, const row_block<T>& c, index_t columns,
                      const extent& pieces) const {
        with_constant<max_few>(rows_, [&]<int Rows>(std::integral_constant<int, Rows>) {
            for (index_t first = 0; first < columns; first += lane_count)
                multiply_register<Rows>(a, columns_of_b.from(first), c.from(0, first), std::min(lane_count, columns - first), pieces);
        });
    }
    /// Of a register of columns.
    template <int Rows>
    void multiply_register(const row_block<const T>& a, const row_block<const T>& b, const row_block<T>& c, index_t present,
                           const extent& pieces) const {
        lanes total[std::size_t{Rows}];
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) total[r] = lanes::load_first(c.address(r), present);
        for (auto p = pieces.first; p < std::min(depth_pieces(depth_), pieces.first + pieces.count); ++p) {
            const auto within = depth_piece(depth_, p);
            const T* const left = a.address(0, within.first);
            lanes sum[std::size_t{Rows}];
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) sum[r] = lanes(T{0});
            const auto add = [&](index_t k, const lanes& column) __attribute__((always_inline)) {
#pragma GCC unroll 4
                for (int r = 0; r < Rows; ++r) sum[r] = fma(lanes(left[r * a.row_stride + k * a.channel_stride]), column, sum[r]);
            };
            for_each_column<T, T>(b.address(0, within.first), b.row_stride, present, within.count, no_prefetch(), add);
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) total[r] += sum[r];
        }
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) total[r].store_first(c.address(r), present);
    }

    /// C += A B for the runs of one piece of the depth.
    template <int Rows, int Columns>
    [[gnu::noinline]] static void multiply_runs(const E* a, index_t a_row, const E* b, std::span<const depth_run> runs, T* c, index_t c_row,
                                                index_t columns) {
        matrix_tile<Rows, Columns, T> tile;
        tile.zero();
        for (index_t i = 0; i < Rows; ++i) // read at the end
            for (index_t n = 0; n < Columns; ++n) simd::prefetch(c + i * c_row + n * lane_count);
        for (const auto& run : runs) {
            const E *left = a + run.first, *right = b + run.first * Columns * lane_count;
            constexpr index_t line = alignment / sizeof(E);
            for (index_t terms = run.count; terms > 0; terms -= line, left += line, right += line * Columns * lane_count) {
                for (index_t i = 0; i < Rows; ++i)
                    simd::prefetch(left + (Rows + i) * a_row); // the rows of the next tile, which may lie far apart
                tile.multiply_add(left, a_row, unit_stride{}, right, Columns * lane_count, std::min(line, terms));
            }
        }
        if (columns == Columns * lane_count) return tile.add_to(c, c_row);
        T sums[static_cast<std::size_t>(Rows * Columns * lane_count)];
        tile.store(sums, Columns * lane_count);
        for (index_t i = 0; i < Rows; ++i)
            for (index_t n = 0; n < columns; ++n) c[i * c_row + n] += sums[i * Columns * lane_count + n];
    }

    index_t rows_, depth_, columns_;
};

} // namespace attn::kernel
