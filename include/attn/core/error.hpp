// How errors leave attn: all through one function, which throws them, or where exceptions are compiled out tells a handler of them.
#pragma once

#include "instruction_set.hpp"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <utility>

namespace attn {

/// What an error is about, as the types that are thrown say too: the shape or memory of an argument (shape_error), its value
/// (argument_error), weights or a file of them (parameter_error), another rank (rank_error).
enum class error_kind { shape, argument, parameter, rank };

/// What a program with -fno-exceptions is told of an error by: its kind, and the message that an exception would carry, of a file without
/// the file's name. What has called attn cannot go on: the handler ends the program, or it ends when the handler returns.
using error_handler = void (*)(error_kind kind, const char* message);

/// Of the program, whatever instruction sets its objects are compiled for: see set_error_handler.
inline constinit error_handler current_error_handler = nullptr;

} // namespace attn

namespace attn::inline ATTN_INSTRUCTION_SET {

/// Sets what is told of errors where attn is compiled with -fno-exceptions; returns what was before, at the beginning a null pointer, which
/// is nobody. After the handler the message goes to stderr and the program ends by std::abort. To be set before other threads call attn.
/// With exceptions attn throws and asks no handler. Memory that cannot be had ends a program without exceptions, and without a word of
/// attn's.
inline error_handler set_error_handler(error_handler handler) noexcept { return std::exchange(current_error_handler, handler); }

namespace detail {

/// Throws an error; or tells the handler of it and ends the program.
template <class Error>
[[noreturn, gnu::cold]] void raise(const Error& error) {
#ifdef __cpp_exceptions
    throw error;
#else
    if (current_error_handler) current_error_handler(Error::kind, error.what());
    std::fprintf(stderr, "%s\n", error.what());
    std::abort();
#endif
}

/// f(). What it throws, on_exception() sees as the current exception.
void try_catch(const auto& f, const auto& on_exception) {
#ifdef __cpp_exceptions
    try {
        f();
    } catch (...) { on_exception(); }
#else
    static_cast<void>(on_exception);
    f();
#endif
}
/// f(); or on_error(what it throws), if that is of the type.
template <class Error>
auto try_catch(const auto& f, const auto& on_error) -> decltype(f()) {
#ifdef __cpp_exceptions
    try {
        return f();
    } catch (const Error& error) { return on_error(error); }
#else
    static_cast<void>(on_error);
    return f();
#endif
}
/// Passes the current exception on.
[[noreturn]] inline void throw_again() {
#ifdef __cpp_exceptions
    throw;
#else
    std::abort();
#endif
}

} // namespace detail

} // namespace attn
