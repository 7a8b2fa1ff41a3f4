#pragma once

#include "pattern.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

struct shorter_than {
    index_t length;

    constexpr auto visible(auto, auto j) const { return j < length; }
};

} // namespace attn::detail

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// Padded batches: batch entry b has the keys before absolute position length[b], j < length[b]. The lengths are the caller's memory,
/// one for each batch entry. Refused: another number of them, a negative one, and one beyond the keys there are. A call of some of the
/// keys, whose lengths are those of all, gives its positions; without them it is taken to have all keys.
struct lengths {
    static constexpr bool compares_positions = false;
    borrowed<const index_t> length;

    constexpr detail::shorter_than at(index_t batch, index_t) const { return {length[static_cast<std::size_t>(batch)]}; }
    constexpr bool heads_alike() const { return true; }

    void check(const pattern_context& context) const {
        const auto name = [&] { return "lengths{" + std::to_string(length.size()) + " values}"; };
        if (std::ssize(length) != context.batch) context.refuse(name(), "is for another batch than ", context.batch);
        for (const auto value : length) {
            if (value < 0) context.refuse(name(), "holds the length ", value);
            if (value > context.end_key && !context.where.given())
                context.refuse(name(), "holds the length ", value, ", but there are ", context.end_key,
                               " keys; if they are some of a longer sequence, give their positions");
        }
    }
    void check_apart(const output_memory& out) const { out.require_apart("the lengths of the pattern", length); }
};

} // namespace attn::pattern
