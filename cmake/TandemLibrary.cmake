# SPDX-License-Identifier: MIT
# libtandem.so and libtandem.a from the same objects. lib/tandem.map lists what the shared library exports.
include(GNUInstallDirs)
set(tandem_map ${PROJECT_SOURCE_DIR}/lib/tandem.map)

add_library(tandem SHARED $<TARGET_OBJECTS:tandem_objects>)
add_library(tandem::tandem ALIAS tandem)
set_target_properties(tandem PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
                                        LINK_DEPENDS ${tandem_map} LINKER_LANGUAGE CXX)
target_link_options(tandem PRIVATE -Wl,--version-script=${tandem_map} -Wl,--as-needed)
if(TANDEM_SANITIZE)
  target_link_options(tandem PRIVATE -fsanitize=${TANDEM_SANITIZE})
else()
  target_link_options(tandem PRIVATE -Wl,-z,defs)  # a sanitizer's run time comes with the program
endif()
target_link_libraries(tandem PRIVATE $<BUILD_INTERFACE:tandem_dependencies>)

# A C program that links the archive is linked by the C compiler: the C++ library is named like any other dependency.
set(tandem_cxx_runtime ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
list(FILTER tandem_cxx_runtime INCLUDE REGEX "^(std)?c\\+\\+$")
list(REMOVE_DUPLICATES tandem_cxx_runtime)
list(APPEND tandem_cxx_runtime m)

add_library(tandem_static STATIC $<TARGET_OBJECTS:tandem_objects>)
add_library(tandem::tandem_static ALIAS tandem_static)
set_target_properties(tandem_static PROPERTIES OUTPUT_NAME tandem LINKER_LANGUAGE CXX)
target_link_libraries(tandem_static PUBLIC $<BUILD_INTERFACE:tandem_dependencies> ${tandem_cxx_runtime})

foreach(library tandem tandem_static)
  target_include_directories(${library} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                               $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
endforeach()
