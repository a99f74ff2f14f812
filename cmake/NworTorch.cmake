# Defines the target nwor_torch (LibTorch without Python) and NWOR_TORCH_* facts about it.
#
# torch's own TorchConfig.cmake is not used: it enables CUDA by itself and adds architectures that
# newer toolkits refuse. What it would tell us is in the package: headers, libraries, a version file.
#
#   NWOR_TORCH_DIR   a LibTorch folder (with include/ and lib/); default: the torch of NWOR_PYTHON

if(NOT NWOR_TORCH_DIR)
  execute_process(
    COMMAND "${NWOR_PYTHON}" -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE NWOR_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT EXISTS "${NWOR_TORCH_DIR}/include/ATen/ATen.h")
  message(FATAL_ERROR
    "LibTorch not found (looked in '${NWOR_TORCH_DIR}'). Install torch first (pip install torch==2.11.0) "
    "and build with --no-build-isolation, or pass -DNWOR_TORCH_DIR=<folder with include/ and lib/>.")
endif()

# The version string as torch.__version__ gives it: the build stamp compares it at import.
if(EXISTS "${NWOR_TORCH_DIR}/version.py")
  file(STRINGS "${NWOR_TORCH_DIR}/version.py" _version_line REGEX "^__version__ *=")
  string(REGEX REPLACE ".*['\"]([^'\"]+)['\"].*" "\\1" NWOR_TORCH_VERSION "${_version_line}")
  file(STRINGS "${NWOR_TORCH_DIR}/version.py" _cuda_line REGEX "^cuda[ :].*=")
  string(REGEX MATCH "['\"]([0-9.]+)['\"]" _ "${_cuda_line}")
  set(NWOR_TORCH_CUDA "${CMAKE_MATCH_1}")
elseif(EXISTS "${NWOR_TORCH_DIR}/build-version")
  file(READ "${NWOR_TORCH_DIR}/build-version" NWOR_TORCH_VERSION)
  string(STRIP "${NWOR_TORCH_VERSION}" NWOR_TORCH_VERSION)
endif()
if(EXISTS "${NWOR_TORCH_DIR}/lib/libc10_cuda.so")
  set(NWOR_TORCH_HAS_CUDA TRUE)
else()
  set(NWOR_TORCH_HAS_CUDA FALSE)
endif()

add_library(nwor_torch INTERFACE)
target_include_directories(nwor_torch SYSTEM INTERFACE
  "${NWOR_TORCH_DIR}/include" "${NWOR_TORCH_DIR}/include/torch/csrc/api/include")
target_compile_definitions(nwor_torch INTERFACE _GLIBCXX_USE_CXX11_ABI=1)
target_link_directories(nwor_torch INTERFACE "${NWOR_TORCH_DIR}/lib")
target_link_libraries(nwor_torch INTERFACE torch torch_cpu c10)
