# SPDX-License-Identifier: MIT
# Options for dependencies, and the summary that CMake prints at the end: which parts are built, and why.

# tandem_choice(NAME default "what"): a cache variable that is ON (a missing dependency is an error), OFF (CMake does not look
# for it) or AUTO (used if found). Accepts every spelling of true and false that CMake accepts.
macro(tandem_choice name default what)
  set(${name} ${default} CACHE STRING "${what}: ON, OFF or AUTO (where it is found)")
  set_property(CACHE ${name} PROPERTY STRINGS ON OFF AUTO)
  string(TOUPPER "${${name}}" tandem_chosen)
  if(tandem_chosen MATCHES "^(ON|TRUE|YES|Y|1)$")
    set(${name} ON)
  elseif(tandem_chosen MATCHES "^(OFF|FALSE|NO|N|0)$")
    set(${name} OFF)
  elseif(tandem_chosen STREQUAL AUTO)
    set(${name} AUTO)
  else()
    message(FATAL_ERROR "${name}=${${name}} is not ON, OFF or AUTO")
  endif()
endmacro()

# tandem_decided(NAME "what" found "what was found" "what is missing"): prints a line of the summary. Fails if the choice is ON
# and cannot be met.
function(tandem_decided name what found with missing)
  if(found)
    tandem_summary("${what}" "yes, ${with} (${name}=${${name}})")
  elseif(${name} STREQUAL ON)
    message(FATAL_ERROR "${name}=ON: ${missing}. ${name}=OFF builds without it.")
  elseif(${name} STREQUAL OFF)
    tandem_summary("${what}" "no (${name}=OFF)")
  else()
    tandem_summary("${what}" "no: ${missing} (${name}=AUTO)")
  endif()
endfunction()

function(tandem_summary what text)
  string(LENGTH "${what}" length)
  if(length LESS 32)
    math(EXPR length "32 - ${length}")
    string(REPEAT " " ${length} spaces)
  endif()
  set_property(GLOBAL APPEND_STRING PROPERTY tandem_summary "\n     ${what}${spaces}${text}")
endfunction()

function(tandem_print_summary)
  get_property(text GLOBAL PROPERTY tandem_summary)
  message(STATUS "Tandem ${PROJECT_VERSION}${text}")
endfunction()
