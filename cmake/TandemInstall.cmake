# SPDX-License-Identifier: MIT
# cmake --install: headers, libraries, programs, pkg-config files, the CMake package, documentation. Every path is relative to
# the file that names it, so an installed tree may be moved. Packages consist of these components:
#   runtime  the shared library                        module  libtandem-cuda.so
#   dev      files to build programs with              ggml    the module of ggml
#   tools    programs, and the data of tandem-demo     doc     licence, changes, pages, examples
include(CMakePackageConfigHelpers)

set(tandem_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tandem)

set(tandem_headers tandem.h tensors.h weights.h selection.h pruning.h patterns.h saving.h plan.h tandem.hpp saving.hpp
    dlpack.h)
list(TRANSFORM tandem_headers PREPEND ${PROJECT_SOURCE_DIR}/include/tandem/)
install(FILES ${tandem_headers} ${PROJECT_SOURCE_DIR}/bindings/ggml/tandem-ggml.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tandem COMPONENT dev)
if(tandem_shared)
  install(TARGETS tandem EXPORT tandem-targets
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT dev)
endif()
if(TARGET tandem-cuda) # the library looks there for modules that are not beside it
  # OPTIONAL: the target tandem_programs does not build the module.
  install(TARGETS tandem-cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/tandem COMPONENT module OPTIONAL)
endif()
if(TANDEM_BUILD_STATIC)
  target_link_libraries(tandem_static PUBLIC $<INSTALL_INTERFACE:tandem::static_dependencies>)
  install(TARGETS tandem_static EXPORT tandem-static-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT dev)
endif()

file(RELATIVE_PATH tandem_bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
foreach(program tandem-front tandem-info tandem-plan tandem-patterns tandem-bench tandem-generate tandem-demo)
  if(TARGET ${program})
    if(tandem_shared AND NOT program STREQUAL tandem-front) # tandem-front links nothing
      set_target_properties(${program} PROPERTIES INSTALL_RPATH "$ORIGIN/${tandem_bin_to_lib}")
    endif()
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
  endif()
endforeach()

# ---- data of tandem-demo, and documentation ----
set(examples_dir ${PROJECT_SOURCE_DIR}/examples)
if(TARGET tandem-demo)
  install(FILES ${examples_dir}/models/pico/config.json ${examples_dir}/models/pico/model.safetensors
          DESTINATION ${CMAKE_INSTALL_DATADIR}/tandem/models/pico COMPONENT tools)
  install(FILES ${examples_dir}/data/haystack.txt DESTINATION ${CMAKE_INSTALL_DATADIR}/tandem/data COMPONENT tools)
endif()
# Folders are as in the source tree, because pages link to each other. Headers, sources and tests are not installed beside the pages, so
# links to them become plain text.
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT doc)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT doc
        FILES_MATCHING PATTERN "*.svg" PATTERN man EXCLUDE)
file(GLOB tandem_pages RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/docs/*.md)
foreach(page ${tandem_pages} README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md bindings/python/README.md bindings/rust/README.md
             bindings/go/README.md bindings/ggml/README.md lib/routes/README.md examples/models/pico/README.md)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${page})
  file(READ ${PROJECT_SOURCE_DIR}/${page} text)
  string(REGEX REPLACE "\\[([^]]*)\\]\\(([./]*(include|lib/tables|lib/policy|test|tools)|man)/[^)]*\\)" "\\1" text "${text}")
  file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/installed/${page} "${text}")
endforeach()
install(DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/installed/ DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT doc)
install(FILES ${examples_dir}/attend_tensors.c ${examples_dir}/decode.c ${examples_dir}/openmp.c ${examples_dir}/selection.c
              ${examples_dir}/smallest.c ${examples_dir}/smallest.py ${examples_dir}/speculation.c
        DESTINATION ${CMAKE_INSTALL_DOCDIR}/examples COMPONENT doc)
install(DIRECTORY ${examples_dir}/tutorial DESTINATION ${CMAKE_INSTALL_DOCDIR}/examples COMPONENT doc)
install(FILES ${PROJECT_SOURCE_DIR}/bindings/ggml/smallest.c
        DESTINATION ${CMAKE_INSTALL_DOCDIR}/bindings/ggml COMPONENT doc)

# Libraries besides pthread that a static link needs if oneDNN is built on OpenMP. The library asks oneDNN for one thread per
# worker.
set(tandem_openmp_libs ${OpenMP_CXX_LIB_NAMES})
list(REMOVE_ITEM tandem_openmp_libs pthread)

# ---- CMake package ----
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/tandem-config.cmake.in
                              ${CMAKE_CURRENT_BINARY_DIR}/tandem-config.cmake INSTALL_DESTINATION ${tandem_package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/tandem-config-version.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tandem-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/tandem-config-version.cmake
        DESTINATION ${tandem_package_dir} COMPONENT dev)
if(tandem_shared)
  install(EXPORT tandem-targets NAMESPACE tandem:: DESTINATION ${tandem_package_dir} COMPONENT dev)
endif()
if(TANDEM_BUILD_STATIC)
  install(EXPORT tandem-static-targets NAMESPACE tandem:: DESTINATION ${tandem_package_dir} COMPONENT dev)
endif()

# ---- pkg-config ----
# ${pcfiledir} is the folder of the .pc file. An absolute CMAKE_INSTALL_LIBDIR or _INCLUDEDIR is kept as it is.
file(RELATIVE_PATH tandem_pc_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
set(tandem_pc_prefix "\${pcfiledir}/${tandem_pc_to_prefix}")
string(REGEX REPLACE "/$" "" tandem_pc_prefix "${tandem_pc_prefix}")
cmake_path(IS_ABSOLUTE CMAKE_INSTALL_LIBDIR libdir_is_absolute)
cmake_path(IS_ABSOLUTE CMAKE_INSTALL_INCLUDEDIR includedir_is_absolute)
set(tandem_pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
set(tandem_pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
if(libdir_is_absolute)
  set(tandem_pc_prefix ${CMAKE_INSTALL_PREFIX})
  set(tandem_pc_libdir ${CMAKE_INSTALL_LIBDIR})
endif()
if(includedir_is_absolute)
  set(tandem_pc_includedir ${CMAKE_INSTALL_INCLUDEDIR})
endif()
set(tandem_pc_static_libs -ldnnl)
foreach(name ${tandem_openmp_libs} pthread ${CMAKE_DL_LIBS} ${tandem_cxx_runtime})
  string(APPEND tandem_pc_static_libs " -l${name}")
endforeach()
# `pkg-config --static` appends to Libs, where -ltandem is the shared library unless the linker takes only archives (-static).
# The shared library does not define the required symbol. So a program is never linked to it instead of the archive.
set(tandem_pc_libs "Libs: -L\${libdir} -ltandem
Libs.private: -Wl,--require-defined=tandem_archive_is_linked_by_tandem_static_pc -lhwloc -lhwy ${tandem_pc_static_libs}")
if(NOT tandem_shared)
  set(tandem_pc_libs "Requires: tandem-static = ${PROJECT_VERSION}")
endif()
set(tandem_pc_names tandem)
if(TANDEM_BUILD_STATIC)
  list(APPEND tandem_pc_names tandem-static)
endif()
foreach(name ${tandem_pc_names})
  configure_file(${PROJECT_SOURCE_DIR}/pkgconfig/${name}.pc.in ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT dev)
endforeach()

# ---- uninstall ----
if(PROJECT_IS_TOP_LEVEL)
  add_custom_target(uninstall COMMAND ${CMAKE_COMMAND} -D "build=${CMAKE_BINARY_DIR}"
                                      -P ${PROJECT_SOURCE_DIR}/cmake/uninstall.cmake VERBATIM)
endif()
