// attn_fingerprints [FOLDER]: the bits of every operator's results and gradients, a hash for each, as a table; or those that are not
// in the folder's. One table holds for all processors that fuse products with sums, another for SSE2.
#include "answers.hpp"
#include "storage.hpp"

#include <attn/norm/layer_norm.hpp>
#include <attn/norm/rep_batch_norm.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/norm/train_backward.hpp>
#include <attn/parallel/thread_pool.hpp>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>

namespace attn::testing {

namespace {

/// FNV-1a over the bits of numbers. All NaN are one: which of two comes out of a sum is the processor's.
class fingerprint {
public:
    template <class T>
    void add(const tensor<T>& t) {
        if (t.data()) add(std::span<const T>(t.data(), static_cast<std::size_t>(t.shape().size())));
    }
    template <class T>
    void add(std::span<const T> numbers) {
        for (const T x : numbers) {
            using bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
            hash_ = (hash_ ^ std::bit_cast<bits>(std::isnan(x) ? std::numeric_limits<T>::quiet_NaN() : x)) * 0x100000001b3u;
        }
    }
    std::string text() const {
        char digits[17];
        std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash_));
        return digits;
    }

private:
    std::uint64_t hash_ = 0xcbf29ce484222325u;
};

/// Few queries and many, keys in several blocks and spans, channels that no register divides, shared heads.
const std::vector<problem> problems{{2, 4, 2, 97, 150, 16, 20},
                                    {1, 1, 1, 5, 9, 3, 2},
                                    {1, 2, 1, 1, 129, 8, 8, {.first_query = 128}},
                                    {1, 2, 2, 290, 290, 64, 64},
                                    {1, 1, 1, 33, 2200, 37, 35}};

template <Scalar T>
class prints_of_case {
public:
    explicit prints_of_case(const attention_case& c) : case_(c) {
        for (const auto& p : problems)
            if (const auto fitting = adapted(c, p); c.supports(fitting)) add(fitting);
    }
    /// "forward" and its hash, ...
    std::map<std::string, std::string> lines() const {
        std::map<std::string, std::string> all;
        for (const auto& [what, print] : prints_) all[what] = print.text();
        return all;
    }

private:
    void add(const problem& p) {
        const auto op = case_.template make<T>(p);
        const auto in = random_given<T>(p);
        const auto result = attend(*op, inputs<T>(in), case_.has_log_sum_exp, pool_);
        add("forward", result);
        if (op->has_gradient()) add_gradients(*op, p, in, result);
        if constexpr (std::same_as<T, float>)
            for (const auto format : {narrow_format::bfloat16, narrow_format::half}) add_stored(*op, p, format);
    }
    void add(const std::string& what, const answer<T>& result) {
        prints_[what].add(result.values);
        prints_[what].add(result.log_sum_exp);
    }
    void add_gradients(const instance<T>& op, const problem& p, const given<T>& in, const answer<T>& saved) {
        const auto s = p.shapes();
        const auto d_values = random_tensor<T>(saved.values.shape(), 5), d_rows = random_tensor<T>(saved.log_sum_exp.shape(), 6);
        std::vector<tensor<T>> found;
        for (const auto& of_input : {s.queries, s.keys, s.values}) found.emplace_back(of_input);
        for (const auto& of_parameter : op.parameter_shapes(s)) found.emplace_back(of_parameter);
        const wanted_gradients<T> wanted{{found[0], found[1], found[2]}, {found.begin() + 3, found.end()}};
        workspace memory(op.backward_workspace_bytes(s, pool_.concurrency()));
        const bool has_rows = case_.has_log_sum_exp;
        op.backward(inputs<T>(in), {saved.values, has_rows ? saved.log_sum_exp.view() : tensor_view<const T>()},
                    {d_values, has_rows ? d_rows.view() : tensor_view<const T>()}, wanted, execution(pool_, memory));
        for (const auto& gradient : found) prints_["backward"].add(gradient);
    }
    void add_stored(const instance<T>& op, const problem& p, narrow_format format) {
        const auto s = p.shapes();
        const auto stored = [&](const shape& of, unsigned seed) {
            return stored_tensor(random_tensor<float>(of, seed), format, layout::head_major);
        };
        auto q = stored(s.queries, 1), k = stored(s.keys, 2), v = stored(s.values, 3), out = stored(op.output_shape(s), 4);
        workspace memory(op.narrow_workspace_bytes(s, pool_.concurrency()));
        op.attend({q.view(), k.view(), v.view(), p.positions}, {out.view(), {}}, execution(pool_, memory));
        prints_[name_of(format)].add(out.copy());
    }

    const attention_case& case_;
    thread_pool pool_{2};
    std::map<std::string, fingerprint> prints_;
};

/// Norms of rows of several lengths: results, gradients, statistics of a batch and what a training step makes of them.
template <Scalar T>
class prints_of_norms {
public:
    explicit prints_of_norms(index_t channels) : s_{2, 1, 67, channels}, x_(random_tensor<T>(s_, 1)), d_out_(random_tensor<T>(s_, 2)) {
        std::mt19937 random(3);
        for (index_t c = 0; c < channels; ++c) {
            weight_.push_back(random_number(random, T(2)));
            bias_.push_back(random_number(random, T(2)));
            mean_.push_back(random_number(random, 2.0));
            variance_.push_back(2.5 + random_number(random, 2.0));
        }
    }
    void add(std::map<std::string, fingerprint>& prints) const {
        const batch_norm<T> batch{weight_, bias_, mean_, variance_};
        each(prints, "layer_norm", layer_norm<T>{weight_, bias_});
        each(prints, "rms_norm", rms_norm<T>{weight_});
        forward(prints, "batch_norm", batch);
        forward(prints, "rep_batch_norm", rep_batch_norm<T>{batch, 0.7});
        const batch_norm<T> training{.weight = weight_, .bias = bias_, .batch_statistics = true};
        forward(prints, "batch_norm_training", training);
        tensor<T> of_x(s_);
        std::vector<T> of_weight(weight_.size()), of_bias(bias_.size());
        train_backward(training, x_, d_out_, {of_x, of_weight, of_bias});
        put(prints["batch_norm_training backward"], of_x, of_weight, of_bias);
    }

private:
    static void put(fingerprint& print, const tensor<T>& t, const auto&... more) {
        print.add(t);
        (print.add(std::span<const T>(more)), ...);
    }
    void forward(std::map<std::string, fingerprint>& prints, const std::string& name, const auto& norm) const {
        tensor<T> out(s_);
        normalise(norm, x_, out);
        put(prints[name + " forward"], out);
    }
    template <class N>
    void each(std::map<std::string, fingerprint>& prints, const std::string& name, const N& norm) const {
        forward(prints, name, norm);
        tensor<T> of_x(s_);
        std::vector<T> of_weight(weight_.size()), of_bias(N::adds_bias ? bias_.size() : 0);
        backward(norm, x_, d_out_, norm_gradients<T>{of_x, of_weight, of_bias});
        put(prints[name + " backward"], of_x, of_weight, of_bias);
    }

    shape s_;
    tensor<T> x_, d_out_;
    std::vector<T> weight_, bias_;
    std::vector<double> mean_, variance_;
};

/// "softmax_causal float forward", and the hash.
template <Scalar T>
void add_lines(std::map<std::string, std::string>& table) {
    if constexpr (is_tested<T>) {
        std::map<std::string, fingerprint> of_norms;
        for (const index_t channels : {1, 5, 16, 37, 64, 150, 768}) prints_of_norms<T>(channels).add(of_norms);
        for (const auto& [name, print] : of_norms) {
            const auto space = name.find(' ');
            table[name.substr(0, space) + (sizeof(T) == 4 ? " float" : " double") + name.substr(space)] = print.text();
        }
        for (const auto& c : all_cases())
            if (sizeof(T) == 4 || c.make_double)
                for (const auto& [what, hash] : prints_of_case<T>(c).lines())
                    table[c.name + (sizeof(T) == 4 ? " float " : " double ") + what] = hash;
    }
}

/// What the file says; where there is none, nothing.
std::map<std::string, std::string> read(const std::string& path) {
    std::map<std::string, std::string> table;
    std::ifstream file(path);
    for (std::string name, scalar, what, hash; file >> name >> scalar >> what >> hash;) table[name + " " + scalar + " " + what] = hash;
    return table;
}

} // namespace

} // namespace attn::testing

int main(int count, char** arguments) {
    using namespace attn::testing;
    const std::string name = attn::simd::fuses ? "fused.txt" : "sse2.txt";
    std::map<std::string, std::string> found;
    add_lines<float>(found);
    add_lines<double>(found);
    if (count < 2) {
        for (const auto& [line, hash] : found) std::cout << line << ' ' << hash << '\n';
        return 0;
    }
    const auto path = std::string(arguments[1]) + "/" + name;
    const auto wanted = read(path);
    int wrong = 0;
    for (const auto& [line, hash] : found) {
        const auto at = wanted.find(line);
        if (at != wanted.end() && at->second == hash) continue;
        ++wrong;
        std::cout << line << ' ' << hash << (at == wanted.end() ? ", which the table does not have" : ", but the table has " + at->second)
                  << '\n';
    }
    std::cout << found.size() << " fingerprints, " << wrong << " of them not those of " << path << '\n';
    return wrong != 0;
}
