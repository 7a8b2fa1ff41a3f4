// A case of softmax attention that only the benchmark knows.
#pragma once

#include "cases/softmax_case.hpp"

namespace attn::bench {

/// A case in float from make(problem), which returns testing::made<softmax_attention<...>>.
template <class Make>
testing::attention_case only_float(std::string name, Make make) {
    return {.name = std::move(name),
            .cost = {},
            .supports = testing::any_problem,
            .make_float = [make](const testing::problem& p) -> std::unique_ptr<testing::instance<float>> {
                auto m = make(p);
                return std::make_unique<testing::softmax_instance<float, decltype(m.op)>>(std::move(m));
            },
            .make_double = {}};
}

} // namespace attn::bench
