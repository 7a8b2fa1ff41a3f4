# cmake -DMODEL=<attn_ranks_model> -DFOLDER=<folder to write in> -P check_ranks_model.cmake: what a model of known speeds must say.
cmake_minimum_required(VERSION 3.24)
file(REMOVE_RECURSE ${FOLDER})
file(MAKE_DIRECTORY ${FOLDER})
set(sizes --tokens=65536 --heads=2 --ranks=8 --pairs=1e9)

# Links without end leave what each computes, and dense attention waits for nothing: 2 x 65536^2 / 8 pairs.
execute_process(COMMAND ${MODEL} ${sizes} --gigabytes=1e6 --microseconds=1e-6 ${FOLDER}/ranks.csv RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
if(NOT result EQUAL 0 OR NOT output MATCHES "A model, not a measurement" OR NOT output MATCHES " 8 +1\\.000 .* 1\\.07 s +8\\.0 +100 %")
  message(SEND_ERROR "exit code ${result}\n${output}\n${error}")
endif()
file(STRINGS ${FOLDER}/ranks.csv lines)
list(LENGTH lines count)
if(NOT count EQUAL 21) # five patterns on 1, 2, 4 and 8 ranks, and a heading
  message(SEND_ERROR "${count} lines in:\n${lines}")
endif()

# Slow ones take at least as long as the bytes that a rank receives: 7 / 8 of 65536 keys and values of 2 x 64 floats, at 1 MB/s.
execute_process(COMMAND ${MODEL} ${sizes} --gigabytes=0.001 RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
if(NOT result EQUAL 0 OR NOT output MATCHES "dense[^:]* 8 +1\\.000 +58\\.7 MB +58\\.7 MB +1\\.07 s +58\\.7 s +[0-9]+ s +0\\.1 ")
  message(SEND_ERROR "exit code ${result}\n${output}\n${error}")
endif()

foreach(wrong --ranks=0 --tokens=many --speed=1 "a.csv;b.csv")
  execute_process(COMMAND ${MODEL} ${wrong} RESULT_VARIABLE result OUTPUT_QUIET ERROR_QUIET)
  if(NOT result EQUAL 2)
    message(SEND_ERROR "${wrong}: exit code ${result}, expected 2")
  endif()
endforeach()
