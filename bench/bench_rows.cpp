#include "bench_rows.hpp"

#include <cmath>
#include <tuple>

namespace attn::bench {

namespace {

struct size {
    index n, head_dim, heads, batch = 1;
};

// The heads of transformers with these head dimensions.
constexpr index heads_of(index head_dim) { return head_dim >= 128 ? 8 : 12; }
constexpr size sequence(index n, index head_dim = 64) { return {n, head_dim, heads_of(head_dim)}; }
constexpr size deit_tiny{197, 64, 3, 8};

testing::problem problem_of(const size& s) {
    return {.batch = s.batch,
            .heads = s.heads,
            .kv_heads = s.heads,
            .queries = s.n,
            .keys = s.n,
            .key_dim = s.head_dim,
            .value_dim = s.head_dim};
}

std::string name_of(const std::string& case_name, const size& s, index threads = 1) {
    return "attend/" + case_name + (s.batch != 1 ? "/b:" + std::to_string(s.batch) : "") + "/n:" + std::to_string(s.n) +
           "/d:" + std::to_string(s.head_dim) + "/h:" + std::to_string(s.heads) + "/t:" + std::to_string(threads);
}

} // namespace

std::string row::name() const {
    const auto& p = problem;
    return name_of(timed_case->name, {p.queries, p.key_dim, p.heads, p.batch}, threads) +
           (query_factor != 1 ? "/q:" + std::to_string(std::lround(query_factor)) : "") + (is_double ? "/f64" : "");
}

std::unique_ptr<subject> row::make() const {
    const auto with = [this]<Scalar T>(T) {
        return make_subject<T>(*timed_case, problem, std::make_shared<const tensors<T>>(random_tensors<T>(problem, query_factor)), threads);
    };
    return is_double ? with(double{}) : with(float{});
}

double row::dense_flops() const {
    const auto& p = problem;
    return 2.0 * static_cast<double>(p.key_dim + p.value_dim) * static_cast<double>(p.batch * p.heads * p.queries * p.keys);
}

std::vector<row> all_rows(bool quick) {
    std::vector<row> rows;
    const auto add = [&](const testing::attention_case& c, const size& s, index threads = 1, bool is_double = false,
                         double query_factor = 1) {
        const row r{&c, problem_of(s), threads, is_double, query_factor};
        if (c.supports(r.problem)) rows.push_back(r);
    };
    for (const auto& c : testing::all_cases()) {
        for (const index n : {512, 2048}) add(c, sequence(n));
        if (c.name == "linformer") add(c, sequence(4096));
        if (c.name == "talking_heads" || c.name == "talking_heads_causal")
            for (const index n : {1024, 4096}) add(c, sequence(n));
        if (c.name != "softmax" && c.name != "softmax_causal") continue;
        add(c, sequence(4096));
        for (const index n : {512, 2048, 4096}) add(c, sequence(n, 128));
        for (const index head_dim : {64, 128}) add(c, sequence(2048, head_dim), 1, true);
        add(c, deit_tiny);
        add(c, sequence(2048), 2);
        add(c, sequence(2048), 1, false, 30);
    }
    const auto goals = all_goals();
    const auto can_wait = [&](const row& r) {
        return r.problem.queries != 512 && std::ranges::none_of(goals, [name = r.name()](const goal& g) { return g.row == name; });
    };
    if (quick) std::erase_if(rows, can_wait);
    return rows;
}

std::vector<goal> all_goals() {
    std::vector<goal> goals;
    const auto share = [&](std::string label, std::string row, double of_512_bits, double of_256_bits = 0) {
        goals.push_back({std::move(label), std::move(row), "", of_512_bits, of_256_bits});
    };
    const auto against = [&](std::string label, std::string row, std::string other, double times) {
        goals.push_back({std::move(label), std::move(row), std::move(other), times, times});
    };
    const auto dense = [](const size& s) { return name_of("softmax", s); };
    const auto causal = [](const size& s) { return name_of("softmax_causal", s); };

    share("full, d 64, n 512", dense(sequence(512)), 0.87);
    share("full, d 64, n 2048", dense(sequence(2048)), 0.89, 0.86);
    share("full, d 64, n 4096", dense(sequence(4096)), 0.88);
    share("causal, d 64, n 512", causal(sequence(512)), 0.83);
    share("causal, d 64, n 2048", causal(sequence(2048)), 0.87);
    share("causal, d 64, n 4096", causal(sequence(4096)), 0.87);
    share("full, d 128, n 512", dense(sequence(512, 128)), 0.91);
    share("full, d 128, n 2048", dense(sequence(2048, 128)), 0.92, 0.90);
    share("full, d 128, n 4096", dense(sequence(4096, 128)), 0.92);
    share("causal, d 128, n 512", causal(sequence(512, 128)), 0.82);
    share("causal, d 128, n 2048", causal(sequence(2048, 128)), 0.90);
    share("causal, d 128, n 4096", causal(sequence(4096, 128)), 0.90);
    share("double, d 64, n 2048", dense(sequence(2048)) + "/f64", 0.82);
    share("double, d 128, n 2048", dense(sequence(2048, 128)) + "/f64", 0.87);
    share("DeiT-tiny: batch 8, 3 heads, n 197, d 64", dense(deit_tiny), 0.80);
    share("bias shared by the heads, d 64, n 2048", name_of("softmax_bias", sequence(2048)), 0.78);
    share("bias per head, d 64, n 2048", name_of("softmax_bias_per_head", sequence(2048)), 0.68);
    share("bool mask, all pairs counted, d 64, n 2048", name_of("softmax_mask", sequence(2048)), 0.76);
    goals.back().counts_all_pairs = true;
    share("ALiBi, d 64, n 2048", name_of("softmax_alibi", sequence(2048)), 0.84);
    share("soft cap, d 64, n 2048", name_of("softmax_soft_cap", sequence(2048)), 0.77);
    share("Linformer, k 256, d 64, n 4096", name_of("linformer", sequence(4096)), 0.85);
    for (const auto& [n, full_share, causal_share] : {std::tuple{512, 0.76, 0.70}, {1024, 0.76, 0.70}, {4096, 0.66, 0.68}}) {
        share("talking heads, full, d 64, n " + std::to_string(n), name_of("talking_heads", sequence(n)), full_share);
        share("talking heads, causal, d 64, n " + std::to_string(n), name_of("talking_heads_causal", sequence(n)), causal_share);
    }
    against("two threads against one, full", name_of("softmax", sequence(2048), 2), dense(sequence(2048)), 1.9);
    against("two threads against one, causal", name_of("softmax_causal", sequence(2048), 2), causal(sequence(2048)), 1.9);
    against("scores 30 times as large, full", dense(sequence(2048)) + "/q:30", dense(sequence(2048)), 0.95);
    against("scores 30 times as large, causal", causal(sequence(2048)) + "/q:30", causal(sequence(2048)), 0.95);
    return goals;
}

} // namespace attn::bench
