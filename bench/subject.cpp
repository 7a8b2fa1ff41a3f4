#include "subject.hpp"

#include <attn/core/heads.hpp>

#include "fma_peak.hpp"
#include "naive_forms.hpp"
#include "read_bandwidth.hpp"

#include <Eigen/Core>

#include <random>

namespace attn::bench {

namespace {


/// The call that computes some queries only. It is another call of the same operator, at another position.
template <Scalar T>
inputs<T> some_queries(const inputs<T>& in, index_t first, index_t count) {
    return {in.queries.slice({.tokens = {first, count}}), in.keys, in.values, {.first_query = first}};
}

/// The numbers that are computed with.
template <Narrow S>
tensor<float> widened(const tensor<S>& from) {
    tensor<float> to(from.shape());
    std::transform(from.data(), from.data() + from.shape().size(), to.data(), [](S x) { return static_cast<float>(x); });
    return to;
}

/// By how much storing a number changes it, relative to it.
template <Storage S>
constexpr double rounding_of(S) { return 0; }
constexpr double rounding_of(Eigen::bfloat16) { return 0x1p-8; }
constexpr double rounding_of(Eigen::half) { return 0x1p-11; }

template <Storage S>
class typed_subject final : public subject {
    using T = computed_in<S>;

public:
    typed_subject(const testing::attention_case& c, const testing::problem& p, std::shared_ptr<const tensors<S>> in, index_t threads)
        : in_(std::move(in)), instance_(c.make<T>(p)), threads_(threads),
          workspace_(Narrow<S> ? instance_->narrow_workspace_bytes(p.shapes(), threads) : instance_->workspace_bytes(p.shapes(), threads)),
          out_(instance_->output_shape(p.shapes())) {
        useful_flops_ = instance_->useful_flops(p);
        visited_flops_ = instance_->visited_flops(p);
        workspace_bytes_ = static_cast<double>(workspace_.size_bytes());
        const auto s = p.shapes();
        tensor_bytes_ = static_cast<double>((s.queries.size() + s.keys.size() + s.values.size() + out_.shape().size()) * index_t{sizeof(S)});
        matrix_bytes_ = static_cast<double>(p.queries) * static_cast<double>(p.keys) * sizeof(T);
        naive_is_written_ = Scalar<S>;
    }

    void attend() override { instance_->attend(*in_, {out_}, execution(threads_, workspace_)); }
    void naive() override {
        if (naive_out_.shape() != out_.shape()) naive_out_ = tensor<T>(out_.shape());
        if constexpr (Scalar<S>) instance_->naive(eigen_forms<T>(), *in_, {naive_out_});
    }
    double peak() override { return fma_peak<T>(threads_); }
    double bandwidth() override { return read_bandwidth(threads_); }
    double naive_difference() override {
        if (!naive_is_written_) return 0;
        naive();
        return largest_difference<S, T>(out_.view(), naive_out_.view());
    }
    double difference(const tensor_view<const float>& answer) const override {
        return largest_difference<const S, const float>(out_, answer);
    }

    accuracy check() override {
        if constexpr (Scalar<S>) return check(*in_);
        else return check(tensors<T>{widened(in_->queries), widened(in_->keys), widened(in_->values)});
    }

private:
    /// Of the inputs as they are computed with.
    accuracy check(const inputs<T>& in) {
        const auto& q = in.queries.shape();
        attend();
        const auto k = reference::widen(in.keys), v = reference::widen(in.values);
        double largest_value = 0, largest_result = 0;
        for (index_t i = 0; i < v.shape().size(); ++i) largest_value = std::max(largest_value, std::abs(v.data()[i]));

        // An error is twice that of the textbook formula in the same precision, and the rounding of a few sums: a row of weights that
        // sum to one makes of values no more than the largest of them. Then the result is rounded, if it is stored in 16 bits.
        const auto compare = [&](index_t first, index_t count, accuracy& found) {
            const auto some = some_queries(in, first, count);
            const auto wide = reference::widen(some.queries);
            tensor<double> exact(instance_->output_shape(shapes_of(some)));
            tensor<T> plain(exact.shape());
            instance_->reference({wide, k, v, some.positions}, {exact});
            instance_->plain(some, {plain});
            for (index_t e = 0; e < exact.shape().size(); ++e) largest_result = std::max(largest_result, std::abs(exact.data()[e]));
            const tensor_view<const S> ours = out_;
            found.error = std::max(found.error, largest_difference(ours.slice({.tokens = {first, count}}), exact.view()));
            found.bound = std::max(found.bound, 2 * largest_difference(plain.view(), exact.view()));
            found.queries += count;
        };
        const auto judged = [&](accuracy found) {
            found.bound += 4 * static_cast<double>(std::numeric_limits<T>::epsilon()) * largest_value + rounding_of(S{}) * largest_result;
            return found;
        };

        constexpr index_t pairs_to_compare = 1'000'000, max_pairs = 60'000'000, fewest = 6;
        const auto pairs_of_a_query = std::max<index_t>(1, q.batch * q.heads * in.keys.shape().tokens);
        const auto affordable = pairs_to_compare / pairs_of_a_query;
        const auto slice = std::max(fewest, affordable) / 3;
        if (3 * slice < q.tokens) {
            accuracy found;
            for (const auto first : {index_t{0}, (q.tokens - slice) / 2 + 1, q.tokens - slice}) compare(first, slice, found);
            if (judged(found).right() || q.tokens > max_pairs / pairs_of_a_query) return judged(found);
        }
        // Few enough; or wrong in the sample, as it also is if an operator's rows depend on other queries.
        accuracy found;
        compare(0, q.tokens, found);
        return judged(found);
    }

    std::shared_ptr<const tensors<S>> in_;
    std::unique_ptr<testing::instance<T>> instance_;
    thread_pool threads_;
    workspace workspace_;
    tensor<S> out_;
    tensor<T> naive_out_;
};

/// One head of the problem is compared with the definition, or all of one batch entry if they depend on each other. The loss has a random gradient.
template <Scalar T>
class gradient_subject final : public subject {
public:
    gradient_subject(const testing::attention_case& c, const testing::problem& p, std::shared_ptr<const tensors<T>> in, index_t threads)
        : case_(c), problem_(p), in_(std::move(in)), instance_(c.make<T>(p)), threads_(threads), workspace_(instance_->backward_workspace_bytes(p.shapes(), threads)),
          out_(instance_->output_shape(p.shapes())), log_sum_exp_(instance_->log_sum_exp_shape(p.shapes())), given_(out_.shape()), of_queries_(p.shapes().queries),
          of_keys_(p.shapes().keys), of_values_(p.shapes().values) {
        const auto pairs = [&p](double of_keys, double of_values) { return of_keys * static_cast<double>(p.key_dim) + of_values * static_cast<double>(p.value_dim); };
        useful_flops_ = instance_->useful_flops(p) * pairs(3, 2) / pairs(1, 1);
        visited_flops_ = instance_->visited_flops(p) * pairs(3, 2) / pairs(1, 1);
        workspace_bytes_ = static_cast<double>(workspace_.size_bytes());
        const auto s = p.shapes();
        tensor_bytes_ = static_cast<double>(2 * (s.queries.size() + s.keys.size() + s.values.size() + out_.shape().size()) * index_t{sizeof(T)});
        matrix_bytes_ = static_cast<double>(p.queries) * static_cast<double>(p.keys) * sizeof(T);
        naive_is_written_ = false;
        for (const auto& of : instance_->parameter_shapes(s)) of_parameters_.emplace_back(of);
        wanted_ = {{of_queries_, of_keys_, of_values_}, {of_parameters_.begin(), of_parameters_.end()}};
        std::mt19937_64 random(4);
        std::normal_distribution<double> normal;
        std::generate_n(given_.data(), given_.shape().size(), [&] { return static_cast<T>(normal(random)); });
        workspace memory(instance_->workspace_bytes(s, threads));
        instance_->attend(*in_, {out_, log_sum_exp()}, execution(threads_, memory));
    }

    void attend() override {
        instance_->backward(*in_, {out_, log_sum_exp()}, {given_}, wanted_, execution(threads_, workspace_));
    }
    void naive() override {}
    double peak() override { return fma_peak<T>(threads_); }
    double bandwidth() override { return read_bandwidth(threads_); }
    double naive_difference() override { return 0; }
    double difference(const tensor_view<const float>& answer) const override {
        double largest = 0;
        const tensor<T>* ours[] = {&of_queries_, &of_keys_, &of_values_};
        for (index_t g = 0; g < 3; ++g) {
            const tensor_view<const float> theirs(answer.data() + g * problem_.batch * answer.strides().batch, problem_.shapes().queries, answer.strides());
            largest = std::max(largest, largest_difference<const T, const float>(*ours[g], theirs));
        }
        return largest;
    }
    tensor_view<const float> given() const override {
        if constexpr (std::same_as<T, float>)
            return given_;
        else
            return {};
    }

    accuracy check() override {
        attend();
        auto p = problem_;
        p.batch = 1;
        if (case_.heads_stand_alone) p.heads = p.kv_heads = 1;
        const auto op = case_.make<T>(p);
        tensor_part first{.batch = {0, 1}};
        if (case_.heads_stand_alone) first.heads = {0, 1};
        const auto in = inputs<T>(*in_).slice(first, first);
        const auto given = output_gradients<T>{given_}.slice(first);
        const auto s = p.shapes();
        tensor<T> plain[] = {tensor<T>(s.queries), tensor<T>(s.keys), tensor<T>(s.values)};
        tensor<double> exact[] = {tensor<double>(s.queries), tensor<double>(s.keys), tensor<double>(s.values)};
        op->plain_gradients(in, given, {{plain[0], plain[1], plain[2]}});
        const auto q = reference::widen(in.queries), k = reference::widen(in.keys), v = reference::widen(in.values), d_out = reference::widen(given.values);
        op->reference_gradients({q, k, v}, {d_out}, {{exact[0], exact[1], exact[2]}});
        const tensor<T>* ours[] = {&of_queries_, &of_keys_, &of_values_};
        accuracy found{.bound = 16 * static_cast<double>(std::numeric_limits<T>::epsilon()), .queries = p.queries};
        for (std::size_t g = 0; g < 3; ++g) {
            found.error = std::max(found.error, largest_difference<const T, double>(ours[g]->view().slice(first), exact[g].view()));
            found.bound = std::max(found.bound, 3 * largest_difference<T, double>(plain[g].view(), exact[g].view()));
        }
        return found;
    }

private:
    tensor_view<T> log_sum_exp() { return case_.has_log_sum_exp ? log_sum_exp_.view() : tensor_view<T>{}; }
    const testing::attention_case& case_;
    testing::problem problem_;
    std::shared_ptr<const tensors<T>> in_;
    std::unique_ptr<testing::instance<T>> instance_;
    thread_pool threads_;
    workspace workspace_;
    tensor<T> out_, log_sum_exp_, given_, of_queries_, of_keys_, of_values_;
    std::vector<tensor<T>> of_parameters_;
    testing::wanted_gradients<T> wanted_;
};

} // namespace

template <Storage S>
tensors<S> random_tensors(const testing::problem& p, double query_factor) {
    std::mt19937_64 random(3);
    std::normal_distribution<double> normal;
    const auto filled = [&](const shape& s, double factor) {
        tensor<S> t(s);
        std::generate_n(t.data(), s.size(), [&] { return static_cast<S>(static_cast<computed_in<S>>(factor * normal(random))); });
        return t;
    };
    const auto s = p.shapes();
    auto queries = filled(s.queries, query_factor);
    auto keys = filled(s.keys, 1);
    return {std::move(queries), std::move(keys), filled(s.values, 1)};
}

template <Storage S>
std::unique_ptr<subject> make_subject(const testing::attention_case& c, const testing::problem& p, std::shared_ptr<const tensors<S>> in,
                                      index_t threads) {
    return std::make_unique<typed_subject<S>>(c, p, std::move(in), threads);
}

template <Scalar T>
std::unique_ptr<subject> make_gradient_subject(const testing::attention_case& c, const testing::problem& p, std::shared_ptr<const tensors<T>> in,
                                               index_t threads) {
    return std::make_unique<gradient_subject<T>>(c, p, std::move(in), threads);
}

template tensors<float> random_tensors(const testing::problem&, double);
template tensors<double> random_tensors(const testing::problem&, double);
template tensors<Eigen::bfloat16> random_tensors(const testing::problem&, double);
template tensors<Eigen::half> random_tensors(const testing::problem&, double);
template std::unique_ptr<subject> make_subject(const testing::attention_case&, const testing::problem&,
                                               std::shared_ptr<const tensors<float>>, index_t);
template std::unique_ptr<subject> make_subject(const testing::attention_case&, const testing::problem&,
                                               std::shared_ptr<const tensors<double>>, index_t);
template std::unique_ptr<subject> make_subject(const testing::attention_case&, const testing::problem&,
                                               std::shared_ptr<const tensors<Eigen::bfloat16>>, index_t);
template std::unique_ptr<subject> make_subject(const testing::attention_case&, const testing::problem&,
                                               std::shared_ptr<const tensors<Eigen::half>>, index_t);

template std::unique_ptr<subject> make_gradient_subject(const testing::attention_case&, const testing::problem&,
                                                        std::shared_ptr<const tensors<float>>, index_t);
template std::unique_ptr<subject> make_gradient_subject(const testing::attention_case&, const testing::problem&,
                                                        std::shared_ptr<const tensors<double>>, index_t);

} // namespace attn::bench
