#pragma once

#include <pybind11/pybind11.h>

// The parts of the Python module: each adds its subsystem's classes and functions.

namespace nwor {

void BindAttention(pybind11::module_& m);  // module_attention.cpp
void BindDrafters(pybind11::module_& m);   // module_drafters.cpp
void BindSession(pybind11::module_& m);    // module_session.cpp
void BindSlots(pybind11::module_& m);      // module_slots.cpp
void BindSpecPV(pybind11::module_& m);     // module_specpv.cpp
void BindTree(pybind11::module_& m);       // module_tree.cpp

}  // namespace nwor
