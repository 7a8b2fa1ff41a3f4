// Memory for the keys and values of many sequences, in pages.
#pragma once

#include "../attention/softmax_attention.hpp"
#include "cache_format.hpp"

#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// What a cache keeps of each token, rows of keys and of values for every kv head, and how.
struct cache_layout {
    index_t kv_heads = 1;
    index_t key_channels = 0;   ///< d_k
    index_t value_channels = 0; ///< d_v
    index_t page_tokens = 128;  ///< the tokens of a page: a multiple of 128
    cache_format format = cache_format::full;
    index_t exact_tokens = 0;  ///< how many first tokens of a sequence are not quantised, such as sinks
    bool rotates_keys = false; ///< by a Hadamard matrix, queries too, so that channels that stand out cost the others no digits
};

/// Rotary positions that a cache turns keys by when they are read, and queries alike: what is appended, kept and saved are keys before
/// them. The key of the token at position j, and the query of that at i, become what rotary<T>::forward makes of them at p(j) and p(i):
///     p(j) = j,      or, where evicted tokens are skipped,      p(j) = how many tokens before j are not evicted
/// Then those that are left stand side by side, so that a window with sinks has no greater distances than it has tokens, and what follows a
/// prompt that is cut short is as near as if it had been short. Patterns and score functions compare positions in the sequence, always.
/// Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding"; Xiao et al. 2023, "Efficient Streaming Language Models
/// with Attention Sinks".
template <Scalar T>
struct rotary_reading {
    kernel::rotary_table<T> table = {}; ///< a rotary<T>, which outlives the cache, with all positions p; none, and nothing is turned
    bool skips_evicted = false;         ///< whether positions count the tokens that are left
};

namespace detail {

/// Where the rows of a page lie, the keys of all heads and then the values; and how many bytes it has, in whole cache lines.
struct page_places : kernel::page_layout {
    index_t bytes = 0;
};

/// Throws argument_error unless there can be such a cache.
template <Scalar T>
page_places page_places_of(std::string_view operation, const cache_layout& l) {
    constexpr auto block = kernel::softmax_call<T>::block_keys;
    const auto require = [&](const char* what, index_t number, index_t least, index_t most) {
        if (number < least || number > most)
            detail::raise(argument_error(operation, what, "is ", number, ", not in ", least, " .. ", most));
    };
    constexpr index_t most = index_t{1} << 40; // of which the products below fit
    require("kv_heads", l.kv_heads, 1, most);
    require("key_channels", l.key_channels, 1, most);
    require("value_channels", l.value_channels, 0, most);
    require("page_tokens", l.page_tokens, block, most);
    require("exact_tokens", l.exact_tokens, 0, most);
    if (l.page_tokens % block != 0)
        detail::raise(argument_error(operation, "page_tokens", "is ", l.page_tokens, ", no multiple of ", block));
    if ((l.format == cache_format::bfloat16 || l.format == cache_format::half) && !std::same_as<T, float>)
        detail::raise(argument_error(operation, "format", "is of 16 bits, which are computed with in float"));
    page_places places;
    places.page_rows = l.page_tokens;
    const auto place = [&](kernel::page_part& part, index_t channels) {
        part.offset = places.bytes;
        part.format = row_format_of(l.format, channels);
        part.row_bytes = part.format.template row_bytes<T>();
        part.head_bytes = product(l.page_tokens, part.row_bytes);
        const auto bytes = product(l.kv_heads, part.head_bytes);
        if (bytes > max_bytes / 4)
            detail::raise(argument_error(operation, "page_tokens", "make pages of more than a quarter of ", max_bytes_text));
        constexpr auto line = static_cast<index_t>(alignment);
        places.bytes = (places.bytes + bytes + line - 1) / line * line;
    };
    place(places.keys, l.key_channels);
    places.keys.in_columns = true;
    place(places.values, l.value_channels);
    return places;
}

/// Throws argument_error unless keys of such a layout can be turned when they are read.
template <Scalar T>
const rotary_reading<T>& check_reading(const cache_layout& l, const rotary_reading<T>& reading) {
    constexpr auto name = "key_value_pool";
    const auto channels = 2 * reading.table.pairs;
    if (channels > l.key_channels)
        detail::raise(argument_error(name, "reading", "turns ", channels, " channels, but keys have ", l.key_channels));
    if (channels > 0 && l.rotates_keys)
        detail::raise(
            argument_error(name, "reading", "turns keys, but the layout rotates_keys: a Hadamard matrix mixes their channels before"));
    return reading;
}

} // namespace detail

/// Bytes of memory for so many pages of keys and values. Throws argument_error if the layout is wrong, or they are more than max_bytes.
template <Scalar T>
std::size_t pool_bytes(const cache_layout& layout, index_t pages) {
    const auto bytes = detail::product(detail::page_places_of<T>("pool_bytes", layout).bytes, std::max<index_t>(pages, 0));
    if (pages < 0 || bytes > max_bytes)
        detail::raise(argument_error("pool_bytes", "pages", "are ", pages, ": more than ", detail::max_bytes_text, ", or negative"));
    return static_cast<std::size_t>(bytes);
}

namespace detail {
template <Scalar T>
class page_list;
template <Scalar T>
class saved_sequence;
}
template <Scalar T>
class sequence;

/// Memory for the keys and values of sequences, in pages of a fixed number of tokens that the sequences take and give back: its own, or the
/// caller's. It outlives its sequences, stays where it is, and is used by one thread at a time; calls of attention that read it may run
/// beside each other.
template <Scalar T>
class key_value_pool {
public:
    /// A pool of so many pages. Throws argument_error if the layout is wrong, there can be no such memory, or `reading` turns more channels
    /// than keys have, or those that a Hadamard matrix has mixed (rotates_keys).
    key_value_pool(const cache_layout& layout, index_t pages, const rotary_reading<T>& reading = {})
        : key_value_pool(layout, detail::check_reading(layout, reading), workspace(pool_bytes<T>(layout, pages))) {}
    /// A pool of as many pages as fit the memory, from its first cache line on. It outlives the pool.
    key_value_pool(const cache_layout& layout, std::span<std::byte> memory, const rotary_reading<T>& reading = {})
        : key_value_pool(layout, detail::check_reading(layout, reading), workspace(memory)) {}
    key_value_pool(const key_value_pool&) = delete;
    key_value_pool& operator=(const key_value_pool&) = delete;

    /// What its pages hold, and how.
    const cache_layout& layout() const { return layout_; }
    /// What its keys are turned by when they are read.
    const rotary_reading<T>& reading() const { return reading_; }
    /// How many pages there are, taken or not.
    index_t pages() const { return std::ssize(uses_); }
    /// How many nobody has taken.
    index_t free_pages() const { return std::ssize(free_); }

private:
    friend class sequence<T>;
    friend class detail::page_list<T>;
    friend class detail::saved_sequence<T>;

    key_value_pool(const cache_layout& layout, const rotary_reading<T>& reading, workspace memory)
        : layout_(layout), reading_(reading), places_(detail::page_places_of<T>("key_value_pool", layout)), memory_(std::move(memory)),
          uses_(memory_.size_bytes() / static_cast<std::size_t>(places_.bytes)) {
        free_.reserve(uses_.size());
        for (auto page = pages(); page > 0; --page) free_.push_back(page - 1);
    }

    /// A page, which somebody takes: there is one.
    std::byte* take() {
        const auto page = free_.back();
        free_.pop_back();
        uses_[static_cast<std::size_t>(page)] = 1;
        return memory_.bytes().data() + page * places_.bytes;
    }
    index_t& uses(const std::byte* page) { return uses_[static_cast<std::size_t>((page - memory_.bytes().data()) / places_.bytes)]; }
    /// One of those who use a page needs it no more.
    void give_back(const std::byte* page) {
        if (--uses(page) == 0) free_.push_back((page - memory_.bytes().data()) / places_.bytes); // no memory: it was there before
    }

    cache_layout layout_;
    rotary_reading<T> reading_;
    detail::page_places places_;
    workspace memory_;
    std::vector<index_t> uses_, free_;
};

} // namespace attn
