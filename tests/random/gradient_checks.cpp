#include "gradient_checks.hpp"

#include "differences.hpp"
#include "draw_layout.hpp"
#include "on_threads.hpp"

namespace attn::fuzz {

template <Scalar T>
std::string broken_gradient(draw& random, const std::vector<defined_gradient<T>>& defined, const std::function<std::size_t(index_t)>& workspace_bytes,
                            const gradient_call<T>& call) {
    if constexpr (!testing::is_tested<T>) return {};
    std::vector<tensor<T>> ours;
    std::vector<tensor_view<T>> all;
    for (const auto& g : defined) all.push_back(ours.emplace_back(g.exact.shape()).view());
    {
        workspace memory(workspace_bytes(1));
        on_threads(1, memory, [&](const execution& run) { call(all, false, run); });
    }
    for (std::size_t g = 0; g < ours.size(); ++g)
        if (const auto problem = too_far(ours[g], defined[g].exact); !problem.empty()) return std::string(defined[g].name) + ": " + problem;

    std::vector<testing::placed<T>> placed;
    std::vector<tensor_view<T>> wanted;
    for (const auto& g : defined) {
        auto& own = placed.emplace_back(g.exact.shape(), g.lies == lies::anyhow ? draw_layout(random) : g.lies == lies::in_rows ? draw_row_layout(random) : testing::layout::head_major);
        wanted.push_back(random.one_in(4) ? tensor_view<T>{} : own.view());
    }
    const auto threads = random.number(1, 4);
    workspace memory(workspace_bytes(threads));
    testing::fill(memory, std::byte{0xff}); // NaN, in either precision
    on_threads(threads, memory, [&](const execution& run) { call(wanted, true, run); });
    for (std::size_t g = 0; g < placed.size(); ++g) {
        const auto where = std::string(defined[g].name) + ", elsewhere (" + std::to_string(threads) + " threads): ";
        if (!placed[g].guards_intact()) return where + "wrote beside its output";
        if (!wanted[g].data()) continue;
        if (const auto problem = other_bits(placed[g].copy(), ours[g]); !problem.empty()) return where + problem;
    }
    return {};
}

template std::string broken_gradient(draw&, const std::vector<defined_gradient<float>>&, const std::function<std::size_t(index_t)>&, const gradient_call<float>&);
template std::string broken_gradient(draw&, const std::vector<defined_gradient<double>>&, const std::function<std::size_t(index_t)>&, const gradient_call<double>&);

} // namespace attn::fuzz
