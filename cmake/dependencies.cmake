# What attn stands on: an installed package if there is one, else a pinned release from the project's own repository.
include(FetchContent)

# attn_header_only(<package> <target> <repository> <tag> <include directory>): only headers are needed, so the project's own
# CMakeLists.txt is not run (SOURCE_SUBDIR names a folder that has none).
macro(attn_header_only package target repository tag directory)
  if(NOT TARGET ${target})
    find_package(${package} QUIET GLOBAL)
  endif()
  if(NOT TARGET ${target})
    message(STATUS "${package} is not installed: fetching ${tag} from ${repository}")
    FetchContent_Declare(attn_${package} GIT_REPOSITORY ${repository} GIT_TAG ${tag} GIT_SHALLOW ON SOURCE_SUBDIR no_cmake)
    FetchContent_MakeAvailable(attn_${package})
    string(TOLOWER attn_${package} fetched)
    add_library(${target} INTERFACE IMPORTED GLOBAL)
    target_include_directories(${target} SYSTEM INTERFACE "${${fetched}_SOURCE_DIR}${directory}")
  endif()
endmacro()

# Without a version: Eigen 3.4 and 5 each refuse the other's range. The headers check it.
attn_header_only(Eigen3 Eigen3::Eigen https://gitlab.com/libeigen/eigen.git 3.4.0 "")
set(attn_xsimd_tag 8.1.0)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^wasm")
  set(attn_xsimd_tag 14.3.0)
endif()
attn_header_only(xsimd xsimd https://github.com/xtensor-stack/xsimd.git ${attn_xsimd_tag} /include)

set(THREADS_PREFER_PTHREAD_FLAG ON)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^wasm" AND NOT TARGET Threads::Threads) # it has none
  add_library(Threads::Threads INTERFACE IMPORTED GLOBAL)
else()
  find_package(Threads REQUIRED GLOBAL)
endif()
