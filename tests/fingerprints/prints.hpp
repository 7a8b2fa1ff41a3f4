// Fingerprints of results by their names.
#pragma once

#include "fingerprint.hpp"

#include <attn/core/tensor.hpp>

#include <cstdio>
#include <map>

namespace attn::testing {

/// The fingerprints of results, by "softmax_causal float forward".
class named_prints {
public:
    template <Scalar T>
    void add(const std::string& name, const std::string& what, std::span<const T> numbers) {
        prints_[name + (sizeof(T) == 4 ? " float " : " double ") + what].add(numbers);
    }
    template <Scalar T>
    void add(const std::string& name, const std::string& what, const tensor<T>& t) {
        add(name, what, std::span<const T>(t.data(), static_cast<std::size_t>(t.data() ? t.shape().size() : 0)));
    }
    /// Names, and hashes in sixteen digits.
    std::map<std::string, std::string> table() const {
        std::map<std::string, std::string> lines;
        for (const auto& [name, print] : prints_) {
            char digits[17];
            std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(print.value()));
            lines[name] = digits;
        }
        return lines;
    }

private:
    std::map<std::string, fingerprint> prints_;
};

/// Those of transformer blocks of floats, of positions, and of a causal convolution.
void print_layers(named_prints& prints);

} // namespace attn::testing
