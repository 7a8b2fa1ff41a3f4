// Talking-heads attention: any pattern, any score function, any two mixings of heads, never an n x m matrix.
#pragma once

#include "../parallel/executor.hpp"
#include "../pattern/narrowed.hpp"
#include "score_tile.hpp"
#include "talking_heads_tile.hpp"

namespace attn::kernel {

/// The pattern of a schedule for all heads together: a key is visited if any head sees it, and full if all do.
template <Pattern P>
struct over_heads {
    const P& pattern;
    index batch, heads;

    constexpr visibility visible(const range& i, const range& j) const { return of_all(i, j); }
    constexpr bool visible(index i, index j) const {
        for (index c = 0; c < heads; ++c)
            if (bool(at(pattern, batch, c).visible(i, j))) return true;
        return false;
    }
    /// The step that all heads promise.
    constexpr index common_step() const {
        index step = 0;
        for (index c = 0; c < patterns(); ++c) step = std::gcd(step, step_of(at(pattern, batch, c)));
        return std::max<index>(step, 1);
    }

private:
    /// Different ones, at most.
    constexpr index patterns() const { return detail::HasAt<P> ? heads : std::min<index>(heads, 1); }
    constexpr visibility of_all(const range& i, const range& j) const {
        bool all = heads > 0, none = true;
        for (index c = 0; c < patterns(); ++c) {
            const visibility seen = at(pattern, batch, c).visible(i, j);
            all = all && seen.is_all();
            none = none && seen.is_none();
        }
        return {all, none};
    }
};

/// What a call of talking-heads attention is made of; see talking_heads_attention. Shapes have been checked.
/// A panel of queries goes through all keys in blocks, all heads together. Without a second mixing the values are added on the way. With
/// one, they have to wait until every head knows its maximum and sum: the weights of all keys are kept, heads x m numbers per query of the
/// panel, if the workspace has room for them; else a second pass computes them again, by the same steps and thus to the same bits.
template <Scalar T, class Arch, Pattern P, ScoreFunction S>
class talking_heads {
public:
    const P& pattern;
    const S& score;
    double scale;
    std::span<const double> sinks;
    tensor_view<const double> logits_mix;
    std::span<const double> logits_bias;
    tensor_view<const double> weights_mix;
    std::span<const double> weights_bias;

    /// roomy: all that makes it fast, or else the least.
    std::size_t workspace_bytes(const input_shapes& s, index concurrency, bool roomy) const {
        if (s.queries.batch == 0) return 0; // there is no head whose score function could be asked
        detail::scratch memory;
        take_mixings(memory, tile_shape(s));
        return memory.used_bytes() + static_cast<std::size_t>(concurrency) * slice_bytes(s, roomy);
    }
    bool is_roomy(const input_shapes& s, const execution& run) const {
        return run.workspace().size_bytes() >= workspace_bytes(s, run.concurrency(), true);
    }

    void operator()(const inputs<T>& in, const outputs<T>& out, const execution& run) const {
        const auto shapes = shapes_of(in);
        const auto s = tile_shape(shapes);
        const auto batch = shapes.queries.batch, n = shapes.queries.tokens;
        if (batch * n == 0) return;
        const bool roomy = is_roomy(shapes, run);
        detail::scratch memory(run.workspace().bytes().data());
        auto mixings = take_mixings(memory, s);
        if (s.mixes_logits) mixings.logits.load(logits_mix, logits_bias, scored ? 1 : std::numbers::log2e);
        if (s.mixes_weights) mixings.weights.load(weights_mix, weights_bias, 1);
        std::byte* const slices = run.workspace().bytes().data() + memory.used_bytes();
        const auto bytes = slice_bytes(shapes, roomy);
        const auto parts = parts_of(n, roomy);

        index tasks = 0;
        const auto tiles_of = [&](index step) { return tile_count(n, tile_type::most_queries, step); };
        const auto step_of_entry = [&](index b) { return over_heads<P>{pattern, b, s.heads}.common_step(); };
        for (index b = 0; b < batch; ++b) tasks = std::max(tasks, (tiles_of(step_of_entry(b)) + parts - 1) / parts);
        run.for_each(batch * tasks, [&](index task, index slice) {
            const auto b = task / tasks, step = step_of_entry(b);
            const auto first = task % tasks * parts, last = std::min(first + parts, tiles_of(step));
            detail::scratch own(slices + static_cast<std::size_t>(slice) * bytes);
            panels work(*this, own, s, mixings, parts, roomy);
            std::array<query_tile, most_parts> tiles{};
            for (index t = first; t < last; ++t)
                tiles[static_cast<std::size_t>(t - first)] =
                    tile_at(t, in.positions.first_query[b], n, tile_type::most_queries, step, tile_type::lane_count);
            const std::span given(tiles.data(), static_cast<std::size_t>(std::max<index>(0, last - first)));
            if (step == 1 && !given.empty()) work.run(in, out, b, given);
            // Residue classes see different keys, so that their panels have no blocks in common.
            else
                for (const auto& tile : given) work.run(in, out, b, {&tile, 1});
        });
    }

private:
    using tile_type = talking_heads_tile<T, Arch>;
    using bound_score = decltype(score_at(std::declval<const S&>(), 0, 0));
    using score_type = score_tile<T, Arch, bound_score>;
    using lanes = simd::lanes<T, Arch>;
    static constexpr bool scored = !std::same_as<bound_score, identity_score>;
    static constexpr bool differs_by_head = attn::detail::HasAt<P>;
    /// Panels that walk the keys in lock-step, so that a block of keys and values comes from memory once for all of them. Of few queries it
    /// is not worth the fewer tasks: their keys and values stay in the caches.
    static constexpr index most_parts = 2;
    static constexpr index parts_of(index queries, bool roomy) { return roomy && queries > 512 ? most_parts : 1; }

    index heads_of(const input_shapes& s) const { return logits_mix.data() ? logits_mix.shape().tokens : s.queries.heads; }
    talking_heads_shape tile_shape(const input_shapes& s) const {
        const auto heads = heads_of(s);
        return {.query_heads = s.queries.heads,
                .heads = heads,
                .value_heads = weights_mix.data() ? weights_mix.shape().tokens : heads,
                .key_channels = s.queries.channels,
                .value_channels = s.values.channels,
                .keys = s.keys.tokens,
                .mixes_logits = logits_mix.data() != nullptr,
                .mixes_weights = weights_mix.data() != nullptr};
    }
    static talking_heads_mixings<T, Arch> take_mixings(detail::scratch& memory, const talking_heads_shape& s) {
        const auto rows = s.mixes_logits ? s.heads : 0, value_rows = s.mixes_weights ? s.value_heads : 0;
        auto logits = head_mixing<T, Arch>::take(memory, rows, s.query_heads);
        return {logits, head_mixing<T, Arch>::take(memory, value_rows, s.heads)};
    }
    std::size_t slice_bytes(const input_shapes& s, bool roomy) const {
        detail::scratch memory;
        panels(*this, memory, tile_shape(s), {}, parts_of(s.queries.tokens, roomy), roomy);
        return memory.used_bytes();
    }

    /// One thread's work on one panel, or on several in lock-step.
    class panels {
    public:
        panels(const talking_heads& call, detail::scratch& memory, const talking_heads_shape& s,
               const talking_heads_mixings<T, Arch>& mixings, index parts, bool roomy)
            : call_(call), shape_(s), mixings_(mixings), keeps_(roomy && s.mixes_weights), step_(tile_type::step_memory::take(memory, s)),
              tiles_(take_tiles(memory, s, step_, parts, keeps_)),
              visible_(memory.take<std::uint64_t>((differs_by_head ? s.heads : 1) * tiles_[0].block_keys())) {
            detail::scratch sizes;
            if (s.heads > 0) score_type::take(sizes, score_at(call.score, 0, 0), tiles_[0].block_keys());
            score_memory_ = memory.take<std::byte>(static_cast<index>(sizes.used_bytes()));
        }

        /// Of neighbouring panels. 0 * NaN is NaN, so a weight of 0 does not protect from the value of a hidden key: if a sum is not
        /// finite, all is done again with every hidden key left out.
        void run(const inputs<T>& in, const outputs<T>& out, index batch, std::span<const query_tile> queries) {
            first_key_ = in.positions.first_key[batch];
            parts_ = std::ssize(queries);
            const auto factor = static_cast<T>(call_.scale * (scored ? 1.0 : std::numbers::log2e));
            for_each_part(
                [&](tile_type& tile, index p) { tile.begin(queries[static_cast<std::size_t>(p)], in, out, batch, factor, p, parts_); });
            for (careful_ = false;; careful_ = true) {
                for_each_part([&](tile_type& tile, index) {
                    tile.reset_states();
                    tile.reset_values();
                });
                for_each_block([&](tile_type& tile, const weight_block<T>& block) {
                    compute_weights(tile, block);
                    if (!shape_.mixes_weights) tile.add_values(block, mixings_, careful_);
                });
                for_each_part([&](tile_type& tile, index) { finish_states(tile, in, out, batch); });
                if (shape_.mixes_weights) {
                    for_each_block([&](tile_type& tile, const weight_block<T>& block) {
                        if (!keeps_) compute_weights(tile, block);
                        tile.add_values(block, mixings_, careful_);
                    });
                }
                bool finite = true;
                for_each_part([&](tile_type& tile, index) { finite = finite && tile.has_finite_values(); });
                if (careful_ || finite) break;
            }
            for_each_part([&](tile_type& tile, index) { write_values(tile, in, out, batch); });
        }

    private:
        /// Those beyond `parts` have no memory.
        static std::array<tile_type, most_parts> take_tiles(detail::scratch& memory, const talking_heads_shape& s,
                                                            const typename tile_type::step_memory& step, index parts, bool keeps) {
            detail::scratch none;
            tile_type first(memory, s, step, keeps);
            return {first, tile_type(parts > 1 ? memory : none, s, step, keeps)};
        }
        template <class F>
        void for_each_part(F&& f) {
            for (index p = 0; p < parts_; ++p) f(tiles_[static_cast<std::size_t>(p)], p);
        }
        /// Calls f(tile, block) for the blocks of keys that any head of a panel sees.
        template <class F>
        void for_each_block(F&& f) {
            const over_heads<P> any_head{call_.pattern, tiles_[0].batch(), shape_.heads};
            const auto most = tiles_[0].block_keys();
            query_tile all = tiles_[0].queries();
            for (index p = 1; p < parts_; ++p) all.count += tiles_[static_cast<std::size_t>(p)].queries().count;
            index number = 0;
            for_each_run(any_head, all, first_key_, shape_.keys, most, [&](key_run run) {
                for (; run.count > 0; run.first += most * run.step, run.count -= most, ++number) {
                    auto keys = run;
                    keys.count = std::min(most, run.count);
                    for_each_part([&](tile_type& tile, index) {
                        // What the panels see together need not be what each of them sees.
                        const auto seen = run.full || parts_ == 1 ? visibility(run.full, false)
                                                                  : any_head.visible(tile.queries().positions(), keys.positions());
                        if (seen.is_none()) return;
                        keys.full = seen.is_all();
                        f(tile, tile.block(number, keys, keys.full && !looks_at_scores()));
                    });
                }
            });
        }
        /// The first pass of a panel is over.
        void finish_states(tile_type& tile, const inputs<T>& in, const outputs<T>& out, index batch) {
            const auto& queries = tile.queries();
            tile.finish_states([&](index c) {
                return call_.sinks.empty() ? -std::numeric_limits<T>::infinity() : static_cast<T>(call_.sinks[static_cast<std::size_t>(c)]);
            });
            const auto row = queries.first - in.positions.first_query[batch];
            if (out.log_sum_exp.data())
                for (index c = 0; c < shape_.heads; ++c)
                    for (index q = 0; q < queries.count; ++q)
                        out.log_sum_exp(batch, c, row + q * queries.step, 0) = tile.state(c).log_sum_exp(q);
            if (shape_.mixes_weights && !keeps_) tile.reset_states();
        }
        void write_values(const tile_type& tile, const inputs<T>& in, const outputs<T>& out, index batch) const {
            const auto& queries = tile.queries();
            const auto row = queries.first - in.positions.first_query[batch];
            for (index e = 0; e < shape_.value_heads; ++e)
                for (index q = 0; q < queries.count; ++q)
                    write_row<false, T, Arch>(tile.values(e, q), shape_.value_channels, tile.factor(e, q), T{0},
                                              out.values.row(batch, e, row + q * queries.step), out.values.strides().channel);
        }
        /// Whether a score of -infinity must be told from a low one: where values of hidden keys are left out, or get no bias.
        bool looks_at_scores() const { return careful_ || !call_.weights_bias.empty(); }

        void compute_weights(tile_type& tile, const weight_block<T>& block) {
            if (!block.all_seen) find_visible(tile, block);
            tile.multiply_keys(block, mixings_.logits);
            if (scored || !block.keys.full)
                for (index c = 0; c < shape_.heads; ++c) adjust_scores(tile, block, c);
            if (looks_at_scores()) tile.find_seen(block);
            tile.push_scores(block);
        }
        /// One bit per query and key, by head if the pattern differs, and for any head.
        [[gnu::noinline]] void find_visible(const tile_type& tile, const weight_block<T>& block) {
            const auto queries = tile.template positions_from<tile_type::most_queries>(0);
            const auto present = simd::lane_bits::first(queries.count);
            std::fill_n(block.seen, block.keys.count, block.keys.full ? present.value : 0);
            if (block.keys.full) return;
            for (index c = 0; c < (differs_by_head ? shape_.heads : 1); ++c) {
                const auto here = narrowed(at(call_.pattern, tile.batch(), c), tile.queries().positions(), block.keys.positions());
                for (index j = 0; j < block.keys.count; ++j) { // a pattern may answer with one bool for all queries
                    const auto bits = (present && here.visible(queries, block.keys.first + j * block.keys.step)).value;
                    visible(c)[j] = bits;
                    block.seen[j] |= bits;
                }
            }
        }
        std::uint64_t* visible(index head) const { return visible_ + (differs_by_head ? head * tiles_[0].block_keys() : 0); }

        /// The score function of one head, and the mask of its pattern.
        [[gnu::noinline]] void adjust_scores(const tile_type& tile, const weight_block<T>& block, index head) {
            detail::scratch memory(score_memory_);
            auto function = score_type::take(memory, score_at(call_.score, tile.batch(), head), tile.block_keys());
            const auto* const seen = visible(head);
            for (index reg = 0; reg < tile.registers(); ++reg) {
                const auto lane = reg * tile_type::lane_count;
                const auto queries = tile.template positions_from<tile_type::lane_count>(lane);
                function.load(tile.queries().part(lane, tile_type::lane_count), block.keys);
                for (index j = 0; j < block.keys.count; ++j) {
                    T* const at = tile.weights(block, head) + j * tile.stride() + lane;
                    auto x = lanes::load(at);
                    if constexpr (scored)
                        x = function(x, queries, block.keys.first + j * block.keys.step, j) * lanes(std::numbers::log2e_v<T>);
                    if (!block.keys.full) x = select(simd::lane_bits{seen[j] >> lane}, x, lanes(hidden_score<T>));
                    x.store(at);
                }
            }
        }

        const talking_heads& call_;
        const talking_heads_shape& shape_;
        const talking_heads_mixings<T, Arch>& mixings_;
        bool keeps_, careful_ = false;
        typename tile_type::step_memory step_;
        std::array<tile_type, most_parts> tiles_;
        std::uint64_t* visible_;
        std::byte* score_memory_ = nullptr;
        index first_key_ = 0, parts_ = 1;
    };
};

} // namespace attn::kernel
