// The families of problems.
#pragma once

#include "checks.hpp"
#include "draw.hpp"
#include "numbers.hpp"

#include <exception>
#include <vector>

namespace attn::fuzz {

/// What was drawn, and the promise that was broken, if one was.
struct outcome {
    std::string name, problem;
};

struct family {
    const char* name;
    outcome (*check)(draw&);
};

std::vector<family> all_families();

/// The problem of one that was refused.
inline std::string threw(const std::exception& e) { return std::string("threw: ") + e.what(); }

/// of(std::type_identity<T>) of float or of double, as drawn; or of the only one that the build has.
template <class F>
outcome in_drawn_numbers(draw& random, const F& of) {
    const bool in_float = random.one_in(2);
    if constexpr (!testing::is_tested<double>) return of(std::type_identity<float>{});
    else if constexpr (!testing::is_tested<float>) return of(std::type_identity<double>{});
    else return in_float ? of(std::type_identity<float>{}) : of(std::type_identity<double>{});
}

/// What comes of a trial in float or in double, which draw_trial(std::type_identity<T>) draws.
template <class Draw>
outcome check_trial(draw& random, const Draw& draw_trial) {
    return in_drawn_numbers(random, [&]<Scalar T>(std::type_identity<T> number) {
        outcome result;
        const auto check = [&] {
            const trial<T> t = draw_trial(number);
            result.name = std::string(std::same_as<T, float> ? "float; " : "double; ") + describe(t.size) + "; " + t.name;
            result.problem = broken_promise(t, random);
        };
        attn::detail::try_catch<std::exception>(check, [&](const std::exception& e) { result.problem = threw(e); });
        return result;
    });
}

} // namespace attn::fuzz
