// The memory that a call writes, compared with what it reads.
#pragma once

#include "inputs.hpp"
#include "overlap.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// One output of a call. Operators, projections, norms and layers have a member, and patterns and score functions that refer to memory,
///     void check_apart(const output_memory& out) const { out.require_apart("bias", bias); }
/// by which the front doors refuse an output that overlaps it: what a call reads must not change while it runs.
class output_memory {
public:
    /// The memory that `out`, an argument of `operation`, is written to.
    template <detail::AnyView V>
    output_memory(std::string_view operation, std::string_view argument, const V& out)
        : operation_(operation), argument_(argument), shape_(out.shape()), memory_(out) {}

    /// Throws shape_error if the output overlaps other memory, which the message calls `name`.
    template <detail::AnyView V>
    void require_apart(std::string_view name, const V& other) const {
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
        throw shape_error(operation_, argument_,
                          detail::joined({"of shape ", to_string(shape_), " overlaps ", name, " of shape ", to_string(other)}));
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
