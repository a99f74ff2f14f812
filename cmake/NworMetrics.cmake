# The Prometheus exporter needs prometheus-cpp from the system (Debian: prometheus-cpp-dev).
# Without it the library still counts; serving and rendering say what to install.

if(NOT NWOR_PROMETHEUS MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "NWOR_PROMETHEUS: got '${NWOR_PROMETHEUS}', expected AUTO, ON or OFF")
endif()
if(NOT NWOR_PROMETHEUS STREQUAL "OFF")
  find_package(CURL QUIET)
  find_package(ZLIB QUIET)
  find_package(prometheus-cpp QUIET)
  if(prometheus-cpp_FOUND)
    target_link_libraries(nwor_specpv PRIVATE prometheus-cpp::core)
    target_compile_definitions(nwor_specpv PRIVATE NWOR_WITH_PROMETHEUS=1)
  elseif(NWOR_PROMETHEUS STREQUAL "ON")
    message(FATAL_ERROR "NWOR_PROMETHEUS=ON but prometheus-cpp was not found (Debian: apt-get install prometheus-cpp-dev)")
  else()
    message(STATUS "nwor_specpv: prometheus-cpp not found, building without the exporter (Debian: prometheus-cpp-dev)")
  endif()
endif()
