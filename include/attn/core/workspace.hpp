// Memory that kernels work in. The caller owns it and reuses it, so that `forward` allocates nothing.
#pragma once

#include "tensor.hpp"

#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Scratch memory, aligned and uninitialised. Its contents mean nothing between calls; two calls at a time need two workspaces.
class workspace {
public:
    workspace() = default;
    explicit workspace(std::size_t bytes) { reserve(bytes); }

    std::size_t size_bytes() const { return size_; }
    std::span<std::byte> bytes() const { return {data_.get(), size_}; }

    /// Grows to at least `bytes`; never shrinks.
    void reserve(std::size_t bytes) {
        if (bytes <= size_) return;
        data_.reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{alignment})));
        size_ = bytes;
    }

private:
    std::unique_ptr<std::byte, detail::aligned_delete> data_;
    std::size_t size_ = 0;
};

namespace detail {

/// Cuts a workspace into aligned arrays. A default-constructed one only counts, so that the code which lays out the memory is
/// also the code which tells its size.
class scratch {
public:
    scratch() = default;
    explicit scratch(std::byte* begin) : begin_(begin) {}

    template <class T>
    T* take(index count) {
        const auto at = used_;
        used_ += (static_cast<std::size_t>(count) * sizeof(T) + alignment - 1) / alignment * alignment;
        return begin_ ? reinterpret_cast<T*>(begin_ + at) : nullptr;
    }
    std::size_t used_bytes() const { return used_; }

private:
    std::byte* begin_ = nullptr;
    std::size_t used_ = 0;
};

} // namespace detail

} // namespace attn
