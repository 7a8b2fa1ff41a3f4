# How attn builds its own tests, benchmarks and examples. None of this reaches a user of the library.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()

set(attn_warnings
  -Werror -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wdouble-promotion -Wold-style-cast
  -Wnon-virtual-dtor -Woverloaded-virtual -Wcast-align -Wimplicit-fallthrough -Wextra-semi)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND attn_warnings -Wno-maybe-uninitialized -Wno-uninitialized) # gcc 12 warns in its own AVX-512 header wherever Eigen uses it
else() # clang 19 warns of what -march=native finds on processors with AVX10.1, whatever it compiles; others do not know the warning
  list(APPEND attn_warnings -Wno-unknown-warning-option -Wno-invalid-feature-combination)
endif()

# attn_own: what each of attn's own programs links.
add_library(attn_own INTERFACE)
target_link_libraries(attn_own INTERFACE $<IF:$<BOOL:${ATTN_NATIVE}>,attn::native,attn::attn>)
target_compile_options(attn_own INTERFACE ${attn_warnings})
# Files that are compiled as one see each other's names, which is no fault of a local one; and gcc takes their unnamed namespaces for headers'.
target_compile_options(attn_own INTERFACE
  $<$<BOOL:$<TARGET_PROPERTY:UNITY_BUILD>>:-Wno-shadow$<$<CXX_COMPILER_ID:GNU>:$<SEMICOLON>-Wno-subobject-linkage>>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU") # its collector runs less often, which saves a tenth of the time
  target_compile_options(attn_own INTERFACE --param=ggc-min-heapsize=500000 --param=ggc-min-expand=300)
  # Below -O2 gcc leaves the upper halves of registers in use when it calls a function, vzeroupper being among these optimisations; std::exp and
  # its kin, which definitions call for each pair, then take up to thirty times as long. Textbooks' formulas go on rounding each product.
  if(CMAKE_CXX_FLAGS_RELEASE MATCHES "-O1|-Og" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    target_compile_options(attn_own INTERFACE -fexpensive-optimizations)
    if(NOT CMAKE_CXX_FLAGS_RELEASE MATCHES "-ffp-contract")
      target_compile_options(attn_own INTERFACE -ffp-contract=off)
    endif()
  endif()
endif()

# attn_compile: how checks and benchmarks call the compiler, as own programs are compiled; attn_compile_options: the same for another one.
set(attn_dependency_includes)
foreach(target Eigen3::Eigen xsimd)
  get_target_property(directories ${target} INTERFACE_INCLUDE_DIRECTORIES)
  list(REMOVE_ITEM directories ${CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES})
  list(TRANSFORM directories PREPEND -isystem)
  list(APPEND attn_dependency_includes ${directories})
endforeach()
separate_arguments(own_flags NATIVE_COMMAND "${CMAKE_CXX_FLAGS}")
set(attn_compile_options ${own_flags} -std=c++20 -I${PROJECT_SOURCE_DIR}/include ${attn_dependency_includes})
if(ATTN_NATIVE)
  list(APPEND attn_compile_options -march=native)
endif()
set(attn_compile ${CMAKE_CXX_COMPILER} ${attn_compile_options})
