// The order in which the heads of a call are computed.
#pragma once

#include "../core/scalar.hpp"

#include <algorithm>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// One head of one batch entry.
struct head_place {
    index batch, head;
};

/// The heads of all batch entries in groups of at most `together`: in the order in which they usually lie in memory, or `by_head`, each
/// group from one head, so that what its batch entries share can be kept. Then the groups of the same entries still follow each other:
/// walking all 2048 windows of an image batch for one head, then for the next, took a third longer.
struct head_groups {
    index batch, heads, together;
    bool by_head;

    index count() const { return (columns() + together - 1) / together * rows(); }
    index size(index group) const { return std::min(together, columns() - group / rows() * together); }
    head_place at(index group, index number) const {
        const auto column = group / rows() * together + number;
        return by_head ? head_place{column, group % heads} : head_place{column / heads, column % heads};
    }
    /// What comes after it, or itself if it is the last.
    head_place after(index group, index number) const {
        if (number + 1 < size(group)) return at(group, number + 1);
        return group + 1 < count() ? at(group + 1, 0) : at(group, number);
    }

private:
    index rows() const { return by_head ? heads : 1; }
    index columns() const { return by_head ? batch : batch * heads; }
};

} // namespace attn::kernel
