// Trees of drafts: tokens of which several may follow the same one.
#pragma once

#include "bit_table.hpp"

#include <memory>
#include <span>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET::pattern {

/// A tree of drafts behind the tokens that are settled, those before position `first`: draft t stands at first + t and sees all settled
/// tokens, itself and its ancestors, parents[t] and so on; a draft of parent -1 follows the last settled token. Settled queries see what
/// causal shows. One call then scores all branches; see sequence::keep. Throws argument_error if a parent is not an earlier draft, or
/// positions are beyond farthest_position; refused: queries and keys behind the drafts. Memory: a bit for each pair of drafts, shared by
/// copies.
/// Miao et al. 2024, "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative Inference and Verification".
class draft_tree {
public:
    /// The tree in which draft t follows draft parents[t].
    draft_tree(std::span<const index_t> parents, index_t first) : first_(first), drafts_(std::ssize(parents)) {
        detail::check_positions("draft_tree", "first", first, drafts_);
        std::vector<std::uint64_t> words(detail::to_size(detail::bit_table::word_count(drafts_, drafts_)));
        const auto see = [&](index_t t, index_t j) { words[static_cast<std::size_t>(t / 64 * drafts_ + j)] |= std::uint64_t{1} << t % 64; };
        for (index_t t = 0; t < drafts_; ++t) {
            const auto parent = parents[static_cast<std::size_t>(t)];
            if (parent < -1 || parent >= t)
                detail::raise(
                    argument_error("draft_tree", "parents", "say that draft ", t, " follows ", parent, ", which is no earlier one"));
            for (auto j = t; j >= 0; j = parents[static_cast<std::size_t>(j)]) see(t, j);
        }
        words_ = std::make_shared<const std::vector<std::uint64_t>>(std::move(words));
    }

    bool visible(index_t i, index_t j) const {
        if (i < first_ || j < first_) return j <= i;
        return table().bit(i - first_, j - first_);
    }
    visibility visible(const position_range& i, const position_range& j) const {
        return {j.last < first_ ? j.last <= i.first : i.first == i.last && j.first == j.last && visible(i.first, j.first),
                j.first > i.last};
    }
    auto visible(const QueryLanes auto& i, index_t j) const {
        return detail::mask_of_each(i, [&](index_t query) { return visible(query, j); });
    }
    void check(const pattern_context& context) const {
        const auto name = detail::named("draft_tree", drafts_, first_);
        context.require_inside(-farthest_position, first_ + drafts_, -farthest_position, first_ + drafts_, name);
    }

private:
    detail::bit_table table() const { return {words_->data(), drafts_, drafts_}; }

    index_t first_, drafts_;
    std::shared_ptr<const std::vector<std::uint64_t>> words_;
};

} // namespace attn::pattern
