#pragma once

#include "../core/tensor_view.hpp"
#include "bit_table.hpp"

#include <bit>
#include <cstring>
#include <memory>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// One head's mask: its bits, and for every 16 queries the number of visible pairs before every 8th key, so that how many there are
/// in a box of boxes is a difference.
struct tile_plane {
    static constexpr index_t box_rows = 16, box_columns = 8;

    bit_table table;
    const index_t* visible_before;
    index_t first_query, first_key;
    bool any_query; // one row that stands for all

    static constexpr index_t counts_per_row(index_t columns) { return (columns + box_columns - 1) / box_columns + 1; }
    static constexpr index_t box_row_count(index_t rows) { return (rows + box_rows - 1) / box_rows; }

    constexpr index_t row_of(index_t i) const { return any_query ? 0 : i - first_query; }

    constexpr bool visible(index_t i, index_t j) const { return table.bit(row_of(i), j - first_key); }

    constexpr visibility visible(const position_range& i, const position_range& j) const {
        const auto row = row_of(i.first), last_row = row_of(i.last), column = j.first - first_key, last_column = j.last - first_key;
        const auto from = row / box_rows, to = last_row / box_rows + 1;
        const auto left = column / box_columns, right = last_column / box_columns + 1;
        const auto pairs =
            (std::min(table.rows, to * box_rows) - from * box_rows) * (std::min(table.columns, right * box_columns) - left * box_columns);
        const auto counts = counts_per_row(table.columns);
        index_t seen = 0;
        for (auto box = from; box < to; ++box) seen += visible_before[box * counts + right] - visible_before[box * counts + left];
        if (seen == 0 || seen == pairs) return seen != 0;

        // Boxes that begin elsewhere or skip positions: a small one is asked pair by pair.
        const auto row_step = any_query ? 0 : i.step, column_step = j.step;
        const auto queries = row_step == 0 ? 1 : (last_row - row) / row_step + 1;
        const auto keys = column_step == 0 ? 1 : (last_column - column) / column_step + 1;
        if (queries * keys == pairs || queries > bit_table::word_rows || keys > box_columns) return visibility::some;
        auto all = ~std::uint64_t{0}, any = std::uint64_t{0};
        for (index_t k = 0; k < keys; ++k) {
            const auto bits = table.bits(row, std::max<index_t>(row_step, 1), queries, column + k * column_step);
            all &= bits;
            any |= bits;
        }
        const auto mask = ~std::uint64_t{0} >> (64 - queries);
        return {(all & mask) == mask, (any & mask) == 0};
    }

    constexpr auto visible(const QueryLanes auto& i, index_t j) const {
        if (any_query) return mask_of(i, table.bit(0, j - first_key) ? ~std::uint64_t{0} : 0);
        return mask_of(i, table.bits(i.first - first_query, i.step, i.count, j - first_key));
    }
};

} // namespace attn::detail

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// An opaque mask as a pattern: what is only known pair by pair is looked at once, and then costs one load for up to 64 queries of a
/// key; boxes of 16 queries and 8 keys that are wholly hidden are skipped, wholly visible ones need no mask. Made once and reused:
/// copies share the table, of 3 n m / 16 bytes for each head and batch entry that the mask tells apart.
class tiles {
public:
    static constexpr bool compares_positions = false;

    /// A bool tensor, true = visible, (entries, heads or 1, queries or 1, keys): what is 1, or has stride 0, serves all; batch entry b has
    /// entry b mod entries, as those of an image's windows are repeated, image after image. Row 0 is the query first_query and column 0 the
    /// key first_key: one number, or some that are repeated likewise. The tensor and they are not needed afterwards. Throws attention_error
    /// if it has no memory.
    explicit tiles(const attn::detail::read_view<bool>& mask, const per_batch& first_query = 0, const per_batch& first_key = 0)
        : size_(distinct(mask)), any_query_(size_.tokens == 1) {
        detail::check_view("tiles", "mask", mask);
        look(first_query, first_key, [&](index_t batch, index_t head, index_t row, std::uint8_t* line) {
            const auto* from = mask.row(batch, head, row);
            if (const auto stride = mask.strides().channels; stride == 1)
                std::copy_n(reinterpret_cast<const std::uint8_t*>(from), size_.channels, line);
            else
                for (index_t column = 0; column < size_.channels; ++column) line[column] = from[column * stride] ? 1 : 0;
        });
    }

    /// A function of positions, visible(i, j), that cannot be evaluated on ranges: it is called for n queries from first_query and m
    /// keys from first_key, and not needed afterwards. Throws attention_error if n or m is negative, or the table would be too large.
    template <class F>
        requires std::predicate<const F&, index_t, index_t>
    tiles(const F& visible, index_t n, index_t m, index_t first_query = 0, index_t first_key = 0)
        : size_{.tokens = n, .channels = m}, any_query_(false) {
        detail::check_shape<bool>("tiles", "size", size_);
        look(first_query, first_key, [&](index_t, index_t, index_t row, std::uint8_t* line) {
            for (index_t column = 0; column < m; ++column) line[column] = visible(first_query + row, first_key + column) ? 1 : 0;
        });
    }

    detail::tile_plane at(index_t batch, index_t head) const {
        const auto plane = detail::table_place(size_, batch, head).plane(size_);
        return {{planes_->words.data() + plane * words_per_plane(), size_.tokens, size_.channels},
                planes_->visible_before.data() + plane * counts_per_plane(),
                planes_->first_query(batch),
                planes_->first_key(batch),
                any_query_};
    }

    bool heads_alike() const { return size_.heads == 1; }

    void check(const pattern_context& context) const {
        const auto name = detail::named("tiles", size_);
        context.require_broadcast(size_, name);
        const auto check_entry = [&](const pattern_context& c, index_t first_query, index_t first_key) {
            c.require_inside(any_query_ ? c.first_query : first_query,
                             any_query_ ? c.end_query : detail::saturating_sum(first_query, size_.tokens), first_key,
                             detail::saturating_sum(first_key, size_.channels), name);
        };
        for (const auto* first : {&planes_->first_queries, &planes_->first_keys})
            if (!context.repeats(std::ssize(*first)) && first->size() != 1)
                context.refuse(name(), "has ", first->size(), " positions for a batch of ", context.batch);
        if (planes_->first_queries.size() == 1 && planes_->first_keys.size() == 1)
            return check_entry(context, planes_->first_query(0), planes_->first_key(0));
        for (index_t b = 0; b < context.batch; ++b) check_entry(context.entry(b), planes_->first_query(b), planes_->first_key(b));
    }

private:
    struct planes {
        std::vector<std::uint64_t> words;
        std::vector<index_t> visible_before;
        std::vector<index_t> first_queries, first_keys; // one for all batch entries, or some that are repeated

        index_t first_query(index_t batch) const { return first_queries[static_cast<std::size_t>(batch % std::ssize(first_queries))]; }
        index_t first_key(index_t batch) const { return first_keys[static_cast<std::size_t>(batch % std::ssize(first_keys))]; }
    };

    static shape distinct(const tensor_view<const bool>& mask) {
        auto size = mask.shape();
        if (mask.strides().batch == 0) size.batch = std::min<index_t>(size.batch, 1);
        if (mask.strides().heads == 0) size.heads = std::min<index_t>(size.heads, 1);
        if (mask.strides().tokens == 0) size.tokens = std::min<index_t>(size.tokens, 1);
        return size;
    }

    static std::vector<index_t> checked(const char* argument, const per_batch& first) {
        std::vector<index_t> numbers(1, first.repeated(0));
        if (!first.shared()) numbers.assign(first.each().begin(), first.each().end());
        if (numbers.empty()) detail::raise(argument_error("tiles", argument, "has no number"));
        for (const auto number : numbers) detail::check_positions("tiles", argument, number, 0);
        return numbers;
    }
    index_t words_per_plane() const { return detail::bit_table::word_count(size_.tokens, size_.channels); }
    index_t counts_per_plane() const {
        return detail::tile_plane::box_row_count(size_.tokens) * detail::tile_plane::counts_per_row(size_.channels);
    }

    /// read(batch, head, row, line) writes a row of the mask as bytes 0 and 1.
    void look(const per_batch& first_query, const per_batch& first_key, const auto& read) {
        const auto made = std::make_shared<planes>();
        made->first_queries = checked("first_query", first_query);
        made->first_keys = checked("first_key", first_key);
        const auto count = size_.batch * size_.heads;
        made->words.resize(static_cast<std::size_t>(count * words_per_plane()));
        made->visible_before.resize(static_cast<std::size_t>(count * counts_per_plane()));
        const auto padded = 8 * (detail::tile_plane::counts_per_row(size_.channels) - 1);
        std::vector<std::uint8_t> line(static_cast<std::size_t>(padded)), octets(line.size());
        for (index_t plane = 0; plane < count; ++plane)
            for (index_t row = 0; row < size_.tokens; row += 8) {
                std::ranges::fill(octets, std::uint8_t{0});
                for (index_t k = 0; k < std::min<index_t>(8, size_.tokens - row); ++k) {
                    read(plane / size_.heads, plane % size_.heads, row + k, line.data());
                    add_row(line, static_cast<int>(k), octets);
                }
                add_octets(octets, plane, row, *made);
            }
        planes_ = made;
    }

    // Eight rows become one row of bytes, eight columns at a time: a byte of 0 or 1, shifted by less than 8, stays in its byte.
    static void add_row(const std::vector<std::uint8_t>& line, int k, std::vector<std::uint8_t>& octets) {
        for (std::size_t column = 0; column < line.size(); column += 8) {
            std::uint64_t bytes, sum;
            std::memcpy(&bytes, line.data() + column, 8);
            std::memcpy(&sum, octets.data() + column, 8);
            sum |= bytes << k;
            std::memcpy(octets.data() + column, &sum, 8);
        }
    }

    void add_octets(const std::vector<std::uint8_t>& octets, index_t plane, index_t row, planes& to) const {
        const auto columns = size_.channels, counts = detail::tile_plane::counts_per_row(columns);
        auto* word = to.words.data() + plane * words_per_plane() + row / detail::bit_table::word_rows * columns;
        for (index_t column = 0; column < columns; ++column)
            word[column] |= std::uint64_t{octets[static_cast<std::size_t>(column)]} << row % detail::bit_table::word_rows;
        auto* before = to.visible_before.data() + plane * counts_per_plane() + row / detail::tile_plane::box_rows * counts;
        index_t seen = 0;
        for (index_t box = 0; box + 1 < counts; ++box) {
            std::uint64_t bits;
            std::memcpy(&bits, octets.data() + 8 * box, 8);
            seen += std::popcount(bits);
            before[box + 1] += seen;
        }
    }

    shape size_;
    bool any_query_;
    std::shared_ptr<const planes> planes_;
};

} // namespace attn::pattern
