// A peer in C++: the other side of peer.hpp.
#pragma once

#include <chrono>
#include <csignal>
#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace attn::bench {

struct peer_problem {
    std::string kind, folder;
    long batch = 1, heads = 1, n = 0, d = 0;
    int threads = 1;

    bool is_norm() const { return kind == "layer_norm"; }
    bool is_gradient() const { return kind.ends_with("_backward"); }
    bool is_causal() const { return kind == "softmax_causal"; }
    std::size_t size() const { return static_cast<std::size_t>(batch * heads * n * d); }

    std::vector<float> input(int number) const {
        std::vector<float> numbers(is_norm() && number > 0 ? static_cast<std::size_t>(d) : size());
        std::ifstream file(folder + "/" + std::to_string(number), std::ios::binary);
        file.read(reinterpret_cast<char*>(numbers.data()), static_cast<std::streamsize>(numbers.size() * sizeof(float)));
        if (!file) throw std::runtime_error("no input " + std::to_string(number));
        return numbers;
    }
};

/// One way to compute a problem: a name, and a call that leaves the answer in `out`.
struct peer_way {
    std::string name;
    std::function<void()> call;
    const std::vector<float>* out;
};

inline double peer_seconds(const std::function<void()>& call, double at_least) {
    using clock = std::chrono::steady_clock;
    const auto since = [](clock::time_point began) { return std::chrono::duration<double>(clock::now() - began).count(); };
    auto began = clock::now();
    call();
    const auto first = since(began);
    if (first >= at_least) return first;
    began = clock::now(); // the first call found cold caches
    int calls = 0;
    for (; calls == 0 || since(began) < at_least; ++calls) call();
    return since(began) / calls;
}

/// make(problem) gives the ways; what they refer to lives until the next problem.
template <class Make>
int serve(const std::string& name, const std::string& version, Make make) {
    std::vector<peer_way> ways;
    std::cout << "ready " << name << "|" << version << std::endl;
    for (std::string line; std::getline(std::cin, line);) try {
            std::istringstream words(line);
            std::string verb, file;
            std::size_t way = 0;
            double at_least = 0;
            words >> verb;
            if (verb == "problem") {
                peer_problem p;
                words >> p.kind >> p.batch >> p.heads >> p.n >> p.d >> p.threads >> p.folder;
                ways.clear();
                ways = make(p);
                std::cout << "ways ";
                for (const auto& w : ways) std::cout << (&w == &ways[0] ? "" : "|") << w.name;
                std::cout << std::endl;
            } else if (verb == "run") {
                words >> way >> file;
                ways.at(way).call();
                const auto& out = *ways[way].out;
                std::ofstream(file, std::ios::binary)
                    .write(reinterpret_cast<const char*>(out.data()), static_cast<std::streamsize>(out.size() * sizeof(float)));
                std::cout << "done" << std::endl;
            } else {
                words >> way >> at_least;
                std::cout << "seconds " << peer_seconds(ways.at(way).call, at_least) << std::endl;
            }
        } catch (const std::exception& e) { std::cout << "failed " << e.what() << std::endl; }
    return 0;
}

} // namespace attn::bench
