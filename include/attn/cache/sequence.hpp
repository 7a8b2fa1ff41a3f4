// A sequence of keys and values that grows token by token, in the pages of a pool.
#pragma once

#include "evicted_positions.hpp"
#include "exact_rows.hpp"
#include "page_list.hpp"
#include "page_rows.hpp"
#include "saved_sequence.hpp"

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
    explicit sequence(key_value_pool<T>& pool) : pages_(pool) {}
    /// Takes the tokens of another, which may then only be assigned to, or die.
    sequence(sequence&&) noexcept = default;
    sequence& operator=(sequence&&) noexcept = default;

    /// How many tokens were appended, and not dropped from the end: the position of the next one.
    index_t size() const { return tokens_; }
    /// The positions that are evicted, in order, none of which touches another.
    std::span<const row_range> evicted() const { return evicted_.ranges(); }
    /// How many pages it uses, by itself or with others.
    index_t pages() const { return pages_.used(); }

    /// Throws attention_error if keys and values of such shapes could not be appended.
    void check_append(const shape& keys, const shape& values) const {
        check_shape("keys", keys, pool().layout_.key_channels);
        check_shape("values", values, pool().layout_.value_channels);
        if (values.tokens != keys.tokens)
            detail::raise(shape_error("sequence::append", "values", "have shape ", values, ", but keys have ", keys));
        detail::check_positions("sequence::append", "keys", tokens_, keys.tokens);
        if (const auto needed = pages_for(keys.tokens); needed > pool().free_pages())
            detail::raise(argument_error("sequence::append", "keys", "of shape ", keys, " need ", needed, " pages, but of the pool's ",
                                         pool().pages(), " only ", pool().free_pages(), " are free"));
    }

    /// Appends tokens: keys (1, kv_heads, n, d_k) and values (1, kv_heads, n, d_v). Throws attention_error, and changes nothing, if the
    /// shapes do not fit, or the pool has too few pages.
    void append(const detail::read_stored<T>& keys, const detail::read_stored<T>& values) {
        detail::check_view("sequence::append", "keys", keys);
        detail::check_view("sequence::append", "values", values);
        check_append(keys.shape(), values.shape());
        if (!pool().layout_.rotates_keys) return append_rows(keys, values);
        tensor<T> rotated(keys.shape());
        detail::rotate_rows<T>(keys, rotated);
        append_rows(rotated, values);
    }

    /// Drops all tokens from position `tokens` on. Throws argument_error if there are fewer.
    void truncate(index_t tokens) {
        if (tokens < 0 || tokens > tokens_)
            detail::raise(argument_error("sequence::truncate", "tokens", "are ", tokens, ", but the sequence has ", tokens_));
        pages_.drop_from((tokens + page_tokens() - 1) / page_tokens());
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
        exact_.keep(pool().layout_, first, numbers, read_quantised(pool().places_.keys), read_quantised(pool().places_.values));
        for (const auto* part : {&pool().places_.keys, &pool().places_.values})
            for (index_t head = 0; head < pool().layout_.kv_heads; ++head)
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
        sequence other(pages_.pool());
        other.pages_ = pages_;
        other.evicted_ = evicted_;
        other.tokens_ = tokens_;
        other.exact_ = exact_;
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
        for (auto page = first_page; (page + 1) * page_tokens() <= gone.end(); ++page) pages_.evict(page);
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
        return {&pool().places_,
                pages_.from(first),
                exact_.keys(),
                exact_.values(),
                exact_.rows(pool().layout_),
                first * page_tokens(),
                turns_from(first * page_tokens())};
    }
    /// How keys, or queries, of tokens from a position on are turned when they are read.
    kernel::row_turns<T> turns_from(index_t position) const {
        const auto& [table, skips_evicted] = pool().reading_;
        return {table, skips_evicted ? evicted() : std::span<const row_range>(), position};
    }
    /// The positions that a call reads: from the first page that is left to the last token.
    row_range positions() const {
        const auto first = first_page() * page_tokens();
        return {first, tokens_ - first};
    }
    /// Where its pages are from.
    const key_value_pool<T>& pool() const { return pages_.pool(); }

private:
    friend class detail::saved_sequence<T>;

    /// f(part, head, position) for each row of a token that is left: keys, then values, head after head.
    void for_each_row(const auto& f) const {
        for (const auto* part : {&pool().places_.keys, &pool().places_.values})
            for (index_t head = 0; head < pool().layout_.kv_heads; ++head)
                evicted_.for_each_left(tokens_, [&](const row_range& left) {
                    for (auto i = left.first; i < left.end(); ++i) f(*part, head, i);
                });
    }

    index_t page_tokens() const { return pool().layout_.page_tokens; }
    index_t first_page() const { return evicted_.first_left() / page_tokens(); }
    /// Appends keys and values that fit.
    void append_rows(const stored_view<const T>& keys, const stored_view<const T>& values) {
        const auto count = keys.shape().tokens;
        detail::check_finite("keys", keys, pool().places_.keys.format);
        detail::check_finite("values", values, pool().places_.values.format);
        if (count == 0) return;
        const auto all = (tokens_ + count + page_tokens() - 1) / page_tokens();
        pages_.reserve(all);
        std::vector<T> numbers(static_cast<std::size_t>(std::max(keys.shape().channels, values.shape().channels)));
        auto memory = memory_of_row();
        if (pool().places_.keys.format.is_quantised()) exact_.put(pool().layout_, tokens_, keys, values); // nothing throws from here on
        if (needs_other_last()) pages_.own(pages_.count() - 1);
        pages_.extend(all);
        for (index_t first = 0; first < count;) {
            const auto at = (tokens_ + first) % page_tokens(), rows = std::min(page_tokens() - at, count - first);
            auto* const page = page_of(tokens_ + first);
            detail::write_tokens(keys, {first, rows}, page, at, pool().places_.keys, numbers.data(), memory.data());
            detail::write_tokens(values, {first, rows}, page, at, pool().places_.values, numbers.data(), memory.data());
            first += rows;
        }
        tokens_ += count;
    }
    void check_shape(const char* what, const shape& rows, index_t channels) const {
        const shape wanted{1, pool().layout_.kv_heads, rows.tokens, channels};
        if (rows != wanted) detail::raise(shape_error("sequence::append", what, "have shape ", rows, ", but the pool wants ", wanted));
    }
    /// Whether the last page is not full, and is evicted, or others use it too.
    bool needs_other_last() const {
        const auto last = pages_.count() - 1;
        return tokens_ % page_tokens() > 0 && (!pages_[last] || pages_.is_shared(last));
    }
    /// How many pages more tokens take.
    index_t pages_for(index_t count) const {
        if (count == 0) return 0;
        return (tokens_ + count + page_tokens() - 1) / page_tokens() - pages_.count() + needs_other_last();
    }
    /// A row of keys or values side by side, as it is stored.
    void read_row(const kernel::page_part& part, index_t head, index_t position, std::byte* to) const {
        part.of_head(head).template read_row<T>(page_of(position), position % page_tokens(), to);
    }
    void write_row(const kernel::page_part& part, index_t head, index_t position, const std::byte* from) const {
        part.of_head(head).template write_row<T>(from, position % page_tokens(), page_of(position));
    }
    std::byte* page_of(index_t position) const { return pages_[position / page_tokens()]; }
    std::vector<std::byte> memory_of_row() const {
        return std::vector<std::byte>(static_cast<std::size_t>(std::max(pool().places_.keys.row_bytes, pool().places_.values.row_bytes)));
    }
    /// Copies the pages from one on that others use too.
    void own_pages(index_t from) {
        if (const auto needed = pages_.shared_from(from); needed > pool().free_pages())
            detail::raise(argument_error("sequence::keep", "first", "asks for ", needed, " pages of its own, but of the pool's ",
                                         pool().pages(), " only ", pool().free_pages(), " are free"));
        for (; from < pages_.count(); ++from)
            if (pages_.is_shared(from)) pages_.own(from);
    }

    detail::page_list<T> pages_;
    detail::evicted_positions evicted_;
    index_t tokens_ = 0;
    detail::exact_rows<T> exact_;
};

} // namespace attn
