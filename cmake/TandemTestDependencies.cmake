# SPDX-License-Identifier: MIT
# Dependencies of the tests: cmocka, and those that AUTO looks for. The tests of the bindings look for Rust, Go and Python
# packages themselves and are skipped without them.
find_path(TANDEM_CMOCKA_INCLUDE cmocka.h)
mark_as_advanced(TANDEM_CMOCKA_INCLUDE)
if(NOT TANDEM_CMOCKA_INCLUDE)
  message(FATAL_ERROR "The tests need cmocka (libcmocka-dev), and cmocka.h is not found. \
TANDEM_BUILD_TESTS=OFF leaves them out.")
endif()

tandem_choice(TANDEM_PYTHON_TESTS AUTO "Tests that python3 runs: of the tree, of the Python package")
if(NOT TANDEM_PYTHON_TESTS STREQUAL OFF)
  find_program(TANDEM_PYTHON python3)
  mark_as_advanced(TANDEM_PYTHON)
else()
  set(TANDEM_PYTHON "")
endif()
set(tandem_has_python ON)
if(NOT TANDEM_PYTHON)
  set(tandem_has_python OFF)
endif()
tandem_decided(TANDEM_PYTHON_TESTS "tests in Python" ${tandem_has_python} "${TANDEM_PYTHON}"
               "python3 is not found, and TANDEM_PYTHON names none")

tandem_choice(TANDEM_GGML_TESTS AUTO "Tests and measurements that link an installed ggml")
set(tandem_has_ggml OFF)
if(NOT TANDEM_GGML_TESTS STREQUAL OFF)
  find_package(ggml CONFIG QUIET)
  if(TARGET ggml::ggml-cpu)
    set(tandem_has_ggml ON)
  endif()
endif()
tandem_decided(TANDEM_GGML_TESTS "tests beside ggml" ${tandem_has_ggml} "${ggml_DIR}"
               "find_package(ggml) finds none with a CPU backend (CMAKE_PREFIX_PATH)")

set(tandem_has_nvtx_test OFF)
if(TANDEM_NVTX_INCLUDE AND NOT TANDEM_NVTX_TESTS STREQUAL OFF)
  set(tandem_has_nvtx_test ON)
endif()
tandem_decided(TANDEM_NVTX_TESTS "test of TANDEM_NVTX" ${tandem_has_nvtx_test} "${TANDEM_NVTX_INCLUDE}"
               "nvtx3/nvToolsExt.h is not found (TANDEM_NVTX_INCLUDE)")
