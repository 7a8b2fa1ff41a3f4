include(CMakeFindDependencyMacro)
find_dependency(Eigen3)
find_dependency(xsimd)
set(THREADS_PREFER_PTHREAD_FLAG ON)
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^wasm" OR TARGET Threads::Threads)
  find_dependency(Threads)
else() # it has none
  add_library(Threads::Threads INTERFACE IMPORTED)
endif()
include(${CMAKE_CURRENT_LIST_DIR}/attn-targets.cmake)

# find_package(attn COMPONENTS compiled), where the package was built with ATTN_COMPILED.
include(${CMAKE_CURRENT_LIST_DIR}/attn-compiled-targets.cmake OPTIONAL RESULT_VARIABLE attn_compiled_FOUND)
foreach(component IN LISTS attn_FIND_COMPONENTS)
  if(attn_FIND_REQUIRED_${component} AND NOT attn_${component}_FOUND)
    set(attn_FOUND FALSE)
    set(attn_NOT_FOUND_MESSAGE "this package of attn has no component ${component}")
  endif()
endforeach()
