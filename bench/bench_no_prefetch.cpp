#define ATTN_NO_PREFETCH
#include "bench_no_prefetch.hpp"

#include "attn/attention/softmax_attention.hpp"
#include "attn/pattern/causal.hpp"
#include "attn/pattern/local.hpp"

namespace attn::bench {

void attend_without_prefetch(const plain_call& c) {
    const inputs<float> in{head_major(c.q, {c.batch, c.heads, c.queries, c.key_dim}), head_major(c.k, {c.batch, c.kv_heads, c.keys, c.key_dim}),
                           head_major(c.v, {c.batch, c.kv_heads, c.keys, c.value_dim}), top_left()};
    const outputs<float> out{head_major(c.out, {c.batch, c.heads, c.queries, c.value_dim})};
    sequential here;
    static workspace memory;
    const auto run = [&](const auto& op) {
        memory.reserve(workspace_bytes<float>(op, shapes_of(in), here));
        attend(op, in, out, execution(here, memory));
    };
    if (c.pattern == seen_keys::all) run(softmax_attention{});
    else if (c.pattern == seen_keys::past) run(softmax_attention{.pattern = pattern::causal{}});
    else run(softmax_attention{.pattern = pattern::local{128}});
}

} // namespace attn::bench
