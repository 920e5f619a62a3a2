# SPDX-License-Identifier: MIT
# Command-line completion for bash, zsh and fish. tools/completion/make.py makes it from the help texts of the programs that are
# built.
if(NOT TARGET tandem-front)
  return()
endif()
tandem_python_option(TANDEM_COMPLETION "Shell completion of the programs")
if(NOT TANDEM_COMPLETION)
  return()
endif()
message(STATUS "Shell completion: bash, zsh and fish, installed into ${CMAKE_INSTALL_DATADIR}")

file(GLOB tandem_completion_sources ${PROJECT_SOURCE_DIR}/docs/man/help/*.txt ${PROJECT_SOURCE_DIR}/tools/completion/*.py
     ${PROJECT_SOURCE_DIR}/tools/man/made_files.py)
tandem_program_names(tandem_completed)
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
