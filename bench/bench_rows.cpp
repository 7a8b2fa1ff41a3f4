#include "bench_rows.hpp"

#include "bench_patterns.hpp"
#include "bench_ranks.hpp"

#include <Eigen/Core>

#include <cmath>
#include <stdexcept>
#include <utility>
#include <tuple>

namespace attn::bench {

namespace {

struct size {
    index_t n, head_dim, heads, batch = 1;
};

// The heads of transformers with these head dimensions.
constexpr index_t heads_of(index_t head_dim) { return head_dim >= 128 ? 8 : 12; }
constexpr size sequence(index_t n, index_t head_dim = 64) { return {n, head_dim, heads_of(head_dim)}; }
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

std::string name_of(const std::string& family, const std::string& case_name, const testing::problem& p, index_t threads = 1) {
    const auto key = [](const char* word, index_t number) {
        return std::string("/").append(word).append(":").append(std::to_string(number));
    };
    return family + "/" + case_name + (p.batch != 1 ? key("b", p.batch) : "") + key("n", p.queries) +
           (p.keys != p.queries ? key("m", p.keys) : "") +
           (p.key_dim == p.value_dim ? key("d", p.key_dim) : key("dk", p.key_dim) + key("dv", p.value_dim)) + key("h", p.heads) +
           (p.kv_heads != p.heads ? key("kv", p.kv_heads) : "") + key("threads", threads);
}
std::string name_of(const std::string& case_name, const size& s, index_t threads = 1) {
    return name_of("attend", case_name, problem_of(s), threads);
}

const testing::attention_case& case_named(const std::string& name) {
    using cases = std::vector<testing::attention_case>;
    for (const cases* some : {&std::as_const(testing::all_cases()), &pattern_cases(), &rank_cases()})
        for (const auto& c : *some)
            if (c.name == name) return c;
    throw std::logic_error("no case is called " + name);
}

// --- Groups: rows outside of "attend", and what they are compared with ---------------------------------------------------------------

/// Child et al. 2019, Table 2: seconds of an iteration, dense, fixed and strided, of 12288 bytes of text and 3072 of images.
struct sparse_transformer_times {
    index_t n;
    double dense, fixed, strided;
};
constexpr sparse_transformer_times sparse_transformer_table[] = {{12288, 1.31, 0.55, 0.35}, {3072, 0.54, 0.47, 0.38}};
constexpr index_t sparse_heads = 2;

/// Heads and head sizes whose product is that of T5-base (Shazeer et al. 2020, Talking-Heads Attention, Table 1).
constexpr size talking_sizes[] = {{512, 128, 6}, {512, 64, 12}, {512, 32, 24}, {512, 16, 48}};

constexpr index_t key_sizes[] = {32, 64, 96, 128, 192, 256};
testing::problem key_size_problem(index_t key_dim) {
    auto p = problem_of(sequence(2048));
    p.key_dim = key_dim;
    return p;
}

/// 7 x 7 windows of one 56 x 56 image, whose tensors a cache holds, and of so many that none does.
constexpr size windows_in_cache{49, 32, 3, 64}, windows_streamed{49, 32, 3, 32 * 64};

/// A grid of 56 x 56 tokens.
constexpr size grid_of(index_t d) { return {56 * 56, d, 4}; }

/// One new token against a cache of so many, with the heads of Llama 3 8B: every number of the cache is read once.
testing::problem decoding(index_t keys) {
    return {.batch = 1, .heads = 32, .kv_heads = 8, .queries = 1, .keys = keys, .key_dim = 128, .value_dim = 128};
}

/// Queries of 32 heads beside keys and values that all of them share, as multi-head latent attention has them.
testing::problem shared_keys(index_t queries, index_t keys) {
    return {.heads = 32, .queries = queries, .keys = keys, .key_dim = 576, .value_dim = 512};
}

/// What a pattern may cost at most: a share of the FMA peak, visible pairs counted.
struct pattern_goal {
    const char* name;
    size problem;
    double meant;
};
constexpr pattern_goal pattern_goals[] = {{"documents_37", {4096, 64, 12}, 0.30},          {"documents_128", {4096, 64, 12}, 0.50},
                                          {"documents_512", {4096, 64, 12}, 0.70},         {"block_diagonal_64", {4096, 64, 12}, 0.65},
                                          {"block_sparse_64", {4096, 64, 12}, 0.65},       {"block_sparse_28", {3126, 64, 4}, 0.35},
                                          {"dilated_window_28_3", {3126, 64, 4}, 0.35},    {"dilated_window_128_3", {16384, 64, 2}, 0.60},
                                          {"longformer_128_16", {16384, 64, 2}, 0.60},     {"fixed_256", {16384, 64, 2}, 0.55}};

/// The family of rows that time gradients: the same, of five products on visible pairs, or of linear attention's sums; 0 if nothing is meant.
constexpr const char* gradient_family = "backward";
constexpr pattern_goal gradient_goals[] = {{"softmax", {2048, 64, 12}, 0.85},
                                           {"softmax_causal", {2048, 64, 12}, 0.80},
                                           {"softmax", {2048, 128, 8}, 0.87},
                                           {"local_128", {16384, 64, 2}, 0.65},
                                           {"softmax_bias", {2048, 64, 12}, 0.55},
                                           {"linformer", {2048, 64, 12}, 0.72},
                                           {"talking_heads", {512, 64, 12}, 0},
                                           {"linear", {512, 64, 4}, 0.70},
                                           {"simplified_linear", {512, 64, 4}, 0.70}};

/// Softmax attention with and without asking for what comes next, where that may matter.
struct prefetched {
    const char* name;
    testing::problem problem;
};
const prefetched prefetched_calls[] = {{"softmax", problem_of(windows_in_cache)}, {"softmax", problem_of(windows_streamed)},
                                       {"softmax", decoding(4096)},              {"softmax", decoding(32768)},
                                       {"softmax", problem_of(sequence(512))},   {"softmax_causal", problem_of(sequence(512))},
                                       {"local_128", problem_of({16384, 64, sparse_heads})}};

/// A row of floats that is also timed with q, k, v and out, or x and out, in 16 bits, and how many times as fast that is meant to be;
/// 0 if nothing is meant.
struct stored_row {
    std::string label, row;
    double meant;
};
std::vector<stored_row> stored_rows() {
    std::vector<stored_row> rows{{"full, d 64, n 2048", name_of("softmax", sequence(2048)), 0.95},
                                 {"causal, d 64, n 2048", name_of("softmax_causal", sequence(2048)), 0.95},
                                 {"full, d 128, n 2048", name_of("softmax", sequence(2048, 128)), 0.95}};
    for (const auto& [keys, meant] : {std::pair<index_t, double>{4096, 0}, {32768, 1.7}})
        for (const index_t threads : {1, 2})
            rows.push_back({"decoding against " + std::to_string(keys) + " keys, threads " + std::to_string(threads),
                            name_of("decode", "softmax", decoding(keys), threads), meant});
    for (const char* norm : {"layer_norm", "rms_norm"})
        rows.push_back({std::string(norm) + ", 4096 x 768, from memory", std::string("norm/") + norm + "/rows:4096/channels:768/memory/threads:1", 1.7});
    for (const char* size : {"d:32/h:24", "d:64/h:12"})
        rows.push_back({"simplified linear, " + std::string(size) + ", from memory", std::string("linear/simplified_5x5/n:3136/") + size + "/memory/threads:1", 1.05});
    return rows;
}
constexpr narrow_format narrow_formats[] = {narrow_format::bfloat16, narrow_format::half};

/// The same with products of bfloat16, n 2048.
struct bf16_goal {
    index_t head_dim;
    double meant;

    testing::problem problem() const { return problem_of(sequence(2048, head_dim)); }
    std::string name() const { return name_of("products", "softmax_bf16_products", problem()); }
    std::string against() const { return name_of("products", "softmax", problem()); }
};
constexpr bf16_goal bf16_goals[] = {{64, 1.5}, {128, 1.6}};

/// Calls over ranks that are threads, one thread each, beside those of as many threads on one machine: they may take 15 % longer.
constexpr const char* rank_family = "ranks";
constexpr double rank_goal = 1 / 1.15;
struct ranked {
    const char *name, *label;

    testing::problem problem() const { return problem_of({16384, 64, sparse_heads}); }
    std::string row(index_t count) const { return name_of(rank_family, rank_case_name(name, count), problem(), count); }
    std::string against(index_t count) const { return name_of(rank_family, name, problem(), count); }
};
constexpr ranked ranked_calls[] = {{"softmax", "full"}, {"softmax_causal", "causal"}, {"window_1024", "causal window of 1024"}};

/// From which n on an operator is faster than softmax attention, which is causal where the operator is.
struct crossover {
    const char *name, *against;
    index_t first = 64; ///< n
};
constexpr crossover crossovers[] = {{"sliding_window_256", "softmax_causal"},
                                    {"sparse_strided", "softmax_causal"},
                                    {"sigmoid", "softmax"},
                                    {"linformer", "softmax", 512}, // to 256 rows from there on
                                    {"lsh", "softmax"},
                                    {"linear", "softmax"},
                                    {"linear_causal", "softmax_causal"},
                                    {"recurrent_gated", "softmax_causal"},
                                    {"recurrent_gated_delta", "softmax_causal"},
                                    {"simplified_linear", "softmax"},
                                    {"focused_linear", "softmax"},
                                    {"talking_heads", "softmax"}};
constexpr index_t last_crossover = 2048;

void add_crossovers(std::vector<row>& rows) {
    for (index_t n = 64; n <= last_crossover; n *= 2) { // what is compared comes soon after: the machine changes
        const auto add = [&](const char* name) { rows.push_back({&case_named(name), problem_of(sequence(n)), 1, "crossover"}); };
        for (const char* name : {"softmax", "softmax_causal"}) add(name);
        for (const auto& c : crossovers)
            if (n >= c.first) add(c.name);
    }
}

void add_groups(std::vector<row>& rows) {
    const auto add = [&](const std::string& family, const std::string& name, const testing::problem& p, index_t threads = 1) {
        rows.push_back({&case_named(name), p, threads, family});
    };
    for (const auto& c : {"local_128", "strided_64", "sparse_transformer_strided", "sparse_transformer_symmetric", "selected_16_of_64", "softmax"})
        add("sparse", c, problem_of({16384, 64, sparse_heads}));
    for (const auto& c : {"softmax", "single_keys_2048"}) add("sparse", c, shared_keys(1, 131072));
    for (const auto& c : {"softmax_causal", "single_keys_512"}) add("sparse", c, shared_keys(4096, 4096));
    for (const auto& g : pattern_goals) add("patterns", g.name, problem_of(g.problem));
    for (const auto& s : {windows_in_cache, windows_streamed})
        for (const auto& c : {"windows_7x7", "windows_7x7_shifted"}) add("windows", c, problem_of(s));
    for (const index_t d : {32, 64})
        for (const auto& c : {"neighborhood_7", "neighborhood_13"}) add("neighborhood", c, problem_of(grid_of(d)));
    for (const auto& line : sparse_transformer_table)
        for (const auto& c : {"softmax_causal", "sparse_transformer_fixed", "sparse_transformer_strided"})
            add("sparse_transformer", c, problem_of({line.n, 64, sparse_heads}));
    for (const auto& s : talking_sizes)
        for (const auto& c : {"softmax", "talking_heads"}) add("talking_heads_overhead", c, problem_of(s));
    for (const auto& c : {"recurrent_linear", "recurrent_gated", "recurrent_gated_channel", "recurrent_delta", "recurrent_gated_delta", "recurrent_kda", "recurrent_general"})
        for (const index_t d : {64, 128}) add("recurrent", c, problem_of({4096, d, 12}));
    for (const auto key_dim : key_sizes) add("key_size", "softmax", key_size_problem(key_dim));
    for (const index_t keys : {4096, 32768})
        for (const index_t threads : {1, 2}) add("decode", "softmax", decoding(keys), threads);
    for (const auto& c : ranked_calls)
        for (const index_t count : {1, 2})
            for (const index_t ranks : {index_t{0}, count}) add(rank_family, rank_case_name(c.name, ranks), c.problem(), count);
    for (const auto& g : bf16_goals)
        for (const auto& c : {"softmax", "softmax_bf16_products"}) add("products", c, g.problem());
    for (const auto& [name, problem] : prefetched_calls)
        for (const char* how : {"", "_no_prefetch"}) add("prefetch", std::string(name).append(how), problem);
    for (const auto& g : gradient_goals) {
        add(gradient_family, g.name, problem_of(g.problem));
        add(gradient_family, g.name, problem_of(g.problem), 2);
    }
    add_crossovers(rows);
}

/// Two heads of every case, from n = 1024 on in doublings while a call stays within so many flops: how time and memory grow.
void add_sweeps(std::vector<row>& rows) {
    constexpr double max_flops = 3.5e10;
    for (const auto& c : testing::all_cases()) {
        const auto at = [&](index_t n) { return problem_of({n, 64, 2}); };
        if (!c.supports(at(512)) || !c.supports(at(1024))) continue;
        const auto flops = [&](index_t n) { return c.make_float(at(n))->useful_flops(at(n)); };
        auto expected = flops(1024); // of larger ones, which take long to make, by how it grew so far
        const auto growth = expected / flops(512);
        for (index_t n = 1024; n <= 65536 && expected <= max_flops && c.supports(at(n)); n *= 2, expected *= growth)
            rows.push_back({&c, at(n), 1, "sweep"});
    }
}

} // namespace

std::string row::name() const {
    return name_of(family, timed_case->name, problem, threads) +
           (query_factor != 1 ? "/q:" + std::to_string(std::lround(query_factor)) : "") + (is_double ? "/f64" : "") + format_suffix(format);
}
std::string format_suffix(narrow_format format) {
    return format == narrow_format::none ? "" : format == narrow_format::half ? "/half" : "/bf16";
}

std::unique_ptr<subject> row::make() const {
    const auto with = [this]<Storage S>(S) {
        const auto in = std::make_shared<const tensors<S>>(random_tensors<S>(problem, query_factor));
        if constexpr (Scalar<S>)
            if (family == gradient_family) return make_gradient_subject<S>(*timed_case, problem, in, threads);
        return make_subject<S>(*timed_case, problem, in, threads);
    };
    if (format == narrow_format::bfloat16) return with(Eigen::bfloat16{});
    if (format == narrow_format::half) return with(Eigen::half{});
    return is_double ? with(double{}) : with(float{});
}

double row::dense_flops() const {
    const auto& p = problem;
    return 2.0 * static_cast<double>(p.key_dim + p.value_dim) * static_cast<double>(p.batch * p.heads * p.queries * p.keys);
}

std::vector<row> all_rows(bool quick) {
    std::vector<row> rows;
    const auto add = [&](const testing::attention_case& c, const size& s, index_t threads = 1, bool is_double = false,
                         double query_factor = 1) {
        const row r{&c, problem_of(s), threads, "attend", is_double, query_factor};
        if (c.supports(r.problem) && (!is_double || c.make_double)) rows.push_back(r);
    };
    for (const auto& c : testing::all_cases()) {
        for (const index_t n : {512, 2048}) add(c, sequence(n));
        for (const index_t head_dim : {32, 128}) add(c, sequence(512, head_dim));
        add(c, sequence(2048), 2);
        if (c.name == "linformer") add(c, sequence(4096));
        if (c.name != "softmax" && c.name != "softmax_causal") continue;
        add(c, sequence(4096));
        for (const index_t n : {2048, 4096}) add(c, sequence(n, 128));
        for (const index_t head_dim : {64, 128}) add(c, sequence(2048, head_dim), 1, true);
        add(c, deit_tiny);
        add(c, sequence(2048), 1, false, 30);
    }
    add_groups(rows);
    for (const auto& s : stored_rows()) { // what is compared comes soon after
        const auto floats = std::ranges::find(rows, s.row, &row::name);
        if (floats == rows.end()) continue; // a row of another file
        std::vector<row> narrow(std::size(narrow_formats), *floats);
        for (std::size_t f = 0; f < narrow.size(); ++f) narrow[f].format = narrow_formats[f];
        rows.insert(floats + 1, narrow.begin(), narrow.end());
    }
    if (!quick) add_sweeps(rows);
    const auto goals = all_goals();
    const auto can_wait = [&](const row& r) {
        if (r.family == "decode" || (r.family == "attend" && r.dense_flops() > 4e10)) return true;
        const bool is_shortest = r.family == "attend" && r.problem.queries == 512 && r.problem.key_dim == 64;
        return !is_shortest && std::ranges::none_of(goals, [name = r.name()](const goal& g) { return g.row == name; });
    };
    if (quick) std::erase_if(rows, can_wait);
    return rows;
}

std::vector<comparison> all_comparisons() {
    std::vector<comparison> all;
    for (const auto& line : sparse_transformer_table) {
        const auto named = [&](const char* name) { return name_of("sparse_transformer", name, problem_of({line.n, 64, sparse_heads})); };
        const auto dense = named("softmax_causal");
        all.push_back({"sparse_transformer", dense, dense, 1});
        all.push_back({"sparse_transformer", named("sparse_transformer_fixed"), dense, line.dense / line.fixed});
        all.push_back({"sparse_transformer", named("sparse_transformer_strided"), dense, line.dense / line.strided});
    }
    for (const auto& s : talking_sizes) {
        const auto named = [&](const char* name) { return name_of("talking_heads_overhead", name, problem_of(s)); };
        all.push_back({"talking_heads_overhead", named("talking_heads"), named("softmax")});
    }
    for (const auto& c : crossovers)
        for (auto n = c.first; n <= last_crossover; n *= 2) {
            const auto named = [&](const char* name) { return name_of("crossover", name, problem_of(sequence(n))); };
            all.push_back({"crossover", named(c.name), named(c.against)});
        }
    for (const auto& [name, problem] : prefetched_calls)
        all.push_back({"prefetch", name_of("prefetch", name, problem), name_of("prefetch", std::string(name).append("_no_prefetch"), problem)});
    const auto key_size_name = [](index_t key_dim) { return name_of("key_size", "softmax", key_size_problem(key_dim)); };
    for (const auto key_dim : key_sizes) all.push_back({"key_size", key_size_name(key_dim), key_size_name(64)});
    for (const char* name : {"local_128", "strided_64", "sparse_transformer_strided", "sparse_transformer_symmetric"}) {
        const auto p = problem_of({16384, 64, sparse_heads});
        all.push_back({"sparse", name_of("sparse", name, p), name_of("sparse", "softmax", p)});
    }
    for (const auto& s : stored_rows())
        for (const auto f : narrow_formats) all.push_back({"16 bits", s.row + format_suffix(f), s.row});
    for (const auto& g : bf16_goals) all.push_back({"16 bits", g.name(), g.against()});
    for (const auto& c : ranked_calls)
        for (const index_t count : {1, 2}) all.push_back({rank_family, c.row(count), c.against(count)});
    return all;
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
    for (const auto& [n, meant] : {std::pair{512, 0.72}, {2048, 0.76}}) {
        share("bool mask, all pairs counted, d 64, n " + std::to_string(n), name_of("softmax_mask", sequence(n)), meant);
        goals.back().counts_all_pairs = true;
    }
    share("ALiBi, d 64, n 2048", name_of("softmax_alibi", sequence(2048)), 0.84);
    share("soft cap, d 64, n 2048", name_of("softmax_soft_cap", sequence(2048)), 0.77);
    share("Linformer, k 256, d 64, n 4096", name_of("linformer", sequence(4096)), 0.85);
    for (const auto& [n, full_share, causal_share] : {std::tuple{512, 0.76, 0.70}, {1024, 0.76, 0.70}, {4096, 0.66, 0.68}}) {
        share("talking heads, full, d 64, n " + std::to_string(n), name_of("talking_heads", sequence(n)), full_share);
        share("talking heads, causal, d 64, n " + std::to_string(n), name_of("talking_heads_causal", sequence(n)), causal_share);
    }
    const auto sparse = [](const char* name) { return name_of("sparse", name, problem_of({16384, 64, sparse_heads})); };
    share("local +-128, d 64, n 16384", sparse("local_128"), 0.72);
    share("strided by 64, d 64, n 16384", sparse("strided_64"), 0.75);
    share("Sparse Transformer, causal, w = s = 128, n 16384", sparse("sparse_transformer_strided"), 0.62);
    share("Sparse Transformer, symmetric, w = s = 128, n 16384", sparse("sparse_transformer_symmetric"), 0.66);
    for (const auto& g : pattern_goals)
        share(std::string(g.name) + ", d 64, n " + std::to_string(g.problem.n), name_of("patterns", g.name, problem_of(g.problem)), g.meant);
    share("predicate with a modulo, d 64, n 2048", name_of("softmax_predicate", sequence(2048)), 0.50);
    share("causal & (local | strided), d 64, n 2048", name_of("softmax_local_strided", sequence(2048)), 0.50);
    share("causal, soft cap, ALiBi and bias composed, d 64, n 2048", name_of("softmax_composed", sequence(2048)), 0.50);
    for (const auto& [where, s, meant] : {std::tuple{"in cache", windows_in_cache, 0.68}, {"from memory", windows_streamed, 0.58}}) {
        const auto row = [&](const char* name) { return name_of("windows", name, problem_of(s)); };
        share(std::string("7 x 7 windows, d 32, bias, ") + where, row("windows_7x7"), meant);
        share(std::string("the same shifted, visible pairs counted (88 %), ") + where, row("windows_7x7_shifted"), meant);
    }
    for (const index_t d : {32, 64})
        for (const auto& [name, meant] : {std::pair{"neighborhood_7", 0.25}, {"neighborhood_13", 0.40}})
            share(std::string(name) + " of a 56 x 56 grid, d " + std::to_string(d), name_of("neighborhood", name, problem_of(grid_of(d))), meant);
    for (const auto& g : gradient_goals) {
        if (g.meant == 0) continue;
        const auto row = name_of(gradient_family, g.name, problem_of(g.problem));
        const auto label = "gradient of " + std::string(g.name) + ", d " + std::to_string(g.problem.head_dim) + ", n " + std::to_string(g.problem.n);
        share(label, row, g.meant);
        against(label + ", two threads against one", name_of(gradient_family, g.name, problem_of(g.problem), 2), row, 1.85);
    }
    for (const auto& s : stored_rows())
        for (const auto f : narrow_formats)
            if (s.meant > 0) against(s.label + ", in " + format_suffix(f).substr(1) + " against float", s.row + format_suffix(f), s.row, s.meant);
    for (const auto& g : bf16_goals) against("products in bf16 against float, d " + std::to_string(g.head_dim) + ", n 2048", g.name(), g.against(), g.meant);
    for (const auto& c : ranked_calls)
        for (const index_t count : {1, 2}) {
            const auto pair = count == 1 ? "1 rank against 1 thread, " : "2 ranks against 2 threads, ";
            against(std::string(pair) + c.label + ", n 16384", c.row(count), c.against(count), rank_goal);
        }
    against("two threads against one, full", name_of("softmax", sequence(2048), 2), dense(sequence(2048)), 1.9);
    against("two threads against one, causal", name_of("softmax_causal", sequence(2048), 2), causal(sequence(2048)), 1.9);
    against("scores 30 times as large, full", dense(sequence(2048)) + "/q:30", dense(sequence(2048)), 0.95);
    against("scores 30 times as large, causal", causal(sequence(2048)) + "/q:30", causal(sequence(2048)), 0.95);
    return goals;
}

} // namespace attn::bench
