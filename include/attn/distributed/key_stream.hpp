// Keys and values on their way between ranks, a piece at a time.
#pragma once

#include "../core/inputs.hpp"
#include "../core/workspace.hpp"
#include "../parallel/executor.hpp"
#include "communicator.hpp"
#include "key_plan.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// The part of a tensor that has none of its tokens.
inline constexpr tensor_part no_tokens{.tokens = {}};

/// Rows of keys or values, token after token: so some tokens are one run of bytes.
template <Scalar T>
class travelling_rows {
public:
    travelling_rows(const stored_view<const T>& own, const row_range& held)
        : own_(own), held_(held), element_(own.element_bytes()),
          row_bytes_(product(own.shape().batch, own.shape().heads, own.shape().channels, element_)) {}

    /// Bytes of one token, in all batch entries and heads.
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
    /// A view of rows in memory whose first row is `begin`, or without memory where the rank holds them.
    stored_view<const T> view(const row_range& rows, const std::byte* memory, index_t begin) const {
        const auto own = own_.slice({.tokens = {rows.first - held_.first, rows.count}});
        if (!memory) return own;
        const auto& s = own.shape();
        return {memory + (rows.first - begin) * row_bytes_,
                own.format(),
                s,
                {s.heads * s.channels, s.channels, s.batch * s.heads * s.channels, 1}};
    }

private:
    stored_view<const T> own_;
    row_range held_;
    index_t element_, row_bytes_;
};

/// Memory for keys and values under way: of two pieces, what a rank sees of them and does not hold alone; and all own rows that others see.
template <Scalar T>
struct stream_memory {
    struct rows {
        workspace keys, values;

        void reserve(const inputs<T>& own, index_t count) {
            const auto reserve_for = [&](workspace& memory, const stored_view<const T>& of) {
                memory.reserve(static_cast<std::size_t>(product(count, travelling_rows<T>(of, {}).row_bytes())));
            };
            reserve_for(keys, own.keys);
            reserve_for(values, own.values);
        }
    };
    rows pieces[2], leaving;

    stream_memory(const key_plan& plan, index_t rank, const inputs<T>& own) {
        index_t most[2] = {};
        for (index_t number = 0; number < plan.pieces(); ++number)
            if (plan.receives(number, rank)) most[number > 0] = std::max(most[number > 0], plan.seen(number, rank).count);
        pieces[0].reserve(own, std::max(most[0], most[1]));
        if (plan.pieces() > 1) pieces[1].reserve(own, std::max(most[0], most[1]));
        leaving.reserve(own, plan.sent(rank).count);
    }
};

/// Takes a rank through the pieces of a plan: while it computes with one, the next is on its way. A rank's own rows are on their way before
/// it waits for anything, each piece when who is to have it is ready: so who has few queries goes on at its own pace. All ranks take the
/// pieces in the same order, and the parts of a piece in the order of hops: so each waits only for what comes before.
template <Scalar T, Communicator C>
class key_stream {
public:
    key_stream(C& ranks, const key_plan& plan, const inputs<T>& own, const row_range& held, stream_memory<T>& memory)
        : ranks_(ranks), plan_(plan), held_(held), keys_(own.keys, held), values_(own.values, held),
          slots_{{&memory.pieces[0]}, {&memory.pieces[1]}}, leaving_{&memory.leaving} {
        for (index_t number = 0; number < plan.pieces(); ++number)
            if (plan.seen(number, ranks.rank()).count > 0) numbers_.push_back(number);
    }

    /// Calls compute(number, rows, keys, values) for each piece of which the rank sees something, and progress() is to be called now and
    /// then meanwhile; before each of them, and when all are done, before_piece(its number, or that of one behind all).
    void run(const auto& compute, const auto& before_piece) {
        send_own();
        if (!numbers_.empty()) prepare(0);
        for (std::size_t at = 0; at < numbers_.size(); ++at) {
            auto& own = slot_of(at);
            before_piece(numbers_[at]);
            take_in(own, true);
            if (at > 0) finish(slot_of(at - 1));
            if (at + 1 < numbers_.size()) prepare(at + 1);
            const auto view = [&](const travelling_rows<T>& rows, const workspace& memory) {
                return rows.view(own.rows, own.in_place ? nullptr : memory.bytes().data(), own.rows.first);
            };
            compute(numbers_[at], own.rows, view(keys_, own.memory->keys), view(values_, own.memory->values));
        }
        before_piece(std::numeric_limits<index_t>::max());
        for (auto* own : {&slots_[0], &slots_[1], &leaving_}) finish(*own);
    }
    void run(const auto& compute) {
        run(compute, [](index_t) {});
    }
    /// Moves on the messages that are under way.
    void progress() {
        for (auto& own : slots_) {
            take_in(own, false);
            for (auto& one : own.sending) ranks_.test(one);
        }
    }

private:
    using request = typename C::request;
    struct received {
        key_transfer what;
        request parts[2]; ///< keys and values
    };
    /// Rows of a piece, and what of them is under way.
    struct slot {
        typename stream_memory<T>::rows* memory;
        row_range rows = {};
        bool in_place = true;                 ///< the rank holds them: they are read as they lie
        std::vector<received> receiving = {}; ///< by hops
        std::size_t taken_in = 0;             ///< of those
        std::vector<key_transfer> passed_on = {};
        std::vector<request> sending = {};
    };

    slot& slot_of(std::size_t at) { return slots_[at % 2]; }
    void prepare(std::size_t at) {
        auto& own = slot_of(at);
        const auto number = numbers_[at];
        own.rows = plan_.seen(number, ranks_.rank());
        own.in_place = !plan_.receives(number, ranks_.rank());
        own.receiving.clear();
        own.passed_on.clear();
        own.taken_in = 0;
        if (own.in_place) return;
        plan_.for_each_transfer_of(number, ranks_.rank(), [&](const key_transfer& t) {
            if (t.to == ranks_.rank()) own.receiving.push_back({t, {}});
            else if (t.owner != ranks_.rank()) own.passed_on.push_back(t);
        });
        std::ranges::sort(own.receiving, std::ranges::less{}, [](const received& r) { return std::pair(r.what.hop, r.what.owner); });
        for (auto& [what, parts] : own.receiving)
            each_part(own, what, [&](std::span<std::byte> bytes, index_t part) {
                parts[part] = ranks_.receive(what.from, tag_of(what, part), bytes);
            });
        copy(own, common_rows(own.rows, held_));
    }
    /// Passes on what has come; all of it, if it waits.
    void take_in(slot& own, bool waits) {
        for (; own.taken_in < own.receiving.size(); ++own.taken_in) {
            auto& [what, parts] = own.receiving[own.taken_in];
            for (auto& part : parts) {
                if (waits) ranks_.wait(part);
                else if (!ranks_.test(part)) return;
            }
            for (const auto& t : own.passed_on)
                if (t.owner == what.owner) send(own, t);
        }
    }
    void send_own() {
        leaving_.rows = plan_.sent(ranks_.rank());
        copy(leaving_, leaving_.rows);
        for (index_t number = 0; number < plan_.pieces(); ++number)
            plan_.for_each_transfer_of(number, ranks_.rank(), [&](const key_transfer& t) {
                if (t.owner == ranks_.rank()) send(leaving_, t);
            });
    }
    void finish(slot& own) {
        for (auto& one : own.sending) ranks_.wait(one);
        own.sending.clear();
    }
    void copy(slot& own, const row_range& rows) {
        keys_.copy(rows, own.memory->keys.bytes().data(), own.rows.first);
        values_.copy(rows, own.memory->values.bytes().data(), own.rows.first);
    }
    void send(slot& own, const key_transfer& t) {
        each_part(own, t,
                  [&](std::span<std::byte> bytes, index_t part) { own.sending.push_back(ranks_.send(t.to, tag_of(t, part), bytes)); });
    }
    /// Between two ranks, what has the same tag is sent and received in the order of pieces.
    static index_t tag_of(const key_transfer& t, index_t part) { return 2 * (t.owner % 16'000) + part + 1; }
    /// f(bytes, number) of the keys, 0, and of the values, 1, if they have any.
    void each_part(slot& own, const key_transfer& t, const auto& f) const {
        const auto part = [&](const workspace& memory, index_t row_bytes, index_t number) {
            if (row_bytes == 0) return;
            f(memory.bytes().subspan(static_cast<std::size_t>((t.rows.first - own.rows.first) * row_bytes),
                                     static_cast<std::size_t>(t.rows.count * row_bytes)),
              number);
        };
        part(own.memory->keys, keys_.row_bytes(), 0);
        part(own.memory->values, values_.row_bytes(), 1);
    }

    C& ranks_;
    const key_plan& plan_;
    row_range held_;
    travelling_rows<T> keys_, values_;
    std::vector<index_t> numbers_; ///< of the pieces that the rank sees
    slot slots_[2];
    slot leaving_; ///< own rows
};

} // namespace attn::detail
