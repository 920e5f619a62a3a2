# SPDX-License-Identifier: MIT
# Removes the files of the last `cmake --install` of a build folder, by its install_manifest.txt, and Tandem's own folders that
# are then empty. Respects DESTDIR as the install does. Does not read manifests of components, because CPack writes them, too,
# and they name files of /usr that it has not installed.
# cmake -D build=FOLDER -P uninstall.cmake
cmake_policy(VERSION 3.25)
set(manifest ${build}/install_manifest.txt)
if(NOT EXISTS ${manifest})
  message(FATAL_ERROR "${manifest} does not exist: nothing, or single components, has been installed from this folder")
endif()
set(folders "")
set(n_removed 0)
file(STRINGS ${manifest} files)
foreach(name ${files})
  set(file "$ENV{DESTDIR}${name}")
  if(EXISTS "${file}" OR IS_SYMLINK "${file}")
    file(REMOVE "${file}")
    if(EXISTS "${file}" OR IS_SYMLINK "${file}")
      message(FATAL_ERROR "${file} cannot be removed")
    endif()
    math(EXPR n_removed "${n_removed} + 1")
  endif()
  cmake_path(GET file PARENT_PATH folder)
  list(APPEND folders "${folder}/tandem") # an install creates it for the CUDA module, which may not exist
  while("${folder}" MATCHES "/(include|cmake|doc|share|lib[^/]*|[^/]+-linux-[^/]+)/tandem(/|$)")
    list(APPEND folders "${folder}")
    cmake_path(GET folder PARENT_PATH folder)
  endwhile()
endforeach()
list(REMOVE_DUPLICATES folders)
list(SORT folders ORDER DESCENDING) # a folder comes after the folders in it
foreach(folder ${folders})
  file(GLOB entries "${folder}/*" "${folder}/.*")
  if(IS_DIRECTORY "${folder}" AND NOT entries)
    file(REMOVE_RECURSE "${folder}")
  endif()
endforeach()
message(STATUS "${n_removed} files removed")
