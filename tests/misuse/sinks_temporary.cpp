// expect: deleted function
// Sinks that are gone before the operator reads them.
#include <attn/attention/softmax_attention.hpp>

#include <vector>

int main() {
#ifdef ATTN_MISUSE
    const attn::softmax_attention<> op{.sinks = std::vector<double>{0, 1}};
#else
    const std::vector<double> sinks{0, 1};
    const attn::softmax_attention<> op{.sinks = sinks};
#endif
    return op.sinks.size() == 2 ? 0 : 1;
}
