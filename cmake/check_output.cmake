# cmake -DPROGRAM=<program> -DEXPECTED=<file> -P check_output.cmake: runs the program, which must print what the file holds.
execute_process(COMMAND ${PROGRAM} RESULT_VARIABLE result OUTPUT_VARIABLE output)
file(READ ${EXPECTED} expected)
if(NOT result EQUAL 0 OR NOT output STREQUAL expected)
  message(FATAL_ERROR "exit code ${result}, printed:\n${output}\nexpected:\n${expected}")
endif()
