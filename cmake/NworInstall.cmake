# Two install components, both relocatable: nothing in them names a folder of this machine.
#   package   libraries, build stamp, CMake package: what setup.py puts into the wheel and into python/
#   headers   csrc/**/*.h as nwor_specpv/include (a checkout used in place has csrc/ itself)

include(CMakePackageConfigHelpers)
configure_file("${CMAKE_CURRENT_SOURCE_DIR}/cmake/nwor_specpvConfig.cmake.in"
  "${CMAKE_CURRENT_BINARY_DIR}/nwor_specpvConfig.cmake" @ONLY)
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/nwor_specpvConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)

install(TARGETS nwor_specpv LIBRARY DESTINATION nwor_specpv COMPONENT package)
if(NWOR_BUILD_PYTHON)
  install(TARGETS _C LIBRARY DESTINATION nwor_specpv COMPONENT package)
endif()
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/_build_info.json" DESTINATION nwor_specpv COMPONENT package)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/nwor_specpvConfig.cmake"
  "${CMAKE_CURRENT_BINARY_DIR}/nwor_specpvConfigVersion.cmake"
  DESTINATION nwor_specpv/cmake COMPONENT package)
install(DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/csrc/" DESTINATION nwor_specpv/include
  COMPONENT headers FILES_MATCHING PATTERN "*.h")
