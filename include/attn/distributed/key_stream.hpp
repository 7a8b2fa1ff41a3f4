// Keys and values on their way between ranks, a piece at a time.
#pragma once

#include "../core/inputs.hpp"
#include "../core/workspace.hpp"
#include "../parallel/executor.hpp"
#include "communicator.hpp"
#include "key_plan.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Rows of keys or values, token after token: so some tokens are one run of bytes.
template <Scalar T>
class travelling_rows {
public:
    travelling_rows(const stored_view<const T>& own, const row_range& held)
        : own_(own), held_(held), element_(own.is_narrow() ? 2 : static_cast<index_t>(sizeof(T))),
          row_bytes_(product(own.shape().batch, own.shape().heads, own.shape().channels, element_)) {}

    /// Of one token, in all batch entries and heads.
    index_t row_bytes() const { return row_bytes_; }
    /// Copies own rows, of those that the rank holds, to memory whose first row is `begin`.
    void copy(const row_range& rows, std::byte* memory, index_t begin) const {
        const auto& s = own_.shape();
        auto* to = memory + (rows.first - begin) * row_bytes_;
        for (auto token = rows.first; token < rows.end(); ++token)
            for (index_t b = 0; b < s.batch; ++b)
                for (index_t h = 0; h < s.heads; ++h) {
                    const auto row = own_.rows(b, h, token - held_.first);
                    const auto together = row.channel_stride == 1 ? s.channels : 1;
                    for (index_t c = 0; c < s.channels; c += together, to += together * element_)
                        std::memcpy(to, row.address(0, c), static_cast<std::size_t>(together * element_));
                }
    }
    /// Rows in such memory, or where the rank holds them.
    stored_view<const T> view(const row_range& rows, const std::byte* memory, index_t begin) const {
        auto s = own_.shape();
        s.tokens = rows.count;
        if (!memory) return {own_.rows(0, 0, rows.first - held_.first).data, own_.format(), s, own_.strides()};
        return {memory + (rows.first - begin) * row_bytes_, own_.format(), s, {s.heads * s.channels, s.channels, s.batch * s.heads * s.channels, 1}};
    }

private:
    stored_view<const T> own_;
    row_range held_;
    index_t element_, row_bytes_;
};

/// Room for a rank's share of any piece.
template <Scalar T>
struct piece_memory {
    workspace keys, values;

    piece_memory(const key_plan& plan, index_t rank, const inputs<T>& own) {
        index_t most = 0;
        for (index_t number = 0; number < plan.pieces(); ++number)
            if (const auto share = plan.share_of(number, rank); share.travels) most = std::max(most, share.rows.count);
        const auto reserve = [&](workspace& memory, const stored_view<const T>& rows) {
            memory.reserve(static_cast<std::size_t>(product(most, travelling_rows<T>(rows, {}).row_bytes())));
        };
        reserve(keys, own.keys);
        reserve(values, own.values);
    }
};

/// Takes a rank through the pieces of a plan: while it computes with one, the next is on its way. Receives are begun before their sends can be waited
/// for, and all ranks take the pieces in the same order, and the parts of a piece in the order of hops: so each waits only for what comes before.
template <Scalar T, Communicator C>
class key_stream {
public:
    key_stream(C& ranks, const key_plan& plan, const inputs<T>& own, const row_range& held, std::span<piece_memory<T>, 2> memory)
        : ranks_(ranks), plan_(plan), held_(held), keys_(own.keys, held), values_(own.values, held) {
        for (index_t number = 0; number < plan.pieces(); ++number)
            if (plan.share_of(number, ranks.rank()).rows.count > 0) numbers_.push_back(number);
        for (std::size_t i = 0; i < 2; ++i) slots_[i].memory = &memory[i];
    }

    /// Calls compute(pass, rows, keys, values) for each piece of which the rank sees something, and progress() is to be called now and then meanwhile;
    /// then, of each that it has to do with, done(piece, the next of these or -1).
    template <class F>
    void run(const F& compute) {
        run(compute, [](index_t, index_t) {});
    }
    template <class F, class D>
    void run(const F& compute, const D& done) {
        if (!numbers_.empty()) prepare(0);
        for (std::size_t at = 0; at < numbers_.size(); ++at) {
            arrive(slot_of(at));
            if (at > 0) finish(slot_of(at - 1));
            if (at + 1 < numbers_.size()) prepare(at + 1);
            const auto seen = plan_.seen(numbers_[at], ranks_.rank());
            const auto& own = slot_of(at);
            const auto view = [&](const travelling_rows<T>& rows, const workspace& memory) {
                return rows.view(seen, own.in_place ? nullptr : memory.bytes().data(), own.rows.first);
            };
            if (seen.count > 0) compute(plan_.piece(numbers_[at]).pass, seen, view(keys_, own.memory->keys), view(values_, own.memory->values));
            done(numbers_[at], at + 1 < numbers_.size() ? numbers_[at + 1] : -1);
        }
        if (!numbers_.empty()) finish(slot_of(numbers_.size() - 1));
    }
    /// Moves on what is under way.
    void progress() {
        for (auto& s : slots_) {
            for (auto& one : s.receiving)
                for (auto& part : one.parts) ranks_.test(part);
            for (auto& one : s.sending) ranks_.test(one);
        }
    }

private:
    using request = typename C::request;

    struct received {
        key_transfer what;
        request parts[2]; ///< keys and values
    };
    /// A piece, and what of it is under way.
    struct slot {
        piece_memory<T>* memory;
        row_range rows;
        bool in_place = true; ///< nothing travels: the rank's own rows are read as they lie
        std::vector<received> receiving; ///< by hops
        std::vector<key_transfer> passed_on;
        std::vector<request> sending;
    };

    slot& slot_of(std::size_t at) { return slots_[at % 2]; }
    void prepare(std::size_t at) {
        auto& own = slot_of(at);
        const auto number = numbers_[at];
        const auto share = plan_.share_of(number, ranks_.rank());
        own.rows = share.rows;
        own.in_place = !share.travels;
        own.passed_on.clear();
        if (own.in_place) return;
        plan_.for_each_transfer_of(number, ranks_.rank(), [&](const key_transfer& t) {
            if (t.to == ranks_.rank()) own.receiving.push_back({t, {}});
            else if (t.owner != ranks_.rank()) own.passed_on.push_back(t);
        });
        std::ranges::sort(own.receiving, std::ranges::less{}, [](const received& r) { return std::pair(r.what.hop, r.what.owner); });
        for (auto& [what, parts] : own.receiving)
            each_part(own, what, [&](std::span<std::byte> bytes, index_t part) { parts[part] = ranks_.receive(what.from, tag_of(what, part), bytes); });
        const auto copied = common_rows(own.rows, held_);
        keys_.copy(copied, own.memory->keys.bytes().data(), own.rows.first);
        values_.copy(copied, own.memory->values.bytes().data(), own.rows.first);
        plan_.for_each_transfer_of(number, ranks_.rank(), [&](const key_transfer& t) {
            if (t.owner == ranks_.rank()) send(own, t);
        });
    }
    void arrive(slot& own) {
        for (auto& [what, parts] : own.receiving) {
            for (auto& part : parts) ranks_.wait(part);
            for (const auto& t : own.passed_on)
                if (t.owner == what.owner) send(own, t);
        }
        own.receiving.clear();
    }
    void finish(slot& own) {
        for (auto& one : own.sending) ranks_.wait(one);
        own.sending.clear();
    }
    void send(slot& own, const key_transfer& t) {
        each_part(own, t, [&](std::span<std::byte> bytes, index_t part) { own.sending.push_back(ranks_.send(t.to, tag_of(t, part), bytes)); });
    }
    /// Between two ranks, what is begun with a tag is ended before the next with it.
    static index_t tag_of(const key_transfer& t, index_t part) { return 2 * (t.owner % 16'000) + part + 1; }
    /// f(bytes, number) of the keys, 0, and of the values, 1, if they have any.
    template <class F>
    void each_part(slot& own, const key_transfer& t, const F& f) const {
        const auto part = [&](const workspace& memory, index_t row_bytes, index_t number) {
            if (row_bytes == 0) return;
            f(memory.bytes().subspan(static_cast<std::size_t>((t.rows.first - own.rows.first) * row_bytes), static_cast<std::size_t>(t.rows.count * row_bytes)), number);
        };
        part(own.memory->keys, keys_.row_bytes(), 0);
        part(own.memory->values, values_.row_bytes(), 1);
    }

    C& ranks_;
    const key_plan& plan_;
    row_range held_;
    travelling_rows<T> keys_, values_;
    std::vector<index_t> numbers_; ///< of the pieces that the rank has to do with
    slot slots_[2];
};

} // namespace attn::detail
