# cmake -DTREE=<build tree> -DPREFIX=<folder> -P install.cmake: installs attn, with its licence, into an empty folder.
file(REMOVE_RECURSE ${PREFIX})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${TREE} --prefix ${PREFIX} --component attn COMMAND_ERROR_IS_FATAL ANY)
if(NOT EXISTS ${PREFIX}/share/doc/attn/LICENSE)
  message(FATAL_ERROR "attn is installed without its licence")
endif()
