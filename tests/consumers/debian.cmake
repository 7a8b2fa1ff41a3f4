# cmake -DROOT=<source tree> -DCPACK=<cpack> -DCOMPILER=<compiler> -DGENERATOR=<generator> -DMAKE_PROGRAM=<its program> -DFOLDER=<folder> -P debian.cmake:
# makes libattn-dev, unpacks it as dpkg would, and builds a project that finds it there.
file(REMOVE_RECURSE ${FOLDER})
# CMake's default generator is the one that has cpack build what an installation depends on. Nothing of attn's own programs is: who compiles fails.
execute_process(
  COMMAND ${CMAKE_COMMAND} -S ${ROOT} -B ${FOLDER}/tree -G "Unix Makefiles" -DCMAKE_CXX_COMPILER=${COMPILER}
    -DCMAKE_CXX_COMPILER_LAUNCHER=false -DATTN_BUILD_TESTS=OFF -DATTN_BUILD_BENCH=OFF -DATTN_BUILD_EXAMPLES=ON
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CPACK} --config ${FOLDER}/tree/CPackConfig.cmake -B ${FOLDER} OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(GLOB package ${FOLDER}/libattn-dev_*_all.deb)
execute_process(COMMAND dpkg-deb --field ${package} Depends OUTPUT_VARIABLE depends COMMAND_ERROR_IS_FATAL ANY)
if(NOT depends MATCHES "libeigen3-dev.*libxsimd-dev")
  message(FATAL_ERROR "libattn-dev depends on: ${depends}")
endif()
execute_process(COMMAND dpkg-deb -x ${package} ${FOLDER}/root COMMAND_ERROR_IS_FATAL ANY)
if(NOT EXISTS ${FOLDER}/root/usr/share/doc/libattn-dev/copyright)
  message(FATAL_ERROR "libattn-dev has no copyright file")
endif()
execute_process(
  COMMAND ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/find_package -B ${FOLDER}/build -DCMAKE_CXX_COMPILER=${COMPILER}
    -G ${GENERATOR} -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_PREFIX_PATH=${FOLDER}/root/usr
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
load_cache(${FOLDER}/build READ_WITH_PREFIX found_ attn_DIR)
if(NOT found_attn_DIR STREQUAL "${FOLDER}/root/usr/share/cmake/attn")
  message(FATAL_ERROR "found attn in ${found_attn_DIR}")
endif()
execute_process(COMMAND ${COMPILER} -std=c++20 -fsyntax-only -isystem ${FOLDER}/root/usr/include ${INCLUDES} ${CMAKE_CURRENT_LIST_DIR}/main.cpp
  COMMAND_ERROR_IS_FATAL ANY)
