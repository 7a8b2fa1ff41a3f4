# `cmake --install` lays down the headers and the package that find_package(attn) reads.
include(GNUInstallDirs)

set(attn_package_dir ${CMAKE_INSTALL_DATADIR}/cmake/attn)
install(TARGETS attn attn_native EXPORT attn-targets COMPONENT attn FILE_SET HEADERS COMPONENT attn)
install(EXPORT attn-targets NAMESPACE attn:: DESTINATION ${attn_package_dir} COMPONENT attn)
configure_file(${PROJECT_SOURCE_DIR}/cmake/attn-config-version.cmake.in ${PROJECT_BINARY_DIR}/attn-config-version.cmake @ONLY)
install(FILES ${PROJECT_SOURCE_DIR}/cmake/attn-config.cmake ${PROJECT_BINARY_DIR}/attn-config-version.cmake
  DESTINATION ${attn_package_dir} COMPONENT attn)

if(ATTN_COMPILED) # find_package(attn COMPONENTS compiled)
  install(TARGETS attn_compiled EXPORT attn-compiled-targets COMPONENT attn_compiled)
  install(EXPORT attn-compiled-targets NAMESPACE attn:: DESTINATION ${attn_package_dir} COMPONENT attn_compiled)
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT attn)

# The same for those who ask pkg-config. Relative to where the file lies, so that the whole may be moved, unless headers go to a place of their own.
cmake_path(IS_ABSOLUTE CMAKE_INSTALL_INCLUDEDIR attn_pc_includedir)
if(attn_pc_includedir)
  set(attn_pc_includedir ${CMAKE_INSTALL_INCLUDEDIR})
else()
  cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX BASE_DIRECTORY ${CMAKE_INSTALL_FULL_DATADIR}/pkgconfig OUTPUT_VARIABLE attn_pc_includedir)
  set(attn_pc_includedir "\${pcfiledir}/${attn_pc_includedir}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/attn.pc.in ${PROJECT_BINARY_DIR}/attn.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/attn.pc DESTINATION ${CMAKE_INSTALL_DATADIR}/pkgconfig COMPONENT attn)

# `cpack -G DEB` makes libattn-dev. A component of its own holds the file that Debian wants the licence in.
if(PROJECT_IS_TOP_LEVEL)
  if(NOT ATTN_COMPILED)
    set(CMAKE_SKIP_INSTALL_ALL_DEPENDENCY ON) # headers only: tests, benchmarks and examples are no part of it
  endif()
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/libattn-dev RENAME copyright COMPONENT attn_debian EXCLUDE_FROM_ALL)
  set(CPACK_GENERATOR DEB)
  set(CPACK_COMPONENTS_ALL attn attn_debian)
  set(CPACK_COMPONENT_ATTN_GROUP attn)
  set(CPACK_COMPONENT_ATTN_DEBIAN_GROUP attn)
  set(CPACK_DEB_COMPONENT_INSTALL ON)
  set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
  set(CPACK_DEBIAN_ATTN_PACKAGE_NAME libattn-dev)
  set(CPACK_DEBIAN_ATTN_FILE_NAME DEB-DEFAULT)
  set(CPACK_DEBIAN_ATTN_PACKAGE_ARCHITECTURE all)
  set(CPACK_DEBIAN_ATTN_PACKAGE_SECTION libdevel)
  set(CPACK_DEBIAN_ATTN_PACKAGE_DEPENDS "libeigen3-dev (>= 3.4), libxsimd-dev (>= 8.1)")
  set(CPACK_PACKAGE_CONTACT "the authors of attn")
  set(CPACK_DEBIAN_ATTN_DESCRIPTION "Attention operators for CPUs, as C++20 headers.")
  include(CPack)
endif()
