// Every registered operator that has a gradient: held to its definition, and the definition to finite differences.
#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "layouts.hpp"

namespace attn::testing {

namespace {

/// The gradients of one call.
template <Scalar T>
struct gradients {
    tensor<T> queries, keys, values;
    std::vector<tensor<T>> parameters;

    wanted_gradients<T> wanted() {
        return {{queries, keys, values}, {parameters.begin(), parameters.end()}};
    }
    std::vector<std::pair<std::string, const tensor<T>*>> each() const {
        std::vector<std::pair<std::string, const tensor<T>*>> all{{"queries", &queries}, {"keys", &keys}, {"values", &values}};
        for (const auto& p : parameters) all.emplace_back("parameter " + std::to_string(all.size() - 3), &p);
        return all;
    }
};

/// Room for them, all guards.
template <Scalar T, Scalar U>
gradients<T> no_gradients(const instance<U>& op, const input_shapes& s) {
    gradients<T> all{tensor<T>(s.queries), tensor<T>(s.keys), tensor<T>(s.values), {}};
    for (const auto& p : op.parameter_shapes(s)) all.parameters.emplace_back(p);
    for (const auto& [name, t] : all.each()) std::fill_n(const_cast<T*>(t->data()), t->shape().size(), guard<T>);
    return all;
}

template <Scalar T>
bool same_bits(const gradients<T>& a, const gradients<T>& b) {
    return std::ranges::equal(a.each(), b.each(), [](const auto& x, const auto& y) { return testing::same_bits(*x.second, *y.second); });
}

/// A call with what it wrote, and random gradients of that.
template <Scalar T>
struct given_back {
    given<T> in;
    answer<T> saved, loss;

    given_back(const instance<T>& op, const problem& p, const attention_case& c, given<T> own) : in(std::move(own)) {
        saved = attend(op, inputs<T>(in), c.has_log_sum_exp);
        std::mt19937 random(3);
        std::normal_distribution<double> normal;
        loss = no_answer<T>(op, p.shapes(), c.has_log_sum_exp);
        for (auto* t : {&loss.values, &loss.log_sum_exp})
            std::generate_n(t->data(), t->shape().size(), [&] { return static_cast<T>(normal(random)); });
    }
    saved_outputs<T> outputs() const { return {saved.values, saved.log_sum_exp}; }
    output_gradients<T> given_gradients() const { return {loss.values, loss.log_sum_exp}; }
};

template <Scalar T>
given_back<T> random_given_back(const instance<T>& op, const problem& p, const attention_case& c) {
    return {op, p, c, random_given<T>(p)};
}

template <Scalar T, Executor E>
gradients<T> backward(const instance<T>& op, const given_back<T>& call, E& executor) {
    const auto s = shapes_of(inputs<T>(call.in));
    auto all = no_gradients<T>(op, s);
    workspace memory(op.backward_workspace_bytes(s, executor.concurrency()));
    op.backward(call.in, call.outputs(), call.given_gradients(), all.wanted(), execution(executor, memory));
    return all;
}
template <Scalar T>
gradients<T> backward(const instance<T>& op, const given_back<T>& call) {
    sequential here;
    return backward(op, call, here);
}

/// The definition's, in double.
template <Scalar T>
gradients<double> exact_gradients(const instance<T>& op, const given_back<T>& call) {
    const auto wide = [](const tensor<T>& t) { return reference::widen(t.view()); };
    const auto q = wide(call.in.queries), k = wide(call.in.keys), v = wide(call.in.values), values = wide(call.loss.values), rows = wide(call.loss.log_sum_exp);
    auto all = no_gradients<double>(op, shapes_of(inputs<T>(call.in)));
    op.reference_gradients({q, k, v, call.in.positions}, {values, rows}, all.wanted());
    return all;
}

template <Scalar T>
std::vector<double> gradient_terms(const instance<T>& op, const given_back<T>& call) {
    const auto wide = [](const tensor<T>& t) { return reference::widen(t.view()); };
    const auto q = wide(call.in.queries), k = wide(call.in.keys), v = wide(call.in.values), values = wide(call.loss.values);
    return op.gradient_terms({q, k, v, call.in.positions}, {values});
}

/// Calls f(case, problem) for those that have a gradient.
template <Scalar T, class F>
void for_each_gradient(const std::vector<problem>& problems, F&& f) {
    std::size_t checked = 0;
    for_each_case(problems, [&](const attention_case& c, const problem& p) {
        const auto op = c.make<T>(p);
        if (!op->has_gradient()) return;
        INFO(c.name << ": " << describe(p));
        f(*op, p, c);
        ++checked;
    });
    CHECK(checked > 0);
}

/// How wrong the textbook's formulas are of one problem in single precision, in epsilons of each gradient. A small problem has few roundings,
/// which may be lucky, and so may a gradient of few numbers: the largest error of three is taken, or of twelve, of the same numbers a little
/// smaller each time.
std::vector<double> textbook_errors(const attention_case& c, const problem& p) {
    const auto op = c.make_float(p);
    auto plain = no_gradients<float>(*op, p.shapes());
    std::vector<double> errors(plain.each().size());
    const index_t few = p.batch * p.heads * p.queries * p.keys > 4000 ? 2 : 7; // a large problem takes long
    const bool has_few = std::ranges::any_of(plain.each(), [few](const auto& g) { return g.second->shape().size() <= few; });
    for (int draw = 0; draw < (has_few ? 12 : 3); ++draw) {
        const float factor = 1 - 0.03f * static_cast<float>(draw);
        auto in = random_given<float>(p);
        for (auto* t : {&in.queries, &in.keys, &in.values})
            for (index_t e = 0; e < t->shape().size(); ++e) t->data()[e] *= factor;
        const given_back<float> call(*op, p, c, std::move(in));
        const auto exact = exact_gradients(*op, call);
        op->plain_gradients(call.in, call.given_gradients(), plain.wanted());
        for (std::size_t g = 0; g < errors.size(); ++g)
            errors[g] = std::max(errors[g], largest_error(*plain.each()[g].second, *exact.each()[g].second) / epsilon<float>);
    }
    return errors;
}

/// How wrong each gradient may be, in epsilons: 2 max|textbook - exact| + 8 max(1, |exact|, terms that cancel), the textbook's formula being in the same
/// precision. In double the definition itself rounds, just as the textbook does, and counts a third time.
template <Scalar T>
std::vector<double> bounds_of(const instance<T>& op, const given_back<T>& call, const gradients<double>& exact, std::vector<double> textbook) {
    const auto terms = gradient_terms(op, call);
    for (std::size_t g = 0; g < textbook.size(); ++g) {
        const auto size = std::max({1.0, largest_magnitude(*exact.each()[g].second), g < terms.size() ? terms[g] : 0});
        textbook[g] = (std::same_as<T, double> ? 6 : 2) * textbook[g] + 8 * size;
    }
    return textbook;
}

template <Scalar T>
void check_gradients(const instance<T>& op, const problem& p, const attention_case& c, const std::vector<double>& textbook) {
    const auto call = random_given_back(op, p, c);
    const auto ours = backward(op, call);
    const auto exact = exact_gradients(op, call);
    const auto bounds = bounds_of(op, call, exact, textbook);
    for (std::size_t g = 0; g < ours.each().size(); ++g) {
        INFO("of the " << ours.each()[g].first << " in " << (std::same_as<T, double> ? "double" : "float"));
        CHECK(largest_error(*ours.each()[g].second, *exact.each()[g].second) / epsilon<T> <= bounds[g]);
    }
}
/// In both precisions: how wrong the textbook is takes most of the time.
void check_gradients(const std::vector<problem>& problems) {
    for_each_gradient<float>(problems, [](const instance<float>& op, const problem& p, const attention_case& c) {
        const auto textbook = textbook_errors(c, p);
        check_gradients(op, p, c, textbook);
        if constexpr (is_tested<double>) check_gradients(*c.make<double>(p), p, c, textbook);
    });
}

double inner_product(const tensor<double>& a, const tensor<double>& b) {
    double sum = 0;
    for (index_t e = 0; e < a.shape().size(); ++e) sum += a.data()[e] * b.data()[e];
    return sum;
}

} // namespace

// <g, t> is the derivative of the loss along t, for random directions t of all inputs at once.
TEST_CASE("every gradient's definition is what finite differences say", "[conformance][portable]") {
    if constexpr (!is_tested<double>) return; // a build without the cases in double has none of what follows
    const std::vector<problem> problems{{2, 4, 2, 7, 11, 3, 5}, {1, 2, 1, 20, 30, 4, 2}, {1, 2, 2, 9, 40, 5, 3, {.first_query = 31}}};
    for_each_gradient<double>(problems, [](const instance<double>& op, const problem& p, const attention_case& c) {
        const given_back<double> call(op, p, c, random_given<double>(p, 41)); // of numbers that lie off the kinks of feature maps
        const auto g = exact_gradients(op, call);
        std::mt19937 random(8);
        std::normal_distribution<double> normal;
        for (int direction = 0; direction < 3; ++direction) {
            const auto draw = [&](const tensor<double>& like) {
                tensor<double> t(like.shape());
                std::generate_n(t.data(), t.shape().size(), [&] { return normal(random); });
                return t;
            };
            const auto q = draw(call.in.queries), k = draw(call.in.keys), v = draw(call.in.values);
            const auto loss = [&](double step) {
                const auto moved = [&](const tensor<double>& from, const tensor<double>& along) {
                    tensor<double> to(from.shape());
                    for (index_t e = 0; e < from.shape().size(); ++e) to.data()[e] = from.data()[e] + step * along.data()[e];
                    return to;
                };
                const given<double> in{moved(call.in.queries, q), moved(call.in.keys, k), moved(call.in.values, v), call.in.positions};
                auto out = reference_of(op, inputs<double>(in), c.has_log_sum_exp);
                for (index_t e = 0; e < out.log_sum_exp.shape().size(); ++e) // a row that sees nothing stays as it is
                    if (std::isinf(out.log_sum_exp.data()[e])) out.log_sum_exp.data()[e] = 0;
                return inner_product(out.values, call.loss.values) + inner_product(out.log_sum_exp, call.loss.log_sum_exp);
            };
            constexpr double step = 1e-4; // the error is of the fourth power of it
            const auto slope = (8 * (loss(step) - loss(-step)) - (loss(2 * step) - loss(-2 * step))) / (12 * step);
            const auto expected = inner_product(g.queries, q) + inner_product(g.keys, k) + inner_product(g.values, v);
            CHECK(std::abs(slope - expected) <= 1e-8 * (1 + std::abs(loss(0)) + std::abs(expected)));
        }
    });
}

TEST_CASE("every gradient: accuracy on small problems", "[conformance][portable][arithmetic]") {
    auto problems = sample_problems(14, 11);
    std::erase_if(problems, [](const problem& p) { return p.batch * p.heads * p.queries * p.keys > 8000; });
    check_gradients(problems);
}

TEST_CASE("every gradient: accuracy at the edges of registers and tiles", "[conformance]") { check_gradients(sample_problems(14, 12)); }

TEMPLATE_TEST_CASE("every gradient: executors do not change a bit, nor do tasks for few heads", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    const std::vector<problem> problems{{2, 4, 2, 97, 150, 16, 20}, {1, 2, 1, 290, 400, 8, 8}, {1, 1, 1, 5, 9, 3, 2}};
    for_each_executor([&](auto& executor, const std::string& name) {
        for_each_gradient<TestType>(problems, [&](const auto& op, const problem& p, const auto& c) {
            INFO("on " << name);
            const auto call = random_given_back(op, p, c);
            CHECK(same_bits(backward(op, call, executor), backward(op, call)));
        });
    });
}

TEMPLATE_TEST_CASE("every gradient: what is not wanted is not written, and changes no bit of the others", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    thread_pool pool(3);
    for_each_gradient<TestType>({{2, 4, 2, 57, 150, 16, 20}, {1, 1, 1, 5, 9, 3, 2}}, [&](const auto& op, const problem& p, const auto& c) {
        const auto call = random_given_back(op, p, c);
        const auto all = backward(op, call);
        workspace memory(op.backward_workspace_bytes(p.shapes(), pool.concurrency()));
        // None, each one alone, and all but each one.
        const auto count = all.each().size();
        std::vector<unsigned> subsets{0};
        for (std::size_t g = 0; g < count; ++g) subsets.insert(subsets.end(), {1u << g, ~(1u << g)});
        for (const auto which : subsets) {
            auto some = no_gradients<TestType>(op, p.shapes());
            auto wanted = some.wanted();
            if (!(which & 1)) wanted.queries = {};
            if (!(which & 2)) wanted.keys = {};
            if (!(which & 4)) wanted.values = {};
            for (std::size_t g = 3; g < all.each().size(); ++g)
                if (!(which >> g & 1)) wanted.parameters[g - 3] = {};
            op.backward(call.in, call.outputs(), call.given_gradients(), wanted, execution(pool, memory));
            const auto none = no_gradients<TestType>(op, p.shapes());
            for (std::size_t g = 0; g < all.each().size(); ++g) CHECK(testing::same_bits(*some.each()[g].second, which >> g & 1 ? *all.each()[g].second : *none.each()[g].second));
        }
    });
}

TEMPLATE_TEST_CASE("every gradient: stays inside its memory, and allocates nothing", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    thread_pool pool(3);
    for_each_gradient<TestType>(sample_problems(12, 13), [&](const auto& op, const problem& p, const auto& c) {
        const auto call = random_given_back(op, p, c);
        const auto expected = backward(op, call);
        const auto bytes = op.backward_workspace_bytes(p.shapes(), pool.concurrency());
        for (const auto filling : {std::byte{0}, std::byte{0xff}}) {
            workspace memory(bytes + 4096);
            fill(memory, filling);
            auto ours = no_gradients<TestType>(op, p.shapes());
            const execution run(pool, memory);
            const auto wanted = ours.wanted();
            const auto go = [&] { op.backward(call.in, call.outputs(), call.given_gradients(), wanted, run); };
            go();
            CHECK(allocations_in(go) == 0);
            CHECK(same_bits(ours, expected));
            CHECK(std::ranges::all_of(memory.bytes().subspan(bytes), [=](std::byte b) { return b == filling; }));
        }
    });
}

TEMPLATE_TEST_CASE("every gradient: memory layouts", "[conformance]", ATTN_TEST_NUMBERS) {
    for_each_gradient<TestType>({{2, 4, 2, 19, 37, 16, 20}}, [&](const auto& op, const problem& p, const auto& c) {
        const auto call = random_given_back(op, p, c);
        const auto exact = exact_gradients(op, call);
        const auto bounds = bounds_of(op, call, exact, textbook_errors(c, p));
        for (const auto& l : all_layouts) {
            INFO(l.name);
            placed<TestType> q(call.in.queries, l.value), k(call.in.keys, l.value), v(call.in.values, l.value), out(call.saved.values, l.value),
                rows(call.saved.log_sum_exp, l.value), d_out(call.loss.values, l.value), d_rows(call.loss.log_sum_exp, l.value);
            placed<TestType> dq(p.shapes().queries, l.value), dk(p.shapes().keys, l.value), dv(p.shapes().values, l.value);
            sequential here;
            workspace memory(op.backward_workspace_bytes(p.shapes(), 1));
            const auto of_rows = c.has_log_sum_exp ? d_rows.view() : tensor_view<TestType>{};
            op.backward({q.view(), k.view(), v.view(), call.in.positions}, {out.view(), rows.view()}, {d_out.view(), of_rows},
                        {{dq.view(), dk.view(), dv.view()}}, execution(here, memory));
            std::size_t g = 0;
            for (auto* gradient : {&dq, &dk, &dv}) {
                CHECK(gradient->guards_intact());
                CHECK(largest_error(gradient->copy(), *exact.each()[g].second) / epsilon<TestType> <= bounds[g]);
                ++g;
            }
        }
    });
}

// A key, value, query, or a row of the loss, holds NaN or infinity: the same elements become NaN as in the definition, and those that it does
// not reach there keep their bits.
TEMPLATE_TEST_CASE("every gradient: what is hidden gives nothing, whatever it holds", "[conformance][portable]", ATTN_TEST_NUMBERS) {
    std::mt19937 random(10);
    for_each_gradient<TestType>({{1, 2, 1, 19, 35, 4, 5}, {1, 1, 1, 50, 150, 8, 20}}, [&](const auto& op, const problem& p, const auto& c) {
        const auto fill = [](tensor<TestType>& t, index_t i, TestType value) {
            for (index_t channel = 0; channel < t.shape().channels; ++channel) t(0, 0, i, channel) = value;
        };
        const auto before = random_given_back(op, p, c);
        const auto ours_before = backward(op, before);
        const auto exact_before = exact_gradients(op, before);
        constexpr auto nan = std::numeric_limits<TestType>::quiet_NaN();
        for (int kind = 0; kind < 4; ++kind)
            for (const index_t j : {index_t{0}, p.keys / 2, p.keys - 1}) {
                INFO("kind " << kind << ", row " << j);
                auto in = random_given<TestType>(p);
                if (kind <= 1) fill(in.keys, j, nan);
                if (kind == 1) fill(in.values, j, nan);
                if (kind == 2) fill(in.queries, j % p.queries, nan);
                given_back<TestType> after(op, p, c, std::move(in));
                if (kind == 3) fill(after.loss.values, j % p.queries, nan);
                const auto ours = backward(op, after);
                const auto exact = exact_gradients(op, after);
                for (std::size_t g = 0; g < 3; ++g) {
                    const auto &was = *ours_before.each()[g].second, &is = *ours.each()[g].second;
                    const auto &exact_was = *exact_before.each()[g].second, &exact_is = *exact.each()[g].second;
                    index_t wrong = 0, leaked = 0;
                    for (index_t e = 0; e < is.shape().size(); ++e) {
                        wrong += std::isnan(is.data()[e]) != std::isnan(exact_is.data()[e]);
                        leaked += testing::same_bits(exact_is.data()[e], exact_was.data()[e]) && !testing::same_bits(is.data()[e], was.data()[e]);
                    }
                    INFO("of the " << ours.each()[g].first);
                    CHECK(wrong == 0);
                    CHECK(leaked == 0);
                }
            }
    });
}

} // namespace attn::testing
