// Random programs on caches: sequences of keys and values that grow, shrink, fork and forget, beside a plain model of them.
#include "differences.hpp"
#include "on_threads.hpp"
#include "others.hpp"
#include "softmax.hpp"

#include <attn/cache/attend.hpp>
#include <attn/layer/rotary.hpp>

#include <numeric>
#include <optional>

namespace attn::fuzz {

namespace {

/// A sequence, and what it should hold: its tokens as tensors with room for all, and which of them are left.
template <Scalar T>
struct modelled {
    sequence<T> ours;
    tensor<T> keys, values;
    std::vector<bool> kept = {};

    index_t size() const { return std::ssize(kept); }
};

/// The keys that are left, as a pattern.
struct left_over {
    const std::vector<bool>* kept;

    bool visible(const auto&, index_t j) const { return (*kept)[static_cast<std::size_t>(j)]; }
    visibility visible(const position_range&, const position_range& j) const {
        bool all = true, none = true;
        for (auto at = j.first; at <= j.last; at += std::max<index_t>(1, j.step)) {
            const bool here = (*kept)[static_cast<std::size_t>(at)];
            all = all && here;
            none = none && !here;
        }
        return {all, none};
    }
};

/// A row of numbers as a cache stores it.
template <Scalar T>
void store_as(cache_format format, std::span<T> row) {
    const auto narrow = attn::detail::row_format_of(format, std::ssize(row)).narrow;
    if (format == cache_format::int8 || format == cache_format::int4) {
        std::vector<std::byte> bytes(quantised_bytes(format, std::ssize(row)));
        quantise<T>(format, row, bytes);
        dequantise<T>(format, bytes, row);
        return;
    }
    for (auto& x : row) {
        alignas(T) std::byte bytes[sizeof(T)];
        attn::detail::stored<T>(x, bytes, narrow);
        x = attn::detail::loaded<T>(bytes, narrow);
    }
}

/// Some tokens of a tensor.
template <Scalar T>
tensor<T> tokens_of(const tensor<T>& t, index_t first, index_t count) {
    tensor<T> some({1, t.shape().heads, count, t.shape().channels});
    attn::detail::for_each_number(some.shape(), [&](index_t, index_t h, index_t i, index_t c) { some(0, h, i, c) = t(0, h, first + i, c); });
    return some;
}

/// One program.
template <Scalar T>
class cache_program {
public:
    explicit cache_program(draw& random) : random_(random) {
        size_.kv_heads = random.number(1, 3);
        const auto channels = [&](index_t least) { // or groups of them that are whole
            return random.one_in(3) ? 32 * random.number(1, 4) : random.number(least, random.one_in(2) ? 70 : 9);
        };
        size_.key_dim = channels(1);
        size_.value_dim = channels(0);
        size_.heads = size_.kv_heads * random.number(1, random.one_in(3) ? 9 : 4);
        size_.queries = size_.keys = random.number(1, 700); // positions that patterns and scores have to know
        size_.first_query = size_.first_key = {0};
        d_.size = size_;
        d_.tree = draw_pattern(random, size_);
        d_.stepped = draw_stepped_pattern(random, size_);
        d_.steps = std::make_shared<const score_steps>(draw_score(random, size_, static_cast<double>(std::numeric_limits<T>::lowest())));
        static constexpr cache_format formats[] = {cache_format::full, cache_format::int8, cache_format::int4, cache_format::bfloat16, cache_format::half};
        layout_ = {.kv_heads = size_.kv_heads,
                   .key_channels = size_.key_dim,
                   .value_channels = size_.value_dim,
                   .page_tokens = 128 * random.number(1, 2),
                   .format = formats[random.number(0, std::same_as<T, float> ? 4 : 2)],
                   .exact_tokens = random.one_in(2) ? random.number(0, 200) : 0,
                   .rotates_keys = random.one_in(3)};
        if (!layout_.rotates_keys && random.one_in(2)) {
            const auto pairs = random.one_in(2) ? rotary_pairs::interleaved : rotary_pairs::half_split;
            turns_.emplace(size_.keys, 2 * random.number(0, size_.key_dim / 2), pairs);
            skips_evicted_ = random.one_in(2);
        }
        pages_ = random.one_in(3) ? random.number(0, 6) : 40;
        name_ = joined(std::same_as<T, float> ? "float; " : "double; ", describe(size_), "; pages of ", layout_.page_tokens, ", ", pages_, " of them, format ",
                       static_cast<int>(layout_.format), " but for ", layout_.exact_tokens, layout_.rotates_keys ? ", rotated" : "",
                       turns_ ? skips_evicted_ ? ", turned on reading by places among those left" : ", turned on reading" : "", "; tree ", d_.tree->name(), "; stepped ",
                       d_.stepped->name(), "; steps ", d_.steps->name(), ";");
    }
    outcome run() {
        rotary_reading<T> reading{.skips_evicted = skips_evicted_};
        if (turns_) reading.table = *turns_;
        key_value_pool<T> pool(layout_, pages_, reading);
        {
            std::vector<modelled<T>> all;
            all.push_back(fresh(pool));
            for (index_t steps = random_.number(2, 12); steps > 0 && problem_.empty(); --steps) step(pool, all);
            if (problem_.empty()) attend_to_all(all);
        }
        if (problem_.empty() && pool.free_pages() != pages_) problem_ = "pages were lost";
        return {name_, problem_};
    }
    const std::string& name() const { return name_; }

private:
    modelled<T> fresh(key_value_pool<T>& pool) const {
        return {sequence<T>(pool), tensor<T>({1, size_.kv_heads, size_.keys, size_.key_dim}), tensor<T>({1, size_.kv_heads, size_.keys, size_.value_dim})};
    }

    void step(key_value_pool<T>& pool, std::vector<modelled<T>>& all) {
        auto& m = all[static_cast<std::size_t>(random_.number(0, std::ssize(all) - 1))];
        switch (random_.number(0, 12)) {
        default: return append(pool, m);
        case 4: {
            const auto tokens = random_.number(0, m.size());
            say("truncate " + std::to_string(tokens));
            m.ours.truncate(tokens);
            m.kept.resize(static_cast<std::size_t>(tokens));
            return;
        }
        case 5: {
            say("fork");
            modelled<T> other{m.ours.fork(), tokens_of(m.keys, 0, size_.keys), tokens_of(m.values, 0, size_.keys), m.kept};
            if (std::ssize(all) < 3) all.push_back(std::move(other));
            else all[static_cast<std::size_t>(random_.number(0, 2))] = std::move(other);
            return;
        }
        case 6: {
            const auto first = random_.number(0, m.size()), count = random_.number(0, m.size() - first);
            say(joined("evict ", count, " from ", first));
            m.ours.evict({first, count});
            std::fill_n(m.kept.begin() + first, count, false);
            return;
        }
        case 7: return release(m);
        case 8: return attend_to(m);
        case 9: return attend_to_all(all);
        case 10: return save_and_load(pool, m);
        case 11: return keep(pool, m);
        }
    }
    void append(const key_value_pool<T>& pool, modelled<T>& m) {
        const auto count = random_.number(0, std::min<index_t>(size_.keys - m.size(), random_.one_in(3) ? 1 : 300));
        say("append " + std::to_string(count));
        const auto drawn = [&](index_t channels) { return filled<T>({1, size_.kv_heads, count, channels}, [&] { return random_.real(-2, 2); }); };
        const auto k = drawn(size_.key_dim), v = drawn(size_.value_dim);
        const auto free = pool.free_pages();
        try {
            m.ours.append(k, v);
        } catch (const argument_error&) {
            say("(refused)");
            if (m.ours.size() != m.size() || pool.free_pages() != free) problem_ = "a refused append changed something";
            return;
        }
        const bool quantises = layout_.format == cache_format::int8 || layout_.format == cache_format::int4;
        const auto copy = [&](const tensor<T>& from, tensor<T>& to) {
            attn::detail::for_each_row(from.shape(), [&](index_t, index_t h, index_t i) {
                auto* const row = to.view().row(0, h, m.size() + i);
                std::copy_n(from.view().row(0, h, i), from.shape().channels, row);
                if (&to == &m.keys) rotate(row);
                if (!quantises || m.size() + i >= layout_.exact_tokens)
                    store_as<T>(layout_.format, std::span(row, static_cast<std::size_t>(from.shape().channels)));
            });
        };
        copy(k, m.keys);
        copy(v, m.values);
        m.kept.resize(m.kept.size() + static_cast<std::size_t>(count), true);
    }
    void keep(const key_value_pool<T>& pool, modelled<T>& m) {
        const auto first = random_.number(std::max<index_t>(0, m.size() - 200), m.size());
        std::vector<index_t> numbers;
        for (index_t number = 0; number < m.size() - first; ++number)
            if (random_.one_in(2)) numbers.push_back(number);
        say(joined("keep ", numbers.size(), " from ", first, " on"));
        const auto free = pool.free_pages();
        try {
            m.ours.keep(first, numbers);
        } catch (const argument_error&) {
            say("(refused)");
            if (m.ours.size() != m.size() || pool.free_pages() != free) problem_ = "a refused keep changed something";
            return;
        }
        for (auto* all : {&m.keys, &m.values})
            for (index_t h = 0; h < size_.kv_heads; ++h)
                for (std::size_t n = 0; n < numbers.size(); ++n)
                    std::copy_n(all->view().row(0, h, first + numbers[n]), all->shape().channels, all->view().row(0, h, first + static_cast<index_t>(n)));
        m.kept.resize(static_cast<std::size_t>(first) + numbers.size());
    }
    /// To the same pool, and from a part of the bytes not at all.
    void save_and_load(key_value_pool<T>& pool, modelled<T>& m) {
        say("save and load");
        const auto bytes = m.ours.save();
        const auto free = pool.free_pages();
        for (const bool whole : {false, true})
            try {
                auto loaded = sequence<T>::load(pool, std::span(bytes).first(whole ? bytes.size() : static_cast<std::size_t>(random_.number(0, std::ssize(bytes) - 1))));
                if (!whole) problem_ = "a part of the bytes was loaded";
                if (loaded.size() != m.size() || !std::ranges::equal(loaded.evicted(), m.ours.evicted())) problem_ = "what was loaded has other tokens";
                m.ours = std::move(loaded);
            } catch (const argument_error&) {
                say("(refused)");
                if (pool.free_pages() != free) problem_ = "a refused load changed something";
            }
    }
    /// Only what no later query sees may go, and all full pages of that.
    void release(modelled<T>& m) {
        const auto width = random_.number(1, 400), sinks = random_.number(0, 3);
        const auto pattern = sliding_window(width) | (causal{} & global{sinks});
        say(joined("release what a window of ", width, " and ", sinks, " first tokens do not show"));
        m.ours.release(pattern);
        auto left = m.kept;
        for (const auto& range : m.ours.evicted()) std::fill_n(left.begin() + range.first, range.count, false);
        for (index_t j = 0; j < m.size(); ++j)
            if (m.kept[static_cast<std::size_t>(j)] && !left[static_cast<std::size_t>(j)] && (j < sinks || j > m.size() - width))
                problem_ = "token " + std::to_string(j) + " was released, but will be seen";
        m.kept = left;
    }

    auto pattern() const { return d_.tree_of(whole()) | d_.stepped_of(whole()); }
    slice whole() const { return {0, 1, 0, size_.heads}; }
    template <Pattern P>
    softmax_attention<P, random_score> op_of(const P& pattern) const {
        return {.score = d_.steps_of(whole()), .pattern = pattern};
    }
    /// A row of keys or queries, as the cache has it.
    void rotate(T* row) const {
        if (layout_.rotates_keys) rotate_hadamard(std::span(row, static_cast<std::size_t>(size_.key_dim)));
    }
    tensor<T> draw_queries(index_t count) {
        return filled<T>({1, size_.heads, count, size_.key_dim}, [&] { return random_.real(-2, 2); });
    }
    /// Turns the rows of tokens from one on as the cache does when they are read.
    void turn(const modelled<T>& m, index_t first, tensor<T>& rows) const {
        if (!turns_) return;
        tensor<index_t> places({.tokens = rows.shape().tokens, .channels = 1});
        for (index_t i = 0; i < places.shape().tokens; ++i)
            places(0, 0, i, 0) = skips_evicted_ ? std::count(m.kept.begin(), m.kept.begin() + first + i, true) : first + i;
        attn::rotate(*turns_, rows.view(), places, rows.view());
    }
    /// What attention to the model gives.
    testing::answer<T> expected(const modelled<T>& m, tensor<T> q) const {
        attn::detail::for_each_row(q.shape(), [&](index_t, index_t h, index_t i) { rotate(q.view().row(0, h, i)); });
        turn(m, m.size() - q.shape().tokens, q);
        auto k = tokens_of(m.keys, 0, m.size());
        turn(m, 0, k);
        const auto op = op_of(pattern() & left_over{&m.kept});
        inputs<T> in{q, k, m.values.slice({.tokens = {0, m.size()}})};
        in.positions = {.first_query = m.size() - q.shape().tokens, .first_key = 0};
        auto result = testing::no_answer<T>(op.output_shape(shapes_of(in)), true);
        attend(op, in, result.out());
        return result;
    }
    void compare(const testing::answer<T>& ours, const testing::answer<T>& exact) {
        if (problem_.empty()) problem_ = other_bits(ours.values, exact.values);
        if (problem_.empty()) problem_ = other_bits(ours.log_sum_exp, exact.log_sum_exp);
    }
    void attend_to(const modelled<T>& m) {
        const auto q = draw_queries(random_.number(0, random_.one_in(2) ? std::min<index_t>(m.size(), 4) : m.size()));
        say("attend with " + std::to_string(q.shape().tokens));
        auto ours = testing::no_answer<T>({1, size_.heads, q.shape().tokens, size_.value_dim}, true);
        on_threads(random_.number(1, 4), [&](const execution& run) { attend(op_of(pattern()), q, m.ours, ours.out(), run); });
        compare(ours, expected(m, tokens_of(q, 0, q.shape().tokens)));
    }
    void attend_to_all(const std::vector<modelled<T>>& all) {
        std::vector<const sequence<T>*> sequences;
        std::vector<index_t> starts{0};
        for (const auto& m : all) {
            sequences.push_back(&m.ours);
            starts.push_back(starts.back() + random_.number(0, std::min<index_t>(m.size(), random_.one_in(3) ? 200 : 2)));
        }
        say("attend to all");
        const auto q = draw_queries(starts.back());
        auto ours = testing::no_answer<T>({1, size_.heads, starts.back(), size_.value_dim}, true);
        on_threads(random_.number(1, 4), [&](const execution& run) {
            attend(op_of(pattern()), q, sequence_batch<T>{sequences, starts}, ours.out(), run);
        });
        for (std::size_t e = 0; e < all.size(); ++e) {
            const auto rows = [&](const tensor<T>& of) { return tokens_of(of, starts[e], starts[e + 1] - starts[e]); };
            compare({rows(ours.values), rows(ours.log_sum_exp)}, expected(all[e], rows(q)));
        }
    }
    void say(const std::string& what) { name_ += " " + what + ","; }

    draw& random_;
    sizes size_;
    softmax_drawn<T> d_;
    cache_layout layout_;
    std::optional<rotary<T>> turns_ = {};
    bool skips_evicted_ = false;
    index_t pages_ = 0;
    std::string name_, problem_;
};

} // namespace

outcome check_cache(draw& random) {
    return in_drawn_numbers(random, [&]<Scalar T>(std::type_identity<T>) -> outcome {
        cache_program<T> program(random);
        try {
            return program.run();
        } catch (const std::exception& e) {
            return {program.name(), threw(e)};
        }
    });
}

} // namespace attn::fuzz
