#include "peer.hpp"

#include <cstdlib>
#include <sstream>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace attn::bench {

peer::peer(std::vector<std::string> command, int threads) {
    int questions[2], answers[2];
    if (pipe2(questions, O_CLOEXEC) != 0 || pipe2(answers, O_CLOEXEC) != 0) {
        why_ = "no pipes";
        return;
    }
    const auto count = std::to_string(threads);
    std::vector<char*> arguments;
    for (auto& argument : command) arguments.push_back(argument.data());
    arguments.push_back(nullptr);
    process_ = fork();
    if (process_ == 0) {
        dup2(questions[0], STDIN_FILENO);
        dup2(answers[1], STDOUT_FILENO);
        setenv("OMP_NUM_THREADS", count.c_str(), 1);
        setenv("OPENBLAS_NUM_THREADS", "1", 1); // PyTorch calls it from threads of its own, which wait for processors that OpenBLAS's would hold
        execvp(arguments[0], arguments.data());
        _exit(127);
    }
    close(questions[0]);
    close(answers[1]);
    to_ = fdopen(questions[1], "w");
    from_ = fdopen(answers[0], "r");
    std::istringstream names(answer("", "ready"));
    std::getline(names, name_, '|');
    std::getline(names, version_);
}

peer::~peer() {
    if (to_) std::fclose(to_); // at the end of its input it ends
    if (from_) std::fclose(from_);
    if (process_ > 0) waitpid(process_, nullptr, 0);
}

std::vector<std::string> peer::ways(const std::string& problem) {
    std::vector<std::string> all;
    std::istringstream list(answer("problem " + problem, "ways"));
    for (std::string way; std::getline(list, way, '|');) all.push_back(way);
    return all;
}

bool peer::run(std::size_t way, const std::string& file) {
    answer("run " + std::to_string(way) + " " + file, "done");
    return why_.empty();
}

double peer::seconds(std::size_t way, double at_least) {
    const auto text = answer("time " + std::to_string(way) + " " + std::to_string(at_least), "seconds");
    return text.empty() ? 0 : std::strtod(text.c_str(), nullptr);
}

std::string peer::answer(const std::string& question, const std::string& word) {
    why_.clear();
    if (!question.empty()) {
        std::fputs((question + "\n").c_str(), to_);
        std::fflush(to_);
    }
    std::string line;
    for (int c = std::fgetc(from_); c != EOF && c != '\n'; c = std::fgetc(from_)) line += static_cast<char>(c);
    if (line.starts_with(word)) return line.size() > word.size() ? line.substr(word.size() + 1) : "";
    why_ = line.empty() ? "it does not start, or has ended" : line;
    return "";
}

} // namespace attn::bench
