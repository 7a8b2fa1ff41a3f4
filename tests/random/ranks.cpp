// Operators over ranks: the bits of the call on one machine, whatever the cuts, layouts, threads and storage of each rank.
#include "differences.hpp"
#include "draw_layout.hpp"
#include "others.hpp"
#include "softmax.hpp"

#include <attn/attention/cosformer_features.hpp>
#include <attn/attention/linear_attention.hpp>
#include <attn/attention/linformer_attention.hpp>
#include <attn/attention/performer_features.hpp>
#include <attn/attention/pooling.hpp>
#include <attn/attention/random_projection.hpp>
#include <attn/attention/simplified_linear_attention.hpp>
#include <attn/attention/talking_heads_attention.hpp>
#include <attn/distributed/backward.hpp>
#include <attn/distributed/sequence_parallel.hpp>
#include <attn/distributed/thread_communicator.hpp>
#include <attn/parallel/thread_pool.hpp>

#include <functional>

namespace attn::fuzz {

namespace {

using T = std::conditional_t<testing::is_tested<float>, float, double>;

tensor<T> rows_of(const tensor<T>& all, const row_range& rows) {
    auto s = all.shape();
    s.tokens = rows.count;
    tensor<T> own(s);
    detail::for_each_number(s, [&](index_t b, index_t h, index_t i, index_t c) { own(b, h, i, c) = all(b, h, rows.first + i, c); });
    return own;
}
void put_rows(tensor<T>& all, const row_range& rows, const tensor<T>& own) {
    detail::for_each_number(own.shape(), [&](index_t b, index_t h, index_t i, index_t c) { all(b, h, rows.first + i, c) = own(b, h, i, c); });
}

/// Softmax attention has a gradient over ranks.
template <class Op>
inline constexpr bool has_rank_gradient = false;
template <Pattern P, ScoreFunction S>
inline constexpr bool has_rank_gradient<softmax_attention<P, S>> = true;

/// One problem of any operator.
class trial_over_ranks {
public:
    trial_over_ranks(draw& random, const sizes& size) : random_(random), in_(draw_given<T>(random, size, random.one_in(6) ? numbers::peaked : numbers::usual)) {}

    const std::string& name() const { return name_; }

    template <class Op>
    std::string check(const Op& op) {
        draw_cuts();
        const auto s = shapes_of(inputs<T>(in_));
        const auto parts = of_queries_.empty() ? partition(op.pattern, s, ranks_, in_.positions) : partition(op.pattern, s, of_queries_, of_keys_, in_.positions);
        const sequence_parallel over{op, parts};
        auto problem = other_results(parts, op, Op::traits.has_log_sum_exp, [&](thread_communicator& ranks, const inputs<T>& in, const outputs<T>& out, thread_pool& threads) {
            workspace memory(workspace_bytes<T>(over, ranks.rank(), threads));
            testing::fill(memory, std::byte{0xff});
            attend(over, ranks, in, out, execution(threads, memory));
        });
        if constexpr (has_rank_gradient<Op>)
            if (problem.empty() && random_.one_in(2))
                return other_gradients(parts, [&](thread_communicator* ranks, const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given,
                                                  const input_gradients<T>& wanted, thread_pool& threads) {
                    if (ranks) backward(over, *ranks, in, saved, given, {wanted}, threads);
                    else backward(op, in, saved, given, {wanted}, threads);
                });
        return problem;
    }

private:
    using call_on_rank = std::function<void(thread_communicator&, const inputs<T>&, const outputs<T>&, thread_pool&)>;
    /// Of one machine without a communicator.
    using gradient_call = std::function<void(thread_communicator*, const inputs<T>&, const saved_outputs<T>&, const output_gradients<T>&, const input_gradients<T>&, thread_pool&)>;

    static testing::answer<T> room(const any_attention<T>& op, const input_shapes& s, bool with_rows) {
        return with_rows ? testing::no_answer<T>(op.output_shape(s), op.log_sum_exp_shape(s)) : testing::no_answer<T>(op.output_shape(s), false);
    }
    /// The number of ranks, and where queries and keys are cut: by the library, if they are empty.
    void draw_cuts() {
        const auto s = shapes_of(inputs<T>(in_));
        ranks_ = random_.number(1, 5);
        name_ += "; " + std::to_string(ranks_) + " ranks";
        if (random_.one_in(2)) return;
        const auto cuts = [&](index_t tokens) {
            std::vector<index_t> all{0, tokens};
            for (index_t r = 1; r < ranks_; ++r) all.push_back(random_.number(0, tokens));
            std::ranges::sort(all);
            for (const auto cut : all) name_.append(" ").append(std::to_string(cut));
            return all;
        };
        of_queries_ = cuts(s.queries.tokens);
        name_ += ";";
        of_keys_ = cuts(s.keys.tokens);
    }
    /// f(communicator, what to draw from) on each rank; returns what went wrong on one.
    std::string on_ranks(const partition& parts, const std::function<std::string(thread_communicator&, draw&)>& f) {
        std::vector<std::string> problems(static_cast<std::size_t>(parts.ranks()));
        const auto seed = random_.bits();
        on_thread_ranks(parts.ranks(), [&](thread_communicator& ranks) {
            draw own(seed, static_cast<std::uint64_t>(ranks.rank()));
            problems[static_cast<std::size_t>(ranks.rank())] = f(ranks, own);
        });
        for (std::size_t r = 0; r < problems.size(); ++r)
            if (!problems[r].empty()) return "rank " + std::to_string(r) + ": " + problems[r];
        return {};
    }
    /// Of the call on one machine, whose results it keeps.
    std::string other_results(const partition& parts, const any_attention<T>& op, bool with_rows, const call_on_rank& call) {
        const auto s = shapes_of(inputs<T>(in_));
        expected_ = room(op, s, with_rows);
        auto found = room(op, s, with_rows);
        attend(op, inputs<T>(in_), expected_.out());
        if (auto problem = on_ranks(parts, [&](thread_communicator& ranks, draw& own) { return attend_on(op, parts, call, ranks, own, found); }); !problem.empty()) return problem;
        auto problem = other_bits(found.values, expected_.values);
        if (problem.empty() && with_rows)
            if (problem = other_bits(found.log_sum_exp, expected_.log_sum_exp); !problem.empty()) problem = "log_sum_exp " + problem;
        return problem;
    }
    std::string attend_on(const any_attention<T>& op, const partition& parts, const call_on_rank& call, thread_communicator& ranks, draw& own, testing::answer<T>& found) {
        const auto q = parts.queries(ranks.rank()), k = parts.keys(ranks.rank());
        const auto placed = [&](const tensor<T>& all, const row_range& rows) { return testing::placed<T>(rows_of(all, rows), draw_layout(own)); };
        auto queries = placed(in_.queries, q), keys = placed(in_.keys, k), values = placed(in_.values, k);
        auto own_found = room(op, parts.shapes(ranks.rank()), found.log_sum_exp.data() != nullptr);
        testing::placed<T> out(own_found.values.shape(), draw_layout(own)), rows(own_found.log_sum_exp.shape(), draw_layout(own));
        thread_pool threads(own.number(1, 3));
        call(ranks, {queries.view(), keys.view(), values.view()}, {out.view(), found.log_sum_exp.data() ? rows.view() : tensor_view<T>{}}, threads);
        if (!queries.guards_intact() || !keys.guards_intact() || !values.guards_intact()) return "an input was written to";
        if (!out.guards_intact() || !rows.guards_intact()) return "wrote beside its output";
        put_rows(found.values, q, out.copy());
        if (found.log_sum_exp.data()) put_rows(found.log_sum_exp, q, rows.copy());
        return {};
    }
    /// Near that of one machine, with the same bits of another run.
    std::string other_gradients(const partition& parts, const gradient_call& call) {
        const saved_outputs<T> saved{expected_.values, expected_.log_sum_exp};
        const auto of_values = testing::random_tensor<T>(expected_.values.shape(), 1);
        const inputs<T> in(in_);
        tensor<T> exact[3] = {tensor<T>(in_.queries.shape()), tensor<T>(in_.keys.shape()), tensor<T>(in_.values.shape())};
        thread_pool here(1);
        call(nullptr, in, saved, {of_values}, {exact[0], exact[1], exact[2]}, here);
        tensor<T> found[2][3];
        for (auto& of_run : found) {
            for (int i = 0; i < 3; ++i) of_run[i] = tensor<T>(exact[i].shape());
            const auto run = [&](thread_communicator& ranks, draw& own) -> std::string {
                const auto q = parts.queries(ranks.rank()), k = parts.keys(ranks.rank());
                testing::placed<T> keys(rows_of(in_.keys, k), draw_layout(own));
                testing::placed<T> dq(rows_of(exact[0], q), draw_layout(own)), dk(rows_of(exact[1], k), draw_layout(own)), dv(rows_of(exact[2], k), draw_layout(own));
                thread_pool threads(own.number(1, 3));
                call(&ranks, {in.queries.slice({.tokens = q}), keys.view(), in.values.slice({.tokens = k})}, saved.slice({.tokens = q}),
                     {of_values.slice({.tokens = q})}, {dq.view(), dk.view(), dv.view()}, threads);
                if (!dq.guards_intact() || !dk.guards_intact() || !dv.guards_intact()) return "wrote beside a gradient";
                put_rows(of_run[0], q, dq.copy());
                put_rows(of_run[1], k, dk.copy());
                put_rows(of_run[2], k, dv.copy());
                return {};
            };
            if (auto problem = on_ranks(parts, run); !problem.empty()) return "gradients, " + problem;
        }
        static constexpr const char* names[] = {"queries", "keys", "values"};
        for (int i = 0; i < 3; ++i) {
            if (auto problem = other_bits(found[1][i], found[0][i]); !problem.empty()) return std::string("gradient of the ") + names[i] + ", another run: " + problem;
            const auto bound = 1e4 * static_cast<double>(unit_of<T>) * testing::largest_magnitude(reference::widen(exact[i].view()));
            if (auto problem = too_far(found[0][i], [&](index_t e) { return static_cast<double>(exact[i].data()[e]); }, [&](index_t) { return bound; }); !problem.empty())
                return std::string("gradient of the ") + names[i] + ": " + problem;
        }
        return {};
    }

    draw& random_;
    given<T> in_;
    index_t ranks_ = 1;
    std::vector<index_t> of_queries_, of_keys_;
    testing::answer<T> expected_;
    std::string name_;
};

/// Now and then so many keys that they travel in several pieces.
sizes draw_sizes_over_ranks(draw& random) {
    auto s = draw_sizes(random);
    if (random.one_in(4)) {
        s.keys = random.number(4'000, 14'000);
        s.queries = random.one_in(2) ? random.number(0, 200) : random.number(0, 1'500);
        s.batch = std::min<index_t>(1, s.batch), s.heads = s.kv_heads = std::min<index_t>(1, s.kv_heads);
        s.key_dim = std::min<index_t>(9, s.key_dim), s.value_dim = std::min<index_t>(9, s.value_dim);
    }
    draw_positions(random, s);
    s.first_query.resize(1), s.first_key.resize(1);
    for (auto* first : {&s.first_query[0], &s.first_key[0]}) *first = std::clamp(*first, -farthest, farthest - 20'000);
    return s;
}

outcome check_softmax_over_ranks(draw& random) {
    softmax_drawn<T> d{.size = draw_sizes_over_ranks(random)};
    d.tree = draw_pattern(random, d.size);
    d.stepped = draw_stepped_pattern(random, d.size);
    d.steps = std::make_shared<const score_steps>(draw_score(random, d.size, static_cast<double>(std::numeric_limits<T>::lowest())));
    const slice all{0, d.size.batch, 0, d.size.heads};
    std::vector<double> sinks(random.one_in(3) ? static_cast<std::size_t>(d.size.heads) : 0, 0.5);
    trial_over_ranks t(random, d.size);
    outcome result{describe(d.size) + "; tree " + d.tree->name(), {}};
    if (random.one_in(2)) {
        result.name += " | " + d.stepped->name() + "; steps " + d.steps->name();
        result.problem = t.check(softmax_attention{.score = d.steps_of(all), .pattern = d.tree_of(all) | d.stepped_of(all), .sinks = sinks});
    } else {
        result.problem = t.check(softmax_attention{.pattern = d.tree_of(all), .sinks = sinks});
    }
    result.name += t.name();
    return result;
}
outcome check_linear_over_ranks(draw& random) {
    auto size = draw_sizes_over_ranks(random);
    const auto kind = random.number(0, 5);
    if (kind == 3) size.keys = size.queries;
    std::vector<index_t> length;
    for (index_t b = 0; b < size.batch; ++b) length.push_back(std::max<index_t>(0, size.first_key[0] + random.number(0, size.keys)));
    trial_over_ranks t(random, size);
    outcome result{describe(size), {}};
    switch (kind) {
    case 0:
        result.name += "; linear, causal & lengths";
        result.problem = t.check(linear_attention{.pattern = causal{} & lengths{length}});
        break;
    case 1:
        result.name += "; linear, relu, lengths";
        result.problem = t.check(linear_attention{.feature_map = relu{}, .pattern = lengths{length}});
        break;
    case 2:
        result.name += "; linear, relu, causal";
        result.problem = t.check(linear_attention{.feature_map = relu{}, .pattern = causal{}});
        break;
    case 4: {
        tensor<T> directions({1, 1, random.number(1, 40), size.key_dim});
        fill_orthogonal_directions(directions.view(), 3);
        result.name += joined("; linear, performer's features of ", directions.shape(), ", lengths");
        result.problem = t.check(linear_attention{.feature_map = performer_features{directions}, .pattern = lengths{length}});
        break;
    }
    case 5:
        result.name += "; linear, cosformer's features, causal";
        result.problem = t.check(linear_attention{.feature_map = cosformer_features{.length = 20'000}, .pattern = causal{}});
        break;
    default: {
        depthwise_convolution<T> convolution{.height = 1, .width = size.queries};
        while (convolution.width > 1 && convolution.width % 2 == 0 && random.one_in(2)) convolution.width /= 2, convolution.height *= 2;
        const auto weights = testing::random_tensor<T>({1, size.value_dim, 2 * random.number(0, 3) + 1, 2 * random.number(0, 4) + 1}, 3);
        convolution.weights = weights;
        result.name += joined("; simplified linear, grid ", convolution.height, " x ", convolution.width, ", kernel ", weights.shape());
        result.problem = t.check(simplified_linear_attention{.convolution = size.value_dim > 0 ? convolution : depthwise_convolution<T>{}, .pattern = lengths{length}});
    }
    }
    result.name += t.name();
    return result;
}

outcome check_talking_heads_over_ranks(draw& random) {
    const auto size = draw_sizes_over_ranks(random);
    const auto tree = draw_pattern(random, size);
    tensor<double> mix({1, 1, size.heads, size.heads});
    std::generate_n(mix.data(), mix.shape().size(), [&] { return random.real(-1, 1); });
    const bool first = random.one_in(2), second = random.one_in(2);
    talking_heads_attention<random_pattern> op{.pattern = {tree.get()}};
    if (first) op.logits_mix = mix;
    if (second) op.weights_mix = mix;
    trial_over_ranks t(random, size);
    outcome result{describe(size) + "; talking heads, tree " + tree->name() + (first ? ", mixed before" : "") + (second ? ", mixed after" : ""), {}};
    result.problem = t.check(op);
    result.name += t.name();
    return result;
}
outcome check_linformer_over_ranks(draw& random) {
    const auto size = draw_sizes_over_ranks(random);
    const auto projected = random.number(1, 20);
    std::vector<index_t> length;
    for (index_t b = 0; b < size.batch; ++b) length.push_back(std::max<index_t>(0, size.first_key[0] + random.number(0, size.keys)));
    trial_over_ranks t(random, size);
    outcome result{describe(size) + "; linformer, " + std::to_string(projected) + " rows", {}};
    if (random.one_in(2)) {
        const auto matrix = testing::random_tensor<T>({1, size.kv_heads, projected, size.keys}, 3);
        result.name += " of a matrix";
        result.problem = t.check(linformer_attention{.key_projection = linear_projection<T>{matrix}, .pattern = lengths{length}});
    } else {
        result.name += " of means";
        result.problem = t.check(linformer_attention{.key_projection = mean_pooling{projected}, .pattern = lengths{length}});
    }
    result.name += t.name();
    return result;
}

} // namespace

outcome check_ranks(draw& random) {
    try {
        switch (random.number(0, 5)) {
        case 0:
            return check_linear_over_ranks(random);
        case 1:
            return check_talking_heads_over_ranks(random);
        case 2:
            return check_linformer_over_ranks(random);
        case 3:
            return check_recurrent_over_ranks(random);
        default:
            return check_softmax_over_ranks(random);
        }
    } catch (const std::exception& e) {
        return {"", threw(e)};
    }
}

} // namespace attn::fuzz
