// What a refused call says.
#pragma once

#include "catch.hpp"

#include <attn/core/shape.hpp>

#include <string>
#include <vector>

namespace attn::testing {

inline const std::string nothing_thrown = "nothing was thrown";

/// The message of the error that a call throws.
template <class Error = attention_error, class F>
std::string error_of(const F& call) {
    try {
        call();
    } catch (const Error& error) { return error.what(); }
    return nothing_thrown;
}

/// The message contains all these parts.
inline void check_says(const std::string& error, const std::vector<std::string>& parts) {
    for (const auto& part : parts) {
        INFO("expected: " << part << "\nsaid: " << error);
        CHECK(error.find(part) != std::string::npos);
    }
}

} // namespace attn::testing
