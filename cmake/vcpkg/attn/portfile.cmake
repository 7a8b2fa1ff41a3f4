# An overlay port of the tree that it lies in: vcpkg install attn --overlay-ports=<attn>/cmake/vcpkg
set(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../..")
set(VCPKG_BUILD_TYPE release) # headers only

vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}" OPTIONS -DATTN_BUILD_TESTS=OFF -DATTN_BUILD_BENCH=OFF -DATTN_BUILD_EXAMPLES=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME attn CONFIG_PATH share/cmake/attn)
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/lib")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
