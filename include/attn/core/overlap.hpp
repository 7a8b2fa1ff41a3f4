// Whether views share memory.
#pragma once

#include "tensor_view.hpp"

#include <algorithm>
#include <array>
#include <cstdint>

namespace attn::inline ATTN_INSTRUCTION_SET {

namespace detail {

struct address_dimension {
    std::int64_t stride, extent; // bytes, count
};

/// Strided memory in bytes: first address, and the dimensions by falling stride.
struct footprint {
    std::int64_t first = 0, bytes = 0;
    std::array<address_dimension, 4> dimensions{};

    explicit footprint(const AnyView auto& v) : first(reinterpret_cast<std::int64_t>(v.data())), bytes(v.element_bytes()) {
        const auto& n = v.shape();
        const auto& s = v.strides();
        dimensions = {{{s.batch, n.batch}, {s.heads, n.heads}, {s.tokens, n.tokens}, {s.channels, n.channels}}};
        for (auto& d : dimensions) {
            if (d.extent <= 1) d = {0, 1};
            d.stride *= bytes;
            if (d.stride < 0) {
                first += d.stride * (d.extent - 1);
                d.stride = -d.stride;
            }
        }
        std::ranges::sort(dimensions, std::ranges::greater{}, &address_dimension::stride);
    }
    /// Bytes from the first element to the end of the last, over the dimensions whose stride is below `limit`.
    std::int64_t span_below(std::int64_t limit) const {
        auto span = bytes;
        for (const auto& d : dimensions)
            if (d.stride < limit) span += d.stride * (d.extent - 1);
        return span;
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

} // namespace detail

/// True unless the two views provably share no byte. Interleaved views (the q, k, v and out columns of one buffer) count as
/// disjoint: modulo a stride that both walk by, their inner blocks lie beside each other.
template <detail::AnyView A, detail::AnyView B>
bool overlap(const A& a, const B& b) noexcept {
    if (a.shape().size() == 0 || b.shape().size() == 0) return false;
    return detail::overlap(detail::footprint(a), detail::footprint(b));
}

/// True if two elements of the view may share an address, so that it cannot be written to.
template <detail::AnyView V>
bool overlaps_itself(const V& v) noexcept {
    if (v.shape().size() == 0) return false;
    const detail::footprint f(v);
    auto limit = INT64_MAX;
    for (const auto& d : f.dimensions) {
        if (d.extent <= 1) continue;
        if (f.span_below(d.stride) > d.stride || d.stride == limit) return true;
        limit = d.stride;
    }
    return false;
}

namespace detail {

/// Throws shape_error if two elements of the view may share an address.
void check_writable(std::string_view operation, std::string_view argument, const AnyView auto& view) {
    if (overlaps_itself(view))
        throw shape_error(operation, argument, "of shape " + to_string(view.shape()) + " has strides by which its elements overlap");
}

} // namespace detail

} // namespace attn
