// BatchNorm over ranks: the statistics of all tokens, of which each rank holds some.
#pragma once

#include "../norm/rep_batch_norm.hpp"
#include "communicator.hpp"
#include "partition.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

/// The moments of all ranks' tokens, with the bits of token_statistics: its pieces are made where their rows are, and merged in their
/// order. A piece whose rows are on several ranks goes on from one to the next, with the few rows that wait for a group to fill.
template <Scalar T, Communicator C>
class moments_over_ranks {
public:
    moments_over_ranks(C& ranks, const row_cuts& cuts, const tensor_view<const T>& x, const token_mask& mask)
        : ranks_(ranks), cuts_(cuts), x_(x), mask_(mask), channels_(x.shape().channels),
          pieces_(x.shape().batch * x.shape().heads * cuts.cuts.back()) {
        taken_of(memory_, [&](scratch& memory) { lay_out(memory); });
        all_count_ = all_ + 2 * channels_;
        piece_count_ = piece_ + 2 * channels_;
        waiting_ = piece_count_ + 1;
    }

    /// The moments of all tokens. They stay valid as long as this object does.
    moments_view operator()(const execution& run) {
        const auto failure = failure_of([&] { find_own(run); }); // who has failed still passes on what others wait for
        index_t before = -1;
        *all_count_ = *piece_count_ = *waiting_ = 0;
        std::fill_n(all_, 2 * channels_, 0.0);
        for (index_t piece = 0; piece < pieces_.count; ++piece)
            for_each_segment(piece, [&](index_t rank, index_t first_row, index_t end_row) {
                if (before >= 0 && before != rank) hand_on(before, rank);
                before = rank;
                if (rank == ranks_.rank()) add(piece, first_row, end_row);
            });
        const auto found = all_gather(ranks_, std::as_bytes(std::span(all_, static_cast<std::size_t>(2 * channels_ + 1))));
        const auto bytes = found.size() / static_cast<std::size_t>(ranks_.size());
        std::memcpy(all_, found.data() + static_cast<std::size_t>(std::max<index_t>(0, before)) * bytes,
                    bytes); // of who has seen the last row
        if (failure) std::rethrow_exception(failure);
        return {all_, all_ + channels_, static_cast<index_t>(*all_count_)};
    }

private:
    using group_type = row_group<T>;

    /// What goes from rank to rank lies together: sums of the pieces before, of the piece that is not complete, and the rows that wait.
    void lay_out(scratch& memory) {
        const auto before = memory.used_bytes();
        all_ = memory.take<double>(2 * channels_ + 1);
        piece_ = memory.take<double>(2 * channels_ + 2);
        rows_ = memory.take<T>(group_type::max_rows, padded());
        handed_on_ = memory.used_bytes() - before;
        own_ = memory.take<double>(pieces_.count, 2 * channels_);
        own_count_ = memory.take<index_t>(pieces_.count);
        sums_ = memory.take<T>(group_type::scratch_rows, padded());
    }
    index_t padded() const { return (channels_ + 63) / 64 * 64; }

    /// f(rank, first row, end) for the parts of a piece that lie on one rank, of one batch entry and head each.
    void for_each_segment(index_t piece, const auto& f) const {
        const auto tokens = cuts_.cuts.back();
        for (auto row = pieces_.first(piece); row < pieces_.first(piece + 1);) {
            const auto rank = std::ranges::upper_bound(cuts_.cuts, row % tokens) - cuts_.cuts.begin() - 1;
            const auto end = std::min(pieces_.first(piece + 1), row / tokens * tokens + cuts_.of(rank).end());
            f(rank, row, end);
            row = end;
        }
    }
    bool is_own(index_t piece) const {
        bool own = true;
        for_each_segment(piece, [&](index_t rank, index_t, index_t) { own = own && rank == ranks_.rank(); });
        return own;
    }
    void push(group_type& group, index_t first_row, index_t end_row, moments_view& into) const {
        const auto tokens = cuts_.cuts.back(), first_token = cuts_.of(ranks_.rank()).first, heads = x_.shape().heads;
        for (auto row = first_row; row < end_row; ++row) {
            const auto b = row / (heads * tokens), h = row / tokens % heads, i = row % tokens - first_token;
            if (counts(mask_, b, h, i)) group.push(x_.row(b, h, i), channels_, into);
        }
    }
    /// Finds the moments of the pieces that lie on this rank alone.
    void find_own(const execution& run) {
        workspace sums(to_size(product(group_type::scratch_rows, run.concurrency(), padded(), static_cast<index_t>(sizeof(T)))));
        run.for_each(pieces_.count, [&](index_t piece, index_t slice) {
            if (!is_own(piece)) return;
            T* const own = reinterpret_cast<T*>(sums.bytes().data()) + slice * group_type::scratch_rows * padded();
            moments_view moments{own_ + 2 * piece * channels_, own_ + (2 * piece + 1) * channels_};
            moments.clear(channels_);
            group_type group(own, padded());
            for_each_segment(piece, [&](index_t, index_t first, index_t end) { push(group, first, end, moments); });
            group.flush(channels_, moments);
            own_count_[piece] = moments.count;
        });
    }
    /// Adds some rows of a piece, in the order of its rows.
    void add(index_t piece, index_t first_row, index_t end_row) {
        const bool ends = end_row == pieces_.first(piece + 1);
        if (is_own(piece)) {
            if (ends) merge(piece, {own_ + 2 * piece * channels_, own_ + (2 * piece + 1) * channels_, own_count_[piece]});
            return;
        }
        moments_view moments{piece_, piece_ + channels_, static_cast<index_t>(*piece_count_)};
        if (first_row == pieces_.first(piece)) moments.clear(channels_);
        group_type group(sums_, padded());
        for (index_t r = 0; r < static_cast<index_t>(*waiting_); ++r) group.push(rows_ + r * padded(), channels_, moments);
        push(group, first_row, end_row, moments);
        if (ends) {
            group.flush(channels_, moments);
            merge(piece, moments);
        }
        for (index_t r = 0; r < group.waiting(); ++r)
            if (T* const to = rows_ + r * padded(); to != group.waiting_row(r)) std::copy_n(group.waiting_row(r), channels_, to);
        *waiting_ = static_cast<double>(group.waiting());
        *piece_count_ = static_cast<double>(moments.count);
    }
    void merge(index_t piece, const moments_view& more) {
        moments_view all{all_, all_ + channels_, static_cast<index_t>(*all_count_)};
        if (piece == 0) {
            std::copy_n(more.mean, channels_, all.mean);
            std::copy_n(more.squares, channels_, all.squares);
            all.count = more.count;
        } else {
            all.merge(more, channels_);
        }
        *all_count_ = static_cast<double>(all.count);
    }
    void hand_on(index_t from, index_t to) {
        if (from != ranks_.rank() && to != ranks_.rank()) return;
        const auto bytes = memory_.bytes().first(handed_on_);
        auto message = from == ranks_.rank() ? ranks_.send(to, 1, bytes) : ranks_.receive(from, 1, bytes);
        ranks_.wait(message);
    }

    C& ranks_;
    const row_cuts& cuts_;
    tensor_view<const T> x_;
    token_mask mask_;
    index_t channels_;
    row_pieces pieces_;
    workspace memory_;
    std::size_t handed_on_ = 0;
    double *all_ = nullptr, *all_count_ = nullptr, *piece_ = nullptr, *piece_count_ = nullptr,
           *waiting_ = nullptr; ///< [2][channels], and numbers
    T *rows_ = nullptr, *sums_ = nullptr;
    double* own_ = nullptr; ///< [pieces][2][channels]
    index_t* own_count_ = nullptr;
};

/// Training of a batch_norm, plus eta x, over ranks.
template <Scalar T, Communicator C>
void train_over_ranks(std::string_view name, const batch_norm<T>& norm, double eta, const partition& parts, C& ranks,
                      const tensor_view<const T>& x, const tensor_view<T>& out, batch_norm_statistics& statistics, const execution& run,
                      const token_mask& mask) {
    const auto& s = x.shape();
    std::optional<moments_over_ranks<T, C>> moments;
    const auto unfit = failure_of([&] {
        if (parts.ranks() != ranks.size())
            detail::raise(argument_error(name, "partition", "is for ", parts.ranks(), " ranks, but the communicator has ", ranks.size()));
        check_training<T>(name, x, out, statistics, mask, false);
        norm.check_parameters(name, s);
        norm.check_apart(output_memory(name, "out", out));
        run.reserve(name, "x", s, training_workspace_bytes(norm, s, run));
        if (const auto own = parts.queries(ranks.rank()).count; s.tokens != own)
            detail::raise(shape_error(name, "x", "has shape ", s, ", but rank ", ranks.rank(), " of the partition holds ", own, " tokens"));
        moments.emplace(ranks, parts.query_cuts(), x, mask);
    });
    std::uint64_t cuts = 0;
    for (const auto cut : parts.query_cuts().cuts) cuts = cuts * 0x100000001b3 + static_cast<std::uint64_t>(cut);
    agree(ranks, name, unfit,
          {{"the bytes of a number", static_cast<index_t>(sizeof(T))},
           {"the batch of x", s.batch},
           {"the heads of x", s.heads},
           {"the channels of x", s.channels},
           {"their cuts, a number of which is", static_cast<index_t>(cuts >> 1)}});
    if (s.channels == 0) return;
    moments_view seen{};
    agree(ranks, name, failure_of([&] { seen = (*moments)(run); }));
    if (seen.count < 2)
        detail::raise(shape_error(name, "x", "of all ranks has ", seen.count, " tokens that count, but training needs two for a variance"));
    agree(ranks, name, failure_of([&] { norm.train_with(seen, x, out, statistics, run, mask, eta, 0); }));
}

} // namespace detail

/// Training of a batch_norm on tokens that lie on the ranks of a communicator, as `train` is on one machine: x, out and the mask are the
/// tokens that the partition's queries(rank) names, of all batch entries and heads. Statistics are those of all ranks' tokens; the running
/// ones are each rank's own, and remain alike. The result has the bits of the call on one machine. Sent are two sums a channel and 32 rows
/// at most from each rank to the next, and the result to all. All ranks call it. Throws attention_error, on all ranks and before anything
/// is written, as `train` does, and rank_error where the error is another rank's.
template <Scalar T, Communicator C>
void train(const batch_norm<T>& norm, const partition& parts, C& ranks, const std::type_identity_t<tensor_view<const T>>& x,
           const std::type_identity_t<tensor_view<T>>& out, batch_norm_statistics& statistics, const detail::call_execution& run = {},
           const token_mask& mask = {}) {
    detail::train_over_ranks<T>(norm.name, norm, 0, parts, ranks, x, out, statistics, run, mask);
}

/// Training of a rep_batch_norm on ranks: as of a batch_norm, plus eta x.
template <Scalar T, Communicator C>
void train(const rep_batch_norm<T>& norm, const partition& parts, C& ranks, const std::type_identity_t<tensor_view<const T>>& x,
           const std::type_identity_t<tensor_view<T>>& out, batch_norm_statistics& statistics, const detail::call_execution& run = {},
           const token_mask& mask = {}) {
    detail::train_over_ranks<T>(norm.name, norm.batch, norm.eta, parts, ranks, x, out, statistics, run, mask);
}

} // namespace attn
