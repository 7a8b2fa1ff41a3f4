// Memory that kernels work in. The caller owns it and reuses it, so that `forward` allocates nothing.
#pragma once

#include "tensor.hpp"

#include <span>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Scratch memory, aligned and uninitialised. Its contents mean nothing between calls; two calls at a time need two workspaces. One that
/// was moved from is empty.
class workspace {
public:
    workspace() = default;
    /// Memory of so many bytes.
    explicit workspace(std::size_t bytes) { reserve(bytes); }
    /// Memory that somebody else lends, from its first cache line on: a piece of a larger one, an arena, an array. It outlives the
    /// workspace.
    explicit workspace(std::span<std::byte> lent) noexcept {
        void* begin = lent.data();
        std::size_t size = lent.size();
        if (std::align(alignment, 0, begin, size)) bytes_ = {static_cast<std::byte*>(begin), size};
    }
    /// Takes the memory of another.
    workspace(workspace&& other) noexcept : own_(std::move(other.own_)), bytes_(std::exchange(other.bytes_, {})) {}
    workspace& operator=(workspace&& other) noexcept {
        own_ = std::move(other.own_);
        bytes_ = std::exchange(other.bytes_, {});
        return *this;
    }

    /// How many bytes there are.
    std::size_t size_bytes() const noexcept { return bytes_.size(); }
    /// The bytes.
    std::span<std::byte> bytes() const noexcept { return bytes_; }

    /// Grows to at least `bytes`, in memory of its own; never shrinks. Throws argument_error if that is more than max_bytes.
    void reserve(std::size_t bytes) {
        if (bytes <= size_bytes()) return;
        if (bytes > static_cast<std::size_t>(max_bytes))
            detail::raise(argument_error("workspace", "size", "of ", bytes, " bytes is more than ", detail::max_bytes_text));
        own_.reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{alignment})));
        bytes_ = {own_.get(), bytes};
    }

private:
    std::unique_ptr<std::byte, detail::aligned_delete> own_;
    std::span<std::byte> bytes_;
};

namespace detail {

/// Cuts a workspace into aligned arrays. A default-constructed one only counts, so that the code which lays out the memory is
/// also the code which tells its size. Throws argument_error if they take more than max_bytes, or a count is negative: the shapes that the
/// memory is for are no tensors'.
class scratch {
public:
    scratch() = default;
    explicit scratch(std::byte* begin) : begin_(begin) {}

    /// An array of as many elements as the product of the counts.
    template <class T>
    T* take(std::integral auto... counts) {
        const bool fits = std::min({static_cast<index_t>(counts)...}) >= 0;
        return reinterpret_cast<T*>(take_bytes(fits ? product(static_cast<index_t>(counts)..., static_cast<index_t>(sizeof(T))) : -1));
    }
    std::size_t used_bytes() const { return static_cast<std::size_t>(used_); }

private:
    static constexpr auto line = static_cast<index_t>(alignment);

    std::byte* take_bytes(index_t bytes) {
        if (bytes < 0 || bytes > max_bytes - used_) refuse();
        const auto at = std::exchange(used_, used_ + (bytes + line - 1) / line * line);
        return begin_ ? begin_ + at : nullptr;
    }
    [[noreturn, gnu::cold, gnu::noinline]] static void refuse() {
        detail::raise(argument_error("workspace", "size", "for such shapes would be more than ", max_bytes_text, ", or negative"));
    }

    std::byte* begin_ = nullptr;
    index_t used_ = 0;
};

/// A piece of scratch memory for each slice of a workspace: what one thread works in.
class slices {
public:
    slices() = default;
    /// Pieces of so many bytes, from `begin` on.
    slices(std::byte* begin, std::size_t bytes) : begin_(begin), bytes_(bytes) {}
    slices(scratch& memory, index_t count, std::size_t bytes) : slices(memory.take<std::byte>(count, static_cast<index_t>(bytes)), bytes) {}

    scratch operator[](index_t slice) const { return scratch(begin_ + static_cast<std::size_t>(slice) * bytes_); }

private:
    std::byte* begin_ = nullptr;
    std::size_t bytes_ = 0;
};

/// Bytes that take(scratch) takes.
std::size_t bytes_taken(const auto& take) {
    scratch counted;
    static_cast<void>(take(counted));
    return counted.used_bytes();
}
/// Bytes that a Layout(scratch, of...) takes.
template <class Layout>
std::size_t bytes_for(const auto&... of) {
    return bytes_taken([&](scratch& memory) { return Layout(memory, of...); });
}
/// Bytes for so many threads, of so many each. Throws argument_error if they are more than max_bytes.
inline std::size_t bytes_for_threads(index_t concurrency, std::size_t each) {
    return bytes_taken([&](scratch& memory) { return memory.take<std::byte>(concurrency, static_cast<index_t>(each)); });
}
/// What take(scratch) takes of a workspace, which grows to hold it.
auto taken_of(workspace& memory, const auto& take) {
    memory.reserve(bytes_taken(take));
    scratch own(memory.bytes().data());
    return take(own);
}

} // namespace detail

} // namespace attn
