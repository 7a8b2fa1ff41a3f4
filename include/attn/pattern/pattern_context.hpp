// What patterns, and score functions, are checked against.
#pragma once

#include "../core/inputs.hpp"
#include "../core/shape.hpp"

#include <string>
#include <string_view>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What a pattern is about to be used on: the operation that errors name, the counts, and the absolute positions that occur in any
/// batch entry (queries first_query .. end_query - 1, keys first_key .. end_key - 1).
struct pattern_context {
    std::string_view operation = "pattern";
    index_t batch = 1;
    index_t heads = 1;
    index_t first_query = 0, end_query = 0;
    index_t first_key = 0, end_key = 0;
    positions where = {}; ///< of each batch entry
    index_t queries = 0;  ///< of each batch entry
    index_t keys = 0;     ///< of each batch entry

    /// Throws argument_error. `pattern` is the pattern with its numbers, "strided{0}".
    [[noreturn, gnu::cold]] void refuse(std::string_view pattern, const auto&... problem) const {
        detail::raise(argument_error(operation, "pattern", pattern, " ", problem...));
    }
    /// Throws argument_error unless a parameter is at least `least`. Here and below name() gives the pattern with its numbers: only a
    /// refusal spells it out, a call that is fine allocates nothing.
    void require_at_least(index_t least, index_t value, const auto& name, const char* parameter) const {
        if (value < least) refuse(name(), "needs a ", parameter, " of at least ", least);
    }
    /// Throws argument_error unless a table of that many batch entries and heads serves all: its batch entries are repeated, image after
    /// image, and its heads are 1 or the context's number.
    void require_broadcast(const shape& table, const auto& name) const {
        if (!repeats(table.batch)) refuse(name(), "is for another batch than ", batch);
        if (table.heads != 1 && table.heads != heads) refuse(name(), "is for another number of heads than ", heads);
    }
    /// Throws argument_error if it is open how queries stand beside keys: nothing was given, and there are not as many of both. what:
    /// "pattern" or "score", which compares them.
    void require_positions(const char* what) const {
        if (!where.given() && queries != keys && queries != 0 && keys != 0) refuse_positions(what);
    }
    /// Throws argument_error: it is open how queries stand beside keys.
    [[noreturn, gnu::cold]] void refuse_positions(const char* what) const {
        const auto n = std::to_string(queries), m = std::to_string(keys);
        detail::raise(argument_error(operation, "positions", "are not given, but q has ", n, " tokens and k ", m, ", and the ", what,
                                     " compares their positions: attn::top_left() puts the first query beside the first key, "
                                     "attn::bottom_right(",
                                     n, ", ", m, ") the last beside the last"));
    }
    /// Whether so many entries of a table serve all batch entries, image after image.
    bool repeats(index_t entries) const { return entries > 0 ? batch % entries == 0 : batch == 0; }
    /// The positions of one batch entry, as if there were no other.
    pattern_context entry(index_t b) const {
        auto one = *this;
        one.first_query = where.first_query[b], one.end_query = one.first_query + queries;
        one.first_key = where.first_key[b], one.end_key = one.first_key + keys;
        return one;
    }
    /// Throws argument_error unless all positions lie in a table for the queries query_begin .. query_end - 1 and the keys likewise.
    void require_inside(index_t query_begin, index_t query_end, index_t key_begin, index_t key_end, const auto& name) const {
        const auto outside = [&](const char* what, index_t first, index_t end, index_t begin, index_t limit) {
            if (first < end && (first < begin || end > limit))
                refuse(name(), "is for ", what, " ", begin, " .. ", limit - 1, ", not ", first, " .. ", end - 1);
        };
        outside("queries", first_query, end_query, query_begin, query_end);
        outside("keys", first_key, end_key, key_begin, key_end);
    }
};

namespace detail {

/// A function that says "local{3, 4}": what refusals call a pattern of such numbers.
auto named(const char* pattern, const auto&... numbers) {
    return [=] {
        std::string text(pattern);
        ((text.append(text.find('{') == text.npos ? "{" : ", ").append(piece_of(numbers))), ...);
        return text.append("}");
    };
}

/// Where a table that serves all batch entries and heads, as require_broadcast has it, holds the numbers of one of each.
struct table_place {
    index_t entry, head;

    constexpr table_place(const shape& table, index_t batch, index_t of_head)
        : entry(table.batch <= 1 ? 0 : batch % table.batch), head(table.heads == 1 ? 0 : of_head) {}
    /// The number of that entry and head, of all in the table.
    constexpr index_t plane(const shape& table) const { return entry * table.heads + head; }
};

} // namespace detail

} // namespace attn
