// Chunks of recurrent attention whose tokens lie on several ranks: who computes them, and what of their tokens travels there and back.
#pragma once

#include "../core/copy.hpp"
#include "../kernel/recurrent/tiles.hpp"
#include "communicator.hpp"
#include "key_plan.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Which rank computes which chunks of a sequence that is cut anywhere: each the one that holds its first token.
class chunk_plan {
public:
    explicit chunk_plan(const row_cuts& cuts) : cuts_(cuts) {}

    row_range held(index_t rank) const { return cuts_.of(rank); }
    /// The tokens of the chunks that lie wholly on a rank.
    row_range whole(index_t rank) const {
        const auto own = held(rank);
        return rows_between(border_from(own.first), own.end() == tokens() ? tokens() : border_before(own.end()));
    }
    /// The tokens of the chunk that begins on a rank and ends on another, if there is one.
    row_range split(index_t rank) const {
        const auto own = held(rank);
        const auto first = border_before(own.end()), end = border_from(own.end());
        return first >= own.first && end > own.end() ? row_range{first, end - first} : row_range{};
    }
    /// The first tokens of a rank, whose chunk begins on another.
    row_range given(index_t rank) const {
        return rows_between(held(rank).first, std::min(held(rank).end(), border_from(held(rank).first)));
    }
    /// The rank on which the chunk of those begins.
    index_t taker_of(index_t rank) const {
        const auto first = border_before(held(rank).first);
        while (held(rank).first > first) --rank;
        return rank;
    }
    /// f(rank, tokens that it gives) for those that give tokens of a rank's split chunk.
    void for_each_giver(index_t rank, const auto& f) const {
        const auto chunk_rows = split(rank);
        for (auto giver = rank + 1; giver < cuts_.ranks() && held(giver).first < chunk_rows.end(); ++giver)
            if (const auto rows = given(giver); rows.count > 0) f(giver, rows);
    }

private:
    static constexpr index_t chunk = kernel::recurrent_chunk;

    index_t tokens() const { return cuts_.cuts.back(); }
    static index_t border_before(index_t token) { return token / chunk * chunk; }
    index_t border_from(index_t token) const { return std::min(tokens(), border_before(token + chunk - 1)); }

    const row_cuts& cuts_;
};

/// What the gradient of recurrent attention reads of each token: q, k, v, log_decay, beta, a, b, and the gradient of the result. Or what it
/// writes: the gradients of the first seven. Without memory where there is none.
template <class T>
using token_arrays = std::array<tensor_view<T>, 8>;

/// Those of some tokens.
template <class T>
token_arrays<T> of_tokens(token_arrays<T> all, const row_range& rows) {
    for (auto& each : all)
        if (is_given(each)) each = each.slice({.tokens = rows});
    return all;
}

/// A rank's part in the chunks that several hold: the one that it computes, whose tokens it collects, and its first tokens, whose gradients
/// another rank computes.
template <Scalar T>
class split_chunks {
public:
    /// Of arrays of such shapes, but for the number of tokens; no_shape of those that there are not.
    split_chunks(const row_cuts& cuts, index_t rank, const std::array<shape, 8>& shapes)
        : plan_(cuts), rank_(rank), shapes_(shapes), own_(plan_.split(rank)), given_(plan_.given(rank)),
          kept_(common_rows(own_, plan_.held(rank))) {
        for (std::size_t n = 0; n < shapes.size(); ++n) {
            if (shapes[n] == no_shape) continue;
            auto s = shapes[n];
            s.tokens = own_.count;
            read_[n] = tensor<T>(s);
            if (n < gradients) written_[n] = tensor<T>(s);
        }
        of_given_.resize(static_cast<std::size_t>(numbers(shapes.size(), given_.count)));
        of_givers_.resize(static_cast<std::size_t>(numbers(shapes.size(), own_.count)));
    }

    const chunk_plan& plan() const { return plan_; }
    /// The tokens of the chunk that the rank computes, if there is one.
    const row_range& own() const { return own_; }
    /// What those have.
    token_arrays<const T> read() { return views<const T>(read_); }
    /// Where their gradients go.
    token_arrays<T> written() { return views<T>(written_); }

    /// Collects what the tokens of the rank's chunk have. held: what those that the rank holds have.
    template <Communicator C>
    void collect(C& ranks, const token_arrays<const T>& held) {
        typename C::request sending;
        if (const auto given = part(of_given_, given_, given_, shapes_.size()); !given.empty()) {
            put(of_tokens(held, on_rank(given_)), given);
            sending = ranks.send(plan_.taker_of(rank_), tag, std::as_bytes(given));
        }
        copy(of_tokens(held, on_rank(kept_)), of_tokens(views<T>(read_), in_chunk(kept_)));
        plan_.for_each_giver(rank_, [&](index_t giver, const row_range& rows) {
            const auto given = part(of_givers_, own_, rows, shapes_.size());
            if (given.empty()) return;
            auto receiving = ranks.receive(giver, tag, std::as_writable_bytes(given));
            ranks.wait(receiving);
            take(given, rows, of_tokens(views<T>(read_), in_chunk(rows)));
        });
        ranks.wait(sending);
    }
    /// Gives back the gradients of the chunk's tokens. held: where the rank wants those of the tokens that it holds.
    template <Communicator C>
    void give_back(C& ranks, const token_arrays<T>& held) {
        std::vector<typename C::request> sending;
        plan_.for_each_giver(rank_, [&](index_t giver, const row_range& rows) {
            const auto given = part(of_givers_, own_, rows, gradients);
            if (given.empty()) return;
            put(of_tokens(views<const T>(written_), in_chunk(rows)), given);
            sending.push_back(ranks.send(giver, tag, std::as_bytes(given)));
        });
        copy(of_tokens(views<const T>(written_), in_chunk(kept_)), of_tokens(held, on_rank(kept_)));
        if (const auto given = part(of_given_, given_, given_, gradients); !given.empty()) {
            auto receiving = ranks.receive(plan_.taker_of(rank_), tag, std::as_writable_bytes(given));
            ranks.wait(receiving);
            take(given, given_, of_tokens(held, on_rank(given_)));
        }
        for (auto& one : sending) ranks.wait(one);
    }

private:
    static constexpr std::size_t gradients = 7;
    static constexpr index_t tag = 2;

    row_range on_rank(const row_range& rows) const { return {rows.first - plan_.held(rank_).first, rows.count}; }
    row_range in_chunk(const row_range& rows) const { return {rows.first - own_.first, rows.count}; }

    template <class U>
    static token_arrays<U> views(std::array<tensor<T>, 8>& of) {
        token_arrays<U> all;
        for (std::size_t n = 0; n < of.size(); ++n)
            if (of[n].data()) all[n] = of[n].view();
        return all;
    }
    /// How many numbers so many tokens have in the first of the arrays.
    index_t numbers(std::size_t arrays, index_t tokens) const {
        index_t count = 0;
        for (std::size_t n = 0; n < arrays; ++n) count += product(shapes_[n].batch, shapes_[n].heads, tokens, shapes_[n].channels);
        return count;
    }
    /// The numbers of some of the tokens `all` that memory is for.
    std::span<T> part(std::vector<T>& memory, const row_range& all, const row_range& rows, std::size_t arrays) const {
        return std::span<T>(memory).subspan(static_cast<std::size_t>(numbers(shapes_.size(), rows.first - all.first)),
                                            static_cast<std::size_t>(numbers(arrays, rows.count)));
    }
    static void copy(const token_arrays<const T>& from, const token_arrays<T>& to) {
        for (std::size_t n = 0; n < to.size(); ++n)
            if (to[n].data()) copy_numbers(from[n], to[n]);
    }
    static void put(const token_arrays<const T>& rows, std::span<T> to) {
        auto at = to.begin();
        for (const auto& each : rows)
            for_each_number(each.shape(), [&](index_t b, index_t h, index_t i, index_t c) { *at++ = each(b, h, i, c); });
    }
    /// What is not wanted has no memory, but numbers.
    void take(std::span<const T> from, const row_range& rows, const token_arrays<T>& to) const {
        auto at = from.begin();
        for (std::size_t n = 0; at != from.end(); ++n) {
            auto s = shapes_[n];
            s.tokens = rows.count;
            if (to[n].data()) for_each_number(s, [&](index_t b, index_t h, index_t i, index_t c) { to[n](b, h, i, c) = *at++; });
            else at += s.size();
        }
    }

    chunk_plan plan_;
    index_t rank_;
    std::array<shape, 8> shapes_;
    row_range own_, given_, kept_;
    std::array<tensor<T>, 8> read_, written_;
    std::vector<T> of_given_, of_givers_; ///< messages
};

} // namespace attn::detail
