// Selected key blocks: each block of queries has a list of the blocks of keys that it sees.
#pragma once

#include "../core/tensor.hpp"
#include "bit_table.hpp"
#include "schedule.hpp"

#include <memory>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// Selected key blocks: query i sees key j if the block floor(j / key_block) is in list floor((i - first_query) / query_block).
/// table: (entries, heads or 1, query blocks, list), the numbers of key blocks in any order; a number that is no block's, such as -1, is an
/// empty place. Entry b mod entries is for batch entry b. It is copied and sorted once, into memory that copies of the pattern share;
/// select_blocks makes one, and select_tokens one of single queries and keys. O(n list key_block) pairs: the cost follows the lists.
/// Combine it with causal. Throws argument_error for a block below 1 or a list that names a block twice, shape_error for a table without
/// memory; refused: keys below 0, queries that the table has no list of.
/// Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs"; Yuan et al. 2025, "Native Sparse Attention".
class selected {
public:
    static constexpr bool compares_positions = false;

    /// Blocks of so many queries, and of so many keys. The first list is that of the queries from first_query on.
    selected(const attn::detail::read_view<index_t>& table, index_t query_block, index_t key_block, index_t first_query = 0)
        : size_(table.shape()), query_block_(query_block), key_block_(key_block), first_query_(first_query) {
        detail::check_view("selected", "table", table);
        if (query_block < 1 || key_block < 1)
            detail::raise(
                argument_error("selected", "blocks", "are of ", query_block, " queries and ", key_block, " keys: 1 at least is needed"));
        std::vector<index_t> lists;
        lists.reserve(static_cast<std::size_t>(size_.size()));
        detail::for_each_row(size_, [&](index_t b, index_t h, index_t row) { add_list(table, b, h, row, lists); });
        lists_ = std::make_shared<const std::vector<index_t>>(std::move(lists));
    }
    /// Blocks of keys as long as those of queries.
    selected(const attn::detail::read_view<index_t>& table, index_t block) : selected(table, block, block) {}

    auto at(index_t batch, index_t head) const {
        const auto plane = detail::table_place(size_, batch, head).plane(size_);
        return block_lists{lists_->data() + plane * size_.tokens * size_.channels, size_.channels, query_block_, key_block_, first_query_};
    }
    bool heads_alike() const { return size_.heads == 1; }
    index_t queries_alike() const { return query_block_; }
    void check(const pattern_context& context) const {
        const auto name = detail::named("selected", size_, query_block_, key_block_);
        context.require_broadcast(size_, name);
        const auto queries = std::min(detail::product(size_.tokens, query_block_), farthest_position);
        context.require_inside(first_query_, first_query_ + queries, 0, farthest_position, name);
    }

private:
    /// The lists of one batch entry and head, each in rising order; what is left of a list is filled with `no_block`.
    struct block_lists {
        static constexpr index_t no_block = std::numeric_limits<index_t>::max();
        static constexpr bool lists_keys = true;

        const index_t* lists;
        index_t length, query_block, key_block, first_query;

        /// How many of a list's blocks lie in first .. last.
        index_t count(index_t row, index_t first, index_t last) const {
            const auto *const begin = lists + row * length, *const end = begin + length;
            return std::upper_bound(begin, end, last) - std::lower_bound(begin, end, first);
        }
        bool visible(index_t i, index_t j) const { return count((i - first_query) / query_block, j / key_block, j / key_block) > 0; }
        visibility visible(const position_range& i, const position_range& j) const {
            const auto rows = floor_div(i - first_query, query_block), columns = floor_div(j, key_block);
            bool all = true, none = true;
            for (auto row = rows.first; row <= rows.last && (all || none); ++row) {
                const auto seen = count(row, columns.first, columns.last);
                all = all && seen == columns.last - columns.first + 1;
                none = none && seen == 0;
            }
            return {all, none};
        }
        auto visible(const QueryLanes auto& i, index_t j) const {
            auto of_table = i;
            of_table.first -= first_query;
            return detail::mask_of_blocks(of_table, query_block, [&](index_t row) { return count(row, j / key_block, j / key_block) > 0; });
        }
        /// Calls f(number, mask) for the keys of a run that are listed, with the queries that see them.
        void list(const QueryLanes auto& i, const key_run& keys, const auto& f) const {
            const auto last = keys.positions().last;
            for (index_t lane = 0, end; lane < i.count; lane = end) {
                const auto row_of = [&](index_t at) { return (i.first - first_query + at * i.step) / query_block; };
                const auto row = row_of(lane);
                for (end = lane + 1; end < i.count && row_of(end) == row;) ++end;
                const auto seen = detail::mask_of(i, ~std::uint64_t{0} >> (64 - (end - lane)) << lane);
                const auto *const begin = lists + row * length, *const stop = begin + length;
                for (const auto* at = std::lower_bound(begin, stop, keys.first / key_block); at != stop && *at <= last / key_block; ++at) {
                    const auto from = std::max<index_t>(0, *at * key_block - keys.first), to = (*at + 1) * key_block - keys.first;
                    for (auto number = (from + keys.step - 1) / keys.step; number < keys.count && number * keys.step < to; ++number)
                        f(number, seen);
                }
            }
        }
    };

    static void add_list(const tensor_view<const index_t>& table, index_t b, index_t h, index_t row, std::vector<index_t>& lists) {
        constexpr auto none = block_lists::no_block;
        const auto begin = std::ssize(lists);
        for (index_t e = 0; e < table.shape().channels; ++e) lists.push_back(table(b, h, row, e) < 0 ? none : table(b, h, row, e));
        std::sort(lists.begin() + begin, lists.end());
        const auto twice = std::adjacent_find(lists.begin() + begin, lists.end(), [](index_t x, index_t y) { return x == y && x != none; });
        if (twice != lists.end())
            detail::raise(argument_error("selected", "table", "names block ", *twice, " twice for query block ", row));
    }

    shape size_;
    index_t query_block_, key_block_, first_query_;
    std::shared_ptr<const std::vector<index_t>> lists_;
};

} // namespace attn::pattern
