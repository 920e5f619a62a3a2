# SPDX-License-Identifier: MIT
# libtandem.so and libtandem.a from the same objects. lib/tandem.map lists what the shared library exports. BUILD_SHARED_LIBS
# chooses the library that programs link (the target tandem): the shared one (ON, or not set), or the archive (OFF). With OFF
# there is no shared library. TANDEM_BUILD_STATIC=OFF omits the archive, except for the tests of internals.
include(GNUInstallDirs)
set(tandem_map ${PROJECT_SOURCE_DIR}/lib/tandem.map)

set(tandem_shared ON)
if(DEFINED BUILD_SHARED_LIBS AND NOT BUILD_SHARED_LIBS)
  set(tandem_shared OFF)
  if(NOT TANDEM_BUILD_STATIC)
    message(FATAL_ERROR "BUILD_SHARED_LIBS=OFF and TANDEM_BUILD_STATIC=OFF leave no library to build")
  endif()
endif()

# The C compiler links a C program with the archive. So the C++ library must be named like any other dependency.
set(tandem_cxx_runtime ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
list(FILTER tandem_cxx_runtime INCLUDE REGEX "^(std)?c\\+\\+$")
list(REMOVE_DUPLICATES tandem_cxx_runtime)
list(APPEND tandem_cxx_runtime m)

add_library(tandem_static STATIC $<TARGET_OBJECTS:tandem_objects>)
add_library(tandem::tandem_static ALIAS tandem_static)
set_target_properties(tandem_static PROPERTIES OUTPUT_NAME tandem LINKER_LANGUAGE CXX)
target_link_libraries(tandem_static PUBLIC $<BUILD_INTERFACE:tandem_dependencies> ${tandem_cxx_runtime})
target_include_directories(tandem_static PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)

set(tandem_libraries "")
set(tandem_kinds "")
if(tandem_shared)
  list(APPEND tandem_libraries tandem)
  list(APPEND tandem_kinds shared)
  add_library(tandem SHARED $<TARGET_OBJECTS:tandem_objects>)
  set_target_properties(tandem PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
                                          LINK_DEPENDS ${tandem_map} LINKER_LANGUAGE CXX)
  target_link_options(tandem PRIVATE -Wl,--version-script=${tandem_map} -Wl,--as-needed)
  if(TANDEM_SANITIZE)
    target_link_options(tandem PRIVATE -fsanitize=${TANDEM_SANITIZE})
  else()
    target_link_options(tandem PRIVATE -Wl,-z,defs)  # a sanitizer's run time comes with the program
  endif()
  target_link_libraries(tandem PRIVATE $<BUILD_INTERFACE:tandem_dependencies>)
  target_include_directories(tandem PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                           $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
else()
  add_library(tandem INTERFACE)
  target_link_libraries(tandem INTERFACE tandem_static)
endif()
add_library(tandem::tandem ALIAS tandem)

if(TANDEM_BUILD_STATIC)
  list(APPEND tandem_libraries tandem_static)
  list(APPEND tandem_kinds static)
else()
  set_target_properties(tandem_static PROPERTIES EXCLUDE_FROM_ALL ON)
endif()
list(JOIN tandem_kinds " and " tandem_kinds)
tandem_summary("libraries" "${tandem_kinds} (BUILD_SHARED_LIBS, TANDEM_BUILD_STATIC)")
