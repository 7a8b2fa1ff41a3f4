// What a program without exceptions and type information is told of errors: each faulty call is made in a process of its own, which it ends.
#include <attn/attn.hpp>
#include <attn/distributed/sequence_parallel.hpp>
#include <attn/distributed/thread_communicator.hpp>
#include <attn/layer/cached.hpp>
#include <attn/layer/safetensors.hpp>
#include <attn/layer/transformer_block.hpp>

#include <cstdio>
#include <cstring>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

namespace {

int failures = 0;

void check(bool right, const std::string& what) {
    if (right) return;
    std::printf("wrong: %s\n", what.c_str());
    ++failures;
}

/// How a process ended that made a call, and what it wrote to stderr.
struct ending {
    int status;
    std::string text;
};
ending ending_of(const auto& call) {
    int pipe_ends[2];
    if (pipe(pipe_ends) != 0) return {-1, "no pipe"};
    const auto process = fork();
    if (process == 0) {
        dup2(pipe_ends[1], 2);
        call();
        _exit(0);
    }
    close(pipe_ends[1]);
    ending result{0, ""};
    char piece[512];
    for (ssize_t count; (count = read(pipe_ends[0], piece, sizeof piece)) > 0;) result.text.append(piece, static_cast<std::size_t>(count));
    close(pipe_ends[0]);
    waitpid(process, &result.status, 0);
    return result;
}

/// Writes the message and ends the process with 10, 11, ... for each kind.
void handler(attn::error_kind kind, const char* message) {
    std::fprintf(stderr, "%s", message);
    _exit(10 + static_cast<int>(kind));
}

void expect(attn::error_kind kind, const std::string& message, const auto& call) {
    attn::set_error_handler(handler);
    const auto told = ending_of(call);
    check(WIFEXITED(told.status) && WEXITSTATUS(told.status) == 10 + static_cast<int>(kind) && told.text.find(message) != std::string::npos,
          "handler: \"" + told.text + "\", not \"" + message + "\"");
    check(attn::set_error_handler(nullptr) == handler, "the handler of before");
    const auto untold = ending_of(call);
    check(WIFSIGNALED(untold.status) && WTERMSIG(untold.status) == SIGABRT && untold.text.find(message) != std::string::npos,
          "no handler: \"" + untold.text + "\", not \"" + message + "\"");
}

} // namespace

int main() {
    using attn::error_kind;
    const auto q = attn::tensor<float>::random({1, 2, 9, 8}, 1), k = attn::tensor<float>::random({1, 2, 7, 8}, 2);
    const attn::tensor<float> narrow({1, 2, 7, 6});
    attn::softmax_attention op;
    expect(error_kind::shape, "softmax_attention: k has shape (1, 2, 7, 6), but q has (1, 2, 9, 8)",
           [&] { static_cast<void>(attn::attend(op, q, narrow, k)); });
    expect(error_kind::argument, "layer_norm: eps is 0",
           [&] { static_cast<void>(attn::normalise(attn::layer_norm<float>{.eps = 0}, q)); });
    expect(error_kind::parameter, "cannot be read",
           [] { static_cast<void>(attn::read_safetensors("/nowhere.safetensors")); });
    const attn::parameters none;
    expect(error_kind::parameter, "tensor \"missing.weight\" is missing", [&] { static_cast<void>(none.get_linear<float>("missing")); });

    // What is right goes on as ever, on threads, ranks and caches too.
    const auto alone = attn::attend(op, q, k, k);
    attn::thread_pool threads(3);
    const auto shared = attn::attend(op, q, k, k, threads);
    check(std::memcmp(alone.data(), shared.data(), sizeof(float) * static_cast<std::size_t>(alone.shape().size())) == 0, "threads");
    attn::key_value_pool<float> pool({.kv_heads = 2, .key_channels = 8, .value_channels = 8}, 1);
    attn::sequence<float> cache(pool);
    cache.append(k, k);
    check(attn::attend(op, q.slice({.tokens = {0, 7}}), cache).shape().tokens == 7, "a cache");
    expect(error_kind::argument, "sequence::append: keys", [&] {
        for (int i = 0; i < 30; ++i) cache.append(k, k);
    });
    return failures;
}
