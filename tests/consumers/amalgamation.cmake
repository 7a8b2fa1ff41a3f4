# cmake -DSCRIPT=<cmake/amalgamate> -DCOMPILER=<compiler> -DINCLUDES=<flags> -DFOLDER=<folder> -P amalgamation.cmake: builds a program
# with the single header.
file(REMOVE_RECURSE ${FOLDER})
set(header ${FOLDER}/attn/attn.hpp)
execute_process(COMMAND ${SCRIPT} ${header} COMMAND_ERROR_IS_FATAL ANY)
file(STRINGS ${header} own REGEX "^ *#include \"")
if(own)
  message(FATAL_ERROR "headers are left out: ${own}")
endif()
execute_process(COMMAND ${COMPILER} -std=c++20 -I${FOLDER} ${INCLUDES} ${CMAKE_CURRENT_LIST_DIR}/amalgamation.cpp -o ${FOLDER}/main
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${FOLDER}/main COMMAND_ERROR_IS_FATAL ANY)
