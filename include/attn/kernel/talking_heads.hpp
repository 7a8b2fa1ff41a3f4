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

        index tasks = 0;
        const auto tiles_of = [&](index step) { return tile_count(n, tile_type::most_queries, step); };
        const auto step_of_entry = [&](index b) { return over_heads<P>{pattern, b, s.heads}.common_step(); };
        for (index b = 0; b < batch; ++b) tasks = std::max(tasks, tiles_of(step_of_entry(b)));
        run.for_each(batch * tasks, [&](index task, index slice) {
            const auto b = task / tasks, t = task % tasks, step = step_of_entry(b);
            if (t >= tiles_of(step)) return;
            detail::scratch own(slices + static_cast<std::size_t>(slice) * bytes);
            panel(*this, own, s, mixings, roomy)
                .run(in, out, b, tile_at(t, in.positions.first_query[b], n, tile_type::most_queries, step, tile_type::lane_count));
        });
    }

private:
    using tile_type = talking_heads_tile<T, Arch>;
    using bound_score = decltype(score_at(std::declval<const S&>(), 0, 0));
    using score_type = score_tile<T, Arch, bound_score>;
    using lanes = simd::lanes<T, Arch>;
    static constexpr bool scored = !std::same_as<bound_score, identity_score>;
    static constexpr bool differs_by_head = attn::detail::HasAt<P>;

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
        panel(*this, memory, tile_shape(s), {}, roomy);
        return memory.used_bytes();
    }

    /// One thread's work on one panel of queries.
    class panel {
    public:
        panel(const talking_heads& call, detail::scratch& memory, const talking_heads_shape& s,
              const talking_heads_mixings<T, Arch>& mixings, bool roomy)
            : call_(call), shape_(s), mixings_(mixings), keeps_(roomy && s.mixes_weights), tile_(memory, s, keeps_),
              visible_(memory.take<std::uint64_t>((differs_by_head ? s.heads : 1) * tile_.block_keys())) {
            detail::scratch sizes;
            if (s.heads > 0) score_type::take(sizes, score_at(call.score, 0, 0), tile_.block_keys());
            score_memory_ = memory.take<std::byte>(static_cast<index>(sizes.used_bytes()));
        }

        /// 0 * NaN is NaN, so a weight of 0 does not protect from the value of a hidden key: if a sum is not finite, all is done again with
        /// every hidden key left out.
        void run(const inputs<T>& in, const outputs<T>& out, index batch, const query_tile& queries) {
            first_key_ = in.positions.first_key[batch];
            tile_.begin(queries, in, batch, static_cast<T>(call_.scale * (scored ? 1.0 : std::numbers::log2e)));
            for (careful_ = false;; careful_ = true) {
                tile_.reset_states();
                tile_.reset_values();
                for_each_block([&](const weight_block<T>& block) {
                    compute_weights(block);
                    if (!shape_.mixes_weights) tile_.add_values(block, mixings_, careful_);
                });
                finish_states(in, out);
                if (shape_.mixes_weights) {
                    for_each_block([&](const weight_block<T>& block) {
                        if (!keeps_) compute_weights(block);
                        tile_.add_values(block, mixings_, careful_);
                    });
                }
                if (write_values(in, out) || careful_) break;
            }
        }

    private:
        /// Calls f(block) for the blocks of keys that any head sees.
        template <class F>
        void for_each_block(F&& f) {
            const auto most = tile_.block_keys();
            index number = 0;
            for_each_run(over_heads<P>{call_.pattern, tile_.batch(), shape_.heads}, tile_.queries(), first_key_, shape_.keys, most,
                         [&](key_run run) {
                             for (; run.count > 0; run.first += most * run.step, run.count -= most, ++number) {
                                 auto keys = run;
                                 keys.count = std::min(most, run.count);
                                 f(tile_.block(number, keys, keys.full && !looks_at_scores()));
                             }
                         });
        }
        /// The first pass is over.
        void finish_states(const inputs<T>& in, const outputs<T>& out) {
            const auto& queries = tile_.queries();
            tile_.finish_states([&](index c) {
                return call_.sinks.empty() ? -std::numeric_limits<T>::infinity() : static_cast<T>(call_.sinks[static_cast<std::size_t>(c)]);
            });
            const auto row = queries.first - in.positions.first_query[tile_.batch()];
            if (out.log_sum_exp.data())
                for (index c = 0; c < shape_.heads; ++c)
                    for (index q = 0; q < queries.count; ++q)
                        out.log_sum_exp(tile_.batch(), c, row + q * queries.step, 0) = tile_.state(c).log_sum_exp(q);
            if (shape_.mixes_weights && !keeps_) tile_.reset_states();
        }
        /// Writes head by head what is still in the caches from the look at it; whether all of it is finite.
        bool write_values(const inputs<T>& in, const outputs<T>& out) {
            const auto& queries = tile_.queries();
            const auto row = queries.first - in.positions.first_query[tile_.batch()];
            bool finite = true;
            tile_.finish_values();
            for (index e = 0; e < shape_.value_heads; ++e) {
                finite = finite && tile_.has_finite_values(e);
                for (index q = 0; q < queries.count; ++q)
                    write_row<false, T, Arch>(tile_.values(e, q), shape_.value_channels, tile_.factor(e, q), T{0},
                                              out.values.row(tile_.batch(), e, row + q * queries.step), out.values.strides().channel);
            }
            return finite;
        }
        /// Whether a score of -infinity must be told from a low one: where values of hidden keys are left out, or get no bias.
        bool looks_at_scores() const { return careful_ || !call_.weights_bias.empty(); }

        void compute_weights(const weight_block<T>& block) {
            if (!block.all_seen) find_visible(block);
            tile_.multiply_keys(block, mixings_.logits);
            if (scored || !block.keys.full)
                for (index c = 0; c < shape_.heads; ++c) adjust_scores(block, c);
            if (looks_at_scores()) tile_.find_seen(block);
            tile_.push_scores(block);
        }
        /// One bit per query and key, by head if the pattern differs, and for any head.
        [[gnu::noinline]] void find_visible(const weight_block<T>& block) {
            const auto queries = tile_.template positions_from<tile_type::most_queries>(0);
            const auto present = simd::lane_bits::first(queries.count);
            std::fill_n(block.seen, block.keys.count, block.keys.full ? present.value : 0);
            if (block.keys.full) return;
            for (index c = 0; c < (differs_by_head ? shape_.heads : 1); ++c) {
                const auto here = narrowed(at(call_.pattern, tile_.batch(), c), tile_.queries().positions(), block.keys.positions());
                for (index j = 0; j < block.keys.count; ++j) { // a pattern may answer with one bool for all queries
                    const auto bits = (present && here.visible(queries, block.keys.first + j * block.keys.step)).value;
                    visible(c)[j] = bits;
                    block.seen[j] |= bits;
                }
            }
        }
        std::uint64_t* visible(index head) const { return visible_ + (differs_by_head ? head * tile_.block_keys() : 0); }

        /// The score function of one head, and the mask of its pattern.
        [[gnu::noinline]] void adjust_scores(const weight_block<T>& block, index head) {
            detail::scratch memory(score_memory_);
            auto function = score_type::take(memory, score_at(call_.score, tile_.batch(), head), tile_.block_keys());
            const auto* const seen = visible(head);
            for (index reg = 0; reg < tile_.registers(); ++reg) {
                const auto lane = reg * tile_type::lane_count;
                const auto queries = tile_.template positions_from<tile_type::lane_count>(lane);
                function.load(tile_.queries().part(lane, tile_type::lane_count), block.keys);
                for (index j = 0; j < block.keys.count; ++j) {
                    T* const at = tile_.weights(block, head) + j * tile_.stride() + lane;
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
        tile_type tile_;
        std::uint64_t* visible_;
        std::byte* score_memory_ = nullptr;
        index first_key_ = 0;
    };
};

} // namespace attn::kernel
