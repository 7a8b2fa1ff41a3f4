// Recurrent attention over ranks, and its gradient: the bits of the calls on one machine, whatever the cuts, layouts and threads of each rank.
#include "differences.hpp"
#include "draw_layout.hpp"
#include "others.hpp"
#include "recurrent_gradient_checks.hpp"

#include <attn/distributed/backward.hpp>
#include <attn/distributed/thread_communicator.hpp>
#include <attn/parallel/thread_pool.hpp>
#include <attn/pattern/causal.hpp>

namespace attn::fuzz {

namespace {

template <Scalar T>
class recurrent_trial_over_ranks {
public:
    explicit recurrent_trial_over_ranks(draw& random)
        : kind_(testing::all_rules[static_cast<std::size_t>(random.number(0, 4))].value), from_first_(random.one_in(2)), with_last_(random.one_in(2)),
          tokens_(drawn_sizes(random), static_cast<unsigned>(random.number(1, 1 << 20))), given_(tokens_.size), seed_(random.bits()), parts_(drawn_parts(random)), values_(given_.values.shape()),
          last_(tokens_.size.state()), last_over_(tokens_.size.state()), gradients_(tokens_, kind_) {
        const auto decays = random.number(0, 3);
        for (index_t e = 0; e < tokens_.log_decay.shape().size(); ++e) tokens_.log_decay.data()[e] = static_cast<T>(draw_log_decay(random, decays));
        name_ = joined(testing::all_rules[static_cast<std::size_t>(kind_)].name, ": ", testing::describe(tokens_.size), "; decays of kind ", decays, from_first_ ? ", from a state" : "",
                       with_last_ ? ", with a gradient of the last state" : "", "; cuts");
        for (const auto cut : parts_.key_cuts().cuts) name_ += joined(" ", cut);
    }

    outcome run() {
        tokens_.with_rule(kind_, {}, [&](auto op) {
            if (from_first_) op.first_state = tokens_.first_state;
            op.last_state = last_;
            attend(op, tokens_.in(), outputs<T>{values_});
            auto wanted = gradients_.wanted();
            if (with_last_) wanted.d_last_state = given_.last;
            backward(op, tokens_.in(), saved_outputs<T>{values_}, output_gradients<T>{given_.values}, wanted);
        });
        std::vector<std::string> problems(static_cast<std::size_t>(parts_.ranks()));
        on_thread_ranks(parts_.ranks(), [&](thread_communicator& ranks) {
            const auto rows = parts_.keys(ranks.rank());
            draw own(seed_, static_cast<std::uint64_t>(ranks.rank()));
            tokens_.with_rule(kind_, {rows.first, rows.count}, [&](auto op) {
                if (from_first_) op.first_state = tokens_.first_state;
                if (rows.end() == tokens_.size.tokens && (rows.count > 0 || ranks.rank() == ranks.size() - 1)) op.last_state = last_over_;
                problems[static_cast<std::size_t>(ranks.rank())] = problem_of_rank(ranks, sequence_parallel{op, parts_}, rows, own);
            });
        });
        for (std::size_t r = 0; r < problems.size(); ++r)
            if (!problems[r].empty()) return {name_, joined("rank ", r, ": ", problems[r])};
        auto problem = other_bits(last_over_, last_);
        return {name_, problem.empty() ? problem : "the last state " + problem};
    }

private:
    static testing::recurrent_sizes drawn_sizes(draw& random) {
        testing::recurrent_sizes s{.batch = random.number(random.one_in(20) ? 0 : 1, 2), .kv_heads = random.number(1, 3), .tokens = random.size(random.one_in(6) ? 1'300 : 140)};
        s.heads = s.kv_heads * random.number(1, 3);
        s.key_dim = random.number(1, s.tokens > 300 ? 8 : 24), s.value_dim = random.number(random.one_in(20) ? 0 : 1, s.tokens > 300 ? 8 : 24);
        s.by_channel = random.one_in(2), s.one_batch = random.one_in(3), s.one_head = random.one_in(3);
        return s;
    }
    partition drawn_parts(draw& random) const {
        const auto s = shapes_of(tokens_.in());
        const auto ranks = random.number(1, 5);
        if (random.one_in(4)) return {pattern::causal{}, s, ranks};
        std::vector<index_t> cuts{0, s.keys.tokens};
        const auto unit = random.one_in(3) ? index_t{16} : index_t{1};
        for (index_t r = 1; r < ranks; ++r) cuts.push_back(random.number(0, s.keys.tokens) / unit * unit);
        std::ranges::sort(cuts);
        return {pattern::causal{}, s, cuts, cuts};
    }

    static testing::placed<T> placed_rows(const tensor<T>& all, const row_range& rows, draw& random) {
        return testing::placed<T>(testing::rows_of(all, rows.first, rows.count), draw_layout(random));
    }
    std::string problem_of_rank(thread_communicator& ranks, const auto& over, const row_range& rows, draw& own) const {
        auto queries = placed_rows(tokens_.queries, rows, own), keys = placed_rows(tokens_.keys, rows, own), values = placed_rows(tokens_.values, rows, own);
        auto given = placed_rows(given_.values, rows, own);
        testing::placed<T> out(given.copy().shape(), draw_layout(own));
        const inputs<T> in{queries.view(), keys.view(), values.view()};
        thread_pool threads(own.number(1, 3));
        {
            workspace memory(workspace_bytes<T>(over, ranks.rank(), threads));
            testing::fill(memory, std::byte{0xff});
            attend(over, ranks, in, outputs<T>{out.view()}, execution(threads, memory));
        }
        // Each rank wants what it likes.
        std::vector<testing::placed<T>> found;
        recurrent_gradients<T> wanted;
        tensor_view<T>* const views[] = {&wanted.queries, &wanted.keys, &wanted.values, &wanted.log_decay, &wanted.beta, &wanted.a, &wanted.b};
        std::vector<std::size_t> numbers;
        for (std::size_t n = 0; n < std::size(views); ++n) {
            if (!gradients_.all[n].data() || own.one_in(6)) continue;
            found.emplace_back(testing::rows_of(gradients_.all[n], rows.first, rows.count).shape(), draw_layout(own));
            numbers.push_back(n);
        }
        for (std::size_t i = 0; i < found.size(); ++i) *views[numbers[i]] = found[i].view();
        testing::placed<T> of_first(tokens_.size.state(), draw_layout(own)), of_last(given_.last, draw_layout(own));
        const bool is_first = rows.first == 0 && (rows.count > 0 || (tokens_.size.tokens == 0 && ranks.rank() == 0));
        if (is_first || own.one_in(2)) wanted.first_state = of_first.view();
        if (with_last_) wanted.d_last_state = of_last.view();
        {
            workspace memory(backward_workspace_bytes<T>(over, ranks.rank(), threads));
            testing::fill(memory, std::byte{0xff});
            backward(over, ranks, in, saved_outputs<T>{out.view()}, output_gradients<T>{given.view()}, wanted, execution(threads, memory));
        }
        if (auto problem = other_bits(out.copy(), testing::rows_of(values_, rows.first, rows.count)); !problem.empty()) return problem;
        static constexpr const char* names[] = {"queries", "keys", "values", "log_decay", "beta", "a", "b"};
        for (std::size_t i = 0; i < found.size(); ++i) {
            if (!found[i].guards_intact()) return joined("wrote beside the gradient of ", names[numbers[i]]);
            const auto problem = other_bits(found[i].copy(), testing::rows_of(gradients_.all[numbers[i]], rows.first, rows.count));
            if (!problem.empty()) return joined("the gradient of ", names[numbers[i]], " ", problem);
        }
        if (!is_first) return {};
        const auto problem = other_bits(of_first.copy(), gradients_.all[7]);
        return problem.empty() ? problem : "the gradient of the first state " + problem;
    }

    testing::recurrent_rule kind_;
    bool from_first_, with_last_;
    testing::recurrent_tokens<T> tokens_;
    testing::given_to_recurrent<T> given_;
    std::uint64_t seed_;
    partition parts_;
    tensor<T> values_, last_, last_over_; ///< of one machine; and the last state over ranks
    testing::recurrent_gradient_answer<T> gradients_;
    std::string name_;
};

} // namespace

outcome check_recurrent_over_ranks(draw& random) {
    return in_drawn_numbers(random, [&]<Scalar T>(std::type_identity<T>) { return recurrent_trial_over_ranks<T>(random).run(); });
}

} // namespace attn::fuzz
