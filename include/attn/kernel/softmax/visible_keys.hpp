// Which keys a query block sees: a pattern behind an interface, so that the mainloop is compiled once for all of them.
#pragma once

#include "../../pattern/narrowed.hpp"
#include "../../pattern/passes.hpp"
#include "key_reader.hpp"
#include "query_block.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// A pattern, pass by pass (for_each_pass): what is asked of it once per query block and key block.
class visible_keys {
public:
    /// In place of a pass: the pattern as a whole.
    static constexpr index whole = -1;

    /// How many passes some head may need.
    virtual index passes() const = 0;
    /// Whether all heads have the same passes in the same steps, so that some of them can share a query block.
    virtual bool heads_alike() const = 0;
    /// The step of the residue classes that a head's pass runs in, 0 if the head has no such pass.
    virtual index step(index batch, index head, index pass) const = 0;
    /// What is known of all pairs of a box.
    virtual visibility of_box(const query_block& queries, index pass, const range& keys) const = 0;
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
    bool heads_alike() const override {
        using bound = decltype(at(std::declval<const P&>(), index{}, index{}));
        return !attn::detail::HasAt<P> || (max_passes<P> == 1 && !attn::detail::HasStep<bound>);
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
    static void for_each_head(const query_block& queries, F&& f) {
        if constexpr (attn::detail::HasAt<P>) {
            for (index head = 0; head < queries.heads; ++head) f(queries.first_head + head, index{1});
        } else {
            f(queries.first_head, queries.heads);
        }
    }

    const P& pattern_;
    index queries_, keys_; ///< how many there are
    const positions& positions_;
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

/// A key block that some row sees: whether all rows see all of it.
struct visible_block {
    index number;
    bool all;
};

/// Calls f(visible_block) for those of the key blocks from .. end - 1, in order, found by bisection.
template <class F>
void for_each_visible_block(const visible_keys& pattern, const query_block& queries, index pass, const key_blocks& blocks, index from, index end,
                            const F& f) {
    const auto keys = blocks.run(from, end);
    if (keys.count == 0) return;
    const auto seen = pattern.of_box(queries, pass, keys.positions());
    if (seen.is_none()) return;
    if (seen.is_all()) {
        for (auto block = from; block < end; ++block) f(visible_block{block, true});
    } else if (end - from == 1) {
        f(visible_block{from, false});
    } else {
        const auto middle = from + (end - from) / 2;
        for_each_visible_block(pattern, queries, pass, blocks, from, middle, f);
        for_each_visible_block(pattern, queries, pass, blocks, middle, end, f);
    }
}

} // namespace attn::kernel
