# SPDX-License-Identifier: MIT
# cmake --install: headers, both libraries, the programs, pkg-config files and the CMake package. Every path is relative
# to the file that names it, so that an installed tree may be moved.
include(CMakePackageConfigHelpers)

set(tandem_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tandem)
target_link_libraries(tandem_static PUBLIC $<INSTALL_INTERFACE:tandem::static_dependencies>)

set(tandem_headers tandem.h tensors.h weights.h selection.h pruning.h patterns.h plan.h tandem.hpp dlpack.h)
list(TRANSFORM tandem_headers PREPEND ${PROJECT_SOURCE_DIR}/include/tandem/)
install(FILES ${tandem_headers} ${PROJECT_SOURCE_DIR}/bindings/ggml/tandem-ggml.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tandem)
install(TARGETS tandem EXPORT tandem-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET tandem-cuda) # where the library looks for modules that do not lie beside it
  # OPTIONAL: the target tandem_programs does not build the module.
  install(TARGETS tandem-cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/tandem OPTIONAL)
endif()
install(TARGETS tandem_static EXPORT tandem-static-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})

file(RELATIVE_PATH tandem_bin_to_lib /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
foreach(program tandem-front tandem-info tandem-plan tandem-patterns tandem-bench tandem-generate)
  if(TARGET ${program})
    set_target_properties(${program} PROPERTIES INSTALL_RPATH "$ORIGIN/${tandem_bin_to_lib}")
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endforeach()

# oneDNN may be built on OpenMP, and one thread per worker is asked of it.
set(tandem_openmp_libs ${OpenMP_CXX_LIB_NAMES})
list(REMOVE_ITEM tandem_openmp_libs pthread)

# ---- CMake package ----
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/tandem-config.cmake.in
                              ${CMAKE_CURRENT_BINARY_DIR}/tandem-config.cmake INSTALL_DESTINATION ${tandem_package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/tandem-config-version.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tandem-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/tandem-config-version.cmake
        DESTINATION ${tandem_package_dir})
foreach(set tandem-targets tandem-static-targets)
  install(EXPORT ${set} NAMESPACE tandem:: DESTINATION ${tandem_package_dir})
endforeach()

# ---- pkg-config ----
# ${pcfiledir} is where the .pc file lies; an absolute CMAKE_INSTALL_LIBDIR or _INCLUDEDIR is kept as it is.
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
foreach(name tandem tandem-static)
  configure_file(${PROJECT_SOURCE_DIR}/pkgconfig/${name}.pc.in ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()
