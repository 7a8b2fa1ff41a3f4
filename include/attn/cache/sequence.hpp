// A sequence of keys and values that grows token by token, in the pages of a pool.
#pragma once

#include "page_rows.hpp"
#include "saved_sequence.hpp"

#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The keys and values of one sequence, whose tokens stand at the positions 0, 1, 2, ... They lie in pages of a pool, which outlives it and
/// gets them back when it dies. What is appended is stored in the pool's format, rounded to the nearest. Sequences that were forked share
/// pages until one of them writes.
///
///     key_value_pool<float> pool({.kv_heads = 8, .key_channels = 128, .value_channels = 128}, 64);
///     sequence<float> tokens(pool);
///     tokens.append(k, v);                                            // (1, 8, n, 128) each
///     auto out = attend(softmax_attention{.pattern = causal{}}, q, tokens);    // q: the last tokens' queries
template <Scalar T>
class sequence {
public:
    /// Its numbers, in which it attends.
    using scalar = T;

    /// A sequence without tokens.
    explicit sequence(key_value_pool<T>& pool) : pool_(&pool) {}
    /// Takes the tokens of another, which may then only be assigned to, or die.
    sequence(sequence&& other) noexcept { swap(other); }
    sequence& operator=(sequence&& other) noexcept {
        sequence taken(std::move(other));
        swap(taken);
        return *this;
    }
    ~sequence() { drop_pages(0); }

    /// How many tokens were appended, and not dropped from the end: the position of the next one.
    index_t size() const { return tokens_; }
    /// The positions that are evicted, in order, none of which touches another.
    std::span<const row_range> evicted() const { return evicted_.ranges(); }
    /// How many pages it uses, by itself or with others.
    index_t pages() const { return std::ssize(pages_) - std::count(pages_.begin(), pages_.end(), nullptr); }

    /// Throws attention_error if keys and values of such shapes could not be appended.
    void check_append(const shape& keys, const shape& values) const {
        check_shape("keys", keys, pool_->layout_.key_channels);
        check_shape("values", values, pool_->layout_.value_channels);
        if (values.tokens != keys.tokens)
            detail::raise(shape_error("sequence::append", "values", "have shape ", values, ", but keys have ", keys));
        detail::check_positions("sequence::append", "keys", tokens_, keys.tokens);
        if (const auto needed = pages_for(keys.tokens); needed > pool_->free_pages())
            detail::raise(argument_error("sequence::append", "keys", "of shape ", keys, " need ", needed, " pages, but of the pool's ",
                                         pool_->pages(), " only ", pool_->free_pages(), " are free"));
    }

    /// Appends tokens: keys (1, kv_heads, n, d_k) and values (1, kv_heads, n, d_v). Throws attention_error, and changes nothing, if the
    /// shapes do not fit, or the pool has too few pages.
    void append(const detail::read_stored<T>& keys, const detail::read_stored<T>& values) {
        detail::check_view("sequence::append", "keys", keys);
        detail::check_view("sequence::append", "values", values);
        check_append(keys.shape(), values.shape());
        if (!pool_->layout_.rotates_keys) return append_rows(keys, values);
        tensor<T> rotated(keys.shape());
        detail::rotate_rows<T>(keys, rotated);
        append_rows(rotated, values);
    }

    /// Drops all tokens from position `tokens` on. Throws argument_error if there are fewer.
    void truncate(index_t tokens) {
        if (tokens < 0 || tokens > tokens_)
            detail::raise(argument_error("sequence::truncate", "tokens", "are ", tokens, ", but the sequence has ", tokens_));
        drop_pages((tokens + page_tokens() - 1) / page_tokens());
        tokens_ = tokens;
        evicted_.truncate(tokens);
    }

    /// Of the tokens from position `first` on, keeps those numbered, counted from there, in rising order, and moves them together: the
    /// accepted path of a draft_tree. Throws argument_error, and changes nothing, if there are no such tokens, some of them are evicted, or
    /// pages that others use as well cannot be copied.
    void keep(index_t first, std::span<const index_t> numbers) {
        if (first < 0 || first > tokens_)
            detail::raise(argument_error("sequence::keep", "first", "is ", first, ", but the sequence has ", tokens_, " tokens"));
        index_t last = -1;
        for (const auto number : numbers) {
            if (number <= last || number >= tokens_ - first)
                detail::raise(
                    argument_error("sequence::keep", "numbers", "hold ", number, " behind ", last, ", for ", tokens_ - first, " tokens"));
            last = number;
        }
        if (evicted_.end() > first)
            detail::raise(
                argument_error("sequence::keep", "first", "is ", first, ", but tokens up to ", evicted_.end() - 1, " are evicted"));
        own_pages(first / page_tokens());
        auto memory = memory_of_row();
        const auto read_quantised = [&](const kernel::page_part& part) {
            return [&](index_t head, index_t position, T* to) {
                read_row(part, head, position, memory.data());
                part.format.quantised().read(memory.data(), to);
            };
        };
        exact_.keep(pool_->layout_, first, numbers, read_quantised(pool_->places_.keys), read_quantised(pool_->places_.values));
        for (const auto* part : {&pool_->places_.keys, &pool_->places_.values})
            for (index_t head = 0; head < pool_->layout_.kv_heads; ++head)
                for (index_t to = first; const auto number : numbers) {
                    if (to != first + number) {
                        read_row(*part, head, first + number, memory.data());
                        write_row(*part, head, to, memory.data());
                    }
                    ++to;
                }
        truncate(first + std::ssize(numbers));
    }

    /// A sequence of the same tokens, whose pages both use.
    [[nodiscard]] sequence fork() const {
        sequence other(*pool_);
        other.pages_ = pages_;
        other.evicted_ = evicted_;
        other.tokens_ = tokens_;
        other.exact_ = exact_;
        for (const auto* page : pages_)
            if (page) ++pool_->uses(page);
        return other;
    }

    /// Forgets the tokens at some positions: nobody sees them any more; the others stay where they are (rotary_reading may count without
    /// them). Pages that hold no others are given back. Throws argument_error if there are no such tokens.
    void evict(const row_range& positions) {
        if (positions.first < 0 || positions.count < 0 || positions.first > tokens_ || positions.count > tokens_ - positions.first)
            detail::raise(argument_error("sequence::evict", "positions", "are ", positions.first, " .. ",
                                         positions.first + positions.count - 1, ", but the sequence has those before ", tokens_));
        if (positions.count == 0) return;
        const auto gone = evicted_.add(positions);
        const auto first_page = (gone.first + page_tokens() - 1) / page_tokens();
        for (auto page = first_page; (page + 1) * page_tokens() <= gone.end(); ++page)
            if (auto* const own = std::exchange(pages_[static_cast<std::size_t>(page)], nullptr)) pool_->give_back(own);
    }

    /// Evicts the full pages of which no later query, at position size() or beyond, sees anything, as the pattern proves: so a window is a
    /// ring. Throws attention_error if the pattern is wrong, or is not for such positions.
    void release(const Pattern auto& pattern, index_t heads = 1) {
        constexpr auto last = farthest_position;
        attn::check(pattern, pattern_context{.operation = "sequence::release",
                                             .heads = heads,
                                             .first_query = tokens_,
                                             .end_query = last + 1,
                                             .end_key = tokens_,
                                             .where = top_left(),
                                             .queries = last + 1 - tokens_,
                                             .keys = tokens_});
        for (index_t page = 0; (page + 1) * page_tokens() <= tokens_; ++page) {
            const row_range keys{page * page_tokens(), page_tokens()};
            if (const auto* const gone = evicted_.around(keys)) {
                page = gone->end() / page_tokens() - 1;
                continue;
            }
            bool seen = false;
            for (index_t head = 0; head < heads; ++head)
                seen = seen ||
                       !visibility(
                            at(pattern, 0, head).visible(position_range{tokens_, last, 1}, position_range{keys.first, keys.end() - 1, 1}))
                            .is_none();
            if (!seen) evict(keys);
        }
    }

    /// The sequence as bytes, to be kept outside of the program: shapes, format and version, then the rows that are left, as they are
    /// stored.
    std::vector<std::byte> save() const { return detail::saved_sequence<T>::save(*this); }
    /// The sequence that was saved as bytes, in pages of a pool, perhaps of another size. Throws argument_error if the bytes are none, or
    /// end early, or are of another version, order, layout or type, or if the pool has too few pages.
    [[nodiscard]] static sequence load(key_value_pool<T>& pool, std::span<const std::byte> bytes) {
        return detail::saved_sequence<T>::load(pool, bytes);
    }

    /// What is read of it: the pages from that of the first token that is left on.
    kernel::sequence_pages<T> view() const {
        const auto first = first_page();
        return {&pool_->places_,
                pages_.data() + first,
                exact_.keys(),
                exact_.values(),
                exact_.rows(pool_->layout_),
                first * page_tokens(),
                turns_from(first * page_tokens())};
    }
    /// How keys, or queries, of tokens from a position on are turned when they are read.
    kernel::row_turns<T> turns_from(index_t position) const {
        const auto& [table, skips_evicted] = pool_->reading_;
        return {table, skips_evicted ? evicted() : std::span<const row_range>(), position};
    }
    /// The positions that a call reads: from the first page that is left to the last token.
    row_range positions() const {
        const auto first = first_page() * page_tokens();
        return {first, tokens_ - first};
    }
    /// Where its pages are from.
    const key_value_pool<T>& pool() const { return *pool_; }

private:
    friend class detail::saved_sequence<T>;

    /// f(part, head, position) for each row of a token that is left: keys, then values, head after head.
    void for_each_row(const auto& f) const {
        for (const auto* part : {&pool_->places_.keys, &pool_->places_.values})
            for (index_t head = 0; head < pool_->layout_.kv_heads; ++head)
                evicted_.for_each_left(tokens_, [&](const row_range& left) {
                    for (auto i = left.first; i < left.end(); ++i) f(*part, head, i);
                });
    }

    index_t page_tokens() const { return pool_->layout_.page_tokens; }
    index_t first_page() const { return evicted_.first_left() / page_tokens(); }
    /// Appends keys and values that fit.
    void append_rows(const stored_view<const T>& keys, const stored_view<const T>& values) {
        const auto count = keys.shape().tokens;
        detail::check_finite("keys", keys, pool_->places_.keys.format);
        detail::check_finite("values", values, pool_->places_.values.format);
        if (count == 0) return;
        const auto all = (tokens_ + count + page_tokens() - 1) / page_tokens();
        pages_.reserve(static_cast<std::size_t>(all));
        std::vector<T> numbers(static_cast<std::size_t>(std::max(keys.shape().channels, values.shape().channels)));
        auto memory = memory_of_row();
        if (pool_->places_.keys.format.is_quantised()) exact_.put(pool_->layout_, tokens_, keys, values); // nothing throws from here on
        if (needs_other_last()) {
            auto* const own = pool_->take();
            if (const auto* const shared = std::exchange(pages_.back(), own)) {
                std::copy_n(shared, pool_->places_.bytes, own);
                pool_->give_back(shared);
            }
        }
        while (std::ssize(pages_) < all) pages_.push_back(pool_->take());
        for (index_t first = 0; first < count;) {
            const auto at = (tokens_ + first) % page_tokens(), rows = std::min(page_tokens() - at, count - first);
            auto* const page = pages_[static_cast<std::size_t>((tokens_ + first) / page_tokens())];
            detail::write_tokens(keys, {first, rows}, page, at, pool_->places_.keys, numbers.data(), memory.data());
            detail::write_tokens(values, {first, rows}, page, at, pool_->places_.values, numbers.data(), memory.data());
            first += rows;
        }
        tokens_ += count;
    }
    void check_shape(const char* what, const shape& rows, index_t channels) const {
        const shape wanted{1, pool_->layout_.kv_heads, rows.tokens, channels};
        if (rows != wanted) detail::raise(shape_error("sequence::append", what, "have shape ", rows, ", but the pool wants ", wanted));
    }
    /// Whether the last page is not full, and is evicted, or others use it too.
    bool needs_other_last() const { return tokens_ % page_tokens() > 0 && (!pages_.back() || pool_->uses(pages_.back()) > 1); }
    /// How many pages more tokens take.
    index_t pages_for(index_t count) const {
        if (count == 0) return 0;
        return (tokens_ + count + page_tokens() - 1) / page_tokens() - std::ssize(pages_) + needs_other_last();
    }
    /// A row of keys or values side by side, as it is stored.
    void read_row(const kernel::page_part& part, index_t head, index_t position, std::byte* to) const {
        part.of_head(head).template read_row<T>(page_of(position), position % page_tokens(), to);
    }
    void write_row(const kernel::page_part& part, index_t head, index_t position, const std::byte* from) const {
        part.of_head(head).template write_row<T>(from, position % page_tokens(), page_of(position));
    }
    std::byte* page_of(index_t position) const { return pages_[static_cast<std::size_t>(position / page_tokens())]; }
    std::vector<std::byte> memory_of_row() const {
        return std::vector<std::byte>(static_cast<std::size_t>(std::max(pool_->places_.keys.row_bytes, pool_->places_.values.row_bytes)));
    }
    /// Copies the pages from one on that others use too.
    void own_pages(index_t from) {
        const auto shared = [&](const std::byte* page) { return page && pool_->uses(page) > 1; };
        const auto begin = pages_.begin() + std::min(static_cast<std::ptrdiff_t>(from), std::ssize(pages_));
        if (const auto needed = std::count_if(begin, pages_.end(), shared); needed > pool_->free_pages())
            detail::raise(argument_error("sequence::keep", "first", "asks for ", needed, " pages of its own, but of the pool's ",
                                         pool_->pages(), " only ", pool_->free_pages(), " are free"));
        for (auto page = begin; page != pages_.end(); ++page) {
            if (!shared(*page)) continue;
            auto* const own = pool_->take();
            std::copy_n(*page, pool_->places_.bytes, own);
            pool_->give_back(std::exchange(*page, own));
        }
    }
    void drop_pages(index_t from) {
        for (; std::ssize(pages_) > from; pages_.pop_back())
            if (pages_.back()) pool_->give_back(pages_.back());
    }
    void swap(sequence& other) noexcept {
        std::swap(pool_, other.pool_);
        std::swap(pages_, other.pages_);
        std::swap(evicted_, other.evicted_);
        std::swap(tokens_, other.tokens_);
        std::swap(exact_, other.exact_);
    }

    key_value_pool<T>* pool_ = nullptr;
    std::vector<std::byte*> pages_; ///< by number; null where all of it is evicted
    detail::evicted_positions evicted_;
    index_t tokens_ = 0;
    detail::exact_rows<T> exact_;
};

} // namespace attn
