# The pybind11 module _C: thin, links libnwor_specpv and libtorch_python.

set(PYBIND11_FINDPYTHON ON)
set(Python_EXECUTABLE "${NWOR_PYTHON}")
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(COMMAND "${NWOR_PYTHON}" -m pybind11 --cmakedir
  OUTPUT_VARIABLE _pybind11_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
find_package(pybind11 CONFIG REQUIRED HINTS "${_pybind11_dir}")

file(GLOB _module_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/bindings/module*.cpp")
pybind11_add_module(_C MODULE NO_EXTRAS ${_module_sources})
target_link_libraries(_C PRIVATE nwor_specpv nwor_warnings torch_python)
set_target_properties(_C PROPERTIES
  BUILD_RPATH "\$ORIGIN;${NWOR_TORCH_DIR}/lib"
  INSTALL_RPATH "\$ORIGIN:\$ORIGIN/../torch/lib")
