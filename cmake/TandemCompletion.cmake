# SPDX-License-Identifier: MIT
# Command-line completion for bash, zsh and fish. tools/completion/make.py makes it from the help texts of the programs that are
# built.
find_package(Python3 3.9 COMPONENTS Interpreter QUIET)
tandem_program_names(tandem_completed)
set(tandem_completion_default OFF)
if(PROJECT_IS_TOP_LEVEL AND Python3_Interpreter_FOUND)
  set(tandem_completion_default ON)
endif()
option(TANDEM_COMPLETION "Shell completion of the programs; needs Python 3.9" ${tandem_completion_default})
if(NOT TANDEM_COMPLETION OR NOT TARGET tandem-front)
  if(PROJECT_IS_TOP_LEVEL AND TARGET tandem-front)
    message(STATUS "Shell completion: none (TANDEM_COMPLETION=OFF, the default where Python 3.9 or later is not found)")
  endif()
  return()
endif()
if(NOT Python3_Interpreter_FOUND)
  message(FATAL_ERROR "TANDEM_COMPLETION=ON needs Python 3.9 or later, which was not found (Python3_EXECUTABLE names it)")
endif()
message(STATUS "Shell completion: bash, zsh and fish, installed into ${CMAKE_INSTALL_DATADIR}")

file(GLOB tandem_completion_sources ${PROJECT_SOURCE_DIR}/docs/man/help/*.txt ${PROJECT_SOURCE_DIR}/tools/completion/*.py)
list(JOIN tandem_completed "," tandem_completed)
set(tandem_completion_dir ${CMAKE_CURRENT_BINARY_DIR}/completion)
add_custom_command(OUTPUT ${tandem_completion_dir}/made
  COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tools/completion/make.py ${tandem_completion_dir}
          "--programs=${tandem_completed}"
  COMMAND ${CMAKE_COMMAND} -E touch ${tandem_completion_dir}/made
  DEPENDS ${tandem_completion_sources} COMMENT "Making shell completion" VERBATIM)
add_custom_target(tandem_completion ALL DEPENDS ${tandem_completion_dir}/made)
add_dependencies(tandem_programs tandem_completion)

if(TANDEM_INSTALL)
  set(TANDEM_ZSH_COMPLETION_DIR ${CMAKE_INSTALL_DATADIR}/zsh/site-functions CACHE STRING "Where zsh looks for completions")
  install(DIRECTORY ${tandem_completion_dir}/bash/ DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
          COMPONENT tools)
  install(DIRECTORY ${tandem_completion_dir}/zsh/ DESTINATION ${TANDEM_ZSH_COMPLETION_DIR} COMPONENT tools)
  install(DIRECTORY ${tandem_completion_dir}/fish/ DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d
          COMPONENT tools)
endif()
