# The tests with threads under the thread sanitizer, with only the sources they need and without
# CUDA, so that `make test-all` can build them in any tree: ninja session_thread_sanitizer_test.
if(NOT NWOR_SANITIZE)
  file(GLOB_RECURSE _sources CONFIGURE_DEPENDS
    "${PROJECT_SOURCE_DIR}/csrc/base/*.cpp"
    "${PROJECT_SOURCE_DIR}/csrc/kv_interceptor/*.cpp"
    "${PROJECT_SOURCE_DIR}/csrc/tree/*.cpp"
    "${PROJECT_SOURCE_DIR}/csrc/session/*.cpp")
  add_executable(session_thread_sanitizer_test EXCLUDE_FROM_ALL
    ${_sources}
    "${PROJECT_SOURCE_DIR}/csrc/metrics/counters.cpp"
    "${CMAKE_CURRENT_LIST_DIR}/session_room_test.cpp"
    "${CMAKE_CURRENT_LIST_DIR}/session_store_test.cpp"
    "${CMAKE_CURRENT_LIST_DIR}/session_threads_test.cpp")
  target_include_directories(session_thread_sanitizer_test PRIVATE
    "${PROJECT_SOURCE_DIR}/csrc" "${CMAKE_CURRENT_SOURCE_DIR}")
  target_compile_options(session_thread_sanitizer_test PRIVATE -fsanitize=thread -g1 -O1)
  target_link_options(session_thread_sanitizer_test PRIVATE -fsanitize=thread)
  target_link_libraries(session_thread_sanitizer_test PRIVATE
    nwor_torch nwor_warnings GTest::gtest_main)
  set_target_properties(session_thread_sanitizer_test PROPERTIES
    BUILD_RPATH "${NWOR_TORCH_DIR}/lib")
endif()
