# cmake -DCOMPILER=<compiler> -DPREFIX=<where attn is installed> -DFOLDER=<folder> -P pkg_config.cmake: builds main.cpp with what pkg-config says,
# from a copy of the installed tree, for the package may be moved.
file(REMOVE_RECURSE ${FOLDER})
file(COPY ${PREFIX}/ DESTINATION ${FOLDER}/moved)
set(ENV{PKG_CONFIG_PATH} ${FOLDER}/moved/share/pkgconfig:$ENV{PKG_CONFIG_PATH})
execute_process(COMMAND pkg-config --cflags attn OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
execute_process(COMMAND ${COMPILER} -std=c++20 ${flags} ${CMAKE_CURRENT_LIST_DIR}/main.cpp -o ${FOLDER}/main COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${FOLDER}/main COMMAND_ERROR_IS_FATAL ANY)
