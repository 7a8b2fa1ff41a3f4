# `cmake --install` lays down the headers and the package that find_package(attn) reads.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(attn_package_dir ${CMAKE_INSTALL_DATADIR}/cmake/attn)
install(TARGETS attn attn_native EXPORT attn-targets COMPONENT attn FILE_SET HEADERS COMPONENT attn)
install(EXPORT attn-targets NAMESPACE attn:: DESTINATION ${attn_package_dir} COMPONENT attn)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/attn-config-version.cmake COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES ${PROJECT_SOURCE_DIR}/cmake/attn-config.cmake ${PROJECT_BINARY_DIR}/attn-config-version.cmake
  DESTINATION ${attn_package_dir} COMPONENT attn)
