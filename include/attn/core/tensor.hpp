// A tensor that owns its memory: what `attend` returns.
#pragma once

#include "random_numbers.hpp"
#include "scalar.hpp"
#include "tensor_view.hpp"

#include <algorithm>
#include <memory>
#include <new>
#include <span>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Cache lines, and the widest SIMD register: memory the library allocates begins on such a boundary.
inline constexpr std::size_t alignment = 64;

namespace detail {

struct aligned_delete {
    void operator()(void* p) const { ::operator delete(p, std::align_val_t{alignment}); }
};

} // namespace detail

/// A contiguous, zero-initialised tensor [batch][heads][tokens][channels]. One that was moved from is empty. A view of a temporary would
/// be of memory that is gone before it is read, so it is refused when the program is compiled: name the tensor first. A call that takes
/// tensors, such as attend(op, q, k, v), may be given temporary ones.
template <class T>
class tensor {
public:
    tensor() = default;
    /// Throws shape_error if an extent is negative, or there would be more than max_bytes.
    explicit tensor(const attn::shape& shape) : shape_(shape) {
        const auto bytes = bytes_of(shape);
        data_.reset(static_cast<T*>(::operator new(bytes, std::align_val_t{alignment})));
        std::uninitialized_value_construct_n(data_.get(), bytes / sizeof(T));
    }
    /// A tensor of random numbers between -limit and limit, all equally likely, to try an operator with or to begin a training: the same
    /// for a seed on every machine. Throws shape_error as the constructor.
    [[nodiscard]] static tensor random(const attn::shape& shape, std::uint64_t seed, T limit = T(1))
        requires Scalar<T>
    {
        tensor result(shape);
        detail::random_numbers uniform{seed};
        std::generate_n(result.data(), shape.size(), [&] { return static_cast<T>(2 * uniform() - 1) * limit; });
        return result;
    }
    /// Takes the memory of another, which is empty afterwards.
    tensor(tensor&& other) noexcept : shape_(std::exchange(other.shape_, detail::no_shape)), data_(std::move(other.data_)) {}
    tensor& operator=(tensor&& other) noexcept {
        shape_ = std::exchange(other.shape_, detail::no_shape);
        data_ = std::move(other.data_);
        return *this;
    }

    /// Where the elements lie.
    T* data() noexcept { return data_.get(); }
    /// Where the elements lie.
    const T* data() const noexcept { return data_.get(); }
    /// All elements, in the order in which they lie.
    std::span<T> elements() & noexcept { return {data(), static_cast<std::size_t>(shape_.size())}; }
    /// All elements, in the order in which they lie.
    std::span<const T> elements() const& noexcept { return {data(), static_cast<std::size_t>(shape_.size())}; }
    std::span<const T> elements() const&& = delete;
    /// The extents.
    const attn::shape& shape() const noexcept { return shape_; }
    /// A view of all of it.
    tensor_view<T> view() & noexcept { return head_major(data(), shape_); }
    /// A view of all of it.
    tensor_view<const T> view() const& noexcept { return head_major(data(), shape_); }
    tensor_view<const T> view() const&& = delete;
    /// A view of a part of it: see tensor_view::slice.
    tensor_view<T> slice(const tensor_part& part) & noexcept { return view().slice(part); }
    /// A view of a part of it: see tensor_view::slice.
    tensor_view<const T> slice(const tensor_part& part) const& noexcept { return view().slice(part); }
    tensor_view<const T> slice(const tensor_part& part) const&& = delete;
    operator tensor_view<T>() & noexcept { return view(); }
    operator tensor_view<const T>() const& noexcept { return view(); }
    operator tensor_view<const T>() const&& = delete;

    T& operator()(index_t b, index_t h, index_t i, index_t c) noexcept { return view()(b, h, i, c); }
    const T& operator()(index_t b, index_t h, index_t i, index_t c) const noexcept { return view()(b, h, i, c); }

private:
    static std::size_t bytes_of(const attn::shape& shape) {
        detail::check_shape<T>("tensor", "shape", shape);
        // No less and no more than what was checked: gcc 12 does not see it, and warns of allocations that cannot be.
        return static_cast<std::size_t>(std::clamp<index_t>(detail::product(shape.size(), static_cast<index_t>(sizeof(T))), 0, max_bytes));
    }

    attn::shape shape_ = detail::no_shape;
    std::unique_ptr<T, detail::aligned_delete> data_;
};

/// Deduces a view of a tensor's numbers.
template <class T>
tensor_view(tensor<T>&) -> tensor_view<T>;
/// Deduces a view, to be read only, of a const tensor's numbers.
template <class T>
tensor_view(const tensor<T>&) -> tensor_view<const T>;

namespace detail {

/// A view that a call reads and does not keep: it may be of a temporary tensor.
template <class View>
struct call_argument : View {
    using View::View;
    template <class V>
        requires(!std::derived_from<std::remove_cvref_t<V>, call_argument> && std::convertible_to<const std::remove_cvref_t<V>&, View>)
    constexpr call_argument(V&& of) : View(std::as_const(of)) {}
};
/// A view of numbers of T that a call reads and does not keep, where T is known from other arguments.
template <class T>
using read_view = std::type_identity_t<call_argument<tensor_view<const T>>>;

template <class T>
T scalar_of(const tensor_view<T>&);
template <class T>
T scalar_of(const tensor<T>&);
template <MdspanLike M>
typename M::element_type scalar_of(const M&);
/// The scalar type of a tensor or of a view.
template <class V>
using scalar_t = std::remove_const_t<decltype(scalar_of(std::declval<const V&>()))>;

} // namespace detail

/// A tensor, or a view of one, or what converts to a view: an mdspan.
template <class V>
concept TensorLike = requires { typename detail::scalar_t<V>; } && Scalar<detail::scalar_t<V>>;

} // namespace attn
