// attn_peers [--quick] [--filter=REGEX] <folder>: attn beside other people's programs, in one run, in turn, on the same inputs, each answer
// compared with ours, and ours with the reference. Leaves peers.json and peers.txt in the folder.
#include "fma_peak.hpp"
#include "measure.hpp"
#include "peer.hpp"
#include "subject.hpp"

#include "attn/norm/layer_norm.hpp"
#include "attn/reference/norms.hpp"

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <regex>
#include <set>
#include <sstream>

namespace attn::bench {

namespace {

struct task {
    std::string label, kind;
    index_t batch, heads, n, d;
    bool is_long = false;
    static constexpr std::string_view backward = "_backward";

    bool is_norm() const { return kind == "layer_norm"; }
    bool is_gradient() const { return kind.ends_with(backward); }
    /// The operator's, whether it is timed or its gradient.
    std::string case_name() const { return is_gradient() ? kind.substr(0, kind.size() - backward.size()) : kind; }
    /// "peers/softmax/b:1/n:2048/d:64/h:12/threads:1"
    std::string name(index_t threads) const {
        std::ostringstream text;
        text << "peers/" << kind << "/b:" << batch << "/n:" << n << "/d:" << d << "/h:" << heads << "/threads:" << threads;
        return text.str();
    }
    std::string described(index_t threads, const std::string& folder) const {
        std::string text = kind;
        for (const auto size : {batch, heads, n, d, threads}) text.append(" ").append(std::to_string(size));
        return text + " " + folder;
    }
};

const std::vector<task> tasks = {
    {"n 512, d 64, 12 heads", "softmax", 1, 12, 512, 64},         {"n 2048, d 64, 12 heads", "softmax", 1, 12, 2048, 64},
    {"n 4096, d 64, 12 heads", "softmax", 1, 12, 4096, 64, true}, {"n 2048, d 128, 8 heads", "softmax", 1, 8, 2048, 128, true},
    {"n 197, d 64, 3 heads, batch 8", "softmax", 8, 3, 197, 64},  {"causal, n 2048, d 64, 12 heads", "softmax_causal", 1, 12, 2048, 64},
    {"gradient, n 512, d 64, 12 heads", "softmax_backward", 1, 12, 512, 64},
    {"gradient, n 2048, d 64, 12 heads", "softmax_backward", 1, 12, 2048, 64},
    {"gradient, causal, n 2048, d 64, 12 heads", "softmax_causal_backward", 1, 12, 2048, 64},
    {"layer norm, 4096 x 768", "layer_norm", 1, 1, 4096, 768},
};

/// What is timed in turn. The first one is ours.
struct contestant {
    std::string name;
    std::function<double(double at_least)> seconds;
    double error = 0; ///< largest difference: ours from the reference in double, others' from ours
    std::vector<double> times = {};
};

template <class T>
void write_numbers(const std::string& file, const T* numbers, index_t count) {
    std::ofstream(file, std::ios::binary)
        .write(reinterpret_cast<const char*>(numbers), static_cast<std::streamsize>(count * index_t{sizeof(T)}));
}

tensor<float> read_numbers(const std::string& file, const shape& s) {
    tensor<float> t(s);
    std::ifstream in(file, std::ios::binary);
    in.read(reinterpret_cast<char*>(t.data()), static_cast<std::streamsize>(s.size() * index_t{sizeof(float)}));
    if (!in) std::fill_n(t.data(), s.size(), std::numeric_limits<float>::quiet_NaN());
    return t;
}

/// Ours and naive Eigen on a task, in this process.
struct own_side {
    virtual ~own_side() = default;
    virtual std::vector<contestant> contestants() = 0;
    virtual bool right() const = 0;
    virtual double difference(const tensor_view<const float>& answer) const = 0;
    virtual shape answer_shape() const = 0;
    /// What is done in a call, and what the machine does of it in a second: flops and the FMA peak, or bytes and a copy's.
    virtual double amount() const = 0;
    virtual double peak() = 0;
};

class own_attention final : public own_side {
public:
    own_attention(const task& t, index_t threads, const std::string& folder) : threads_(threads) {
        const testing::problem p{
            .batch = t.batch, .heads = t.heads, .kv_heads = t.heads, .queries = t.n, .keys = t.n, .key_dim = t.d, .value_dim = t.d};
        const auto in = std::make_shared<const tensors<float>>(random_tensors<float>(p));
        shape_ = p.shapes().queries;
        for (const auto& [name, numbers] : {std::pair("/0", &in->queries), std::pair("/1", &in->keys), std::pair("/2", &in->values)})
            write_numbers(folder + name, numbers->data(), shape_.size());
        answer_shape_ = shape_;
        const auto is_this = [name = t.case_name()](const testing::attention_case& c) { return c.name == name; };
        const auto& timed = *std::ranges::find_if(testing::all_cases(), is_this);
        subject_ = t.is_gradient() ? make_gradient_subject<float>(timed, p, in, threads) : make_subject<float>(timed, p, in, threads);
        if (t.is_gradient()) {
            write_numbers(folder + "/3", subject_->given().data(), shape_.size());
            answer_shape_.batch *= 3;
        }
        accuracy_ = subject_->check();
    }
    std::vector<contestant> contestants() override {
        std::vector<contestant> all;
        all.push_back(
            {"attn", [this](double at_least) { return seconds_per_warm_call([this] { subject_->attend(); }, at_least); }, accuracy_.error});
        if (threads_ == 1 && subject_->has_naive())
            all.push_back(
                {"Eigen, n x n", [this](double at_least) { return seconds_per_warm_call([this] { subject_->naive(); }, at_least); }});
        return all;
    }
    bool right() const override { return accuracy_.right(); }
    double difference(const tensor_view<const float>& answer) const override { return subject_->difference(answer); }
    shape answer_shape() const override { return answer_shape_; }
    double amount() const override { return subject_->useful_flops(); }
    double peak() override { return subject_->peak(); }

private:
    index_t threads_;
    shape shape_, answer_shape_;
    std::unique_ptr<subject> subject_;
    accuracy accuracy_;
};

class own_norm final : public own_side {
public:
    own_norm(const task& t, index_t threads, const std::string& folder)
        : x_({1, 1, t.n, t.d}), out_(x_.shape()), weight_(static_cast<std::size_t>(t.d)), bias_(weight_.size()), threads_(threads),
          memory_(std::size_t{1} << 22) {
        const testing::problem p{.queries = t.n, .keys = 1, .key_dim = t.d};
        const auto numbers = random_tensors<float>(p);
        std::copy_n(numbers.queries.data(), x_.shape().size(), x_.data());
        for (std::size_t c = 0; c < weight_.size(); ++c) weight_[c] = 1 + 0.1F * numbers.keys.data()[c], bias_[c] = 0.1F * x_.data()[c];
        write_numbers(folder + "/0", x_.data(), x_.shape().size());
        write_numbers(folder + "/1", weight_.data(), t.d);
        write_numbers(folder + "/2", bias_.data(), t.d);
        call();
        const auto wide = reference::widen(tensor_view<const float>(x_));
        tensor<double> exact(x_.shape());
        const std::vector<double> weight(weight_.begin(), weight_.end()), bias(bias_.begin(), bias_.end());
        reference::layer_norm<double>(wide, exact.view(), weight, bias);
        error_ = largest_difference<float, double>(out_.view(), exact.view());
    }
    std::vector<contestant> contestants() override {
        return {{"attn", [this](double at_least) { return seconds_per_warm_call([this] { call(); }, at_least); }, error_}};
    }
    bool right() const override { return error_ < 1e-5; }
    double difference(const tensor_view<const float>& answer) const override {
        return largest_difference<const float, const float>(out_, answer);
    }
    shape answer_shape() const override { return x_.shape(); }
    double amount() const override { return 2.0 * sizeof(float) * static_cast<double>(x_.shape().size()); }
    double peak() override {
        const auto bytes = static_cast<std::size_t>(x_.shape().size()) * sizeof(float);
        return amount() / seconds_per_warm_call([&] { std::memcpy(copy_.data(), x_.data(), bytes); }, 0.02);
    }

private:
    void call() { normalise(layer_norm<float>{weight_, bias_}, x_, out_, execution(threads_, memory_)); }

    tensor<float> x_, out_, copy_{x_.shape()};
    std::vector<float> weight_, bias_;
    thread_pool threads_;
    workspace memory_;
    double error_ = 0;
};

std::vector<std::vector<std::string>> peer_commands() {
    const std::string sources = ATTN_PEERS_SOURCES, binaries = ATTN_PEERS_BINARIES;
    // Debian's PyTorch belongs to Debian's Python, whatever other comes first in the path.
    const std::string python = std::filesystem::exists("/usr/bin/python3") ? "/usr/bin/python3" : "python3";
    return {{binaries + "/peer_openblas"},
            {binaries + "/peer_onednn"},
            {python, sources + "/pytorch.py"},
            {"node", sources + "/onnxruntime.js"}};
}

struct outcome {
    task what;
    index_t threads;
    std::string contestant;
    quartiles seconds;
    double share, error;
    bool agrees;
};

class contest {
public:
    contest(bool quick, const std::string& filter, std::string folder) : quick_(quick), filter_(filter), folder_(std::move(folder)) {}

    void run(index_t threads) {
        std::vector<std::unique_ptr<peer>> peers;
        for (const auto& command : peer_commands()) {
            auto p = std::make_unique<peer>(command, static_cast<int>(threads));
            if (p->name().empty())
                missing_.insert(std::filesystem::path(command.back()).filename().string() + ": " + p->why());
            else
                peers.push_back(std::move(p));
        }
        for (const auto& p : peers) present_.insert(p->name() + " " + p->version());
        for (const auto& t : tasks)
            if ((!quick_ || !t.is_long) && std::regex_search(t.name(threads), filter_)) run(t, threads, peers);
    }
    bool all_right() const { return all_right_; }
    void print_summary() const {
        std::cout << "\n";
        for (const auto& name : present_) std::cout << "timed: " << name << "\n";
        for (const auto& name : missing_) std::cout << "MISSING: " << name << "\n";
        const auto lost = std::ranges::count_if(outcomes_, [this](const outcome& o) { return o.seconds.median < ours(o).seconds.median; });
        std::vector<double> spreads;
        for (const auto& o : outcomes_) spreads.push_back(o.seconds.spread());
        if (const auto typical = spreads.empty() ? 0 : quartiles_of(spreads).median; typical > 0.1)
            std::cout << "WARNING: half of the spreads are above " << percent_text(typical)
                      << ": the machine is busy, these figures are noise in part\n";
        if (10 * busy_waits_ > waits_)
            std::cout << "WARNING: other programs were at work for a second and more before " << busy_waits_ << " of " << waits_ << " measurements\n";
        std::cout << "attn is the slower one in " << lost << " of "
                  << std::ranges::count_if(outcomes_, [](const outcome& o) { return o.contestant != "attn"; }) << " comparisons\n";
        for (const auto& o : outcomes_)
            if (o.seconds.median < ours(o).seconds.median)
                std::cout << "   " << o.what.label << ", " << o.threads << (o.threads == 1 ? " thread: " : " threads: ") << o.contestant
                          << " takes " << fixed_text(o.seconds.median / ours(o).seconds.median, 2) << " of attn's time\n";
    }
    void write_json(const std::string& file) const {
        std::ofstream out(file);
        out << "{\"instruction_set\": \"" << instruction_set() << "\", \"compiler\": \"" << compiler()
            << "\", \"missing\": " << missing_.size() << ", \"rows\": [";
        const char* separator = "\n";
        for (const auto& o : outcomes_) {
            out << std::exchange(separator, ",\n") << "{\"name\": \"" << o.what.name(o.threads) << "\", \"contestant\": \"" << o.contestant
                << "\", \"seconds\": " << o.seconds.median << ", \"spread\": " << o.seconds.spread() << ", \"share\": " << o.share
                << ", \"ours\": " << ours(o).seconds.median / o.seconds.median << ", \"error\": " << o.error
                << ", \"agrees\": " << (o.agrees ? "true" : "false") << "}";
        }
        out << "\n]}\n";
    }

private:
    void run(const task& t, index_t threads, const std::vector<std::unique_ptr<peer>>& peers) {
        std::unique_ptr<own_side> own;
        if (t.is_norm())
            own = std::make_unique<own_norm>(t, threads, folder_);
        else
            own = std::make_unique<own_attention>(t, threads, folder_);
        auto all = own->contestants();
        if (!own->right()) all_right_ = false;
        for (const auto& p : peers) {
            const auto ways = p->ways(t.described(threads, folder_));
            for (std::size_t way = 0; way < ways.size(); ++way) {
                const auto file = folder_ + "/answer";
                std::filesystem::remove(file);
                if (!p->run(way, file)) {
                    missing_.insert(p->name() + ", " + ways[way] + ", " + t.label + ": " + p->why());
                    continue;
                }
                const auto answer = read_numbers(file, own->answer_shape());
                all.push_back({p->name() + ": " + ways[way], [&peer = *p, way](double at_least) { return peer.seconds(way, at_least); },
                               own->difference(answer)});
            }
        }

        std::vector<double> peaks;
        for (int round = 0; round < (quick_ ? 3 : 9); ++round) {
            wait_for_others();
            peaks.push_back(own->peak());
            for (auto& c : all) {
                wait_for_others();
                c.times.push_back(c.seconds(quick_ ? 0.05 : 0.15));
            }
        }
        std::erase_if(all, [&](const contestant& c) { // a peer that ended meanwhile
            const bool failed = std::ranges::any_of(c.times, [](double seconds) { return !(seconds > 0); });
            if (failed) missing_.insert(c.name + ", " + t.label + ": it failed while it was timed");
            return failed;
        });
        print(t, threads, all, own->amount() / quartiles_of(peaks).median);
    }

    void wait_for_others() {
        ++waits_;
        if (!wait_until_idle()) ++busy_waits_;
    }

    void print(const task& t, index_t threads, const std::vector<contestant>& all, double least_seconds) {
        std::vector<std::vector<std::string>> table = {{t.label + ", " + std::to_string(threads) + (threads == 1 ? " thread" : " threads"),
                                                        "time", "spread", t.is_norm() ? "of memcpy" : "of peak", "attn is", "error"}};
        const auto ours = quartiles_of(all.front().times).median;
        for (const auto& c : all) {
            const auto seconds = quartiles_of(c.times);
            const bool agrees = c.error < 1e-4;
            if (!agrees) all_right_ = false;
            outcomes_.push_back({t, threads, c.name, seconds, least_seconds / seconds.median, c.error, agrees});
            char error[32];
            std::snprintf(error, sizeof error, "%.1e", c.error);
            table.push_back(
                {c.name, time_text(seconds.median), percent_text(seconds.spread()), percent_text(least_seconds / seconds.median),
                 &c == &all.front() ? "" : fixed_text(seconds.median / ours, 2) + "x", agrees ? error : std::string(error) + " WRONG"});
        }
        std::cout << "\n" << table_text(table, 1) << std::flush;
    }
    const outcome& ours(const outcome& of) const {
        return *std::ranges::find_if(outcomes_, [&](const outcome& o) {
            return o.contestant == "attn" && o.what.label == of.what.label && o.threads == of.threads;
        });
    }

    bool quick_;
    std::regex filter_;
    std::string folder_;
    std::set<std::string> present_, missing_;
    std::vector<outcome> outcomes_;
    bool all_right_ = true;
    index_t waits_ = 0, busy_waits_ = 0;
};

int run(std::vector<std::string> arguments) {
    const bool quick = std::erase(arguments, "--quick") > 0;
    std::string filter;
    std::erase_if(arguments, [&](const std::string& argument) {
        constexpr std::string_view option = "--filter=";
        if (!argument.starts_with(option)) return false;
        filter = argument.substr(option.size());
        return true;
    });
    if (arguments.size() != 2 || arguments[1].starts_with("-")) {
        std::cerr << "usage: attn_peers [--quick] [--filter=REGEX] <folder>\n";
        return 2;
    }
    std::signal(SIGPIPE, SIG_IGN); // a peer that ended is named, and the others go on
    // OpenBLAS takes AVX2 kernels for processors newer than itself, though it has better ones. PyTorch uses it too.
    if (register_bits() == 512) setenv("OPENBLAS_CORETYPE", "SkylakeX", 1);
    const auto folder = arguments[1] + "/numbers";
    std::filesystem::create_directories(folder);
    std::cout << instruction_set() << ", " << compiler() << "; medians over rounds in which each is timed in turn\n"
              << "of peak: useful flops, as a share of the FMA peak of as many threads; attn is: how many times as fast; error: from "
                 "attn's answer,\n"
              << "attn's from the reference in double\n";
    contest all(quick, filter, folder);
    for (const index_t threads : {1, 2}) {
        all.run(threads);
        all.write_json(arguments[1] + "/peers.json");
    }
    all.print_summary();
    std::filesystem::remove_all(folder);
    return all.all_right() ? 0 : 1;
}

} // namespace

} // namespace attn::bench

int main(int count, char** arguments) { return attn::bench::run({arguments, arguments + count}); }
