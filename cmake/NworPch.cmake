# Precompiled headers of torch. They are off by default because they hide missing includes; `make demo` turns them
# on where it builds for the CPU only.

target_precompile_headers(nwor_specpv PRIVATE
  "$<$<COMPILE_LANGUAGE:CXX>:<ATen/core/Tensor.h$<ANGLE-R>>"
  "$<$<COMPILE_LANGUAGE:CXX>:<ATen/ops/empty.h$<ANGLE-R>>")
set(_precompiled nwor_specpv)
if(NWOR_BUILD_PYTHON)
  target_precompile_headers(_C PRIVATE <torch/csrc/utils/pybind.h>)
  list(APPEND _precompiled _C)
endif()
# Without these two ccache caches nothing that uses precompiled headers.
set(_launcher "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros;${CMAKE_CXX_COMPILER_LAUNCHER}")
foreach(_target IN LISTS _precompiled)
  target_compile_options(${_target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
  if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
    set_target_properties(${_target} PROPERTIES CXX_COMPILER_LAUNCHER "${_launcher}")
  endif()
endforeach()
# Files for one instruction set compile everything they include for it.
set(_levels ${NWOR_SOURCES})
list(FILTER _levels INCLUDE REGEX "/cpu/(kernel_[a-z0-9]+|matrix_unit)\\.cpp$")
set_source_files_properties(${_levels} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
