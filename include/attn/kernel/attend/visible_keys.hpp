// Which keys a query block sees: a pattern behind an interface, so that the mainloop is compiled once for all of them.
#pragma once

#include "../../pattern/narrowed.hpp"
#include "../../pattern/passes.hpp"
#include "query_block.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A pattern, pass by pass (for_each_pass): what is asked of it once per query block and key block.
class visible_keys {
public:
    /// The pattern as a whole, in place of a pass.
    static constexpr index_t whole = -1;

    /// How many passes some head may need.
    virtual index_t passes() const = 0;
    /// Whether all heads of a batch entry see the same keys.
    virtual bool heads_alike() const = 0;
    /// How many neighbouring queries see about the same keys.
    virtual index_t queries_alike() const = 0;
    /// Whether all heads have the same passes in the same steps, so that some of them can share a query block.
    virtual bool steps_alike() const = 0;
    /// The step of the residue classes that a head's pass runs in, 0 if the head has no such pass.
    virtual index_t step(index_t batch, index_t head, index_t pass) const = 0;
    /// What is known of all pairs of a box.
    virtual visibility of_box(const query_block& queries, index_t pass, const position_range& keys) const = 0;
    /// Where the queries before `query` fall apart, if they do within `reach` positions: the last p <= query from which on they see no key
    /// before p, as a packed document begins. Else `query`.
    virtual index_t cut(index_t batch, index_t head, index_t pass, index_t query, index_t reach) const = 0;
    /// bits[j]: one bit per row of the block, whether it sees key j of the run.
    virtual void find(const query_block& queries, index_t pass, const key_run& keys, std::uint64_t* bits) const = 0;

protected:
    ~visible_keys() = default;
};

template <Scalar T, Pattern P>
class visible_keys_of final : public visible_keys {
public:
    visible_keys_of(const P& pattern, const input_shapes& shapes, const positions& where)
        : pattern_(pattern), queries_(shapes.queries.tokens), keys_(shapes.keys.tokens), positions_(where) {}

    index_t passes() const override { return max_passes<P>; }
    bool heads_alike() const override { return attn::heads_alike(pattern_); }
    index_t queries_alike() const override { return attn::queries_alike(pattern_); }
    bool steps_alike() const override {
        using bound = decltype(at(std::declval<const P&>(), index_t{}, index_t{}));
        return attn::heads_alike(pattern_) || (max_passes<P> == 1 && !attn::detail::HasStep<bound>);
    }
    index_t step(index_t batch, index_t head, index_t pass) const override {
        index_t found = 0;
        on_pass(batch, head, pass, [&](const auto&, index_t step) { found = step; });
        return found;
    }
    visibility of_box(const query_block& queries, index_t pass, const position_range& keys) const override {
        const auto tokens = queries.tokens.positions();
        bool always = true, never = true;
        for_each_head(queries, [&](index_t head, index_t) {
            on_pass(queries.batch, head, pass, [&](const auto& pattern, index_t) {
                const visibility seen = pattern.visible(tokens, keys);
                always = always && seen.is_all();
                never = never && seen.is_none();
            });
        });
        return {always, never};
    }
    index_t cut(index_t batch, index_t head, index_t pass, index_t query, index_t reach) const override {
        const auto first_key = positions_.first_key[batch];
        auto found = query;
        on_pass(batch, head, pass, [&](const auto& pattern, index_t) {
            const auto sees_before = [&](index_t from, index_t key) {
                const auto before = std::min(key, first_key + keys_) - first_key;
                return before > 0 &&
                       !visibility(pattern.visible(position_range{from, query, 1}, position_range{first_key, first_key + before - 1, 1}))
                            .is_none();
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
    void find(const query_block& queries, index_t pass, const key_run& keys, std::uint64_t* bits) const override {
        std::fill_n(bits, keys.count, 0);
        for_each_head(queries, [&](index_t head, index_t copies) {
            on_pass(queries.batch, head, pass, [&](const auto& pattern, index_t) {
                const auto first = (head - queries.first_head) * queries.tokens.count;
                constexpr index_t grain = 8; // keys that are not worth a question
                const auto positions = positions_of<T, query_block_traits<T>::max_rows>(queries.tokens);
                const auto present = simd::lane_bits::first(queries.tokens.count);
                const auto add = [&](index_t j, const auto& seen) { // a pattern may answer with one bool for all queries
                    const auto rows = (present && seen).value;
                    for (index_t copy = 0; copy < copies; ++copy) bits[j] |= rows << (first + copy * queries.tokens.count);
                };
                const auto add_run = [&](const key_run& run) {
                    const auto number = (run.first - keys.first) / keys.step;
                    if (run.full) {
                        for (index_t j = 0; j < run.count; ++j) add(number + j, true);
                        return;
                    }
                    const auto here = narrowed(pattern, queries.tokens.positions(), run.positions());
                    for (index_t j = 0; j < run.count; ++j) add(number + j, here.visible(positions, run.first + j * run.step));
                };
                using of_box = decltype(narrowed(pattern, queries.tokens.positions(), keys.positions()));
                if constexpr (attn::detail::ListsKeys<of_box>)
                    narrowed(pattern, queries.tokens.positions(), keys.positions()).list(positions, keys, add);
                else if constexpr (attn::detail::AskedByKey<of_box>) add_run(keys);
                else for_each_run(pattern, queries.tokens, keys.first, (keys.count - 1) * keys.step + 1, grain, add_run);
            });
        });
    }

private:
    /// f(pattern, step) for one pass of one head, if the head has that many.
    void on_pass(index_t batch, index_t head, index_t pass, const auto& f) const {
        if (pass == whole) {
            const auto pattern = at(pattern_, batch, head);
            return f(pattern, step_of(pattern));
        }
        index_t number = 0;
        for_each_pass(at(pattern_, batch, head), positions_.first_query[batch], queries_, positions_.first_key[batch], keys_,
                      [&](const auto& pattern, index_t step) {
                          if (number++ == pass) f(pattern, step);
                      });
    }
    /// f(head, copies): each head of the block, or its first for all if they see the same.
    void for_each_head(const query_block& queries, const auto& f) const {
        const index_t copies = attn::heads_alike(pattern_) ? queries.heads : 1;
        for (index_t head = 0; head < queries.heads; head += copies) f(queries.first_head + head, copies);
    }

    const P& pattern_;
    index_t queries_, keys_; ///< how many there are
    const positions& positions_;
};

} // namespace attn::kernel
