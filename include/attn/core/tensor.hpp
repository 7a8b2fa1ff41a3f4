// A tensor that owns its memory: what `attend` returns.
#pragma once

#include "tensor_view.hpp"

#include <memory>
#include <new>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Cache lines, and the widest SIMD register: memory the library allocates begins on such a boundary.
inline constexpr std::size_t alignment = 64;

namespace detail {

struct aligned_delete {
    void operator()(void* p) const { ::operator delete(p, std::align_val_t{alignment}); }
};

} // namespace detail

/// A contiguous, zero-initialised tensor [batch][heads][tokens][channels].
template <class T>
class tensor {
public:
    tensor() = default;
    explicit tensor(const attn::shape& shape)
        : shape_(shape), data_(static_cast<T*>(::operator new(static_cast<std::size_t>(shape.size()) * sizeof(T), std::align_val_t{alignment}))) {
        std::uninitialized_value_construct_n(data_.get(), shape.size());
    }

    T* data() { return data_.get(); }
    const T* data() const { return data_.get(); }
    const attn::shape& shape() const { return shape_; }
    tensor_view<T> view() { return head_major(data(), shape_); }
    tensor_view<const T> view() const { return head_major(data(), shape_); }
    operator tensor_view<T>() { return view(); }
    operator tensor_view<const T>() const { return view(); }

    T& operator()(index b, index h, index i, index c) { return view()(b, h, i, c); }
    const T& operator()(index b, index h, index i, index c) const { return view()(b, h, i, c); }

private:
    attn::shape shape_;
    std::unique_ptr<T, detail::aligned_delete> data_;
};

} // namespace attn
