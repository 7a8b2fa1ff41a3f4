// expect: attn: a pattern is one of attn.s, or a function of .i, j. in attn::pattern::predicate
// A lambda as a pattern, not wrapped in predicate{}.
#include <attn/attention/softmax_attention.hpp>
#include <attn/pattern/predicate.hpp>

int main() {
    const auto seen = [](auto i, auto j) { return j <= i; };
#ifdef ATTN_MISUSE
    const attn::softmax_attention op{.pattern = seen};
#else
    const attn::softmax_attention op{.pattern = attn::pattern::predicate{seen}};
#endif
    return op.sinks.empty() ? 0 : 1;
}
