// The scheduler of the gradient of talking-heads attention: hands its tasks to threads, with their memory.
#pragma once

#include "../../parallel/executor.hpp"
#include "gradient_worker.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// The gradient of talking-heads attention of any pattern, score function and mixings: see reference/talking_heads.hpp. Scores
/// and weights are computed again tile by tile. A first sweep over the keys finds D, which the saved outputs do not tell once weights are
/// mixed, and not well enough for the gradient of a logits_bias, which all but cancels; a second adds to the gradients.
/// A task is a batch entry; or, where these are too few for the threads, a part of its queries or of its keys, which compute scores for
/// themselves: with the same bits. That is five products on visible pairs, two more where D is summed, and two more where entries are cut.
/// Memory: two numbers a row, and of each thread tiles of all heads; one more for each row and key of a head, if the score function has
/// parameters with gradients. What queries add to the mixings is summed part by part, and then over the parts in order.
template <Scalar T>
class talking_gradient_scheduler {
public:
    talking_heads_parameters with;
    bool has_parameters; ///< the score function has some with gradients

    std::size_t workspace_bytes(const input_shapes& s, index_t concurrency) const {
        return detail::bytes_for<layout>(*this, s, concurrency);
    }

    void operator()(const inputs<T>& in, const saved_outputs<T>& saved, const output_gradients<T>& d_out,
                    const mixed_head_gradients<T>& wanted, const visible_keys& pattern, const score_slopes<T>* slopes,
                    const execution& run) const {
        const auto shapes = shapes_of(in);
        detail::scratch memory(run.workspace().bytes().data());
        layout own(memory, *this, shapes, run.concurrency());
        const auto& s = own.shape;
        own.mix.load(with);
        own.back.load(with);
        const bool sums_weights = s.mixes_weights || !with.logits_bias.empty();
        const talking_gradient_call<T> call{in,   saved,   d_out,    wanted,       s,         pattern,  slopes,
                                            with, own.mix, own.back, sums_weights, own.share, own.delta};
        const auto& cut = own.cut;
        const auto batch = shapes.queries.batch;
        const auto in_worker = [&](index_t slice, const auto& f) {
            auto slice_memory = own.slices[slice];
            worker_type worker(slice_memory, call);
            f(worker);
        };
        run.for_each(batch * cut.query_parts, [&](index_t number, index_t slice) {
            const auto task = task_of(call, cut, number / cut.query_parts, number % cut.query_parts, cut.query_parts);
            in_worker(slice, [&](worker_type& worker) { worker.find_delta(task); });
        });

        const bool of_queries = wanted.queries.data() || wanted.logits_mix.data() || wanted.logits_bias.data() ||
                                wanted.weights_mix.data() || wanted.weights_bias.data();
        const bool of_keys = wanted.keys.data() || wanted.values.data();
        const auto query_tasks = of_queries && !cut.joint ? batch * cut.query_parts : 0;
        const auto key_tasks = of_keys || (of_queries && cut.joint) ? batch * cut.key_parts : 0;
        run.for_each(query_tasks + key_tasks, [&](index_t number, index_t slice) {
            in_worker(slice, [&](worker_type& worker) {
                if (number < query_tasks) {
                    const auto part = number % cut.query_parts;
                    worker(task_of(call, cut, number / cut.query_parts, part, cut.query_parts), true, false, own.sums_of(wanted, number));
                    return;
                }
                const auto b = (number - query_tasks) / cut.key_parts, part = (number - query_tasks) % cut.key_parts;
                worker.begin_keys(b, cut.keys_of(part));
                for (index_t queries = 0; queries < cut.query_parts; ++queries) {
                    auto task = task_of(call, cut, b, queries, cut.query_parts);
                    task.keys = cut.keys_of(part);
                    worker(task, cut.joint, true, cut.joint ? own.sums_of(wanted, b * cut.query_parts + queries) : mixing_sums{});
                }
                worker.end_keys(b, cut.keys_of(part));
            });
        });
        own.write_mixings(wanted, batch);
        if (has_parameters) slopes->find_parameters(summation(call, own, run));
        find_sink_gradients<T>(saved.log_sum_exp, with.sinks, own.share, own.delta, wanted.sinks);
    }

private:
    using worker_type = talking_gradient_worker<T>;

    /// The parts of a batch entry. Those of queries are the same whatever the threads are: sums for the mixings are made in each.
    struct parts {
        bool joint;
        index_t query_parts, key_parts, keys;

        parts(const input_shapes& s, index_t concurrency) : keys(s.keys.tokens) {
            const auto batch = s.queries.batch;
            joint = are_whole_tasks_faster(batch, concurrency);
            const auto blocks = (s.queries.tokens + worker_type::max_queries - 1) / worker_type::max_queries;
            query_parts = std::clamp<index_t>(blocks, 1, 64);
            key_parts = joint || batch == 0 ? 1 : std::clamp<index_t>(4 * concurrency / batch, 1, std::max<index_t>(1, keys / grain));
        }
        row_range keys_of(index_t part) const {
            const auto border = [&](index_t n) { return n == key_parts ? keys : keys * n / key_parts / grain * grain; };
            return {border(part), border(part + 1) - border(part)};
        }

    private:
        static constexpr index_t grain = talking_gradient_memory<T>::keys_of_block;
    };

    struct layout {
        talking_heads_shape shape;
        parts cut;
        head_mixings<T> mix, back;
        T *share, *delta;      ///< (batch, heads, n)
        index_t sums_count[4]; ///< of logits_mix, logits_bias, weights_mix, weights_bias
        double* sums;          ///< [batch][query_parts] of these
        T* pairs;              ///< (batch, heads, n + m), sums of pairs, if there are parameters
        detail::slices slices;

        layout(detail::scratch& memory, const talking_gradient_scheduler& owner, const input_shapes& s, index_t concurrency)
            : shape(owner.with.shape_of(s)), cut(s, concurrency), mix(memory, shape), back(memory, shape, true),
              share(memory.take<T>(s.queries.batch, shape.heads, s.queries.tokens)),
              delta(memory.take<T>(s.queries.batch, shape.heads, s.queries.tokens)),
              sums_count{shape.mixes_logits ? shape.heads * shape.query_heads : 0, shape.mixes_logits ? shape.heads : 0,
                         shape.mixes_weights ? shape.value_heads * shape.heads : 0, shape.mixes_weights ? shape.value_heads : 0},
              sums(memory.take<double>(s.queries.batch, cut.query_parts, sums_per_part())),
              pairs(memory.take<T>(s.queries.batch, shape.heads, owner.has_parameters ? s.queries.tokens + s.keys.tokens : 0)),
              slices(memory, concurrency, detail::bytes_for<talking_gradient_memory<T>>(shape)) {}
        index_t sums_per_part() const { return sums_count[0] + sums_count[1] + sums_count[2] + sums_count[3]; }
        /// The sums for the gradients of the mixings over one part of the queries, as 0.
        mixing_sums sums_of(const mixed_head_gradients<T>& wanted, index_t part) const {
            double* at = sums + part * sums_per_part();
            std::fill_n(at, sums_per_part(), 0.0);
            const auto next = [&](const tensor_view<T>& view, index_t count) {
                double* const own = view.data() ? at : nullptr;
                at += count;
                return own;
            };
            return {.logits_mix = next(wanted.logits_mix, sums_count[0]),
                    .logits_bias = next(wanted.logits_bias, sums_count[1]),
                    .weights_mix = next(wanted.weights_mix, sums_count[2]),
                    .weights_bias = next(wanted.weights_bias, sums_count[3])};
        }
        /// Writes the gradients of the mixings: the sums added over all parts, in order.
        void write_mixings(const mixed_head_gradients<T>& wanted, index_t batch) const {
            const double* first = sums;
            std::size_t number = 0;
            for (const auto* view : {&wanted.logits_mix, &wanted.logits_bias, &wanted.weights_mix, &wanted.weights_bias}) {
                const auto& to = view->shape();
                const auto columns = number % 2 == 0 ? to.channels : 1, rows = number % 2 == 0 ? to.tokens : to.heads;
                for (index_t e = 0; view->data() && e < rows * columns; ++e) {
                    double sum = 0;
                    for (index_t part = 0; part < batch * cut.query_parts; ++part) sum += first[part * sums_per_part() + e];
                    (number % 2 == 0 ? (*view)(0, 0, e / columns, e % columns) : (*view)(0, e, 0, 0)) = static_cast<T>(sum);
                }
                first += sums_count[number++];
            }
        }
    };

    /// Each batch entry of a table by itself, in all heads; or in parts of its keys, or of its queries where it has one column for all.
    /// Query blocks of batch entries that share a table may be cut differently.
    class summation final : public pair_summation<T> {
    public:
        summation(const talking_gradient_call<T>& call, const layout& own, const execution& run)
            : pair_summation<T>(of_mixed_heads(call), call.in.positions, own.pairs), call_(call), own_(own), run_(run) {}

        void operator()(const pair_sum<T>& sum) const override {
            constexpr index_t grain = 4 * talking_gradient_memory<T>::keys_of_block;
            const auto& s = sum.to.shape();
            const auto batch = this->shapes.queries.batch, keys = own_.cut.keys;
            const bool by_key = s.channels != 1, has_parts = this->has_parts(sum) && (by_key || (s.tokens != 1 && s.batch == batch));
            const auto parts = !has_parts ? 1 : by_key ? std::max<index_t>(1, keys / grain) : own_.cut.query_parts;
            run_.for_each(s.batch * parts, [&](index_t number, index_t slice) {
                const auto entry = number / parts, part = number % parts;
                auto slice_memory = own_.slices[slice];
                worker_type worker(slice_memory, call_);
                for (index_t b = 0; b < batch; ++b) {
                    if (attn::detail::table_place(s, b, 0).entry != entry) continue;
                    auto task = by_key ? task_of(call_, own_.cut, b, 0, 1) : task_of(call_, own_.cut, b, part, parts);
                    if (by_key) task.keys = {part * grain, part + 1 == parts ? keys - part * grain : grain};
                    worker(task, sum);
                }
            });
        }

    private:
        static input_shapes of_mixed_heads(const talking_gradient_call<T>& call) {
            auto shapes = shapes_of(call.in);
            shapes.queries.heads = call.shape.heads;
            return shapes;
        }

        const talking_gradient_call<T>& call_;
        const layout& own_;
        const execution& run_;
    };

    /// One of so many parts of the queries of an entry, with all keys.
    static talking_gradient_task task_of(const talking_gradient_call<T>& call, const parts& cut, index_t b, index_t part, index_t parts) {
        const auto step = common_step(call.pattern, call.shape, b);
        const auto blocks = tile_count(call.in.queries.shape().tokens, worker_type::max_queries, step);
        return {b, step, blocks * part / parts, blocks * (part + 1) / parts, {0, cut.keys}};
    }
};

} // namespace attn::kernel
