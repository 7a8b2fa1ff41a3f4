#include "families.hpp"

#include "operators.hpp"
#include "others.hpp"
#include "softmax.hpp"

namespace attn::fuzz {

namespace {

template <Scalar T, class Draw>
outcome attempt(draw& random, const Draw& of) {
    outcome result;
    try {
        const trial<T> t = of(random);
        result.name = std::string(std::same_as<T, float> ? "float; " : "double; ") + describe(t.size) + "; " + t.name;
        result.problem = broken_promise(t, random);
    } catch (const std::exception& e) {
        result.problem = std::string("threw: ") + e.what();
    }
    return result;
}

/// In float or double.
outcome attempt_either(draw& random, trial<float> (*of_float)(draw&), trial<double> (*of_double)(draw&)) {
    return random.one_in(2) ? attempt<float>(random, of_float) : attempt<double>(random, of_double);
}
outcome check_softmax(draw& random) {
    return attempt_either(random, draw_softmax<float>, draw_softmax<double>);
}
outcome check_talking_heads(draw& random) {
    return attempt_either(random, draw_talking_heads<float>, draw_talking_heads<double>);
}
outcome check_linear(draw& random) {
    return attempt_either(random, draw_linear<float>, draw_linear<double>);
}
outcome check_convolved(draw& random) {
    return attempt_either(random, draw_convolved<float>, draw_convolved<double>);
}
outcome check_linformer(draw& random) {
    return attempt_either(random, draw_linformer<float>, draw_linformer<double>);
}

} // namespace

std::vector<family> all_families() {
    // Softmax attention is most of the engine, and gets half of the problems.
    return {{"softmax", check_softmax},
            {"softmax", check_softmax},
            {"softmax", check_softmax},
            {"softmax", check_softmax},
            {"softmax", check_softmax},
            {"softmax", check_softmax},
            {"talking_heads", check_talking_heads},
            {"linear", check_linear},
            {"convolved", check_convolved},
            {"linformer", check_linformer},
            {"pattern", check_pattern},
            {"norm", check_norm},
            {"convolution", check_convolution},
            {"hashed", check_hashed},
            {"rotation", check_rotation},
            {"merge", check_merge},
            {"ranks", check_ranks}};
}

} // namespace attn::fuzz
