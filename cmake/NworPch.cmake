# Precompiled headers, for the tests: much less to parse, at the price of hidden missing includes.

# precompile(<target> <header>...): the headers that files of the target most often include.
function(precompile target)
  list(TRANSFORM ARGN REPLACE "(.+)" "$<$<COMPILE_LANGUAGE:CXX>:<\\1$<ANGLE-R>>" OUTPUT_VARIABLE _headers)
  target_precompile_headers(${target} PRIVATE ${_headers})
  use_precompiled(${target})
endfunction()

# Without these two ccache caches nothing that uses precompiled headers.
function(use_precompiled target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
  if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
    set_target_properties(${target} PROPERTIES CXX_COMPILER_LAUNCHER
      "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros;${CMAKE_CXX_COMPILER_LAUNCHER}")
  endif()
endfunction()

# Loading them takes a second or two, which files without torch's headers would not save.
function(precompile_only_for regex)
  foreach(_source IN LISTS ARGN)
    file(STRINGS "${_source}" _found REGEX "^#include ${regex}" LIMIT_COUNT 1)
    if(NOT _found)
      set_source_files_properties("${_source}" PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
    endif()
  endforeach()
endfunction()
