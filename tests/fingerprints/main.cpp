// attn_fingerprints [FOLDER]: the bits of every operator's results and gradients, a hash for each, as a table; or those that are not
// in the folder's. One table holds for all processors that fuse products with sums, another for SSE2 and WebAssembly.
#include "answers.hpp"
#include "prints.hpp"
#include "storage.hpp"

#include <attn/norm/dynamic_tanh.hpp>
#include <attn/norm/layer_norm.hpp>
#include <attn/norm/rep_batch_norm.hpp>
#include <attn/norm/rms_norm.hpp>
#include <attn/norm/unit_norm.hpp>
#include <attn/norm/train_backward.hpp>
#include <attn/parallel/thread_pool.hpp>

#include <cstdio>
#include <iostream>

namespace attn::testing {

namespace {

/// Few queries and many, keys in several blocks and spans, channels that no register divides, shared heads.
const std::vector<problem> problems{{2, 4, 2, 97, 150, 16, 20},
                                    {1, 1, 1, 5, 9, 3, 2},
                                    {1, 2, 1, 1, 129, 8, 8, {.first_query = 128}},
                                    {1, 1, 1, 290, 290, 64, 64},
                                    {1, 1, 1, 33, 2200, 37, 35}};

/// A case in one problem: results, gradients, and what is stored in 16 bits.
template <Scalar T>
class printed_problem {
public:
    printed_problem(named_prints& prints, const attention_case& c, const problem& p)
        : prints_(prints), case_(c), problem_(p), shapes_(p.shapes()), op_(c.template make<T>(p)) {}

    void print() {
        const auto in = random_given<T>(problem_);
        const auto result = attend(*op_, inputs<T>(in), case_.has_log_sum_exp, pool_);
        for (const auto* t : {&result.values, &result.log_sum_exp}) prints_.add(case_.name, "forward", *t);
        if (op_->has_gradient()) print_gradients(in, result);
        if constexpr (std::same_as<T, float>)
            for (const auto format : {narrow_format::bfloat16, narrow_format::half}) print_stored(format);
    }

private:
    void print_gradients(const given<T>& in, const answer<T>& saved) {
        const auto d_values = random_tensor<T>(saved.values.shape(), 5), d_rows = random_tensor<T>(saved.log_sum_exp.shape(), 6);
        std::vector<tensor<T>> found;
        for (const auto& of_input : {shapes_.queries, shapes_.keys, shapes_.values}) found.emplace_back(of_input);
        for (const auto& of_parameter : op_->parameter_shapes(shapes_)) found.emplace_back(of_parameter);
        const wanted_gradients<T> wanted{{found[0], found[1], found[2]}, {found.begin() + 3, found.end()}};
        workspace memory(op_->backward_workspace_bytes(shapes_, pool_.concurrency()));
        const bool has_rows = case_.has_log_sum_exp;
        op_->backward(inputs<T>(in), {saved.values, has_rows ? saved.log_sum_exp.view() : tensor_view<const T>()},
                      {d_values, has_rows ? d_rows.view() : tensor_view<const T>()}, wanted, execution(pool_, memory));
        for (const auto& gradient : found) prints_.add(case_.name, "backward", gradient);
    }
    void print_stored(narrow_format format) {
        const auto stored = [&](const shape& of, unsigned seed) {
            return stored_tensor(random_tensor<float>(of, seed), format, layout::head_major);
        };
        auto q = stored(shapes_.queries, 1), k = stored(shapes_.keys, 2), v = stored(shapes_.values, 3),
             out = stored(op_->output_shape(shapes_), 4);
        workspace memory(op_->narrow_workspace_bytes(shapes_, pool_.concurrency()));
        op_->attend({q.view(), k.view(), v.view(), problem_.positions}, {out.view(), {}}, execution(pool_, memory));
        prints_.add(case_.name, name_of(format), out.copy());
    }

    named_prints& prints_;
    const attention_case& case_;
    const problem& problem_;
    input_shapes shapes_;
    std::unique_ptr<instance<T>> op_;
#ifdef __STDCPP_THREADS__
    thread_pool pool_{2};
#else
    sequential pool_;
#endif
};

/// Norms of rows of so many channels: results, gradients, and what a training step makes of a batch.
template <Scalar T>
class printed_norms {
public:
    printed_norms(named_prints& prints, index_t channels)
        : prints_(prints), s_{2, 1, 67, channels}, x_(random_tensor<T>(s_, 1)), d_out_(random_tensor<T>(s_, 2)) {
        std::mt19937 random(3);
        for (index_t c = 0; c < channels; ++c) {
            weight_.push_back(random_number(random, T(2)));
            bias_.push_back(random_number(random, T(2)));
            mean_.push_back(random_number(random, 2.0));
            variance_.push_back(2.5 + random_number(random, 2.0));
        }
    }
    void print() {
        const layer_norm<T> centred{weight_, bias_};
        const rms_norm<T> uncentred{weight_};
        const dynamic_tanh<T> by_tanh{weight_, bias_, 0.75};
        const dynamic_erf<T> by_erf{weight_, bias_, 0.75, 0.25};
        const batch_norm<T> batch{weight_, bias_, mean_, variance_}, training{.weight = weight_, .bias = bias_, .batch_statistics = true};
        print_result("layer_norm", centred);
        print_result("rms_norm", uncentred);
        print_result("unit_norm", unit_norm<T>{});
        print_result("dynamic_tanh", by_tanh);
        print_result("dynamic_erf", by_erf);
        print_result("batch_norm", batch);
        print_result("rep_batch_norm", rep_batch_norm<T>{batch, 0.7});
        print_result("batch_norm_training", training);
        print_gradients<true>("layer_norm", [&](const auto& wanted) { backward(centred, x_, d_out_, wanted); });
        print_gradients<false>("rms_norm", [&](const auto& wanted) { backward(uncentred, x_, d_out_, wanted); });
        print_gradients<true>("dynamic_tanh", [&](const auto& wanted) { backward(by_tanh, x_, d_out_, {wanted}); });
        print_gradients<true>("dynamic_erf", [&](const auto& wanted) { backward(by_erf, x_, d_out_, {{wanted}}); });
        print_gradients<true>("batch_norm_training", [&](const auto& wanted) { train_backward(training, x_, d_out_, wanted); });
    }

private:
    void print_result(const std::string& name, const auto& norm) {
        tensor<T> out(s_);
        normalise(norm, x_, out);
        prints_.add(name, "forward", out);
    }
    template <bool has_bias>
    void print_gradients(const std::string& name, const auto& find) {
        tensor<T> of_x(s_);
        std::vector<T> of_weight(weight_.size()), of_bias(has_bias ? bias_.size() : 0);
        find(norm_gradients<T>{of_x, of_weight, of_bias});
        prints_.add(name, "backward", of_x);
        for (const auto* numbers : {&of_weight, &of_bias}) prints_.add(name, "backward", std::span<const T>(*numbers));
    }

    named_prints& prints_;
    shape s_;
    tensor<T> x_, d_out_;
    std::vector<T> weight_, bias_;
    std::vector<double> mean_, variance_;
};

template <Scalar T>
void print_all(named_prints& prints) {
    if constexpr (is_tested<T>) {
        for (const index_t channels : {1, 5, 16, 37, 64, 150, 768}) printed_norms<T>(prints, channels).print();
        for_each_case(problems, [&](const attention_case& c, const problem& p) {
            if (std::same_as<T, float> || c.make_double) printed_problem<T>(prints, c, p).print();
        });
    }
}

/// What the file says; where there is none, nothing.
std::map<std::string, std::string> read(const std::string& path) {
    std::map<std::string, std::string> table;
    std::FILE* const file = std::fopen(path.c_str(), "r");
    char name[200], scalar[20], what[20], hash[20];
    while (file && std::fscanf(file, "%199s %19s %19s %19s", name, scalar, what, hash) == 4)
        table[std::string(name) + " " + scalar + " " + what] = hash;
    if (file) std::fclose(file);
    return table;
}

} // namespace

} // namespace attn::testing

int main(int count, char** arguments) {
    using namespace attn::testing;
    const std::string name = attn::simd::fuses ? "fused.txt" : "sse2.txt";
    named_prints prints;
    print_all<float>(prints);
    print_all<double>(prints);
    print_layers(prints);
    const auto found = prints.table();
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
