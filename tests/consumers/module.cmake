# cmake -DSCRIPT=<cmake/amalgamate> -DCOMPILER=<clang> -DINCLUDES=<flags> -DFOLDER=<folder> -P module.cmake: makes the module, and a program that
# imports it where the compiler can: before clang 21 importers do not find the processor's functions.
file(REMOVE_RECURSE ${FOLDER})
set(module ${FOLDER}/attn.cppm)
execute_process(COMMAND ${SCRIPT} --module ${module} COMMAND_ERROR_IS_FATAL ANY)
set(compile ${COMPILER} -std=c++20 -march=native ${INCLUDES} -Wall -Wextra -Werror -Wno-invalid-feature-combination)
execute_process(COMMAND ${compile} --precompile ${module} -o ${FOLDER}/attn.pcm COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${COMPILER} -dumpversion OUTPUT_VARIABLE version COMMAND_ERROR_IS_FATAL ANY)
if(version VERSION_LESS 21)
  return()
endif()
execute_process(COMMAND ${compile} -fmodule-file=attn=${FOLDER}/attn.pcm ${CMAKE_CURRENT_LIST_DIR}/module.cpp ${FOLDER}/attn.pcm -o ${FOLDER}/main
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${FOLDER}/main COMMAND_ERROR_IS_FATAL ANY)
