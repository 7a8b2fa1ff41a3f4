#include "case.hpp"

#include <algorithm>

namespace attn::testing {

std::vector<attention_case>& all_cases() {
    static std::vector<attention_case> cases;
    return cases;
}

registered::registered(attention_case c) {
    auto& cases = all_cases();
    const auto at = std::ranges::upper_bound(cases, c.name, {}, &attention_case::name);
    cases.insert(at, std::move(c));
}

} // namespace attn::testing
