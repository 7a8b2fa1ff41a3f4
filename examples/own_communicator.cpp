// Your ranks have a way to send bytes already: attention over a sequence goes by it. A communicator is two numbers and four functions.
#include <attn/distributed/sequence_parallel.hpp>
#include <attn/pattern/causal.hpp>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using attn::index_t;

/// Stands for what your ranks are connected by: here, memory that threads share. Messages are numbered, for each pair of ranks and tag.
struct my_network {
    struct line {
        std::map<index_t, std::vector<std::byte>> messages;
        index_t sent = 0, asked = 0;
    };
    std::map<std::array<index_t, 3>, line> lines; // from, to, tag
    std::mutex mutex;
    std::condition_variable changed;
};

/// What attn asks of it: sends are copied, and done at once; a receive is done when its message is there.
struct my_communicator {
    my_network& network;
    index_t own, all;

    struct request {
        my_network::line* line = nullptr;
        index_t number = 0;
        std::span<std::byte> bytes = {};
    };
    index_t rank() const { return own; }
    index_t size() const { return all; }
    request send(index_t to, index_t tag, std::span<const std::byte> bytes) {
        const std::lock_guard lock(network.mutex);
        auto& line = network.lines[{own, to, tag}];
        line.messages[line.sent++].assign(bytes.begin(), bytes.end());
        network.changed.notify_all();
        return {};
    }
    request receive(index_t from, index_t tag, std::span<std::byte> bytes) {
        const std::lock_guard lock(network.mutex);
        auto& line = network.lines[{from, own, tag}];
        return {&line, line.asked++, bytes};
    }
    bool test(request& asked) {
        const std::lock_guard lock(network.mutex);
        return take(asked);
    }
    void wait(request& asked) {
        std::unique_lock lock(network.mutex);
        network.changed.wait(lock, [&] { return take(asked); });
    }

private:
    static bool take(request& asked) {
        if (!asked.line) return true;
        const auto message = asked.line->messages.extract(asked.number);
        if (message.empty()) return false;
        std::ranges::copy(message.mapped(), asked.bytes.begin());
        asked.line = nullptr;
        return true;
    }
};
static_assert(attn::Communicator<my_communicator>);

} // namespace

int main() {
    constexpr index_t ranks = 3, heads = 2, n = 1000, d = 16;
    const auto x = attn::tensor<float>::random({.heads = heads, .tokens = n, .channels = d}, 1);
    const attn::inputs<float> in{x, x, x};
    const attn::softmax_attention op{.pattern = attn::causal{}};
    const auto whole = attn::attend(op, in);

    const attn::sequence_parallel over_ranks{op, attn::partition(op.pattern, shapes_of(in), ranks)};
    my_network network;
    std::array<bool, 3> same{};
    const auto be_rank = [&](index_t rank) {
        my_communicator mine{network, rank, ranks};
        const auto rows = over_ranks.partition.queries(rank); // and the same keys, here
        const auto part = x.slice({.tokens = rows});
        const auto out = attn::attend(over_ranks, mine, attn::inputs<float>{part, part, part});
        bool all_same = true;
        for (index_t h = 0; h < heads; ++h)
            for (index_t i = 0; i < rows.count; ++i)
                for (index_t c = 0; c < d; ++c) all_same = all_same && out(0, h, i, c) == whole(0, h, rows.first + i, c);
        same[static_cast<std::size_t>(rank)] = all_same;
    };
    {
        std::vector<std::jthread> threads;
        for (index_t rank = 0; rank < ranks; ++rank) threads.emplace_back(be_rank, rank);
    }
    for (index_t rank = 0; rank < ranks; ++rank) {
        const auto rows = over_ranks.partition.queries(rank);
        std::printf("rank %td: queries %td to %td, %td pairs, %td bytes sent; the bits of the call on one machine: %s\n", rank, rows.first, rows.end() - 1,
                    over_ranks.partition.pairs(rank), over_ranks.partition.bytes_sent(rank), same[static_cast<std::size_t>(rank)] ? "yes" : "no");
    }
}
