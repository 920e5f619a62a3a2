# SPDX-License-Identifier: MIT
# CPack runs this over each component's files before it packs them. It adds what Debian's policy requires and an install does
# not write.
cmake_policy(VERSION 3.25)
if(NOT CPACK_GENERATOR STREQUAL DEB)
  return()
endif()

function(write_copyright file)
  file(STRINGS ${CPACK_TANDEM_SOURCE_DIR}/LICENSE lines)
  list(FILTER lines INCLUDE REGEX "^Copyright ")
  list(GET lines 0 holder)
  string(REPLACE "Copyright (c) " "" holder "${holder}")
  file(READ ${CPACK_TANDEM_SOURCE_DIR}/LICENSE text)
  string(REGEX REPLACE "^.*(Permission is hereby)" "\\1" text "${text}")
  string(STRIP "${text}" text)
  string(REPLACE "\n\n" "\n.\n" text "${text}")
  string(REPLACE "\n" "\n " text "${text}")
  file(WRITE ${file} "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
    "Upstream-Name: tandem\n\nFiles: *\nCopyright: ${holder}\nLicense: Expat\n ${text}\n")
endfunction()

function(write_changelog file)
  set(version "${CPACK_PACKAGE_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE}")
  set(seconds $ENV{SOURCE_DATE_EPOCH})
  if(seconds STREQUAL "") # CMake's time stamps follow it, too
    file(TIMESTAMP ${CPACK_TANDEM_SOURCE_DIR}/CHANGELOG.md date "%a, %d %b %Y %H:%M:%S +0000" UTC)
  else()
    string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC)
  endif()
  file(WRITE ${file} "tandem (${version}) unstable; urgency=medium\n\n"
    "  * CHANGELOG.md of the package tandem-doc has the changes.\n\n"
    " -- ${CPACK_PACKAGE_CONTACT}  ${date}\n")
  execute_process(COMMAND gzip -9nf ${file} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# Compresses manual pages. Links lead to the compressed pages.
function(compress_pages folder)
  file(GLOB pages ${folder}/man*/*)
  foreach(page ${pages})
    if(IS_SYMLINK ${page})
      file(READ_SYMLINK ${page} target)
      file(REMOVE ${page})
      file(CREATE_LINK ${target}.gz ${page}.gz SYMBOLIC)
    else()
      execute_process(COMMAND gzip -9nf ${page} COMMAND_ERROR_IS_FATAL ANY)
    endif()
  endforeach()
endfunction()

foreach(component ${CPACK_COMPONENTS_ALL})
  set(root ${CPACK_TEMPORARY_DIRECTORY}/${component})
  string(TOUPPER ${component} upper)
  set(folder ${root}/usr/share/doc/${CPACK_DEBIAN_${upper}_PACKAGE_NAME})
  write_copyright(${folder}/copyright)
  write_changelog(${folder}/changelog.Debian)
  # The library is where the loader looks, so programs need no RPATH. A stripped archive keeps what the linker needs.
  file(GLOB programs ${root}/usr/bin/*)
  foreach(program ${programs})
    file(RPATH_REMOVE FILE ${program})
  endforeach()
  file(GLOB_RECURSE archives ${root}/usr/lib/*.a)
  foreach(archive ${archives})
    execute_process(COMMAND ${CPACK_TANDEM_STRIP} --strip-debug --enable-deterministic-archives ${archive}
                    COMMAND_ERROR_IS_FATAL ANY)
  endforeach()
  file(REMOVE ${root}/usr/share/doc/tandem/LICENSE) # the copyright file contains it
  compress_pages(${root}/usr/share/man)
  if(IS_DIRECTORY ${root}/usr/share/zsh/site-functions) # Debian's zsh looks there for completions of packages
    file(RENAME ${root}/usr/share/zsh/site-functions ${root}/usr/share/zsh/vendor-completions)
  endif()
endforeach()
