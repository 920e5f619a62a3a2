# SPDX-License-Identifier: MIT
# CPack reads this before it packs.
cmake_policy(VERSION 3.25)
if(CPACK_GENERATOR STREQUAL DEB)
  # Files go to Debian's folders, whatever the prefix of the build folder is.
  set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
endif()
# The target tandem_programs does not build the CUDA module. Then there is no package of it.
if(NOT EXISTS ${CPACK_TANDEM_MODULE})
  list(REMOVE_ITEM CPACK_COMPONENTS_ALL module)
endif()
