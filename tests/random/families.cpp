#include "families.hpp"

#include "others.hpp"

namespace attn::fuzz {

std::vector<family> all_families() {
    // Softmax attention is most of the engine, and gets half of the problems.
    return {{"softmax", check_softmax},
            {"softmax", check_softmax},
            {"softmax", check_softmax},
            {"softmax", check_softmax},
            {"softmax", check_softmax},
            {"softmax", check_softmax},
            {"pointwise", check_pointwise},
            {"talking_heads", check_talking_heads},
            {"linear", check_linear},
            {"convolved", check_convolved},
            {"linformer", check_linformer},
            {"projection", check_projection},
            {"pattern", check_pattern},
            {"norm", check_norm},
            {"convolution", check_convolution},
            {"causal_convolution", check_causal_convolution},
            {"hashed", check_hashed},
            {"rotation", check_rotation},
            {"merge", check_merge},
#ifdef __cpp_exceptions // programs of calls, some of which are refused; and ranks on threads
            {"cache", check_cache},
            {"linear_state", check_linear_state},
            {"ranks", check_ranks},
#endif
            {"recurrent", check_recurrent},
            {"recurrent_state", check_recurrent_state}};
}

} // namespace attn::fuzz
