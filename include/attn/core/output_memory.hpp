// Whether views share memory: that which a call writes is compared with what it reads.
#pragma once

#include "inputs.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

struct address_dimension {
    std::int64_t stride, extent; // bytes, count
};

/// Strided memory in bytes: first address, and the dimensions by falling stride.
struct footprint {
    std::int64_t first = 0, bytes = 0;
    std::array<address_dimension, 4> dimensions{};

    explicit footprint(const AnyView auto& v) : footprint(v.data(), v.element_bytes(), v.shape(), v.strides()) {}
    [[gnu::noinline]] footprint(const void* data, index_t element_bytes, const shape& n, const strides& s)
        : first(reinterpret_cast<std::int64_t>(data)), bytes(element_bytes) {
        dimensions = {{{s.batch, n.batch}, {s.heads, n.heads}, {s.tokens, n.tokens}, {s.channels, n.channels}}};
        for (auto& d : dimensions) {
            if (d.extent <= 1) d = {0, 1};
            d.stride *= bytes;
            if (d.stride < 0) {
                first += d.stride * (d.extent - 1);
                d.stride = -d.stride;
            }
        }
        for (auto end = dimensions.begin() + 1; end != dimensions.end(); ++end) // four of them, which std::sort is much code for
            for (auto at = end; at != dimensions.begin() && at[-1].stride < at->stride; --at) std::swap(at[-1], *at);
    }
    /// Bytes from the first element to the end of the last, over the dimensions whose stride is below `limit`.
    std::int64_t span_below(std::int64_t limit) const {
        auto span = bytes;
        for (const auto& d : dimensions)
            if (d.stride < limit) span += d.stride * (d.extent - 1);
        return span;
    }
    /// Whether two elements may share an address.
    [[gnu::noinline]] bool overlaps_itself() const {
        auto limit = INT64_MAX;
        for (const auto& d : dimensions) {
            if (d.extent > 1 && (span_below(d.stride) > d.stride || d.stride == limit)) return true;
            if (d.extent > 1) limit = d.stride;
        }
        return false;
    }
};

inline bool overlap(const footprint& x, const footprint& y) {
    if (x.first + x.span_below(INT64_MAX) <= y.first || y.first + y.span_below(INT64_MAX) <= x.first) return false;
    const auto apart_modulo = [&](std::int64_t period) {
        const auto walks_by_period = [&](const address_dimension& d) { return d.stride < period || d.stride % period == 0; };
        if (!std::ranges::all_of(x.dimensions, walks_by_period) || !std::ranges::all_of(y.dimensions, walks_by_period)) return false;
        const auto offset = ((y.first - x.first) % period + period) % period;
        return x.span_below(period) <= offset && offset + y.span_below(period) <= period;
    };
    for (const auto* view : {&x, &y})
        for (const auto& candidate : view->dimensions)
            if (candidate.stride > 0 && apart_modulo(candidate.stride)) return false;
    return true;
}

[[noreturn, gnu::cold]] inline void refuse_overlapping(std::string_view operation, std::string_view argument, const shape& s) {
    detail::raise(shape_error(operation, argument, joined({"of shape ", to_string(s), " has strides by which its elements overlap"})));
}
/// Throws shape_error if two elements of the view may share an address.
void check_writable(std::string_view operation, std::string_view argument, const AnyView auto& view) {
    if (view.shape().size() > 0 && footprint(view).overlaps_itself()) refuse_overlapping(operation, argument, view.shape());
}

} // namespace detail

/// True unless the two views provably share no byte. Interleaved views (the q, k, v and out columns of one buffer) count as
/// disjoint: modulo a stride that both walk by, their inner blocks lie beside each other.
bool overlap(const detail::AnyView auto& a, const detail::AnyView auto& b) noexcept {
    if (a.shape().size() == 0 || b.shape().size() == 0) return false;
    return detail::overlap(detail::footprint(a), detail::footprint(b));
}

/// True if two elements of the view may share an address, so that it cannot be written to.
bool overlaps_itself(const detail::AnyView auto& v) noexcept { return v.shape().size() > 0 && detail::footprint(v).overlaps_itself(); }

/// One output of a call. Operators, projections, norms and layers have a member, and patterns and score functions that refer to memory,
///     void check_apart(const output_memory& out) const { out.require_apart("bias", bias); }
/// by which the front doors refuse an output that overlaps it: what a call reads must not change while it runs.
class output_memory {
public:
    /// The memory that `out`, an argument of `operation`, is written to.
    output_memory(std::string_view operation, std::string_view argument, const detail::AnyView auto& out)
        : operation_(operation), argument_(argument), shape_(out.shape()), memory_(out) {}

    /// Throws shape_error if the output overlaps other memory, which the message calls `name`.
    void require_apart(std::string_view name, const detail::AnyView auto& other) const {
        require_apart(name, other.data(), other.element_bytes(), other.shape(), other.strides());
    }
    /// Throws shape_error if the output overlaps numbers side by side, called `name`.
    template <class T>
    void require_apart(std::string_view name, const std::span<T>& numbers) const {
        require_apart(name, detail::as_row(numbers));
    }
    /// Throws shape_error if the output overlaps the numbers of batch entries, called `name`.
    void require_apart(std::string_view name, const per_batch& numbers) const { require_apart(name, numbers.each()); }

private:
    [[gnu::noinline]] void require_apart(std::string_view name, const void* data, index_t element_bytes, const shape& n,
                                         const strides& s) const {
        if (!data || n.size() == 0 || shape_.size() == 0) return;
        if (detail::overlap(memory_, detail::footprint(data, element_bytes, n, s))) refuse(name, n);
    }
    [[noreturn, gnu::cold]] void refuse(std::string_view name, const shape& other) const {
        detail::raise(shape_error(operation_, argument_,
                                  detail::joined({"of shape ", to_string(shape_), " overlaps ", name, " of shape ", to_string(other)})));
    }

    std::string_view operation_, argument_;
    shape shape_;
    detail::footprint memory_;
};

/// Throws shape_error if `out` overlaps memory that a value refers to, if it has a member that says so.
void check_apart(const auto& value, const output_memory& out) {
    if constexpr (requires { value.check_apart(out); }) value.check_apart(out);
}

} // namespace attn
