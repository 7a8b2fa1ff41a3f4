// Which keys a query block sees: a pattern behind an interface, so that the mainloop is compiled once for all of them.
#pragma once

#include "../../pattern/narrowed.hpp"
#include "../../pattern/passes.hpp"
#include "key_reader.hpp"
#include "query_block.hpp"

#include <limits>
#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A pattern, pass by pass (for_each_pass): what is asked of it once per query block and key block.
class visible_keys {
public:
    /// In place of a pass: the pattern as a whole.
    static constexpr index whole = -1;

    /// How many passes some head may need.
    virtual index passes() const = 0;
    /// Whether all heads of a batch entry see the same keys.
    virtual bool heads_alike() const = 0;
    /// Whether all heads have the same passes in the same steps, so that some of them can share a query block.
    virtual bool steps_alike() const = 0;
    /// The step of the residue classes that a head's pass runs in, 0 if the head has no such pass.
    virtual index step(index batch, index head, index pass) const = 0;
    /// What is known of all pairs of a box.
    virtual visibility of_box(const query_block& queries, index pass, const range& keys) const = 0;
    /// Where the queries before `query` fall apart, if they do within `reach` positions: the last p <= query from which on they see no key
    /// before p, as a packed document begins. Else `query`.
    virtual index cut(index batch, index head, index pass, index query, index reach) const = 0;
    /// bits[j]: one bit per row of the block, whether it sees key j of the run.
    virtual void find(const query_block& queries, index pass, const key_run& keys, std::uint64_t* bits) const = 0;

protected:
    ~visible_keys() = default;
};

template <Scalar T, class Arch, Pattern P>
class visible_keys_of final : public visible_keys {
public:
    visible_keys_of(const P& pattern, const input_shapes& shapes, const positions& where)
        : pattern_(pattern), queries_(shapes.queries.tokens), keys_(shapes.keys.tokens), positions_(where) {}

    index passes() const override { return max_passes<P>; }
    bool heads_alike() const override { return attn::heads_alike(pattern_); }
    bool steps_alike() const override {
        using bound = decltype(at(std::declval<const P&>(), index{}, index{}));
        return attn::heads_alike(pattern_) || (max_passes<P> == 1 && !attn::detail::HasStep<bound>);
    }
    index step(index batch, index head, index pass) const override {
        index found = 0;
        on_pass(batch, head, pass, [&](const auto&, index step) { found = step; });
        return found;
    }
    visibility of_box(const query_block& queries, index pass, const range& keys) const override {
        const auto tokens = queries.tokens.positions();
        bool always = true, never = true;
        for_each_head(queries, [&](index head, index) {
            on_pass(queries.batch, head, pass, [&](const auto& pattern, index) {
                const visibility seen = pattern.visible(tokens, keys);
                always = always && seen.is_all();
                never = never && seen.is_none();
            });
        });
        return {always, never};
    }
    index cut(index batch, index head, index pass, index query, index reach) const override {
        const auto first_key = positions_.first_key[batch];
        auto found = query;
        on_pass(batch, head, pass, [&](const auto& pattern, index) {
            const auto sees_before = [&](index from, index key) {
                const auto before = std::min(key, first_key + keys_) - first_key;
                return before > 0 && !visibility(pattern.visible(range{from, query, 1}, range{first_key, first_key + before - 1, 1})).is_none();
            };
            auto low = std::max(query - reach, positions_.first_query[batch]), high = query;
            if (sees_before(query, low)) return;
            while (low < high) { // the first key that `query` sees
                const auto middle = high - (high - low) / 2;
                if (sees_before(query, middle)) high = middle - 1;
                else low = middle;
            }
            if (!sees_before(low, low)) found = low;
        });
        return found;
    }
    void find(const query_block& queries, index pass, const key_run& keys, std::uint64_t* bits) const override {
        std::fill_n(bits, keys.count, 0);
        for_each_head(queries, [&](index head, index copies) {
            on_pass(queries.batch, head, pass, [&](const auto& pattern, index) {
                const auto first = (head - queries.first_head) * queries.tokens.count;
                for_each_run_of(pattern, queries.tokens, keys, [&](const key_run& run, index number) {
                    const auto add = [&](index j, std::uint64_t seen) {
                        for (index copy = 0; copy < copies; ++copy) bits[number + j] |= seen << (first + copy * queries.tokens.count);
                    };
                    const auto present = simd::lane_bits::first(queries.tokens.count);
                    if (run.full) {
                        for (index j = 0; j < run.count; ++j) add(j, present.value);
                        return;
                    }
                    const auto positions = positions_of<T, Arch, query_block_traits<T, Arch>::max_rows>(queries.tokens);
                    const auto here = narrowed(pattern, queries.tokens.positions(), run.positions());
                    for (index j = 0; j < run.count; ++j) // a pattern may answer with one bool for all queries
                        add(j, (present && here.visible(positions, run.first + j * run.step)).value);
                });
            });
        });
    }

private:
    /// f(pattern, step) for one pass of one head, if the head has that many.
    template <class F>
    void on_pass(index batch, index head, index pass, F&& f) const {
        if (pass == whole) {
            const auto pattern = at(pattern_, batch, head);
            return f(pattern, step_of(pattern));
        }
        index number = 0;
        for_each_pass(at(pattern_, batch, head), positions_.first_query[batch], queries_, positions_.first_key[batch], keys_,
                      [&](const auto& pattern, index step) {
                          if (number++ == pass) f(pattern, step);
                      });
    }
    /// f(run, number of its first key) for the parts of a run that a pattern does not rule out.
    template <class F>
    static void for_each_run_of(const auto& pattern, const query_tile& tokens, const key_run& keys, const F& f, index number = 0) {
        constexpr index small = 16; // keys that are not worth a question
        const visibility seen = pattern.visible(tokens.positions(), keys.positions());
        if (seen.is_none()) return;
        if (seen.is_all() || keys.count <= small) return f({keys.first, keys.count, keys.step, seen.is_all()}, number);
        const auto half = std::max(small, keys.count / 2 / small * small);
        for_each_run_of(pattern, tokens, {keys.first, half, keys.step, false}, f, number);
        for_each_run_of(pattern, tokens, {keys.first + half * keys.step, keys.count - half, keys.step, false}, f, number + half);
    }
    /// f(head, copies): each head of the block, or its first for all if they see the same.
    template <class F>
    void for_each_head(const query_block& queries, F&& f) const {
        const index copies = attn::heads_alike(pattern_) ? queries.heads : 1;
        for (index head = 0; head < queries.heads; head += copies) f(queries.first_head + head, copies);
    }

    const P& pattern_;
    index queries_, keys_; ///< how many there are
    const positions& positions_;
};

/// What a query block sees of one span of keys, found once for all heads that see the same: a run of keys for each key block that some row
/// sees something of, and one bit per row for each key where not every row sees all.
class visible_span {
public:
    struct part {
        key_run keys;
        const std::uint64_t* rows; ///< [keys] null if all see all
    };

    /// Spans of at most max_blocks key blocks.
    static constexpr index max_blocks = 8;

    visible_span() = default;
    visible_span(detail::scratch& memory, index block_keys) : block_keys_(block_keys), bits_(memory.take<std::uint64_t>(max_blocks, block_keys)) {}

    void forget() { asked_from_ = none; }
    /// The first span of which something is seen, of the key blocks from .. end - 1, unless it is known already. False if there is none.
    bool find(const visible_keys& pattern, const query_block& queries, index pass, const key_blocks& blocks, index from, index end) {
        if (from == asked_from_) return count_ > 0;
        asked_from_ = from;
        count_ = 0;
        for (end_ = from; end_ < end && count_ == 0;) {
            from = end_;
            end_ = std::min(end, (floor_div(from, max_blocks) + 1) * max_blocks);
            find_blocks(pattern, queries, pass, blocks, from, end_);
        }
        if (end_ < end && pattern.of_box(queries, pass, blocks.run(end_, end).positions()).is_none()) end_ = end;
        return count_ > 0;
    }
    /// Where the next one may begin.
    index end() const { return end_; }
    std::span<const part> parts() const { return {parts_, static_cast<std::size_t>(count_)}; }

private:
    static constexpr index none = std::numeric_limits<index>::min();

    /// By bisection.
    void find_blocks(const visible_keys& pattern, const query_block& queries, index pass, const key_blocks& blocks, index from, index end) {
        const auto keys = blocks.run(from, end);
        const auto seen = pattern.of_box(queries, pass, keys.positions());
        if (seen.is_none()) return;
        if (seen.is_all()) {
            for (auto block = from; block < end; ++block) parts_[count_++] = {blocks.run(block, block + 1), nullptr};
        } else if (end - from == 1) {
            find_rows(pattern, queries, pass, keys);
        } else {
            const auto middle = from + (end - from) / 2;
            find_blocks(pattern, queries, pass, blocks, from, middle);
            find_blocks(pattern, queries, pass, blocks, middle, end);
        }
    }
    /// Of one block, from the first key that some row sees to the last.
    void find_rows(const visible_keys& pattern, const query_block& queries, index pass, key_run keys) {
        auto* bits = bits_ + count_ * block_keys_;
        pattern.find(queries, pass, keys, bits);
        while (keys.count > 0 && bits[keys.count - 1] == 0) --keys.count;
        while (keys.count > 0 && *bits == 0) {
            ++bits;
            keys.first += keys.step;
            --keys.count;
        }
        if (keys.count > 0) parts_[count_++] = {keys, bits};
    }

    index block_keys_ = 0;
    std::uint64_t* bits_ = nullptr;
    index asked_from_ = none, end_ = 0, count_ = 0;
    part parts_[max_blocks];
};

/// Scores[keys][rows] of hidden keys become -infinity. visible: one bit per row for each key. rows: whole registers.
template <Scalar T, class Arch>
void hide_scores(T* scores, index keys, index rows, const std::uint64_t* visible) {
    using lanes = simd::lanes<T, Arch>;
    const lanes hidden = -std::numeric_limits<T>::infinity();
    const auto all = simd::lane_bits::first(lanes::size).value;
    for (index j = 0; j < keys; ++j) {
        for (index row = 0; row < rows; row += lanes::size) {
            T* const at = scores + j * rows + row;
            const auto seen = visible[j] >> row & all;
            if (seen == all) continue;
            (seen == 0 ? hidden : select(simd::lane_bits{seen}, lanes::load(at), hidden)).store(at);
        }
    }
}

} // namespace attn::kernel
