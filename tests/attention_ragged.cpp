// Ragged batches: each sequence has the bits that it has by itself.
#include "allocations.hpp"
#include "answers.hpp"
#include "catch.hpp"
#include "errors.hpp"
#include "executors.hpp"
#include "layer_checks.hpp"

#include <attn/attention/any_attention.hpp>
#include <attn/attention/linear_backward.hpp>
#include <attn/attention/linformer_backward.hpp>
#include <attn/attention/ragged_backward.hpp>
#include <attn/attention/recurrent_backward.hpp>
#include <attn/attention/simplified_linear_backward.hpp>
#include <attn/attention/softmax_backward.hpp>
#include <attn/attention/talking_heads_backward.hpp>
#include <attn/layer/backward.hpp>
#include <attn/layer/ragged.hpp>
#include <attn/layer/transformer_block.hpp>
#include <attn/layer/windowed.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/pattern/causal.hpp>
#include <attn/pattern/local.hpp>
#include <attn/pattern/segments.hpp>

namespace attn::testing {

namespace {

const std::vector<index_t> starts{0, 5, 5, 42, 43, 190, 200}, key_starts{0, 9, 12, 40, 41, 100, 180};

/// The tokens of an entry, copied.
template <class T>
tensor<T> entry_of(const tensor<T>& x, const std::vector<index_t>& from, std::size_t e) {
    return rows_of(x, from[e], from[e + 1] - from[e]);
}

/// Queries, keys and values of sequences, whose keys are of other tokens if they are crossed.
struct ragged_tokens {
    bool crossed;
    const std::vector<index_t>& keys_from = crossed ? key_starts : starts;
    index_t heads, kv_heads;
    tensor<float> q = random_tensor<float>({1, heads, starts.back(), 8}, 1), k = random_tensor<float>({1, kv_heads, keys_from.back(), 8}, 2),
                  v = random_tensor<float>({1, kv_heads, keys_from.back(), 11}, 3);
    std::vector<index_t> first{3, 0, 7, 100, 2, 50};

    ragged batch() const { return crossed ? ragged{starts, key_starts} : ragged{.starts = starts}; }
    inputs<float> in() const { return {q, k, v, {.first_query = first, .first_key = 2}}; }
    /// Those of one of them.
    given<float> entry(std::size_t e) const {
        return {entry_of(q, starts, e), entry_of(k, keys_from, e), entry_of(v, keys_from, e), {.first_query = first[e], .first_key = 2}};
    }
};

template <class Op>
void check_operator(const Op& op, index_t heads, index_t kv_heads, bool crossed) {
    const ragged_tokens all{.crossed = crossed, .heads = heads, .kv_heads = kv_heads};
    const auto in = all.in();
    const auto batch = all.batch();
    constexpr bool has_sums = Op::traits.has_log_sum_exp;
    const auto expected_shape = op.output_shape(shapes_of(in));
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        tensor<float> out(expected_shape), sums(has_sums ? log_sum_exp_shape(op, shapes_of(in)) : shape{});
        std::fill_n(out.data(), out.shape().size(), guard<float>);
        attend(op, batch, in, outputs<float>{out, has_sums ? sums.view() : tensor_view<float>()}, executor);
        CHECK(same_bits(attend(op, batch, in, executor), out));
        for (std::size_t e = 0; e + 1 < starts.size(); ++e) {
            const auto own = all.entry(e);
            const inputs<float> alone = own;
            tensor<float> expected(op.output_shape(shapes_of(alone))), expected_sums(has_sums ? log_sum_exp_shape(op, shapes_of(alone)) : shape{});
            attend(op, alone, outputs<float>{expected, has_sums ? expected_sums.view() : tensor_view<float>()});
            CHECK(same_bits(entry_of(out, starts, e), expected));
            if (has_sums) CHECK(same_bits(entry_of(sums, starts, e), expected_sums));
        }
    });
}

template <class Op>
void check_gradient(const Op& op, index_t heads, index_t kv_heads, bool crossed) {
    const ragged_tokens all{.crossed = crossed, .heads = heads, .kv_heads = kv_heads};
    const auto in = all.in();
    const auto batch = all.batch();
    constexpr bool has_sums = Op::traits.has_log_sum_exp;
    tensor<float> out(op.output_shape(shapes_of(in))), sums(has_sums ? log_sum_exp_shape(op, shapes_of(in)) : shape{});
    attend(op, batch, in, outputs<float>{out, has_sums ? sums.view() : tensor_view<float>()});
    const auto d_out = random_tensor<float>(out.shape(), 4);
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        tensor<float> dq(all.q.shape()), dk(all.k.shape()), dv(all.v.shape()), some(dk.shape());
        for (auto* each : {&dq, &dk, &dv}) std::fill_n(each->data(), each->shape().size(), guard<float>);
        gradients_of<Op, float> wanted{}, of_keys{};
        wanted.queries = dq, wanted.keys = dk, wanted.values = dv, of_keys.keys = some;
        backward(op, batch, in, {out, sums}, {d_out}, wanted, executor);
        workspace memory(backward_workspace_bytes(op, batch, in, executor));
        backward(op, batch, in, {out, sums}, {d_out}, of_keys, execution(executor, memory));
        CHECK(same_bits(some, dk));
        for (std::size_t e = 0; e + 1 < starts.size(); ++e) {
            const auto alone = all.entry(e);
            const auto e_out = entry_of(out, starts, e), e_sums = has_sums ? entry_of(sums, starts, e) : tensor<float>(), e_d_out = entry_of(d_out, starts, e);
            tensor<float> edq(alone.queries.shape()), edk(alone.keys.shape()), edv(alone.values.shape());
            gradients_of<Op, float> own{};
            own.queries = edq, own.keys = edk, own.values = edv;
            backward(op, inputs<float>(alone), {e_out, e_sums}, {e_d_out}, own);
            CHECK(same_bits(entry_of(dq, starts, e), edq));
            CHECK(same_bits(entry_of(dk, all.keys_from, e), edk));
            CHECK(same_bits(entry_of(dv, all.keys_from, e), edv));
        }
    });
}

} // namespace

TEST_CASE("ragged: every operator computes each sequence as if it were alone", "[attention]") {
    using namespace pattern;
    check_operator(softmax_attention<>{}, 4, 2, true);
    check_operator(softmax_attention{.pattern = causal{} & local{20}}, 3, 3, false);
    check_operator(any_attention<float>(softmax_attention{.pattern = causal{}}), 4, 2, true);
    check_operator(linear_attention<elu_plus_one, causal>{}, 2, 1, true);
    const auto mixing = random_tensor<double>({1, 1, 3, 3}, 5);
    check_operator(talking_heads_attention<>{.logits_mix = mixing.view(), .weights_mix = mixing.view()}, 3, 3, true);
    const auto matrix = random_tensor<float>({1, 1, 6, 200}, 6);
    check_operator(linformer_attention{.key_projection = linear_projection{.matrix = matrix}}, 2, 2, true);
    const auto kernel = random_tensor<float>({1, 11, 1, 3}, 7);
    check_operator(simplified_linear_attention{.convolution = depthwise_convolution{.weights = kernel}}, 2, 2, false);
}

TEST_CASE("ragged: the gradient of each sequence is that of a call for it alone", "[attention]") {
    using namespace pattern;
    check_gradient(softmax_attention<>{}, 4, 2, true);
    check_gradient(softmax_attention{.pattern = causal{} & local{20}}, 3, 3, false);
    check_gradient(linear_attention<elu_plus_one, causal>{}, 2, 1, true);
    const auto mixing = random_tensor<double>({1, 1, 3, 3}, 5);
    check_gradient(talking_heads_attention<>{.logits_mix = mixing.view(), .weights_mix = mixing.view()}, 3, 3, true);
    const auto matrix = random_tensor<float>({1, 1, 6, 200}, 6);
    check_gradient(linformer_attention{.key_projection = linear_projection{.matrix = matrix}}, 2, 2, true);
    const auto kernel = random_tensor<float>({1, 11, 1, 3}, 7);
    check_gradient(simplified_linear_attention{.convolution = depthwise_convolution{.weights = kernel}}, 2, 2, false);

    // What is refused, by name, with nothing written.
    const auto x = random_tensor<float>({1, 2, 10, 4}, 1);
    const std::vector<double> sinks{0.5, 1};
    const softmax_attention op{.sinks = sinks};
    tensor<float> out(x.shape()), sums({1, 2, 10, 1}), dx(x.shape()), of_sinks({1, 2, 1, 1});
    std::vector<index_t> from{0, 4, 10};
    attend(op, ragged{from}, inputs<float>{x, x, x}, outputs<float>{out, sums});
    std::fill_n(dx.data(), dx.shape().size(), 7.f);
    const auto refusal = [&](const auto& batch, const auto& d_out, const gradients_of<softmax_attention<>, float>& wanted) {
        const auto error = error_of([&] { backward(op, batch, inputs<float>{x, x, x}, {out, sums}, {d_out}, wanted); });
        CHECK(std::all_of(dx.data(), dx.data() + dx.shape().size(), [](float n) { return n == 7; }));
        return error;
    };
    CHECK(refusal(ragged{from}, x, {{.queries = dx}, of_sinks}) ==
          "softmax_attention: wanted.sinks of shape (1, 2, 1, 1) is asked for, but what all sequences of a ragged batch share has a gradient in a call for each of them only");
    CHECK(refusal(ragged{from}, sums, {{.queries = dx}}) == "softmax_attention: d_out.values has shape (1, 2, 10, 1), but the result has (1, 2, 10, 4)");
    CHECK(refusal(ragged{from}, x, {{.queries = out}}).starts_with("softmax_attention: wanted.queries of shape (1, 2, 10, 4) overlaps saved.values"));
    from[2] = 9;
    CHECK(refusal(ragged{from}, x, {{.queries = dx}}) == "softmax_attention: starts do not rise from 0 to 10, for tokens of shape (1, 2, 10, 4)");
}

TEST_CASE("ragged: a layer runs each sequence as if it were alone", "[layer]") {
    parameters weights;
    const auto attention = random_multi_head<float>(weights, "m", 24, 4, 2, 6, 6, softmax_attention{.pattern = causal{}});
    const feed_forward mlp{.up = random_linear<float>(weights, "up", 40, 24), .down = random_linear<float>(weights, "down", 24, 40)};
    const layer_norm<float> norm;
    const transformer_block block{.attention_norm = norm, .attention = attention, .feed_forward_norm = norm, .feed_forward = mlp};
    const auto x = random_rows<float>({1, 1, starts.back(), 24}, 3), y = random_rows<float>({1, 1, key_starts.back(), 24}, 4),
               r = random_rows<float>(x.shape(), 5);
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        const auto out = forward(block, {.starts = starts}, {.tokens = x}, executor);
        const auto crossed = forward(attention, {.starts = starts, .key_starts = key_starts},
                                     {.tokens = x, .residual = r, .context = y, .positions = top_left()}, executor);
        for (std::size_t e = 0; e + 1 < starts.size(); ++e) {
            const auto ex = entry_of(x, starts, e), ey = entry_of(y, key_starts, e), er = entry_of(r, starts, e);
            CHECK(same_bits(entry_of(out, starts, e), forward(block, {.tokens = ex})));
            CHECK(same_bits(entry_of(crossed, starts, e), forward(attention, {.tokens = ex, .residual = er, .context = ey, .positions = top_left()})));
        }
    });
}

TEST_CASE("ragged: a layer that is trained on segments gives each sequence the bits that it has alone, at its positions", "[layer]") {
    parameters weights;
    std::vector<std::int32_t> ids;
    for (std::size_t e = 0; e + 1 < starts.size(); ++e) ids.insert(ids.end(), static_cast<std::size_t>(starts[e + 1] - starts[e]), static_cast<std::int32_t>(e));
    const auto packed = random_multi_head<float>(weights, "m", 24, 4, 2, 6, 6, softmax_attention{.pattern = causal{} & pattern::segments(ids)});
    const multi_head alone{.heads = packed.heads, .kv_heads = packed.kv_heads, .q = packed.q, .k = packed.k, .v = packed.v, .out = packed.out,
                           .attention = softmax_attention{.pattern = causal{}}};
    struct results {
        tensor<float> out, of_tokens;
    };
    const auto train = [](const auto& layer, const tensor<float>& x, index_t first, const tensor<float>& d_out, auto& executor) {
        results r{tensor<float>(x.shape()), tensor<float>(x.shape())};
        const layer_inputs<float> in{.tokens = x, .positions = {.first_query = first, .first_key = first}};
        workspace kept(kept_bytes(layer, in));
        forward(layer, in, r.out, kept, executor);
        backward(layer, in, kept, d_out, {.tokens = r.of_tokens}, executor);
        return r;
    };
    const auto x = random_rows<float>({1, 1, starts.back(), 24}, 3), d_out = random_rows<float>(x.shape(), 4);
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        const auto all = train(packed, x, 0, d_out, executor);
        for (std::size_t e = 0; e + 1 < starts.size(); ++e) {
            const auto own = train(alone, entry_of(x, starts, e), starts[e], entry_of(d_out, starts, e), executor);
            CHECK(same_bits(entry_of(all.out, starts, e), own.out));
            CHECK(same_bits(entry_of(all.of_tokens, starts, e), own.of_tokens));
        }
    });
}

TEST_CASE("ragged: starts that do not fit are refused", "[attention]") {
    using Catch::Matchers::StartsWith;
    const auto x = random_tensor<float>({1, 2, 10, 4}, 1), two = random_tensor<float>({2, 2, 10, 4}, 1);
    const softmax_attention op;
    const auto refusal = [&](const std::vector<index_t>& from, const std::vector<index_t>& keys = {}) {
        return error_of([&] { (void)attend(op, ragged{from, keys}, inputs<float>{x, x, x}); });
    };
    CHECK(refusal({0, 4, 10}) == nothing_thrown);
    CHECK(refusal({0, 10}) == nothing_thrown);
    const std::string rises = "softmax_attention: starts do not rise from 0 to 10, for tokens of shape (1, 2, 10, 4)";
    CHECK(refusal({}) == rises);
    CHECK(refusal({1, 10}) == rises);
    CHECK(refusal({0, 9}) == rises);
    CHECK(refusal({0, 6, 5, 10}) == rises);
    CHECK(refusal({0, -3, 10}) == rises);
    CHECK(refusal({0, 4, 10}, {0, 10}) == "softmax_attention: key_starts are 2, but starts are 3");
    const std::vector<index_t> from{0, 4, 10}, three(3);
    CHECK(error_of([&] { (void)attend(op, ragged{from}, inputs<float>{two, two, two}); }) ==
          "softmax_attention: starts cut one batch entry into sequences, for tokens of shape (2, 2, 10, 4)");
    CHECK(error_of([&] { (void)attend(op, ragged{from}, inputs<float>{x, x, x, {.first_query = three}}); }) ==
          "softmax_attention: positions are 3, but there are 2 sequences");
    // Queries beside other keys than theirs say where they stand, in every sequence.
    const std::vector<index_t> other{0, 5, 10};
    const auto refused = [&](const ragged& batch, const positions& where) {
        return error_of([&] { (void)attend(softmax_attention{.pattern = causal{}}, batch, inputs<float>{x, x, x, where}); });
    };
    CHECK(refused({from}, {}) == nothing_thrown);
    CHECK_THAT(refused({from, other}, {}), StartsWith("softmax_attention: positions are not given, but q has 4 tokens and k 5, and the pattern"));
    CHECK(refused({from, other}, top_left()) == nothing_thrown);
    tensor<float> narrow({1, 2, 10, 3}), out(x.shape());
    CHECK(error_of([&] { attend(op, ragged{from}, inputs<float>{x, x, x}, outputs<float>{narrow}); }) ==
          "softmax_attention: out has shape (1, 2, 10, 3), but the result has (1, 2, 10, 4)");
    sequential here;
    workspace none;
    CHECK_THAT(error_of([&] { attend(op, ragged{from}, inputs<float>{x, x, x}, outputs<float>{out}, execution(here, none)); }),
               StartsWith("softmax_attention: workspace has 0 bytes"));
    // A layer that makes fewer tokens has no starts for them.
    const auto image = random_rows<float>({1, 1, 12, 4}, 2);
    parameters weights;
    const spatial_reduction<float> reduce{.grid = {.height = 3, .width = 4, .window_height = 1, .window_width = 2},
                                          .projection = random_linear<float>(weights, "reduce", 4, 8)};
    const std::vector<index_t> whole{0, 12};
    CHECK(error_of([&] { (void)forward(reduce, {.tokens = image}); }) == nothing_thrown);
    CHECK(error_of([&] { (void)forward(reduce, ragged{whole}, {.tokens = image}); }) ==
          "spatial_reduction: tokens of shape (1, 1, 12, 4) become (1, 1, 6, 4): another number of them has no starts");
    CHECK_THAT(error_of([&] { (void)forward(linear<float>{.weight = x}, ragged{from}, {.tokens = x}); }), StartsWith("linear: "));
}

#ifdef ATTN_COUNTS_ALLOCATIONS
TEST_CASE("ragged: a call allocates nothing", "[attention]") {
    const auto x = random_tensor<float>({1, 2, starts.back(), 8}, 1);
    const softmax_attention op{.pattern = causal{}};
    const ragged batch{starts};
    thread_pool pool(2);
    workspace memory(workspace_bytes<float>(op, batch, inputs<float>{x, x, x}, pool));
    tensor<float> out(x.shape());
    const auto run = [&] { attend(op, batch, inputs<float>{x, x, x}, outputs<float>{out}, execution(pool, memory)); };
    run();
    const auto before = allocations();
    run();
    CHECK(allocations() == before);
}
#endif

TEST_CASE("a workspace of lent memory begins at a cache line and grows into memory of its own", "[core]") {
    alignas(64) std::array<std::byte, 300> lent;
    const std::span<std::byte> all(lent);
    workspace w(all.subspan(1));
    CHECK(w.bytes().data() == lent.data() + 64);
    CHECK(w.size_bytes() == 300 - 64);
    workspace moved(std::move(w));
    CHECK(moved.bytes().data() == lent.data() + 64);
    CHECK(w.size_bytes() == 0); // NOLINT: moved from, it is empty
    moved.reserve(200);
    CHECK(moved.bytes().data() == lent.data() + 64);
    moved.reserve(1000);
    CHECK(moved.size_bytes() == 1000);
    CHECK(moved.bytes().data() != lent.data() + 64);
    CHECK(workspace(std::span<std::byte>()).size_bytes() == 0);
    CHECK(workspace(all.subspan(1, 20)).size_bytes() == 0);
}

TEST_CASE("ragged: recurrent attention, whose rule has numbers of every token and whose states are of every sequence", "[ragged]") {
    const auto n = starts.back(), entries = std::ssize(starts) - 1;
    const auto q = random_tensor<float>({1, 4, n, 8}, 1), k = random_tensor<float>({1, 2, n, 8}, 2), v = random_tensor<float>({1, 2, n, 11}, 3), first = random_tensor<float>({entries, 2, 8, 11}, 4);
    auto log_decay = random_tensor<float>({1, 2, n, 1}, 5), beta = random_tensor<float>({1, 1, n, 1}, 6);
    for (index_t e = 0; e < log_decay.shape().size(); ++e) log_decay.data()[e] = -std::abs(log_decay.data()[e]);
    for (index_t e = 0; e < beta.shape().size(); ++e) beta.data()[e] = 0.1f * std::abs(beta.data()[e]);
    tensor<float> last(first.shape());
    const auto op = [&](tensor_view<const float> g, tensor_view<const float> b, tensor_view<const float> from, tensor_view<float> to) {
        return recurrent_attention<rule::gated_delta<float>>{.rule = {g, b}, .first_state = from, .last_state = to};
    };
    const inputs<float> in{q, k, v};
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        std::fill_n(last.data(), last.shape().size(), guard<float>);
        const auto out = attend(op(log_decay, beta, first, last), ragged{.starts = starts}, in, executor);
        for (std::size_t e = 0; e + 1 < starts.size(); ++e) {
            const auto entry = static_cast<index_t>(e);
            const auto eq = entry_of(q, starts, e), ek = entry_of(k, starts, e), ev = entry_of(v, starts, e), eg = entry_of(log_decay, starts, e), eb = entry_of(beta, starts, e);
            tensor<float> own_last({1, 2, 8, 11});
            CHECK(same_bits(entry_of(out, starts, e), attend(op(eg, eb, first.slice({.batch = {entry, 1}}), own_last), inputs<float>{eq, ek, ev})));
            CHECK(std::equal(own_last.data(), own_last.data() + own_last.shape().size(), last.view().row(entry, 0, 0)));
        }
    });
    // Its gradient: of what the rule takes of each token, and of the states of each sequence.
    const auto full = op(log_decay, beta, first, {});
    const auto out = attend(full, ragged{.starts = starts}, in);
    const auto d_out = random_tensor<float>(out.shape(), 7), d_last = random_tensor<float>(first.shape(), 8);
    tensor<float> dq(q.shape()), dk(k.shape()), dv(v.shape()), dg(log_decay.shape()), db(beta.shape()), d_first(first.shape());
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        backward(full, ragged{.starts = starts}, in, {out}, {d_out},
                 {{dq, dk, dv}, dg, db, {}, {}, d_first, d_last}, executor);
        for (std::size_t e = 0; e + 1 < starts.size(); ++e) {
            const tensor_part state{.batch = {static_cast<index_t>(e), 1}};
            const auto eq = entry_of(q, starts, e), ek = entry_of(k, starts, e), ev = entry_of(v, starts, e), eg = entry_of(log_decay, starts, e), eb = entry_of(beta, starts, e),
                       e_out = entry_of(out, starts, e), e_d_out = entry_of(d_out, starts, e);
            tensor<float> edq(eq.shape()), edk(ek.shape()), edv(ev.shape()), edg(eg.shape()), edb(eb.shape()), ed_first({1, 2, 8, 11});
            backward(op(eg, eb, first.slice(state), {}), inputs<float>{eq, ek, ev}, {e_out}, {e_d_out},
                     {{edq, edk, edv}, edg, edb, {}, {}, ed_first, d_last.slice(state)});
            CHECK(same_bits(entry_of(dq, starts, e), edq));
            CHECK(same_bits(entry_of(dk, starts, e), edk));
            CHECK(same_bits(entry_of(dv, starts, e), edv));
            CHECK(same_bits(entry_of(dg, starts, e), edg));
            CHECK(same_bits(entry_of(db, starts, e), edb));
            CHECK(std::equal(ed_first.data(), ed_first.data() + ed_first.shape().size(), d_first.view().row(static_cast<index_t>(e), 0, 0)));
        }
    });
    const ragged batch{.starts = starts};
    const auto error = [&](const auto& wrong) { return error_of([&] { static_cast<void>(attend(wrong, batch, in)); }); };
    const auto short_decay = random_tensor<float>({1, 2, 5, 1}, 5), one_state = random_tensor<float>({1, 2, 8, 11}, 4);
    CHECK(error(op(short_decay, beta, first, last)) == "recurrent_attention: rule.log_decay has shape (1, 2, 5, 1), but one batch entry of 200 tokens is needed");
    CHECK(error(op(log_decay, beta, one_state, last)) == "recurrent_attention: first_state has shape (1, 2, 8, 11), but there are 6 sequences");
}

} // namespace attn::testing
