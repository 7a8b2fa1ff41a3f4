// A view of a tensor that is computed with in one type, and may be stored in a narrower one.
#pragma once

#include "stored_rows.hpp"
#include "tensor.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A tensor (batch, heads, tokens, channels) that is computed with in T: stored in T, or if that is float perhaps in a 16-bit type, which
/// becomes float on the way to registers, and is rounded to on the way back. T is const where it is only read. Made of a tensor or a view
/// of one.
template <class T>
class stored_view {
    static_assert(
        !Narrow<T>,
        "attn: tensors of 16-bit numbers are viewed, read and written as float: inputs<float>, outputs<float>, stored_view<float>");
    using number = std::remove_const_t<T>;
    using address = std::conditional_t<std::is_const_v<T>, const void*, void*>;
    template <class S>
    static constexpr bool becomes = std::is_const_v<T> || !std::is_const_v<S>; // nothing const is written to

public:
    constexpr stored_view() = default;
    /// A view of memory that somebody else owns, whose numbers are stored in `format`.
    constexpr stored_view(address data, narrow_format format, const attn::shape& shape, const attn::strides& strides) noexcept
        : data_(data), format_(format), shape_(shape), strides_(strides) {}
    /// A view of memory that somebody else owns, of numbers of T.
    constexpr stored_view(T* data, const attn::shape& shape, const attn::strides& strides) noexcept
        : data_(data), shape_(shape), strides_(strides) {}
    /// A view of the elements of a tensor_view of T, or of a 16-bit type.
    template <class S>
        requires becomes<S> && (std::same_as<std::remove_const_t<S>, number> || Narrow<S>)
    constexpr stored_view(const tensor_view<S>& of) noexcept
        : data_(of.data()), format_(narrow_format_of<std::remove_const_t<S>>), shape_(of.shape()), strides_(of.strides()) {
        static_assert(!Narrow<S> || std::same_as<number, float>,
                      "attn: tensors of 16-bit numbers are computed with in float, not in double");
    }
    /// A view of a tensor of T, or of a 16-bit type.
    template <class S>
        requires std::constructible_from<stored_view, tensor_view<S>>
    stored_view(tensor<S>& of) noexcept : stored_view(of.view()) {}
    /// A view, to be read only, of a tensor of T, or of a 16-bit type.
    template <class S>
        requires std::constructible_from<stored_view, tensor_view<const S>>
    stored_view(const tensor<S>& of) noexcept : stored_view(of.view()) {}
    template <class S>
    stored_view(const tensor<S>&& temporary) = delete;
    /// A view of an mdspan, of the extents that a tensor_view may be made of.
    template <detail::MdspanLike M>
        requires std::constructible_from<stored_view, tensor_view<typename M::element_type>>
    constexpr stored_view(const M& m) : stored_view(tensor_view<typename M::element_type>(m)) {}
    /// A view, to be read only, of what another views to write.
    template <class S>
        requires(std::is_const_v<T> && std::same_as<S, number>)
    constexpr stored_view(const stored_view<S>& of) noexcept
        : data_(of.data()), format_(of.format()), shape_(of.shape()), strides_(of.strides()) {}

    /// Where element (0, 0, 0, 0) lies.
    constexpr address data() const noexcept { return data_; }
    /// What the numbers are stored in: none for T.
    constexpr narrow_format format() const noexcept { return format_; }
    /// Whether the numbers are stored in a 16-bit type.
    constexpr bool is_narrow() const noexcept { return format_ != narrow_format::none; }
    /// Bytes of an element.
    constexpr index_t element_bytes() const noexcept { return is_narrow() ? 2 : static_cast<index_t>(sizeof(T)); }
    /// The extents.
    constexpr const attn::shape& shape() const noexcept { return shape_; }
    /// The distances between neighbours, in elements.
    constexpr const attn::strides& strides() const noexcept { return strides_; }
    /// The number; of what is written, something that may be assigned to.
    auto operator()(index_t batch, index_t head, index_t token, index_t channel) const {
        const auto at = rows(batch, head, token).address(0, channel);
        if constexpr (std::is_const_v<T>) return detail::loaded<number>(at, format_);
        else return detail::stored_number<T>(at, format_);
    }
    /// The view of numbers that are stored in T, which is checked before.
    constexpr tensor_view<T> numbers() const noexcept { return {static_cast<T*>(data_), shape_, strides_}; }
    /// The view of numbers that are stored in T; throws argument_error if they are stored in 16 bits.
    constexpr operator tensor_view<T>() const {
        if (is_narrow())
            detail::raise(argument_error("stored_view", "numbers", "of shape ", shape_,
                                         " are stored in 16 bits: they are to be had one by one, or by rows"));
        return numbers();
    }
    /// The rows of one batch entry and head, from one on.
    constexpr stored_rows<T> rows(index_t batch, index_t head, index_t first = 0) const {
        return {element(batch * strides_.batch + head * strides_.heads + first * strides_.tokens), format_, strides_.tokens,
                strides_.channels};
    }
    /// A view of a part of the tensor, where it lies: see tensor_view::slice.
    constexpr stored_view slice(const tensor_part& part) const noexcept {
        return {element(part.offset(strides_)), format_, part.shape_of(shape_), strides_};
    }
    /// A view of the same elements whose tokens are the channels of this one, and whose channels are its tokens.
    constexpr stored_view transposed() const noexcept { return {data_, format_, shape_.transposed(), strides_.transposed()}; }

private:
    /// Where an element lies, so many behind the first; null without memory.
    constexpr typename stored_rows<T>::byte* element(index_t offset) const noexcept {
        return data_ ? static_cast<typename stored_rows<T>::byte*>(data_) + offset * element_bytes() : nullptr;
    }

    address data_ = nullptr;
    narrow_format format_ = narrow_format::none;
    attn::shape shape_ = detail::no_shape;
    attn::strides strides_;
};

/// A tensor, or what views one, of numbers that attn computes in or of 16 bits.
template <class V>
concept StoredTensor = std::convertible_to<const V&, stored_view<const float>> || std::convertible_to<const V&, stored_view<const double>>;

/// How the tensors of a call may be stored: each in its own way, which is known as the program runs.
struct any_storage {
    /// Rows of T.
    template <class T>
    using rows = stored_rows<T>;

    /// The view as it is.
    template <class T>
    static const stored_view<T>& view(const stored_view<T>& of) {
        return of;
    }
};
/// As numbers of T, all of them, which is known as it is compiled: so a call is half as much code.
struct unnarrowed_storage {
    /// Rows of T.
    template <class T>
    using rows = row_block<T>;

    /// The view of its numbers.
    template <class T>
    static tensor_view<T> view(const stored_view<T>& of) {
        return of.numbers();
    }
};

namespace detail {

/// What a call reads and does not keep, as it is stored, of numbers that are computed with in T, which is known from other arguments.
template <class T>
using read_stored = std::type_identity_t<call_argument<stored_view<const T>>>;

/// Calls f with the type that a view's numbers are stored in, of those of 16 bits one for all.
template <class T>
auto with_storage(const stored_view<T>& view, const auto& f) {
    if constexpr (std::same_as<T, float> || std::same_as<T, const float>)
        if (view.is_narrow()) return f(std::type_identity<sixteen_bits>{});
    return f(std::type_identity<std::remove_const_t<T>>{});
}
/// Throws shape_error unless the view can be read, or written, and the channels of a row lie side by side.
void check_rows(std::string_view operation, std::string_view argument, const AnyView auto& view) {
    check_view(operation, argument, view);
    if (view.shape().channels > 1 && view.strides().channels != 1)
        detail::raise(shape_error(operation, argument, "of shape ", view.shape(), " has a channel stride of ", view.strides().channels,
                                  ": the channels of a row must lie side by side"));
}

/// The type that a StoredTensor is computed with in.
template <StoredTensor V>
using computed_t = std::conditional_t<std::convertible_to<const V&, stored_view<const float>>, float, double>;
/// Whether such tensors are computed in one type.
template <StoredTensor First, StoredTensor... Others>
inline constexpr bool computed_alike = (std::same_as<computed_t<First>, computed_t<Others>> && ...);

template <class V>
inline constexpr bool is_stored_view = false;
template <class T>
inline constexpr bool is_stored_view<stored_view<T>> = true;

/// How tensors are stored that are computed with in T, as far as their types tell.
template <class T, StoredTensor... V>
using storage_of = std::conditional_t<((std::convertible_to<const V&, tensor_view<const T>> && !is_stored_view<V>) && ...),
                                      unnarrowed_storage, any_storage>;

} // namespace detail

} // namespace attn
