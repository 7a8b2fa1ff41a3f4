# cmake -DBENCH=<attn_bench> -DFOLDER=<folder to write in> -DNUMBERS=<types that the cases are compiled for> -P check_bench.cmake: a short run, its lines,
# goals and output file.
cmake_minimum_required(VERSION 3.24)
file(REMOVE_RECURSE ${FOLDER})
file(MAKE_DIRECTORY ${FOLDER})
set(names attend/softmax/n:512/d:64/h:12/threads:1 attend/softmax/b:8/n:197/d:64/h:3/threads:1)
execute_process(
  COMMAND ${BENCH} --quick --goals "--benchmark_filter=^attend/softmax/(n:512/d:64|b:8)" --benchmark_repetitions=2 --benchmark_out=${FOLDER}/bench.json
  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "exit code ${result}\n${output}\n${error}")
endif()
if(NOT error MATCHES "\\[2 of 2 rows, ")
  message(SEND_ERROR "no line of progress in:\n${error}")
endif()
foreach(expected IN LISTS names ITEMS "full, d 64, n 512 " "DeiT-tiny")
  string(FIND "${output}" "\n${expected}" at)
  if(at EQUAL -1)
    message(SEND_ERROR "no line of ${expected} in:\n${output}")
  endif()
endforeach()

file(READ ${FOLDER}/bench.json json)
foreach(key instruction_set compiler hardware_threads)
  string(JSON value GET "${json}" context ${key}) # fails if it is not there
endforeach()
string(JSON name GET "${json}" benchmarks 0 name)
if(NOT name IN_LIST names)
  message(SEND_ERROR "the first row is called ${name}")
endif()
foreach(counter flops peak vs_naive bytes workspace_bytes matrix_bytes)
  string(JSON value GET "${json}" benchmarks 0 ${counter})
  if(NOT value GREATER 0)
    message(SEND_ERROR "${counter} is ${value}")
  endif()
endforeach()

# Memory may bound short sequences only.
string(JSON count LENGTH "${json}" benchmarks)
math(EXPR last "${count} - 1")
foreach(row RANGE ${last})
  string(JSON name GET "${json}" benchmarks ${row} name)
  string(JSON bandwidth ERROR_VARIABLE missing GET "${json}" benchmarks ${row} bandwidth)
  if(name MATCHES "n:197" AND NOT missing STREQUAL "NOTFOUND" OR name MATCHES "n:512" AND missing STREQUAL "NOTFOUND")
    message(SEND_ERROR "${name}: bandwidth is ${bandwidth}")
  endif()
endforeach()

string(JSON label GET "${json}" benchmarks 0 label)
if(NOT label MATCHES "bits, (gcc|clang)")
  message(SEND_ERROR "the first row says that it ran with ${label}")
endif()

# Growth, comparisons and the table of operators.
execute_process(
  COMMAND ${BENCH} "--benchmark_filter=^sweep/softmax/n:(1024|2048)/|^talking_heads_overhead/.*/d:16/|^crossover/(softmax|linear)/n:64/"
    --benchmark_repetitions=1
  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
if(NOT result EQUAL 0 OR NOT output MATCHES "\nsoftmax +1024 to 2048 +[12]\\.[0-9]" OR NOT output MATCHES "\ntalking_heads_overhead\n"
   OR NOT output MATCHES "\nlinear +(-|n = 64) +[0-9.]+x\n" OR output MATCHES "\ngoal ")
  message(SEND_ERROR "exit code ${result}\n${output}\n${error}")
endif()

# 16 bits: half the bytes, and a comparison with floats.
execute_process(
  COMMAND ${BENCH} --goals "--benchmark_filter=^attend/softmax/n:2048/d:64/h:12/threads:1(/bf16)?$" --benchmark_repetitions=1
    --benchmark_out=${FOLDER}/stored.json
  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
if(NOT result EQUAL 0 OR NOT output MATCHES "\n16 bits\n" OR NOT output MATCHES "\nfull, d 64, n 2048, in bf16 against float ")
  message(SEND_ERROR "exit code ${result}\n${output}\n${error}")
endif()
file(READ ${FOLDER}/stored.json json)
foreach(row RANGE 1)
  string(JSON bytes_${row} GET "${json}" benchmarks ${row} bytes)
endforeach()
if(NOT bytes_0 EQUAL 25165824 OR NOT bytes_1 EQUAL 12582912) # 4 tensors of 12 x 2048 x 64
  message(SEND_ERROR "floats are ${bytes_0} bytes, bfloat16 ${bytes_1}")
endif()

execute_process(COMMAND ${BENCH} --slow RESULT_VARIABLE result OUTPUT_QUIET ERROR_QUIET)
if(NOT result EQUAL 2)
  message(SEND_ERROR "an unknown option: exit code ${result}, expected 2")
endif()

# Rows of doubles are there where cases of doubles are.
execute_process(COMMAND ${BENCH} --benchmark_list_tests "--benchmark_filter=/f64$" OUTPUT_VARIABLE rows ERROR_VARIABLE error)
string(REGEX MATCHALL "/f64" rows "${rows}")
list(LENGTH rows count)
set(expected 0)
if("double" IN_LIST NUMBERS)
  set(expected 4)
endif()
if(NOT count EQUAL expected)
  message(SEND_ERROR "there are ${count} rows of doubles, not ${expected}, of cases for ${NUMBERS}")
endif()
