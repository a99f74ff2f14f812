# Precompiled headers of torch: a fifth less to compile. They are off by default because they hide missing includes;
# `make demo` turns them on where it builds for the CPU only.

target_precompile_headers(nwor_specpv PRIVATE
  "$<$<COMPILE_LANGUAGE:CXX>:<ATen/core/Tensor.h$<ANGLE-R>>"
  "$<$<COMPILE_LANGUAGE:CXX>:<ATen/ops/empty.h$<ANGLE-R>>")
# Loading them takes a second, which files without torch's headers would not save.
foreach(_source IN LISTS NWOR_SOURCES NWOR_BUILD_INFO_SOURCE)
  file(STRINGS "${_source}" _torch REGEX "^#include <(ATen|torch)/" LIMIT_COUNT 1)
  if(NOT _torch)
    set_source_files_properties("${_source}" PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  endif()
endforeach()
# Without these two ccache caches nothing that uses precompiled headers.
target_compile_options(nwor_specpv PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
  set(_sloppiness "CCACHE_SLOPPINESS=pch_defines,time_macros")
  set_target_properties(nwor_specpv PROPERTIES
    CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND};-E;env;${_sloppiness};${CMAKE_CXX_COMPILER_LAUNCHER}")
endif()
