// A user's function that throws: the exception reaches the caller on every executor, and everything is usable afterwards.
#include "answers.hpp"
#include "catch.hpp"
#include "executors.hpp"

#include <attn/attention/softmax_attention.hpp>
#include <attn/pattern/predicate.hpp>

namespace attn::testing {

using namespace pattern;

namespace {

struct thrown {
    index_t key;
};

/// A score function that throws at one key if told to.
struct throwing_score {
    const bool* armed;

    template <class S>
    S operator()(S score, auto, auto key) const {
        if (*armed && key == 17) throw thrown{key};
        return score;
    }
};

template <class Op, Executor E>
void check_throws(const Op& op, bool& armed, E& executor) {
    const auto in = random_given<float>({2, 3, 1, 100, 90, 8, 8});
    workspace memory(workspace_bytes<float>(op, shapes_of(inputs<float>(in)), executor));
    const execution run(executor, memory);
    auto expected = no_answer<float>({2, 3, 100, 8}, true), after = no_answer<float>({2, 3, 100, 8}, true);
    attn::attend(op, inputs<float>(in), expected.out(), run);
    for (int round = 0; round < 3; ++round) {
        armed = true;
        CHECK_THROWS_AS(attn::attend(op, inputs<float>(in), after.out(), run), thrown);
        armed = false;
        after = no_answer<float>({2, 3, 100, 8}, true);
        attn::attend(op, inputs<float>(in), after.out(), run);
        CHECK(same_bits(after, expected));
    }
}

} // namespace

TEST_CASE("attend: what a score function throws reaches the caller", "[attention][portable][parallel]") {
    bool armed = false;
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        check_throws(softmax_attention{.score = throwing_score{&armed}}, armed, executor);
    });
}

TEST_CASE("attend: what a predicate throws reaches the caller", "[attention][portable][parallel]") {
    bool armed = false;
    const predicate odd{[&armed](auto i, auto j) {
        if (armed) throw thrown{0};
        return (i + j) % 3 != 0;
    }};
    // Made here, not in the generic lambda: there clang 19 forgets the initialiser of a captured variable, and deduces a dense operator.
    const softmax_attention op{.pattern = odd};
    for_each_executor([&](auto& executor, const std::string& name) {
        INFO(name);
        check_throws(op, armed, executor);
    });
}

} // namespace attn::testing
