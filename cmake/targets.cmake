# attn::attn, the library, and attn::native, the library for the instruction set of this machine.

file(GLOB_RECURSE attn_headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/attn/*.hpp)

add_library(attn INTERFACE)
add_library(attn::attn ALIAS attn)
target_sources(attn INTERFACE FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/include FILES ${attn_headers})
target_compile_features(attn INTERFACE cxx_std_20)
# By name where attn is installed ($<1:> keeps CMake from looking the name up): a project may have made it an alias of a target of its own.
target_link_libraries(attn INTERFACE $<BUILD_INTERFACE:Eigen3::Eigen> $<INSTALL_INTERFACE:$<1:Eigen3::Eigen>> Threads::Threads)
# Its include directories, not the target: some installed xsimd targets link xtl, which attn has no use for and which may be missing.
target_include_directories(attn SYSTEM INTERFACE $<TARGET_PROPERTY:xsimd,INTERFACE_INCLUDE_DIRECTORIES>)

# gcc for Windows aligns its stack to 16 bytes, and moves wider registers there as if it were aligned to all of theirs (gcc's bug 54412).
target_compile_options(attn INTERFACE $<$<AND:$<PLATFORM_ID:Windows>,$<CXX_COMPILER_ID:GNU>>:-Wa,-muse-unaligned-vector-move>)

add_library(attn_native INTERFACE)
add_library(attn::native ALIAS attn_native)
set_target_properties(attn_native PROPERTIES EXPORT_NAME native)
target_link_libraries(attn_native INTERFACE attn)
target_compile_options(attn_native INTERFACE $<$<CXX_COMPILER_ID:GNU,Clang,AppleClang>:-march=native>)
