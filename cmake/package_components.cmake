# SPDX-License-Identifier: MIT
# Read by CPack before it packs: the target tandem_programs does not build the CUDA module, and an empty package is none.
if(NOT EXISTS ${CPACK_TANDEM_MODULE})
  list(REMOVE_ITEM CPACK_COMPONENTS_ALL module)
endif()
