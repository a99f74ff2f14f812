# Writes the build stamp twice: build_info.cpp for the library and _build_info.json for the check
# that runs before anything of the library is loaded (python/nwor_specpv/_stamp.py).
#
# The revision is read when CMake configures; setup.py and the Makefile configure on every build.

find_package(Git QUIET)
set(NWOR_GIT_REVISION "unknown")
if(GIT_FOUND)
  execute_process(COMMAND "${GIT_EXECUTABLE}" -C "${CMAKE_CURRENT_SOURCE_DIR}" rev-parse --short=12 HEAD
    OUTPUT_VARIABLE _revision OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _failed)
  if(NOT _failed)
    set(NWOR_GIT_REVISION "${_revision}")
  endif()
endif()
if(DEFINED ENV{NWOR_GIT_REVISION})
  set(NWOR_GIT_REVISION "$ENV{NWOR_GIT_REVISION}")
endif()

set(NWOR_CUDA_VERSION "")
set(NWOR_CUDA_ARCH_TEXT "")
if(NWOR_WITH_CUDA)
  set(NWOR_CUDA_VERSION "${CMAKE_CUDA_COMPILER_VERSION}")
  list(JOIN NWOR_CUDA_ARCHS " " NWOR_CUDA_ARCH_TEXT)
endif()

configure_file("${CMAKE_CURRENT_SOURCE_DIR}/cmake/build_info.cpp.in" "${CMAKE_CURRENT_BINARY_DIR}/build_info.cpp" @ONLY)
configure_file("${CMAKE_CURRENT_SOURCE_DIR}/cmake/build_info.json.in" "${CMAKE_CURRENT_BINARY_DIR}/_build_info.json" @ONLY)
set(NWOR_BUILD_INFO_SOURCE "${CMAKE_CURRENT_BINARY_DIR}/build_info.cpp")
