// Calls the baseline first, then the widest set if this machine has it: both give the same to rounding.
#include <cmath>
#include <cstdio>
#include <vector>

extern "C" {
int attend_baseline(long tokens, long channels, const float* qkv, float* out, double* linear);
int attend_wide(long tokens, long channels, const float* qkv, float* out, double* linear);
}

int main() {
    constexpr long tokens = 100, channels = 16;
    std::vector<float> x(tokens * channels), narrow(x.size()), wide(x.size());
    std::vector<double> narrow_linear(x.size()), wide_linear(x.size());
    for (std::size_t e = 0; e < x.size(); ++e) x[e] = std::sin(static_cast<float>(7 * e % 1000));
    const int lanes = attend_baseline(tokens, channels, x.data(), narrow.data(), narrow_linear.data());
    const int wide_lanes = attend_wide(tokens, channels, x.data(), wide.data(), wide_linear.data());
    double difference = 0;
    for (std::size_t e = 0; e < x.size(); ++e)
        difference = std::fmax(difference, std::fmax(std::fabs(static_cast<double>(narrow[e] - wide[e])), std::fabs(narrow_linear[e] - wide_linear[e])));
    std::printf("%d and %d lanes, difference %g\n", lanes, wide_lanes, difference);
    return lanes == 4 && wide_lanes > 4 && difference < 1e-5 ? 0 : 1;
}
