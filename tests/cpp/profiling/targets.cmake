# The profiler that profiling_test.cpp attaches to itself. Without the CUDA toolkit there is no NVTX
# to attach to, and the test says so.
if(NWOR_WITH_CUDA)
  add_library(nvtx_recorder MODULE "${CMAKE_CURRENT_LIST_DIR}/injection/nvtx_recorder.cpp")
  target_include_directories(nvtx_recorder SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(nvtx_recorder PRIVATE nwor_warnings)
  add_dependencies(profiling_test nvtx_recorder)
  target_compile_definitions(profiling_test PRIVATE
    "NWOR_NVTX_RECORDER=\"$<TARGET_FILE:nvtx_recorder>\"")
endif()
