// How a sequence is kept as bytes.
#pragma once

#include "evicted_positions.hpp"
#include "exact_rows.hpp"

#include <array>
#include <cstring>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Writes a sequence, and reads it: what its bytes begin with, how long they are, and what is refused.
template <Scalar T>
class saved_sequence {
public:
    static std::vector<std::byte> save(const sequence<T>& of) {
        const auto header = header_of(of);
        std::vector<std::byte> bytes(static_cast<std::size_t>(bytes_of(of, header)));
        auto* to = bytes.data();
        const auto put = [&](const void* from, index_t count) { to = std::copy_n(static_cast<const std::byte*>(from), count, to); };
        put(&header, sizeof header);
        put(of.evicted().data(), static_cast<index_t>(of.evicted().size_bytes()));
        const auto& l = of.pool().layout();
        const auto exact = l.kv_heads * header.exact_rows * static_cast<index_t>(sizeof(T));
        if (exact > 0) {
            put(of.exact_.keys(), exact * l.key_channels);
            put(of.exact_.values(), exact * l.value_channels);
        }
        of.for_each_row([&](const auto& part, index_t head, index_t position) {
            of.read_row(part, head, position, to);
            to += part.row_bytes;
        });
        return bytes;
    }

    static sequence<T> load(key_value_pool<T>& pool, std::span<const std::byte> bytes) {
        sequence<T> loaded(pool);
        header_type header;
        if (bytes.size() < sizeof header) refuse("end early: they are ", bytes.size());
        std::memcpy(&header, bytes.data(), sizeof header);
        check(header, header_of(loaded), static_cast<index_t>(bytes.size() - sizeof header));
        const auto* from = bytes.data() + sizeof header;
        const auto get = [&](void* to, index_t count) {
            std::copy_n(from, count, static_cast<std::byte*>(to));
            from += count;
        };
        std::vector<row_range> evicted(static_cast<std::size_t>(header.evicted));
        get(evicted.data(), header.evicted * static_cast<index_t>(sizeof(row_range)));
        index_t end = -1;
        for (const auto& range : evicted) {
            if (range.first <= end || range.count <= 0 || range.count > header.tokens - range.first) refuse("are damaged");
            end = range.end();
        }
        loaded.evicted_ = evicted_positions(std::move(evicted));
        if (static_cast<index_t>(bytes.size()) != bytes_of(loaded, header)) refuse("end early, or are damaged: they are ", bytes.size());
        loaded.tokens_ = header.tokens;
        if (header.exact_rows > 0) loaded.exact_.fill(pool.layout(), get);
        take_pages(loaded);
        loaded.for_each_row([&](const auto& part, index_t head, index_t position) {
            loaded.write_row(part, head, position, from);
            from += part.row_bytes;
        });
        return loaded;
    }

private:
    struct header_type {
        std::uint64_t mark = 0x6174746e'00000002; ///< "attn", and the version; other orders of bytes have another
        index_t number_bytes = sizeof(T), format = 0;
        std::array<index_t, 5> layout{};
        index_t tokens = 0, evicted = 0, exact_rows = 0;
    };
    static header_type header_of(const sequence<T>& of) {
        const auto& l = of.pool().layout();
        header_type header;
        header.format = static_cast<index_t>(l.format);
        header.layout = {l.kv_heads, l.key_channels, l.value_channels, l.exact_tokens, l.rotates_keys};
        header.tokens = of.tokens_;
        header.evicted = std::ssize(of.evicted());
        header.exact_rows = of.exact_.rows(l);
        return header;
    }
    /// Bytes of a saved sequence; the largest index if they are more than memory can hold.
    static index_t bytes_of(const sequence<T>& of, const header_type& header) {
        const auto& places = of.pool().places_;
        auto left = header.tokens;
        for (const auto& range : of.evicted()) left -= range.count;
        const auto rows = product(of.pool().layout().kv_heads, places.keys.row_bytes + places.values.row_bytes, left);
        const auto exact = exact_rows<T>::bytes(of.pool().layout(), header.exact_rows);
        if (rows > max_bytes || exact > max_bytes) return std::numeric_limits<index_t>::max();
        return static_cast<index_t>(sizeof header + of.evicted().size_bytes()) + exact + rows;
    }

    [[noreturn]] static void refuse(const auto&... problem) { detail::raise(argument_error("sequence::load", "bytes", problem...)); }
    /// room: bytes behind the header.
    static void check(const header_type& header, const header_type& wanted, index_t room) {
        if (header.mark != wanted.mark) refuse("are no saved sequence, or one of another version or order of bytes");
        if (header.number_bytes != wanted.number_bytes || header.format != wanted.format || header.layout != wanted.layout)
            refuse("are of another type, format or layout than the pool: kv_heads ", header.layout[0], ", key_channels ", header.layout[1],
                   ", value_channels ", header.layout[2], ", exact_tokens ", header.layout[3], ", rotates_keys ", header.layout[4]);
        const bool counts = header.tokens >= 0 && header.tokens <= farthest_position && header.evicted >= 0 &&
                            header.evicted <= room / static_cast<index_t>(sizeof(row_range)) &&
                            (header.exact_rows == 0 || header.exact_rows == header.layout[3]);
        if (!counts) refuse("end early, or are damaged");
    }
    /// The pages that a sequence needs: those of tokens that are left.
    static void take_pages(sequence<T>& loaded) {
        auto& pool = loaded.pool();
        std::vector<index_t> taken;
        loaded.evicted_.for_each_left(loaded.tokens_, [&](const row_range& left) {
            for (auto page = left.first / loaded.page_tokens(); page * loaded.page_tokens() < left.end(); ++page)
                if (taken.empty() || taken.back() != page) taken.push_back(page);
        });
        if (std::ssize(taken) > pool.free_pages())
            refuse("need ", taken.size(), " pages, but of the pool's ", pool.pages(), " only ", pool.free_pages(), " are free");
        loaded.pages_.extend_evicted((loaded.tokens_ + loaded.page_tokens() - 1) / loaded.page_tokens());
        for (const auto page : taken) loaded.pages_.own(page);
    }
};

} // namespace attn::detail
