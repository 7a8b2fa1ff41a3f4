#include "answers.hpp"
#include "others.hpp"
#include "softmax.hpp"

#include <attn/attention/merge.hpp>

namespace attn::fuzz {

namespace {

/// The keys first .. first + count - 1.
template <Scalar T>
testing::answer<T> some_keys(const operation<T>& op, const inputs<T>& all, index_t first, index_t count) {
    auto in = all.slice({}, {.tokens = {first, count}});
    in.positions.first_key = all.positions.first_key[0] + first;
    auto result = testing::no_answer<T>(op.output_shape(shapes_of(in)), true);
    sequential here;
    workspace memory(op.workspace_bytes(shapes_of(in), 1));
    op.attend(in, result.out(), execution(here, memory));
    return result;
}

template <Scalar T>
outcome attempt(draw& random) {
    softmax_drawn<T> d{.size = draw_sizes(random)};
    draw_positions(random, d.size);
    d.size.first_query.resize(1);
    d.size.first_key.resize(1);
    d.tree = draw_pattern(random, d.size);
    d.sinks = std::make_shared<const std::vector<double>>();
    const auto in = draw_given<T>(random, d.size, random.one_in(4) ? numbers::peaked : numbers::usual);
    const auto cut = random.number(0, d.size.keys);
    outcome result{describe(d.size) + "; tree " + d.tree->name() + "; cut at key " + std::to_string(cut), {}};

    const auto op = softmax_of(softmax_kind::composed, d, {0, d.size.batch, 0, d.size.heads});
    auto ours = some_keys<T>(*op, in, 0, cut);
    auto later = some_keys<T>(*op, in, cut, d.size.keys - cut);
    merge(ours.out(), later.out());

    const auto s = shapes_of(inputs<T>(in));
    auto exact = testing::no_answer<double>(op->output_shape(s), true), bounds = testing::no_answer<double>(op->output_shape(s), true);
    const auto q = reference::widen(in.queries.view()), k = reference::widen(in.keys.view()), v = reference::widen(in.values.view());
    op->reference({q, k, v, in.positions}, exact.out());
    op->bounds({q, k, v, in.positions}, bounds.out());
    // Each half's weight is wrong by what its log_sum_exp is, and all is rounded a few times more.
    const auto largest = testing::largest_magnitude(v);
    for (index_t e = 0; e < exact.values.shape().size(); ++e) {
        const auto of_row = bounds.log_sum_exp.data()[e / d.size.value_dim];
        const auto a = static_cast<double>(ours.values.data()[e]), b = exact.values.data()[e];
        if (a != b && !(std::abs(a - b) <= 4 * (bounds.values.data()[e] + largest * (of_row + 16 * unit_of<T>))))
            result.problem = "element " + std::to_string(e) + " is " + std::to_string(a) + ", not " + std::to_string(b);
    }
    for (index_t e = 0; e < exact.log_sum_exp.shape().size(); ++e) {
        const auto a = static_cast<double>(ours.log_sum_exp.data()[e]), b = exact.log_sum_exp.data()[e];
        if (a != b && !(std::abs(a - b) <= 4 * bounds.log_sum_exp.data()[e]))
            result.problem = "log_sum_exp " + std::to_string(e) + " is " + std::to_string(a) + ", not " + std::to_string(b);
    }
    return result;
}

} // namespace

outcome check_merge(draw& random) {
    return attn::detail::try_catch<std::exception>(
        [&] { return in_drawn_numbers(random, [&]<Scalar T>(std::type_identity<T>) { return attempt<T>(random); }); },
        [](const std::exception& e) { return outcome{"", threw(e)}; });
}

} // namespace attn::fuzz
