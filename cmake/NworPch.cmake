# Precompiled headers: a quarter less to compile. They are off by default because they hide missing includes;
# `make demo` turns them on where it builds for the CPU only.

function(nwor_precompile target include_regex)
  set(_headers)
  foreach(_header IN LISTS ARGN)
    list(APPEND _headers "$<$<COMPILE_LANGUAGE:CXX>:<${_header}$<ANGLE-R>>")
  endforeach()
  target_precompile_headers(${target} PRIVATE ${_headers})
  # Loading them takes a second, which files without such headers would not save.
  get_target_property(_sources ${target} SOURCES)
  foreach(_source IN LISTS _sources)
    file(STRINGS "${_source}" _uses REGEX "^#include <${include_regex}" LIMIT_COUNT 1)
    if(NOT _uses)
      set_source_files_properties("${_source}" PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
    endif()
  endforeach()
  # Without these two ccache caches nothing that uses precompiled headers.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
  if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
    set(_sloppiness "CCACHE_SLOPPINESS=pch_defines,time_macros")
    set_target_properties(${target} PROPERTIES
      CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND};-E;env;${_sloppiness};${CMAKE_CXX_COMPILER_LAUNCHER}")
  endif()
endfunction()

nwor_precompile(nwor_specpv "(ATen|torch)/" ATen/core/Tensor.h ATen/ops/empty.h)
if(NWOR_BUILD_PYTHON)
  nwor_precompile(_C "torch/" pybind11/pybind11.h pybind11/stl.h torch/csrc/utils/pybind.h)
endif()
