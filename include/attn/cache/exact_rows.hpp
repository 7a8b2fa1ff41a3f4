// The first tokens of a cache that are not quantised.
#pragma once

#include "key_value_pool.hpp"

#include <memory>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// Keys and values of the first exact_tokens of a quantised sequence, as they were given: [heads][exact_tokens][channels] each, once there
/// are some. Forks share them until one of them writes.
template <Scalar T>
class exact_rows {
public:
    struct part {
        std::vector<T> keys, values;
    };

    /// How many rows there is memory for: all, or none.
    index_t rows(const cache_layout& l) const { return numbers_ ? l.exact_tokens : 0; }
    const T* keys() const { return numbers_ ? numbers_->keys.data() : nullptr; }
    const T* values() const { return numbers_ ? numbers_->values.data() : nullptr; }
    /// Bytes of so many rows.
    static index_t bytes(const cache_layout& l, index_t rows) {
        return product(l.kv_heads, rows, l.key_channels + l.value_channels, static_cast<index_t>(sizeof(T)));
    }

    /// Keeps those of new tokens, from position `first` on, that are among the first.
    void put(const cache_layout& l, index_t first, const stored_view<const T>& keys, const stored_view<const T>& values) {
        if (first >= l.exact_tokens) return;
        auto own = copy(l);
        const auto put_rows = [&](const stored_view<const T>& from, std::vector<T>& to) {
            const auto count = std::min(from.shape().tokens, l.exact_tokens - first), channels = from.shape().channels;
            for (index_t head = 0; head < l.kv_heads; ++head)
                kernel::copy_rows<T>(from.rows(0, head), count, channels, to.data() + (head * l.exact_tokens + first) * channels, channels);
        };
        put_rows(keys, own->keys);
        put_rows(values, own->values);
        numbers_ = std::move(own);
    }
    /// Of those from `first` on, keeps those numbered, and moves them together. read_keys(head, position, to), and so read_values: tokens
    /// that are not among the first, which they may become.
    void keep(const cache_layout& l, index_t first, std::span<const index_t> numbers, const auto& read_keys, const auto& read_values) {
        if (!numbers_ || first >= l.exact_tokens) return;
        auto own = copy(l);
        const auto move = [&](std::vector<T>& rows, index_t channels, const auto& read) {
            for (index_t head = 0; head < l.kv_heads; ++head) {
                auto* const of_head = rows.data() + head * l.exact_tokens * channels;
                for (index_t to = first; const auto number : numbers) {
                    const auto from = first + number;
                    if (to >= l.exact_tokens) break;
                    if (from >= l.exact_tokens) read(head, from, of_head + to * channels);
                    else if (to != from) std::copy_n(of_head + from * channels, channels, of_head + to * channels);
                    ++to;
                }
            }
        };
        move(own->keys, l.key_channels, read_keys);
        move(own->values, l.value_channels, read_values);
        numbers_ = std::move(own);
    }
    /// Calls f(memory, bytes) for keys, then values, which it fills.
    void fill(const cache_layout& l, const auto& f) {
        auto own = copy(l);
        for (auto* numbers : {&own->keys, &own->values}) f(numbers->data(), static_cast<index_t>(numbers->size() * sizeof(T)));
        numbers_ = std::move(own);
    }

private:
    /// Others may have these.
    std::shared_ptr<part> copy(const cache_layout& l) const {
        auto own = numbers_ ? std::make_shared<part>(*numbers_) : std::make_shared<part>();
        own->keys.resize(to_size(product(l.kv_heads, l.exact_tokens, l.key_channels)));
        own->values.resize(to_size(product(l.kv_heads, l.exact_tokens, l.value_channels)));
        return own;
    }

    std::shared_ptr<const part> numbers_;
};

} // namespace attn::detail
