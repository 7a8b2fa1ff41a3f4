#include "checks.hpp"

#include "differences.hpp"
#include "draw_layout.hpp"
#include "gradient_checks.hpp"
#include "on_threads.hpp"
#include "stored.hpp"

namespace attn::fuzz {

namespace {

using testing::answer;
using testing::same_bits;

template <Scalar T>
class trial_checks {
public:
    trial_checks(const trial<T>& t, draw& random)
        : t_(t), random_(random), has_log_sum_exp_(t.op->has_log_sum_exp) {}

    std::string operator()() {
        expected_ = attend(*t_.op, t_.in, has_log_sum_exp_);
        exact_ = reference(t_.in);
        if (auto problem = accuracy(); !problem.empty()) return "accuracy: " + problem;
        if (auto problem = elsewhere(); !problem.empty()) return problem;
        if constexpr (std::same_as<T, float>)
            if (random_.one_in(2))
                if (auto problem = stored(); !problem.empty()) return problem;
        if (t_.may_spoil && random_.one_in(2))
            if (auto problem = spoiled(); !problem.empty()) return problem;
        if (t_.has_gradient && random_.one_in(2))
            if (auto problem = gradients(); !problem.empty()) return "gradient of the " + problem;
        if (t_.part && random_.one_in(3))
            if (auto problem = part(); !problem.empty()) return "alone, not in a batch: " + problem;
        if (auto problem = cut(); !problem.empty()) return "rows: " + problem;
        if (!t_.keys_stand_alone) return {};
        if (auto problem = without_unseen_keys(); !problem.empty()) return "rows: " + problem;
        if (random_.one_in(2))
            if (auto problem = as_sequences(); !problem.empty()) return "ragged: " + problem;
        return {};
    }

private:
    template <Scalar U>
    answer<U> room(const operation<T>& op, const input_shapes& s, bool with_log_sum_exp) const {
        return with_log_sum_exp ? testing::no_answer<U>(op.output_shape(s), op.log_sum_exp_shape(s))
                                : testing::no_answer<U>(op.output_shape(s), false);
    }
    answer<T> attend(const operation<T>& op, const inputs<T>& in, bool with_log_sum_exp) const {
        auto result = room<T>(op, shapes_of(in), with_log_sum_exp);
        sequential here;
        workspace memory(op.workspace_bytes(shapes_of(in), 1));
        op.attend(in, result.out(), execution(here, memory));
        return result;
    }
    static void with_wide(const inputs<T>& in, const auto& f) {
        const auto q = reference::widen(in.queries), k = reference::widen(in.keys), v = reference::widen(in.values);
        f(inputs<double>{q, k, v, in.positions});
    }
    answer<double> reference(const inputs<T>& in) const {
        auto result = room<double>(*t_.op, shapes_of(in), has_log_sum_exp_);
        with_wide(in, [&](const inputs<double>& wide) { t_.op->reference(wide, result.out()); });
        return result;
    }

    std::string accuracy() const {
        auto bounds = room<double>(*t_.op, shapes_of(inputs<T>(t_.in)), has_log_sum_exp_);
        with_wide(t_.in, [&](const inputs<double>& wide) { t_.op->bounds(wide, bounds.out()); });
        auto problem = near(expected_.values, exact_.values, bounds.values);
        if (problem.empty() && has_log_sum_exp_)
            if (problem = near(expected_.log_sum_exp, exact_.log_sum_exp, bounds.log_sum_exp); !problem.empty())
                problem = "log_sum_exp " + problem;
        return problem;
    }
    /// A number a row, where the operator has a log_sum_exp.
    template <class View>
    View if_any(const View& rows) const {
        return has_log_sum_exp_ ? rows : View{};
    }
    std::string gradients() {
        const auto s = shapes_of(inputs<T>(t_.in));
        const auto seed = static_cast<unsigned>(random_.number(1, 1 << 20));
        const auto of_values = testing::random_tensor<T>(expected_.values.shape(), seed), of_rows = testing::random_tensor<T>(expected_.log_sum_exp.shape(), seed + 1);
        std::vector<defined_gradient<T>> exact;
        const auto add = [&](const char* name, const shape& of) { exact.push_back({name, tensor<bounded<T>>(of), exact.size() > 2 ? lies::in_one_piece : lies::anyhow}); };
        add("queries", s.queries), add("keys", s.keys), add("values", s.values);
        static constexpr const char* names[] = {"1st parameter", "2nd parameter", "3rd parameter", "4th parameter", "5th parameter", "6th parameter"};
        for (const auto& of : t_.op->parameter_shapes(s)) add(names[exact.size() - 3], of);
        const auto wanted = []<class U>(const std::vector<tensor_view<U>>& all) {
            return testing::wanted_gradients<U>{{all[0], all[1], all[2]}, {all.begin() + 3, all.end()}};
        };
        std::vector<tensor_view<bounded<T>>> views;
        for (auto& g : exact) views.push_back(g.exact.view());
        const auto q = bounded_copy<T>(t_.in.queries), k = bounded_copy<T>(t_.in.keys), v = bounded_copy<T>(t_.in.values),
                   given_values = bounded_copy<T>(of_values), given_rows = bounded_copy<T>(of_rows);
        t_.op->reference_gradients({q, k, v, t_.in.positions}, {given_values, if_any(given_rows.view())}, wanted(views));

        const auto call = [&](const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& given, const auto& to, const execution& run) {
            t_.op->backward(in, {saved.values, if_any(saved.log_sum_exp)}, {given.values, if_any(given.log_sum_exp)}, wanted(to), run);
        };
        const auto placed = [&](const tensor<T>& t) { return testing::placed<T>(t, draw_layout(random_)); };
        auto queries = placed(t_.in.queries), keys = placed(t_.in.keys), values = placed(t_.in.values), out = placed(expected_.values),
             rows = placed(expected_.log_sum_exp), d_out = placed(of_values), d_rows = placed(of_rows);
        return broken_gradient<T>(random_, exact, [&](index_t concurrency) { return t_.op->backward_workspace_bytes(s, concurrency); },
                                  [&](const std::vector<tensor_view<T>>& to, bool elsewhere, const execution& run) {
                                      if (!elsewhere) call(t_.in, {expected_.values, expected_.log_sum_exp}, {of_values, of_rows}, to, run);
                                      else call({queries.view(), keys.view(), values.view(), t_.in.positions}, {out.view(), rows.view()}, {d_out.view(), d_rows.view()}, to, run);
                                  });
    }

    static std::string near(const tensor<T>& ours, const tensor<double>& exact, const tensor<double>& bound) {
        // In double the definition rounds too.
        constexpr double times = std::same_as<T, double> ? 2 : 1.001;
        return too_far(ours, [&](index_t e) { return exact.data()[e]; }, [&](index_t e) { return times * bound.data()[e]; });
    }
    static std::string differs(const answer<T>& ours, const answer<T>& expected, bool with_log_sum_exp) {
        if (auto problem = other_bits(ours.values, expected.values); !problem.empty()) return problem;
        if (!with_log_sum_exp) return {};
        const auto problem = other_bits(ours.log_sum_exp, expected.log_sum_exp);
        return problem.empty() ? problem : "log_sum_exp " + problem;
    }

    /// Other layouts, guarded, and another executor give the same bits.
    std::string elsewhere() {
        const auto any = [&] { return draw_layout(random_); };
        const auto s = shapes_of(inputs<T>(t_.in));
        testing::placed<T> q(t_.in.queries, any()), k(t_.in.keys, any()), v(t_.in.values, any()), out(t_.op->output_shape(s), any());
        const bool with_log_sum_exp = has_log_sum_exp_ && random_.one_in(2);
        testing::placed<T> lse(with_log_sum_exp ? t_.op->log_sum_exp_shape(s) : shape{}, any());
        const auto threads = random_.number(1, 4);
        const bool tight = t_.op->has_least_workspace && random_.one_in(2);
        workspace memory(tight ? t_.op->least_workspace_bytes(s, threads) : t_.op->workspace_bytes(s, threads));
        testing::fill(memory, std::byte{0xff}); // NaN, in either precision
        const inputs<T> in{q.view(), k.view(), v.view(), t_.in.positions};
        const outputs<T> to{out.view(), with_log_sum_exp ? lse.view() : tensor_view<T>{}};
        on_threads(threads, memory, [&](const execution& run) { t_.op->attend(in, to, run); });
        const auto where = "elsewhere (" + std::to_string(threads) + " threads" + (tight ? ", least workspace" : "") + "): ";
        if (!q.guards_intact() || !k.guards_intact() || !v.guards_intact()) return where + "an input was written to";
        if (!out.guards_intact() || (with_log_sum_exp && !lse.guards_intact())) return where + "wrote beside its output";
        const auto problem = differs(answer<T>{out.copy(), with_log_sum_exp ? lse.copy() : tensor<T>()}, expected_, with_log_sum_exp);
        return problem.empty() ? problem : where + problem;
    }

    /// Tensors that are stored in 16 bits, each of its own format, are widened first, and the result is rounded last.
    std::string stored() {
        const auto s = shapes_of(inputs<T>(t_.in));
        const auto any = [&](const tensor<T>& from) { return draw_stored(random_, copy_of(from), draw_layout(random_)); };
        auto given = copy_of(t_.in);
        if (t_.may_spoil && random_.one_in(4))
            for (auto* of : {&given.keys, &given.values})
                if (const auto size = of->shape().size(); size > 0 && random_.one_in(2))
                    of->data()[random_.number(0, size - 1)] = random_.one_in(2) ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::quiet_NaN();
        auto q = any(given.queries), k = any(given.keys), v = any(given.values), out = draw_room(random_, t_.op->output_shape(s), draw_layout(random_));
        const auto expected = attend(*t_.op, {q.wide, k.wide, v.wide, t_.in.positions}, has_log_sum_exp_);
        auto rows = room<T>(*t_.op, s, has_log_sum_exp_).log_sum_exp;
        const bool with_log_sum_exp = has_log_sum_exp_ && random_.one_in(2), tight = t_.op->has_least_workspace && random_.one_in(2);
        const auto threads = random_.number(1, 4);
        workspace memory(tight ? t_.op->least_workspace_bytes(s, threads) : t_.op->workspace_bytes(s, threads, out.format() != narrow_format::none));
        testing::fill(memory, std::byte{0xff});
        on_threads(threads, memory, [&](const execution& run) {
            t_.op->attend({q.view(), k.view(), v.view(), t_.in.positions}, {out.view(), with_log_sum_exp ? rows.view() : tensor_view<T>{}}, run);
        });
        std::string where = "stored";
        for (const auto* of : {&q, &k, &v, &out}) where.append(" ").append(testing::name_of(of->format()));
        where += " (" + std::to_string(threads) + " threads" + (tight ? ", least workspace" : "") + "): ";
        if (!q.guards_intact() || !k.guards_intact() || !v.guards_intact()) return where + "an input was written to";
        if (auto problem = other_numbers(out, expected.values); !problem.empty()) return where + problem;
        if (!with_log_sum_exp) return {};
        const auto problem = other_bits(rows, expected.log_sum_exp);
        return problem.empty() ? problem : where + "log_sum_exp " + problem;
    }

    /// NaN or infinity in keys or values. What NaN there does not reach in the definition keeps its bits; what it reaches becomes NaN, or
    /// as infinite as the definition says.
    std::string spoiled() {
        const auto& s = t_.size;
        if (s.batch * s.kv_heads * s.keys * s.queries == 0) return {};
        auto in = copy_of(t_.in), with_nan = copy_of(t_.in);
        const auto kind = random_.number(0, 3);
        constexpr auto infinity = std::numeric_limits<T>::infinity(), not_a_number = std::numeric_limits<T>::quiet_NaN();
        const T value = kind == 0 ? infinity : kind == 1 ? -infinity : not_a_number;
        const bool key = random_.one_in(2), one_channel = random_.one_in(2), both = !one_channel && random_.one_in(2);
        std::string where = both ? "keys and values" : key ? "keys" : "values";
        if (one_channel) where += " (one channel)";
        for (auto count = random_.number(1, 3); count > 0; --count) {
            const auto b = random_.number(0, s.batch - 1), h = random_.number(0, s.kv_heads - 1), j = random_.number(0, s.keys - 1);
            const auto fill = [&](tensor<T>& t, T number) {
                if (h >= t.shape().heads) return;
                for (index_t c = 0; c < (one_channel ? std::min<index_t>(1, t.shape().channels) : t.shape().channels); ++c) t(b, h, j, c) = number;
            };
            if (key || both) fill(in.keys, value), fill(with_nan.keys, not_a_number);
            if (!key || both) fill(in.values, value), fill(with_nan.values, not_a_number);
            where.append(" ").append(std::to_string(j));
        }
        const auto ours = attend(*t_.op, in, has_log_sum_exp_);
        const auto reached = reference(with_nan), exact = kind < 2 ? reference(in) : answer<double>();
        const auto differs_from = [&](const tensor<T>& now, const tensor<T>& before, const tensor<double>& nan, const tensor<double>& infinite) {
            index_t at_e = 0;
            const auto at = first_offence(now.shape(), [&](index_t e) {
                at_e = e;
                const T a = now.data()[e], b = before.data()[e];
                if (!std::isnan(nan.data()[e])) return !same_bits(a, b);
                if (std::isnan(b)) return false;
                return kind < 2 ? std::isfinite(a) != std::isfinite(infinite.data()[e]) : !std::isnan(a);
            });
            if (at.empty()) return at;
            const bool seen = std::isnan(nan.data()[at_e]);
            return at + " is " + text_of(now.data()[at_e]) + ", not " +
                   (!seen ? text_of(before.data()[at_e]) + " (which does not see it)" : kind < 2 ? text_of(infinite.data()[at_e]) : "nan");
        };
        auto problem = differs_from(ours.values, expected_.values, reached.values, exact.values);
        if (problem.empty() && has_log_sum_exp_)
            if (problem = differs_from(ours.log_sum_exp, expected_.log_sum_exp, reached.log_sum_exp, exact.log_sum_exp); !problem.empty())
                problem = "log_sum_exp " + problem;
        return problem.empty() ? problem : where + " made " + text_of(value) + ": " + problem;
    }

    /// Positions that begin so much later.
    static std::vector<index_t> later(std::vector<index_t> first, index_t by) {
        for (auto& x : first) x += by;
        return first;
    }
    static per_batch each(const std::vector<index_t>& v) { return v.size() == 1 ? per_batch(v[0]) : per_batch(std::span(v)); }

    /// A head of keys of a batch entry by itself.
    std::string part() {
        const auto& s = t_.size;
        if (s.batch * s.kv_heads == 0) return {};
        const auto b = random_.number(0, s.batch - 1), g = random_.number(0, s.kv_heads - 1), group = s.heads / s.kv_heads;
        const tensor_part some_heads{.batch = {b, 1}, .heads = {g * group, group}};
        auto in = inputs<T>(t_.in).slice(some_heads, {.batch = {b, 1}, .heads = {g, 1}});
        in.positions = {in.positions.first_query[b], in.positions.first_key[b]};
        const auto ours = attend(*t_.part(b, g), in, has_log_sum_exp_);
        const auto copied = [&](const tensor<T>& from) {
            tensor<T> to({1, group, from.shape().tokens, from.shape().channels});
            const auto view = from.slice(some_heads);
            for (index_t h = 0; h < group; ++h)
                for (index_t i = 0; i < to.shape().tokens; ++i)
                    for (index_t c = 0; c < to.shape().channels; ++c) to(0, h, i, c) = view(0, h, i, c);
            return to;
        };
        return differs(ours, {copied(expected_.values), has_log_sum_exp_ ? copied(expected_.log_sum_exp) : tensor<T>()}, has_log_sum_exp_);
    }

    /// The queries in several calls, against the same keys.
    std::string cut() {
        const inputs<T> all = t_.in;
        const auto& [unit, before, after] = t_.cuts;
        const auto n = t_.size.queries, units = n / unit;
        const auto limit = random_.one_in(2) ? random_.number(1, 3) : random_.number(1, std::max<index_t>(1, units));
        auto ours = room<T>(*t_.op, shapes_of(all), has_log_sum_exp_);
        for (index_t first = 0; first < units;) {
            const auto count = std::min(units - first, random_.number(1, limit));
            const auto begin = std::max<index_t>(0, first - before) * unit, end = std::min(units, first + count + after) * unit;
            const auto first_query = later(t_.size.first_query, begin);
            const auto own = t_.within ? t_.within(begin, end - begin, 0, t_.size.keys) : nullptr;
            const auto part = attend(own ? *own : *t_.op,
                                     {all.queries.slice({.tokens = {begin, end - begin}}), all.keys, all.values, {each(first_query), all.positions.first_key}},
                                     has_log_sum_exp_);
            copy_rows(part.values, first * unit - begin, count * unit, ours.values, first * unit);
            if (has_log_sum_exp_) copy_rows(part.log_sum_exp, first * unit - begin, count * unit, ours.log_sum_exp, first * unit);
            first += count;
        }
        const auto problem = n == 0 ? std::string() : differs(ours, expected_, has_log_sum_exp_);
        return problem.empty() ? problem : "cut into calls of at most " + std::to_string(limit * unit) + " queries: " + problem;
    }
    static void copy_rows(const tensor<T>& from, index_t first, index_t count, tensor<T>& to, index_t at) {
        const auto& s = from.shape();
        for (index_t head = 0; head < s.batch * s.heads; ++head)
            std::copy_n(from.data() + (head * s.tokens + first) * s.channels, count * s.channels,
                        to.data() + (head * to.shape().tokens + at) * s.channels);
    }
    /// Without the first keys, or the last, as far as the definition does not change: NaN in them would have told, but for rows that are NaN
    /// in any case, and in a score that a function replaces where there is no value.
    std::string without_unseen_keys() {
        const auto m = t_.size.keys;
        if (m == 0 || t_.size.batch * t_.size.kv_heads * t_.size.queries == 0 || exact_.values.shape().channels == 0) return {};
        const auto& exact = exact_.values;
        if (std::any_of(exact.data(), exact.data() + exact.shape().size(), [](double x) { return std::isnan(x); })) return {};
        const auto front = random_.number(0, m), count = random_.number(0, m - front);
        if (count == m) return {};
        auto in = copy_of(t_.in);
        for (auto* t : {&in.keys, &in.values})
            for (index_t row = 0; row < t->shape().batch * t->shape().heads * m; ++row)
                if (row % m < front || row % m >= front + count)
                    std::fill_n(t->data() + row * t->shape().channels, t->shape().channels, std::numeric_limits<T>::quiet_NaN());
        const auto spoiled = reference(in);
        if (!same_bits(spoiled, exact_)) return {};
        const auto first_key = later(t_.size.first_key, front);
        const inputs<T> all = t_.in;
        const auto own = t_.within ? t_.within(0, t_.size.queries, front, count) : nullptr;
        const auto ours = attend(own ? *own : *t_.op,
                                 {all.queries, all.keys.slice({.tokens = {front, count}}), all.values.slice({.tokens = {front, count}}),
                                  {all.positions.first_query, each(first_key)}}, has_log_sum_exp_);
        const auto problem = differs(ours, expected_, has_log_sum_exp_);
        return problem.empty() ? problem
                               : "with keys " + std::to_string(front) + " .. " + std::to_string(front + count - 1) + " only: " + problem;
    }

    /// Queries and keys cut into sequences: each has the bits of a call for it alone, and so have gradients.
    std::string as_sequences() {
        const auto& s = t_.size;
        if (!t_.part || t_.within || t_.cuts.unit != 1 || s.batch != 1) return {};
        const auto sequences = random_.number(1, 5);
        const auto cut_into = [&](index_t tokens) {
            std::vector<index_t> starts{0, tokens};
            for (index_t e = 1; e < sequences; ++e) starts.push_back(random_.number(0, tokens));
            std::ranges::sort(starts);
            return starts;
        };
        const auto starts = cut_into(s.queries), key_starts = cut_into(s.keys);
        const auto firsts = [&](index_t first, std::vector<index_t> all) {
            all.pop_back();
            return later(std::move(all), first);
        };
        const inputs<T> given = t_.in;
        const auto first_query = firsts(given.positions.first_query[0], starts), first_key = firsts(given.positions.first_key[0], key_starts);
        const inputs<T> all{given.queries, given.keys, given.values, {std::span(first_query), std::span(first_key)}};
        const ragged batch{starts, key_starts};
        const auto shapes = shapes_of(given);
        auto ours = room<T>(*t_.op, shapes, has_log_sum_exp_);
        const auto threads = random_.number(1, 4);
        on_threads(threads, [&](const execution& run) { t_.op->attend(batch, all, ours.out(), run); });
        const auto d_out = testing::random_tensor<T>(ours.values.shape(), 5);
        tensor<T> dq(shapes.queries), dk(shapes.keys), dv(shapes.values);
        const bool with_gradient = t_.has_gradient && random_.one_in(2);
        if (with_gradient)
            on_threads(threads, [&](const execution& run) {
                t_.op->backward(batch, all, {ours.values, if_any(std::as_const(ours.log_sum_exp).view())}, {d_out}, input_gradients<T>{dq, dk, dv}, run);
            });
        for (index_t e = 0; e < sequences; ++e) {
            const tensor_part rows{.tokens = batch.queries(e)}, key_rows{.tokens = batch.keys(e)};
            auto in = given.slice(rows, key_rows);
            in.positions = {first_query[static_cast<std::size_t>(e)], first_key[static_cast<std::size_t>(e)]};
            const auto alone = attend(*t_.op, in, has_log_sum_exp_);
            const auto where = "sequence " + std::to_string(e) + " of " + std::to_string(sequences) + " (" + std::to_string(threads) + " threads): ";
            const auto compare = [&](const tensor<T>& of_all, const row_range& part, const tensor<T>& expected) {
                auto problem = other_bits(testing::rows_of(of_all, part.first, part.count), expected);
                return problem.empty() ? problem : where + problem;
            };
            if (auto problem = compare(ours.values, rows.tokens, alone.values); !problem.empty()) return problem;
            if (has_log_sum_exp_)
                if (auto problem = compare(ours.log_sum_exp, rows.tokens, alone.log_sum_exp); !problem.empty()) return "log_sum_exp of " + problem;
            if (!with_gradient) continue;
            tensor<T> own_dq(shapes_of(in).queries), own_dk(shapes_of(in).keys), own_dv(shapes_of(in).values);
            on_threads(1, [&](const execution& run) {
                t_.op->backward(in, {alone.values, if_any(alone.log_sum_exp.view())}, {d_out.slice(rows)}, {{own_dq, own_dk, own_dv}, {}}, run);
            });
            if (auto problem = compare(dq, rows.tokens, own_dq); !problem.empty()) return "gradient of the queries of " + problem;
            if (auto problem = compare(dk, key_rows.tokens, own_dk); !problem.empty()) return "gradient of the keys of " + problem;
            if (auto problem = compare(dv, key_rows.tokens, own_dv); !problem.empty()) return "gradient of the values of " + problem;
        }
        return {};
    }

    const trial<T>& t_;
    draw& random_;
    bool has_log_sum_exp_;
    answer<T> expected_;
    answer<double> exact_;
};

} // namespace

template <Scalar T>
std::string broken_promise(const trial<T>& t, draw& random) {
    if constexpr (!testing::is_tested<T>) return {};
    else return trial_checks<T>(t, random)();
}

template std::string broken_promise(const trial<float>&, draw&);
template std::string broken_promise(const trial<double>&, draw&);

} // namespace attn::fuzz
