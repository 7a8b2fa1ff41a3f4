# cmake -DCOMPILE=<compiler and flags> -DSIZE=<size> -DFILE=<calls.cpp> -DOBJECT=<what it becomes> -P call_size.cmake: how much code a call of each operator
# and norm is, without optimisation. What is instantiated for each of many cases shows here, and so it does in the time that users wait.
cmake_minimum_required(VERSION 3.24)
execute_process(COMMAND ${COMPILE} -O0 -c ${FILE} -o ${OBJECT} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${SIZE} ${OBJECT} OUTPUT_VARIABLE table COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCH "\n *([0-9]+)" _ "${table}")
message("${CMAKE_MATCH_1} bytes of code")
if(NOT CMAKE_MATCH_1 GREATER 100000 OR CMAKE_MATCH_1 GREATER 3200000)
  message(SEND_ERROR "a call of each operator and norm is to be 0.1 to 3.2 MB of code (gcc 12 makes 1.9 of it, clang 19 2.4)")
endif()
