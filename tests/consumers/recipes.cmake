# cmake -DROOT=<source tree> -DVERSION=<version> -DPYTHON=<python3> -P recipes.cmake: the recipes for vcpkg and Conan are well-formed and of this version.
file(READ ${ROOT}/cmake/vcpkg/attn/vcpkg.json port)
string(JSON name GET "${port}" name)
string(JSON version GET "${port}" version)
if(NOT name STREQUAL "attn" OR NOT version STREQUAL VERSION)
  message(FATAL_ERROR "vcpkg's port is of ${name} ${version}, not attn ${VERSION}")
endif()
execute_process(COMMAND ${PYTHON} -c "import ast, sys; ast.parse(open(sys.argv[1]).read())" ${ROOT}/cmake/conan/conanfile.py COMMAND_ERROR_IS_FATAL ANY)
