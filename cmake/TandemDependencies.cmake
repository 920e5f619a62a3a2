# SPDX-License-Identifier: MIT
# tandem_dependencies: hwloc, oneDNN, Highway and the OpenMP of oneDNN, private to the library. nlohmann-json and xxHash are
# header-only. The library's objects contain them, so programs that link the static library do not need them.
find_package(PkgConfig REQUIRED)
pkg_check_modules(HWLOC REQUIRED IMPORTED_TARGET GLOBAL hwloc)
find_path(DNNL_INCLUDE_DIR dnnl.hpp REQUIRED)
find_library(DNNL_LIBRARY dnnl REQUIRED)
find_path(HWY_INCLUDE_DIR hwy/highway.h REQUIRED)
find_library(HWY_LIBRARY hwy REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX GLOBAL)
find_package(Threads REQUIRED GLOBAL)
find_package(nlohmann_json REQUIRED)
find_path(XXHASH_INCLUDE_DIR xxhash.h REQUIRED)

add_library(tandem_dependencies INTERFACE)
target_include_directories(tandem_dependencies SYSTEM INTERFACE ${DNNL_INCLUDE_DIR} ${HWY_INCLUDE_DIR} ${XXHASH_INCLUDE_DIR})
target_link_libraries(tandem_dependencies INTERFACE PkgConfig::HWLOC ${DNNL_LIBRARY} ${HWY_LIBRARY} OpenMP::OpenMP_CXX
                                                    Threads::Threads ${CMAKE_DL_LIBS})
