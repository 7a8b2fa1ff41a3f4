// attn_random: problems drawn from a seed, for some seconds. See usage().
#include "families.hpp"

#include <attn/simd/lanes.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

using namespace attn::fuzz;

[[noreturn]] void usage() {
    std::puts("usage: attn_random [--seconds S] [--seed N] [--problem K] [--family NAME] [--verbose]\n"
              "Draws problems from the seed for so many seconds (60), or number K alone, and compares every operator with its definition,\n"
              "and its bits over executors, layouts, batches, hidden keys and cuts of the queries into calls.\n"
              "Exits with 1 if a promise is broken.");
    std::exit(2);
}

struct arguments {
    double seconds = 60;
    std::uint64_t seed = 1;
    std::int64_t problem = -1;
    const char* family = "";
    bool verbose = false;

    arguments(int count, char** values) {
        for (int a = 1; a < count; ++a) {
            const auto is = [&](const char* name) { return std::strcmp(values[a], name) == 0; };
            const auto next = [&] { return a + 1 < count ? values[++a] : (usage(), nullptr); };
            if (is("--seconds")) seconds = std::atof(next());
            else if (is("--seed")) seed = std::strtoull(next(), nullptr, 10);
            else if (is("--problem")) problem = std::atoll(next());
            else if (is("--family")) family = next();
            else if (is("--verbose")) verbose = true;
            else usage();
        }
    }
};

} // namespace

int main(int count, char** values) {
    const arguments given(count, values);
    const auto families = all_families();
    std::vector<long> problems(families.size());
    std::printf("attn_random --seed %llu (%s)\n", static_cast<unsigned long long>(given.seed), attn::instruction_set());
    const auto began = std::chrono::steady_clock::now();
    const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count(); };
    const auto last = given.problem < 0 ? std::numeric_limits<std::int64_t>::max() : given.problem;
    long failures = 0;
    for (auto k = std::max<std::int64_t>(0, given.problem); k <= last && (given.problem >= 0 || seconds() < given.seconds); ++k) {
        draw random(given.seed, static_cast<std::uint64_t>(k));
        const auto f = static_cast<std::size_t>(random.number(0, std::ssize(families) - 1));
        if (*given.family && std::strcmp(given.family, families[f].name) != 0) continue;
        ++problems[f];
        const auto [name, problem] = families[f].check(random);
        if (given.verbose) std::printf("%lld %s: %s\n", static_cast<long long>(k), families[f].name, name.c_str());
        if (problem.empty()) continue;
        ++failures;
        std::printf("attn_random --seed %llu --problem %lld: %s: %s | %s\n", static_cast<unsigned long long>(given.seed), static_cast<long long>(k),
                    families[f].name, problem.c_str(), name.c_str());
        std::fflush(stdout);
    }
    long all = 0;
    for (std::size_t f = 0; f < families.size(); ++f) {
        if (problems[f] > 0) std::printf("%8ld %s\n", problems[f], families[f].name);
        all += problems[f];
    }
    std::printf("%8ld problems in %.0f s, %ld failures\n", all, seconds(), failures);
    return failures == 0 ? 0 : 1;
}
