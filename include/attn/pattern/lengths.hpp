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
/// one for each batch entry. Refused: another number of them, a negative one.
struct lengths {
    borrowed<const index_t> length;

    constexpr detail::shorter_than at(index_t batch, index_t) const { return {length[static_cast<std::size_t>(batch)]}; }
    constexpr bool heads_alike() const { return true; }

    void check(const pattern_context& context) const {
        const auto name = [&] { return "lengths{" + std::to_string(length.size()) + " values}"; };
        if (std::ssize(length) != context.batch) context.refuse(name(), "is for another batch than " + std::to_string(context.batch));
        for (const auto value : length)
            if (value < 0) context.refuse(name(), "holds the length " + std::to_string(value));
    }
    void check_apart(const output_memory& out) const { out.require_apart("the lengths of the pattern", length); }
};

} // namespace attn::pattern
