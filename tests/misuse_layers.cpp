// Wrong arguments of norms, layers, parameters and of what owns memory: null, negative, zero, huge, overlapping, moved from.
#include "catch.hpp"
#include "misuse.hpp"

#include <attn/attention/depthwise_convolution.hpp>
#include <attn/attention/linear_attention.hpp>
#include <attn/attention/linformer_attention.hpp>
#include <attn/attention/merge.hpp>
#include <attn/attention/pooling.hpp>
#include <attn/attention/project.hpp>
#include <attn/attention/random_projection.hpp>
#include <attn/attention/softmax_attention.hpp>
#include <attn/attention/sparse_attention.hpp>
#include <attn/attention/strided_convolution.hpp>
#include <attn/layer/parameters.hpp>
#include <attn/layer/sinusoidal.hpp>
#include <attn/layer/transformer_block.hpp>
#include <attn/layer/windowed.hpp>
#include <attn/norm/fold.hpp>
#include <attn/norm/dynamic_tanh.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/norm/progressive_rep_batch_norm.hpp>
#include <attn/norm/batch_norm.hpp>
#include <attn/norm/recalibration.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/norm/unit_norm.hpp>
#include <attn/pattern/strided.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

constexpr auto unsized = index_t{1} << 62, long_index = index_t{1} << 40, int_size = index_t{1} << 31;
const std::vector<float> memory(4000);
const std::vector<float> numbers(400); // more than needed, so that an output on the first of them is on nothing else
const auto four = std::span(numbers).first(4);
const std::vector<double> four_doubles(4);
const shape rows{2, 1, 9, 4};

/// Rows of floats from number n of the memory on.
tensor_view<float> at(index_t n, const shape& s = rows) { return on<float>(memory.data() + n, s); }

template <Norm N>
void check_norm(const N& norm) {
    INFO(N::name);
    const auto name = std::string(N::name) + ": ";
    const auto to_rows = [&](const tensor_view<float>& x, const tensor_view<float>& out) { return [=] { normalise(checks_of_norm<N>{norm}, x, out); }; };
    CHECK_THROWS_AS(to_rows(at(0), at(100))(), nothing_refused);
    CHECK_THROWS_AS(to_rows(at(0), at(0))(), nothing_refused);
    check_refused({
        {"null x", to_rows(without_memory(at(0)), at(100)), {name + "x ", "null pointer"}},
        {"null out", to_rows(at(0), without_memory(at(100))), {name + "out ", "null pointer"}},
        {"far", to_rows({at(0).data(), rows, {.batch = unsized}}, at(100)), {name + "x ", "strides that reach"}},
        {"overlap", to_rows(at(0), at(1)), {name + "out ", "overlaps x"}},
    });
    for (int dimension = 0; dimension < 4; ++dimension)
        for (const auto extent : wrong_extents) {
            const auto wrong = at(0, with_extent(rows, dimension, extent));
            const auto problem = to_string(wrong.shape());
            check_refused({{"x " + to_string(wrong.shape()), to_rows(wrong, at(100)), {name, problem}},
                           {"out " + to_string(wrong.shape()), to_rows(at(100), wrong), {name + "out ", problem}}});
        }
}

/// A layer of rows (2, 1, 9, 4), and memory that it refers to.
template <Layer L>
void check_layer(const L& layer, const std::vector<std::pair<std::string, const void*>>& references) {
    INFO(L::name);
    const auto name = std::string(L::name) + ": ";
    const auto forwarded = [&](const layer_inputs<float>& in, const tensor_view<float>& out) {
        return [=] {
            sequential here;
            workspace none;
            forward(checks_of_layer<L>{layer}, in, out, execution(here, none));
        };
    };
    const auto to_rows = [&](const tensor_view<float>& x, const tensor_view<float>& out) { return forwarded({.tokens = x}, out); };
    const auto to_layer = [&](const layer_inputs<float>& in) { return forwarded(in, at(200, layer.output_shape(rows))); };
    const auto result = layer.output_shape(rows);
    CHECK_THROWS_AS(to_rows(at(0), at(100, result))(), nothing_refused);
    check_refused({
        {"null tokens", to_rows(without_memory(at(0)), at(100, result)), {"tokens ", "null pointer"}},
        {"null out", to_rows(at(0), without_memory(at(100, result))), {name + "out ", "null pointer"}},
        {"null residual", to_layer({.tokens = at(0), .residual = without_memory(at(100, result))}), {"residual "}},
        {"null context", to_layer({.tokens = at(0), .context = without_memory(at(0))}), {"context "}},
        {"far", to_rows({at(0).data(), rows, {.batch = unsized, .tokens = 4}}, at(100, result)), {"tokens ", "strides that reach"}},
        {"overlap", to_rows(at(0), at(1, result)), {name + "out ", "overlaps tokens"}},
    });
    for (const auto& [argument, reference] : references)
        check_refused({{argument, to_rows(at(0), on<float>(reference, result)), {name + "out ", "overlaps " + argument}}});
    for (int dimension = 0; dimension < 4; ++dimension)
        for (const auto extent : wrong_extents) {
            const auto wrong = at(0, with_extent(rows, dimension, extent));
            check_refused({{"tokens " + to_string(wrong.shape()), to_rows(wrong, at(100, result)), {": "}}});
            check_refused({{"out " + to_string(wrong.shape()), to_rows(at(0), at(100, with_extent(result, dimension, extent))), {name + "out "}}});
        }
}

linear<float> linear_at(index_t n, index_t outputs, index_t inputs) { return {at(n, {1, 1, outputs, inputs})}; }

} // namespace

TEST_CASE("misuse: norms", "[misuse][portable]") {
    check_norm(layer_norm<float>{});
    check_norm(rms_norm<float>{});
    check_norm(unit_norm<float>{});
    check_norm(dynamic_tanh<float>{});
    check_norm(dynamic_erf<float>{});
    const batch_norm<float> batch{.mean = four_doubles, .variance = four_doubles};
    check_norm(batch);
    check_norm(rep_batch_norm<float>{batch});
    check_norm(progressive_rep_batch_norm<layer_norm<float>>{.rep = {batch}});
    check_norm(identity_norm<float>{});
    const shape one{1, 1, 1, 4};
    const auto onto = [&](const void* parameter, const auto& norm) {
        return [=] { normalise(checks_of_norm<std::remove_cvref_t<decltype(norm)>>{norm}, at(0, one), on<float>(parameter, one)); };
    };
    check_refused({
        {"weight", onto(four.data(), layer_norm<float>{.weight = four}), {"layer_norm: out ", "overlaps weight"}},
        {"bias", onto(four.data(), layer_norm<float>{.bias = four}), {"layer_norm: out ", "overlaps bias"}},
        {"tanh weight", onto(four.data(), dynamic_tanh<float>{.weight = four}), {"dynamic_tanh: out ", "overlaps weight"}},
        {"erf bias", onto(four.data(), dynamic_erf<float>{.bias = four}), {"dynamic_erf: out ", "overlaps bias"}},
        {"rms weight", onto(four.data(), rms_norm<float>{.weight = four}), {"rms_norm: out ", "overlaps weight"}},
        {"mean", onto(four_doubles.data(), rep_batch_norm<float>{batch}), {"rep_batch_norm: out ", "overlaps mean"}},
        {"of both", onto(four.data(), progressive_rep_batch_norm<layer_norm<float>>{.norm = {.weight = four}, .rep = {batch}}), {"overlaps weight"}},
        {"statistics < 0", [] { batch_norm_statistics(-1); }, {"batch_norm_statistics: channels "}},
        {"2^62 statistics", [] { batch_norm_statistics{unsized}; }, {"batch_norm_statistics: channels ", "2^48"}},
        {"recalibration", [] { recalibration{-int_size}; }, {"channels "}},
    });
    // Folding writes where it reads only where both are the same.
    const auto folded = [&](index_t weight, index_t bias) {
        const auto linear_of = [](index_t w, index_t b) {
            return linear_view<float>{at(w, {1, 1, 3, 4}), std::span(at(b, {1, 1, 1, 3}).data(), 3)};
        };
        return [=] { fold(batch, linear_of(0, 50), linear_of(weight, bias)); };
    };
    check_refused({
        {"weights shifted", folded(1, 100), {"fold: folded.weight ", "overlaps linear.weight"}},
        {"bias on weights", folded(100, 5), {"fold: folded.bias ", "overlaps linear.weight"}},
        {"weights on bias", folded(48, 200), {"fold: folded.weight ", "overlaps linear.bias"}},
        {"bias in weights", folded(100, 104), {"fold: folded.weight ", "overlaps folded.bias"}},
        {"2^31 x 2^40", [&] { fold(batch, linear_view<float>{at(0, {1, 1, int_size, long_index})}, linear_view<float>{}); }, {"fold: linear ", "2^48"}},
    });
}

TEST_CASE("misuse: layers", "[misuse][portable]") {
    const auto square = linear_at(1000, 4, 4);
    const std::string of_linear = "the weight of a linear";
    const rotary<float> rotation(16, 4);
    const multi_head<float> heads{.q = square, .k = square, .v = square, .out = linear_at(1200, 4, 4), .rotation = &rotation, .gate = linear_at(1250, 1, 4)};
    const feed_forward<float> mlp{.up = linear_at(1300, 8, 4), .down = linear_at(1400, 4, 8), .gate = linear_at(1500, 8, 4)};
    const window_grid grid{.height = 3, .width = 3, .window_height = 3, .window_width = 1};
    check_layer(linear<float>{square.weight, four}, {{of_linear, &memory[1000]}, {"the bias of a linear", four.data()}});
    check_layer(mlp, {{of_linear, &memory[1300]}, {of_linear, &memory[1400]}, {of_linear, &memory[1500]}});
    check_layer(heads, {{of_linear, &memory[1000]}, {of_linear, &memory[1200]}, {of_linear, &memory[1250]}});
    check_layer(windowed<feed_forward<float>>{grid, mlp}, {{of_linear, &memory[1300]}});
    check_layer(spatial_reduction<float>{grid, linear_at(1600, 4, 12)}, {{of_linear, &memory[1600]}});
    check_layer(transformer_block<layer_norm<float>, multi_head<float>, feed_forward<float>>{{.weight = four}, heads, {}, mlp},
                {{"weight", four.data()}, {of_linear, &memory[1000]}, {of_linear, &memory[1400]}});

    sequential here;
    workspace none;
    const execution run(here, none);
    parameters weights;
    const auto add = [&](const parameters::extents& size) { return error_of<parameter_error>([&] { weights.add<float>("w", size); }); };
    check_says(add({int_size, int_size, int_size}), {"tensor \"w\" ", "2^48"});
    check_says(add({unsized, 4, 0}), {"tensor \"w\" ", "2^48"});
    check_says(add({unsized, unsized, unsized, unsized, 8}), {"tensor \"w\" ", "2^48"});
    check_says(add({4, -1}), {"tensor \"w\" ", "negative"});
    CHECK(weights.names().empty());
    const window_grid empty{0, 0, 0, 0}, endless{unsized, 4, unsized, 1};
    check_refused({
        {"rotary null", [&] { rotate(rotation, without_memory(at(0)), 0, at(0), run); }, {"rotary: x ", "null pointer"}},
        {"rotary on itself", [&] { rotate(rotation, at(0), 0, {at(0).data(), rows, {.tokens = 4}}, run); }, {"rotary: out ", "elements overlap"}},
        {"rotary of no entry", [&] { rotate(rotation, at(0), std::span<const index_t>(), at(0), run); }, {"rotary: x ", "0 positions"}},
        {"rotary of -1", [] { rotary<float>(-1, 4); }, {"rotary: table ", "negative"}},
        {"rotary of 2^62", [] { rotary<float>(unsized, 8); }, {"rotary: table ", "2^48"}},
        {"rotary of 2^31 x 2^40", [] { rotary<float>(int_size, long_index); }, {"rotary: table ", "2^48"}},
        {"sinusoidal null", [] { fill_sinusoidal_positions(without_memory(at(0, {1, 1, 9, 4}))); }, {"table ", "null pointer"}},
        {"sinusoidal negative", [] { fill_sinusoidal_positions(at(0, {1, 1, -9, 4})); }, {"table ", "negative"}},
        {"sinusoidal on itself", [] { fill_sinusoidal_positions(tensor_view<float>(at(0).data(), {1, 1, 9, 4}, {})); }, {"table ", "overlap"}},
        {"no windows", [&] { (void)empty.windows(); }, {"window_grid: grid ", "empty"}},
        {"no windows of a layer", [&] { (void)windowed<feed_forward<float>>{empty, mlp}.workspace_bytes(rows, {}, 1); }, {"window_grid: grid "}},
        {"2^62 x 4", [&] { (void)endless.shift_segments(); }, {"grid ", "too large"}},
        {"null images", [&] { window_partition(grid, without_memory(at(0)), at(100, {6, 1, 3, 4})); }, {"window_partition: image ", "null pointer"}},
        {"huge images", [&] { window_reverse(grid, at(0, {unsized, 1, 3, 4}), at(100)); }, {"window_reverse: windows ", "2^48"}},
        {"windows on images", [&] { window_partition(grid, at(0), at(1, {6, 1, 3, 4})); }, {"window_partition: windows ", "overlaps image"}},
    });
}

TEST_CASE("misuse: sizes before checks, projections, convolutions and merging", "[misuse][portable]") {
    using linear = linear_projection<float>;
    const auto x = at(0), to = at(200, {2, 1, 3, 4});
    sequential here;
    workspace space(100'000);
    const execution run(here, space);
    const input_shapes small{{1, 2, 9, 4}, {1, 2, 9, 4}, {1, 2, 9, 4}};
    const std::vector<linear> one{{at(1000, {1, 1, 3, 9})}};
    const auto bytes_of = [&](const auto& op) { return [op, &here, small] { (void)workspace_bytes<float>(op, small, here); }; };
    const auto bytes_for = [&](const shape& s) { return [s, &here] { (void)workspace_bytes<float>(linear_attention<>{}, {s, s, s}, here); }; };
    const auto pairs = [&](const auto& pattern, const positions& where = {}) {
        return [=] { (void)visited_pairs(softmax_attention{.pattern = pattern}, small, where); };
    };
    const auto projected = [&](const auto& projection, const tensor_view<float>& from, const tensor_view<float>& into) {
        return [=, &run] { project(projection, from, into, run); };
    };
    const depthwise_convolution<float> kernel{.weights = at(1000, {1, 4, 1, 3})}, none, huge{.weights = {at(0).data(), {1, 4, 1, unsized + 1}, {.tokens = 0, .channels = 0}}};
    const auto added = [&](const auto& convolution, const tensor_view<float>& from, const tensor_view<float>& into) {
        return [=, &run] { add_convolution(convolution, from, into, run); };
    };
    const auto merged = [](const outputs<float>& into, const outputs<float>& from) { return [=] { merge(into, from); }; };
    const auto sums = at(300, {2, 1, 9, 1}), other_sums = at(400, {2, 1, 9, 1});
    const outputs<float> from{at(500), other_sums};
    check_refused({
        {"no projections", bytes_of(linformer_attention<projection_per_head<linear>>{}), {"projection_per_head: each has 0", "head 0"}},
        {"one projection for two heads", bytes_of(linformer_attention<projection_per_head<linear>>{.key_projection = {one}}), {"has 1 projections", "head 1"}},
        {"no weights", bytes_of(linformer_attention<channel_convolution<float>>{}), {"convolution: weights ", "kernel of 0 tokens"}},
        {"negative", bytes_for({1, 2, -9, 4}), {"linear_attention: q ", "negative"}},
        {"2^62 channels", bytes_for({1, 1, 1, unsized}), {"linear_attention: q ", "2^48"}},
        {"2^40 channels", bytes_for({1, 1, 1, long_index}), {"workspace: size "}},
        {"strided{0}", pairs(strided{0}), {"softmax_attention: pattern strided{0}"}},
        {"sub_blocks 0", pairs(sparse_transformer_fixed_heads{4, 1, 0}), {"softmax_attention: pattern ", "sub_blocks"}},
        {"positions of no entry", pairs(dense{}, {.first_query = std::span<const index_t>()}), {"softmax_attention: positions "}},
        {"strided{0} of no operator", [] { (void)visited_pairs(strided{0}, 0, 9, 0, 9, 4, 4); }, {"visited_pairs: pattern strided{0}"}},
        {"projected null", projected(linear{one[0]}, without_memory(x), to), {"project: x ", "null pointer"}},
        {"null matrix", projected(linear{without_memory(at(0, {1, 1, 3, 9}))}, x, to), {"project: projection ", "null pointer"}},
        {"2^62 rows", projected(mean_pooling{unsized}, x, to), {"project: projection ", "2^48"}},
        {"onto the matrix", projected(linear{one[0]}, x, at(1010, {2, 1, 3, 4})), {"project: out ", "overlaps the matrix"}},
        {"random null", [] { fill_random_projection(without_memory(at(0)), 1); }, {"fill_random_projection: matrix ", "null pointer"}},
        {"random negative", [] { fill_random_projection(at(0, {1, 1, -3, 9}), 1); }, {"fill_random_projection: matrix ", "negative"}},
        {"no kernel", added(none, x, at(100)), {"depthwise_convolution: weights "}},
        {"2^62 taps", added(huge, x, at(100)), {"depthwise_convolution: weights ", "2^48"}},
        {"convolved onto weights", added(kernel, x, at(1005)), {"depthwise_convolution: out ", "overlaps the convolution's weights"}},
        {"convolved onto x", added(kernel, x, at(1)), {"depthwise_convolution: out ", "overlaps x"}},
        {"merged null", merged({without_memory(at(0)), sums}, from), {"merge: into ", "null pointer"}},
        {"merged from null", merged({at(0), sums}, {without_memory(at(0)), other_sums}), {"merge: from ", "null pointer"}},
        {"merged on itself", merged({{at(0).data(), rows, {.tokens = 4}}, sums}, from), {"merge: into ", "elements overlap"}},
        {"merged sums on themselves", merged({at(0), {sums.data(), sums.shape(), {}}}, from), {"merge: into ", "elements overlap"}},
        {"merged overlap", merged({at(501), sums}, from), {"merge: into overlaps from"}},
    });
}

TEST_CASE("misuse: what owns memory", "[misuse][portable]") {
    for (int dimension = 0; dimension < 4; ++dimension)
        for (const auto extent : {index_t{-1}, -unsized, unsized}) {
            const auto wrong = with_extent({2, 2, 2, 2}, dimension, extent);
            check_refused({{to_string(wrong), [&] { tensor<float>{wrong}; }, {"tensor: shape ", to_string(wrong)}}});
        }
    check_refused({
        {"2^31 x 2^31", [] { tensor<float>(shape{1, 1, int_size, int_size}); }, {"tensor: shape ", "more than 2^48 bytes"}},
        {"2^32 x 2^32 x 2^32 x 2^32", [] { tensor<bool>(shape{int_size * 2, int_size * 2, int_size * 2, int_size * 2}); }, {"tensor: shape "}},
        {"workspace", [] { workspace{std::size_t{1} << 62}; }, {"workspace: size "}},
        {"workspace of less than none", [] { workspace{static_cast<std::size_t>(-1)}; }, {"workspace: size "}},
        {"scratch", [] { detail::scratch().take<float>(int_size, int_size); }, {"workspace: size "}},
        {"scratch that wraps", [] { detail::scratch().take<double>(unsized, 4); }, {"workspace: size "}},
        {"scratch below none", [] { detail::scratch().take<double>(-1, 4); }, {"workspace: size "}},
        {"scratch by sums", [] { detail::scratch s; for (;;) s.take<char>(index_t{1} << 46); }, {"workspace: size "}},
    });

    tensor<float> t(shape{1, 1, 2, 3}), u;
    u = std::move(t);
    CHECK(t.shape().size() == 0);
    CHECK(t.data() == nullptr);
    CHECK(u.shape() == shape{1, 1, 2, 3});
    const tensor<float> v = std::move(u);
    CHECK(u.shape().size() == 0);
    CHECK(v.shape() == shape{1, 1, 2, 3});
    workspace a(100), b;
    b = std::move(a);
    CHECK(a.size_bytes() == 0);
    CHECK(b.bytes().size() == 100);
    const workspace c = std::move(b);
    CHECK(b.bytes().empty());
    CHECK(c.size_bytes() == 100);
    a.reserve(10);
    CHECK(a.bytes().data() != nullptr);
}

} // namespace attn::testing
