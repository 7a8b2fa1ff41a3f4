# cmake -DTREE=<build tree> -DPREFIX=<folder> -P install.cmake: installs attn into an empty folder.
file(REMOVE_RECURSE ${PREFIX})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${TREE} --prefix ${PREFIX} --component attn COMMAND_ERROR_IS_FATAL ANY)
