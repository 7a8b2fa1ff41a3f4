// A peer: somebody else's attention or norm, in a process of its own, that is asked line by line over its standard input and output.
//     (it says)                                              ready <name>|<version>
//     problem <kind> <batch> <heads> <n> <d> <threads> <folder>    ways <way>|<way>...     kind: softmax, softmax_causal, layer_norm,
//                                                            or the gradient of attention: softmax_backward, softmax_causal_backward
//     run <way number> <file>                                done
//     time <way number> <seconds>                            seconds <of one call>
//     (whatever it cannot do)                                failed <reason>
// The folder holds the inputs "0", "1" and "2": queries, keys and values as [batch][heads][n][d], or of a norm x as [n][d] and the two
// parameters; for a gradient "3" too, that of the result. `run` writes the answer in the order of the first input; of a gradient those of the
// queries, the keys and the values, one after the other. All numbers are float.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include <sys/types.h>

namespace attn::bench {

class peer {
public:
    /// Starts the program, which gives at most so many threads to its libraries.
    peer(std::vector<std::string> command, int threads);
    ~peer();
    peer(const peer&) = delete;
    peer& operator=(const peer&) = delete;

    /// Its name; empty if it could not be started, and then `why` says why.
    const std::string& name() const { return name_; }
    const std::string& version() const { return version_; }
    const std::string& why() const { return why_; }

    /// The ways in which it computes this; empty if in none.
    std::vector<std::string> ways(const std::string& problem);
    /// Writes the answer of a way to a file. Whether it could.
    bool run(std::size_t way, const std::string& file);
    /// Seconds of one call, over calls that take at least so long; 0 if it failed.
    double seconds(std::size_t way, double at_least);

private:
    /// What it says next, without the word that begins it: empty and `why` set if another word does.
    std::string answer(const std::string& question, const std::string& word);

    pid_t process_ = -1;
    std::FILE *to_ = nullptr, *from_ = nullptr;
    std::string name_, version_, why_;
};

} // namespace attn::bench
