# cmake -DCOMPILE=<command> -DOBJDUMP=<objdump> -DFOLDER=<this folder> -DOBJECT=<what is compiled> -P check.cmake
cmake_minimum_required(VERSION 3.24)
execute_process(COMMAND ${COMPILE} -O3 -c ${FOLDER}/tiles.cpp -o ${OBJECT} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${OBJDUMP} -d --no-show-raw-insn ${OBJECT} COMMAND awk -f ${FOLDER}/check.awk COMMAND_ERROR_IS_FATAL ANY)
