# cmake -DCOMPILE=<command> -DFILE=<file> -DPROGRAM=<what it becomes> -P check.cmake
cmake_minimum_required(VERSION 3.24)
execute_process(COMMAND ${COMPILE} ${FILE} -o ${PROGRAM} -pthread COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${PROGRAM} COMMAND_ERROR_IS_FATAL ANY)
