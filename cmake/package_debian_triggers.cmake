# SPDX-License-Identifier: MIT
# CPack runs this over the packages. CPack gives the packages of the shared library and of the CUDA module scripts that run
# ldconfig. Debian's policy wants a trigger for the library instead, and the loader never looks for the module.
cmake_policy(VERSION 3.25)
find_program(DPKG_DEB dpkg-deb)
if(NOT CPACK_GENERATOR STREQUAL DEB OR NOT DPKG_DEB)
  return()
endif()
foreach(package ${CPACK_PACKAGE_FILES})
  cmake_path(GET package FILENAME name)
  if(NOT name MATCHES "^libtandem(-cuda)?[0-9]")
    continue()
  endif()
  set(folder ${CPACK_TEMPORARY_DIRECTORY}/unpacked)
  file(REMOVE_RECURSE ${folder})
  execute_process(COMMAND ${DPKG_DEB} -R ${package} ${folder} COMMAND_ERROR_IS_FATAL ANY)
  file(REMOVE ${folder}/DEBIAN/postinst ${folder}/DEBIAN/postrm)
  if(NOT name MATCHES "cuda")
    file(WRITE ${folder}/DEBIAN/triggers "activate-noawait ldconfig\n")
  endif()
  execute_process(COMMAND ${DPKG_DEB} --root-owner-group --build ${folder} ${package}
                  COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
endforeach()
