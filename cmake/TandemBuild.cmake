# SPDX-License-Identifier: MIT
# Flags shared by every target, and tandem_test().

# Debug information of inlined types and locals is a third of the time that templates take to compile, and four fifths of the
# object. So Release and sanitizers have only enough for back traces and profiles. Every other build has everything.
if(TANDEM_SANITIZE)
  set(tandem_debug_info -g1)
else()
  set(tandem_debug_info $<IF:$<CONFIG:Release>,-g1,-g>)
endif()

function(tandem_target_defaults target)
  set_target_properties(${target} PROPERTIES CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF
                                             C_STANDARD 99 C_EXTENSIONS ON)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wundef ${tandem_debug_info}
                                           $<$<BOOL:${TANDEM_WERROR}>:-Werror>)
  if(TANDEM_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${TANDEM_SANITIZE} -fno-omit-frame-pointer)
    target_link_options(${target} PRIVATE -fsanitize=${TANDEM_SANITIZE})
  endif()
endfunction()

# tandem_python_option(NAME "what is made"): an option for files that Python makes. It is ON by default where Python is found and
# Tandem is the top-level project; where it is ON without Python, configuring fails.
macro(tandem_python_option name what)
  find_package(Python3 3.9 COMPONENTS Interpreter QUIET)
  set(tandem_python_default OFF)
  if(PROJECT_IS_TOP_LEVEL AND Python3_Interpreter_FOUND)
    set(tandem_python_default ON)
  endif()
  option(${name} "${what}; needs Python 3.9" ${tandem_python_default})
  if(${name} AND NOT Python3_Interpreter_FOUND)
    message(FATAL_ERROR "${name}=ON needs Python 3.9 or later, which was not found (Python3_EXECUTABLE names it)")
  elseif(NOT ${name} AND PROJECT_IS_TOP_LEVEL)
    message(STATUS "${what}: none (${name}=OFF, the default where Python 3.9 or later is not found)")
  endif()
endmacro()

# Lists the programs that are built, by their user-visible names.
function(tandem_program_names out)
  set(names "")
  foreach(program front info plan patterns bench generate demo)
    if(TARGET tandem-${program})
      list(APPEND names tandem-${program})
    endif()
  endforeach()
  list(TRANSFORM names REPLACE "^tandem-front$" tandem)
  set(${out} ${names} PARENT_SCOPE)
endfunction()

# tandem_test(NAME name SOURCES a.cc… [LABEL fast|package|full|device] [INTERNAL] [HOT] [EMULATED] [TIMEOUT s] [ENVIRONMENT A=b…])
# Adds a cmocka program. INTERNAL links the objects of the library (private symbols), otherwise the shared library. HOT: it
# computes much itself and is optimised as the library is; the others build faster than they run. EMULATED: part of the tests
# that run on an emulated processor too (label and target `emulated`). The target `fast` builds what the tests of label fast
# need. The target `smoke` builds what the tests need that test/CMakeLists.txt lists (label smoke).
function(tandem_test)
  cmake_parse_arguments(arg "INTERNAL;HOT;EMULATED" "NAME;LABEL;TIMEOUT" "SOURCES;ENVIRONMENT;LIBRARIES" ${ARGN})
  if(NOT arg_LABEL)
    set(arg_LABEL fast)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)  # ends tests that hang: several times the longest test on two slow cores
  endif()
  if(TANDEM_SANITIZE OR CMAKE_CROSSCOMPILING)
    math(EXPR arg_TIMEOUT "${arg_TIMEOUT} * 2")
  endif()
  add_executable(${arg_NAME} ${arg_SOURCES})
  tandem_target_defaults(${arg_NAME})
  if(NOT arg_HOT)
    target_compile_options(${arg_NAME} PRIVATE $<$<CONFIG:Release>:-O1>)
  endif()
  target_include_directories(${arg_NAME} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/test)
  if(arg_INTERNAL)
    target_link_libraries(${arg_NAME} PRIVATE tandem_static)
  else()
    target_link_libraries(${arg_NAME} PRIVATE tandem)
  endif()
  target_link_libraries(${arg_NAME} PRIVATE ${arg_LIBRARIES} cmocka)
  set_target_properties(${arg_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/test)
  add_test(NAME ${arg_NAME} COMMAND ${arg_NAME})
  if("fast" IN_LIST arg_LABEL)
    add_dependencies(fast ${arg_NAME})
  endif()
  if(arg_EMULATED)
    list(APPEND arg_LABEL emulated)
    add_dependencies(emulated ${arg_NAME})
  endif()
  if(arg_NAME IN_LIST tandem_smoke_tests)
    list(APPEND arg_LABEL smoke)
    add_dependencies(smoke ${arg_NAME})
  endif()
  set_tests_properties(${arg_NAME} PROPERTIES LABELS "${arg_LABEL}" TIMEOUT ${arg_TIMEOUT} ENVIRONMENT "${arg_ENVIRONMENT}")
endfunction()
