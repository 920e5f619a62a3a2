# SPDX-License-Identifier: MIT
# The manual: pages for man(1) and the same as HTML. tools/man/make.py makes it from the headers' comments, the help texts of
# the programs that are built, and docs/man.
tandem_python_option(TANDEM_MAN "Man pages, and the same as HTML")
if(NOT TANDEM_MAN)
  return()
endif()
message(STATUS "Man pages: made by Python ${Python3_VERSION}, installed into ${CMAKE_INSTALL_MANDIR}; as HTML into "
               "${CMAKE_INSTALL_DOCDIR}/html")

tandem_program_names(tandem_man_programs)
list(JOIN tandem_man_programs "," tandem_man_programs)

file(GLOB tandem_man_sources ${PROJECT_SOURCE_DIR}/include/tandem/*.h ${PROJECT_SOURCE_DIR}/docs/man/*
     ${PROJECT_SOURCE_DIR}/docs/man/help/*.txt ${PROJECT_SOURCE_DIR}/tools/man/*.py ${PROJECT_SOURCE_DIR}/tools/abi/*.py)
list(FILTER tandem_man_sources EXCLUDE REGEX "/help$")
set(tandem_man_dir ${CMAKE_CURRENT_BINARY_DIR}/man)
add_custom_command(OUTPUT ${tandem_man_dir}/made
  COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tools/man/make.py ${tandem_man_dir} "--programs=${tandem_man_programs}"
  COMMAND ${CMAKE_COMMAND} -E touch ${tandem_man_dir}/made
  DEPENDS ${tandem_man_sources} COMMENT "Making the manual" VERBATIM)
add_custom_target(tandem_man ALL DEPENDS ${tandem_man_dir}/made)
add_dependencies(tandem_programs tandem_man)

if(TANDEM_INSTALL)
  if(tandem_man_programs)
    install(DIRECTORY ${tandem_man_dir}/man1 DESTINATION ${CMAKE_INSTALL_MANDIR} COMPONENT tools)
  endif()
  install(DIRECTORY ${tandem_man_dir}/man3 ${tandem_man_dir}/man7 DESTINATION ${CMAKE_INSTALL_MANDIR} COMPONENT dev)
  install(DIRECTORY ${tandem_man_dir}/html DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT doc)
endif()
