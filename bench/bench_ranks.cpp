#include "bench_ranks.hpp"

#include "float_case.hpp"

#include "attn/distributed/sequence_parallel.hpp"
#include "attn/distributed/thread_communicator.hpp"
#include "attn/pattern/causal.hpp"
#include "attn/pattern/local.hpp"

#include <barrier>
#include <functional>
#include <thread>

namespace attn::bench {

using namespace pattern;

namespace {

/// Ranks on threads that wait for work.
class waiting_ranks {
public:
    using work = std::function<void(thread_communicator&)>;

    explicit waiting_ranks(index_t count)
        : begin_(count + 1), end_(count + 1), threads_([this, count] { on_thread_ranks(count, [this](auto& ranks) { serve(ranks); }); }) {}
    ~waiting_ranks() {
        work_ = nullptr;
        begin_.arrive_and_wait();
        threads_.join();
    }
    /// Returns when all have done it.
    void run(const work& f) {
        work_ = &f;
        begin_.arrive_and_wait();
        end_.arrive_and_wait();
    }

private:
    void serve(thread_communicator& ranks) {
        for (begin_.arrive_and_wait(); work_; begin_.arrive_and_wait()) {
            (*work_)(ranks);
            end_.arrive_and_wait();
        }
    }

    const work* work_ = nullptr;
    std::barrier<> begin_, end_;
    std::thread threads_;
};

/// Ranks, and what each keeps from call to call.
template <Pattern P>
struct rank_setup {
    sequence_parallel<softmax_attention<P>> op;
    waiting_ranks ranks;
    std::vector<workspace> memory;

    rank_setup(const P& pattern, const input_shapes& s, index_t count) : op{{.pattern = pattern}, partition(pattern, s, count)}, ranks(count) {
        sequential one;
        for (index_t rank = 0; rank < count; ++rank) memory.emplace_back(workspace_bytes<float>(op, rank, one));
    }
};

/// Softmax attention whose call is that of all ranks: each reads and writes its rows where they lie.
template <Pattern P>
struct over_ranks : softmax_attention<P> {
    std::shared_ptr<rank_setup<P>> setup;

    template <class Stored = any_storage, Scalar T>
    void forward(const inputs<T>& in, const outputs<T>& out, const execution&) const {
        setup->ranks.run([&](thread_communicator& ranks) {
            const auto& parts = setup->op.partition;
            const auto q = parts.queries(ranks.rank()), k = parts.keys(ranks.rank());
            const auto own = in.slice({.tokens = q}, {.tokens = k});
            sequential one;
            attn::attend(setup->op, ranks, own, outputs<T>{out.values.slice({.tokens = q})}, execution(one, setup->memory[static_cast<std::size_t>(ranks.rank())]));
        });
    }
};

template <Pattern P>
testing::attention_case over_ranks_case(const std::string& name, const P& pattern, index_t count) {
    return only_float(rank_case_name(name, count), [pattern, count](const testing::problem& p) {
        return testing::made{over_ranks<P>{{.pattern = pattern}, std::make_shared<rank_setup<P>>(pattern, p.shapes(), count)}};
    });
}

} // namespace

std::string rank_case_name(const std::string& name, index_t ranks) {
    return ranks == 0 ? name : name + "_over_" + std::to_string(ranks) + (ranks == 1 ? "_rank" : "_ranks");
}

const std::vector<testing::attention_case>& rank_cases() {
    static const auto cases = [] {
        const auto window = causal{} & local{1024};
        std::vector<testing::attention_case> all{
            only_float("window_1024", [window](const testing::problem&) { return testing::made{softmax_attention{.pattern = window}}; })};
        for (const index_t count : {1, 2}) {
            all.push_back(over_ranks_case("softmax", dense{}, count));
            all.push_back(over_ranks_case("softmax_causal", causal{}, count));
            all.push_back(over_ranks_case("window_1024", window, count));
        }
        return all;
    }();
    return cases;
}

} // namespace attn::bench
