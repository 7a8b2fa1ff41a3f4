# cmake -DROOT=<source tree> -DCOMPILER=<compiler> -DGENERATOR=<generator> -DMAKE_PROGRAM=<its program> -DNM=<nm> -DPROCESSOR=<CMake's name of it>
#   -DFOLDER=<folder> [-DOPTIONS=<options that configure>] [-DEMULATOR=<command before a program>] -P compiled.cmake:
# installs attn with attn::compiled, and builds and runs programs that find it. Not optimised, which takes a fifth of the time, and leaves more
# functions whose names are to be hidden. What was built is kept. Another architecture takes, say, COMPILER=aarch64-linux-gnu-g++, PROCESSOR=aarch64,
# OPTIONS="-DCMAKE_SYSTEM_NAME=Linux;-DCMAKE_SYSTEM_PROCESSOR=aarch64" and EMULATOR="qemu-aarch64;-L;/usr/aarch64-linux-gnu".
cmake_minimum_required(VERSION 3.24)
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()
set(configure ${CMAKE_COMMAND} -G ${GENERATOR} -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${COMPILER} ${OPTIONS})
file(REMOVE_RECURSE ${FOLDER}/prefix ${FOLDER}/build)
run(${configure} -S ${ROOT} -B ${FOLDER}/attn -DATTN_COMPILED=ON -DATTN_COMPILED_OPTIMISATION=-O0 -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O0 -DATTN_BUILD_TESTS=OFF -DATTN_BUILD_BENCH=OFF -DATTN_BUILD_EXAMPLES=OFF)
run(${CMAKE_COMMAND} --build ${FOLDER}/attn)
run(${CMAKE_COMMAND} --install ${FOLDER}/attn --prefix ${FOLDER}/prefix)

# The code of each set is of that set, and no other object can take it: the library defines its functions, and no other name.
file(GLOB_RECURSE library ${FOLDER}/prefix/*/libattn_compiled.a)
if(PROCESSOR MATCHES "aarch64|arm64")
  set(sets neon:neon)
else()
  set(sets sse2:sse2 avx2:avx2_fma avx512:avx512)
endif()
foreach(set IN LISTS sets)
  string(REGEX MATCH "(.*):(.*)" _ ${set})
  execute_process(COMMAND ${NM} -C --defined-only ${library} COMMAND grep -c "attn::${CMAKE_MATCH_2}::" OUTPUT_VARIABLE count COMMAND_ERROR_IS_FATAL LAST)
  if(count LESS 100)
    message(FATAL_ERROR "attn::compiled has ${count} functions of attn::${CMAKE_MATCH_2}")
  endif()
endforeach()
execute_process(COMMAND ${NM} -C --extern-only --defined-only --format=posix ${library} OUTPUT_VARIABLE names COMMAND_ERROR_IS_FATAL ANY)
string(REGEX REPLACE "\n*[^\n]*\\[[^\n]*\\]:" "" names "${names}") # the objects' names
string(REGEX REPLACE "(attn_compiled_(sse2|avx2|avx512|neon)|attn::compiled_library::(widest\\(\\)|runs?\\([^\n]*\\))) T [^\n]*|DW\\.ref[^\n]*" "" names "${names}")
string(STRIP "${names}" names)
if(NOT names STREQUAL "")
  message(FATAL_ERROR "attn::compiled shows more than its functions:\n${names}")
endif()

run(${configure} -S ${CMAKE_CURRENT_LIST_DIR}/compiled -B ${FOLDER}/build -DCMAKE_PREFIX_PATH=${FOLDER}/prefix -DEXAMPLE=${ROOT}/examples/instruction_sets.cpp)
run(${CMAKE_COMMAND} --build ${FOLDER}/build)
run(${EMULATOR} ${FOLDER}/build/consumer)
execute_process(COMMAND ${CMAKE_COMMAND} "-DPROGRAM=${EMULATOR};${FOLDER}/build/example" -DEXPECTED=${ROOT}/examples/instruction_sets.txt -P ${ROOT}/cmake/check_output.cmake COMMAND_ERROR_IS_FATAL ANY)
