// References to callables.
#pragma once

#include "instruction_set.hpp"

#include <concepts>
#include <memory>
#include <type_traits>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// A reference to a callable void(Arguments...), for the duration of a call: what takes one is compiled once for all of them. Two pointers:
/// passing it never allocates.
template <class... Arguments>
class call_ref {
public:
    /// Refers to `function`, which outlives it.
    template <class F>
        requires(!std::same_as<std::remove_cvref_t<F>, call_ref> && std::invocable<F&, Arguments...>)
    call_ref(F&& function)
        : object_(const_cast<void*>(static_cast<const void*>(std::addressof(function)))),
          call_([](void* object, Arguments... a) { (*static_cast<std::remove_reference_t<F>*>(object))(a...); }) {}

    void operator()(Arguments... a) const { call_(object_, a...); }

private:
    void* object_;
    void (*call_)(void*, Arguments...);
};

} // namespace attn::detail
