// Catch2, version 3 or 2.13, whose names differ.
#pragma once

#include "numbers.hpp"

#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/catch_approx.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators_all.hpp>
#include <catch2/matchers/catch_matchers_all.hpp>

using Catch::Approx; // where version 2 has it

namespace attn::testing {

inline auto Contains(const std::string& text) { return Catch::Matchers::ContainsSubstring(text); }

} // namespace attn::testing
#else
#include <catch2/catch.hpp>

namespace attn::testing {

using Catch::Matchers::Contains;

} // namespace attn::testing
#endif
