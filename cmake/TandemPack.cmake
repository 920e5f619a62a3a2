# SPDX-License-Identifier: MIT
# CPack: packages for Debian and Ubuntu (`cpack -G DEB` in the build folder), a component or two each, and the source archive
# (the target package_source). A distribution writes its own debian/. These packages are for users who build for a few machines.
set(CPACK_PACKAGE_NAME tandem)
set(CPACK_PACKAGE_VENDOR "The Tandem authors")
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR}/packages)
set(CPACK_GENERATOR DEB)
set(CPACK_STRIP_FILES ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
    OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(TANDEM_PACKAGE_CONTACT "The Tandem authors <tandem@tandem.invalid>" CACHE STRING
    "Maintainer of packages: Name <address>")
set(CPACK_PACKAGE_CONTACT ${TANDEM_PACKAGE_CONTACT})

set(CPACK_SOURCE_GENERATOR TGZ)
set(CPACK_SOURCE_PACKAGE_FILE_NAME tandem-${PROJECT_VERSION})
set(CPACK_SOURCE_IGNORE_FILES "^${PROJECT_SOURCE_DIR}/build[^/]*/" "/[.]git(/|$)" "/__pycache__/" "/bindings/rust/target/"
    "^${CMAKE_BINARY_DIR}/")

set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
set(CPACK_COMPONENTS_ALL dev tools doc)
if(tandem_shared)
  list(PREPEND CPACK_COMPONENTS_ALL runtime)
endif()
if(TARGET tandem-cuda)
  list(APPEND CPACK_COMPONENTS_ALL module) # package_components.cmake removes it if it has not been built
endif()
if(NOT TARGET tandem-front)
  list(REMOVE_ITEM CPACK_COMPONENTS_ALL tools)
endif()
set(CPACK_PROJECT_CONFIG_FILE ${PROJECT_SOURCE_DIR}/cmake/package_components.cmake)
set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/cmake/package_debian_files.cmake)
set(CPACK_POST_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/cmake/package_debian_triggers.cmake)
set(CPACK_TANDEM_MODULE ${CMAKE_BINARY_DIR}/libtandem-cuda.so)
set(CPACK_TANDEM_SOURCE_DIR ${PROJECT_SOURCE_DIR})
set(CPACK_TANDEM_STRIP ${CMAKE_STRIP})

set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 0tandem1) # a distribution's own 0.2.0-1 is newer
set(CPACK_DEBIAN_PACKAGE_SOURCE tandem)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_BINARY_DIR})
set(tandem_this "(= ${PROJECT_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE})")
set(tandem_needs_runtime "libtandem${PROJECT_VERSION_MAJOR} ${tandem_this}")
if(NOT tandem_shared)
  set(tandem_needs_runtime "")
endif()

macro(tandem_package component name section summary text)
  string(TOUPPER ${component} upper)
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${name})
  set(CPACK_DEBIAN_${upper}_PACKAGE_SECTION ${section})
  set(CPACK_DEBIAN_${upper}_DESCRIPTION "${summary}\n${text}")
endmacro()
set(about "Tandem is a library for language model inference. It computes attention
over key/value caches that are larger than the GPU's memory: the GPU attends
the newest tokens, the CPU the older ones at the same time, or they cross
the bus in pieces. It also runs without a GPU.")
tandem_package(runtime libtandem${PROJECT_VERSION_MAJOR} libs "attention over key/value caches larger than the GPU"
               "${about}\n.\nThis package has the shared library.")
tandem_package(dev libtandem-dev libdevel "attention over key/value caches larger than the GPU (headers)"
               "${about}\n.\nThis package has the headers, the static library and the files of pkg-config\nand CMake.")
tandem_package(tools tandem-tools utils "programs of Tandem: what it finds, plans and measures"
               "${about}\n.\nThis package has the program tandem and its commands, and the small language
model of tandem-demo.")
tandem_package(doc tandem-doc doc "documentation and examples of Tandem"
               "${about}\n.\nThis package has pages and examples.")
tandem_package(module libtandem-cuda${PROJECT_VERSION_MAJOR} libs
               "attention over key/value caches larger than the GPU (CUDA)"
               "${about}\n.\nThis package has the module for NVIDIA GPUs, which the library opens at run
time. It needs NVIDIA's driver.")
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY >=) # the ABI only grows at its end
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SUGGESTS "libtandem-cuda${PROJECT_VERSION_MAJOR}")
# The dependencies of the archive.
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "libhwloc-dev, libdnnl-dev, libhwy-dev")
set(CPACK_DEBIAN_DEV_PACKAGE_SUGGESTS tandem-doc)
if(tandem_shared)
  set(CPACK_DEBIAN_DEV_PACKAGE_SUGGESTS "${CPACK_DEBIAN_DEV_PACKAGE_DEPENDS}, tandem-doc")
  set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS ${tandem_needs_runtime})
endif()
set(CPACK_DEBIAN_TOOLS_PACKAGE_DEPENDS ${tandem_needs_runtime})
set(CPACK_DEBIAN_MODULE_PACKAGE_DEPENDS ${tandem_needs_runtime})
set(CPACK_DEBIAN_DOC_PACKAGE_ARCHITECTURE all)
set(CPACK_DEBIAN_DOC_PACKAGE_SHLIBDEPS OFF)
set(CPACK_DEBIAN_DEV_PACKAGE_SHLIBDEPS OFF)
include(CPack)
