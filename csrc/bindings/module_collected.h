#pragma once

#include <pybind11/pybind11.h>

namespace nwor {

// Shows Python's collector the Python objects that a bound T holds: they often hold it in turn.
// T has `int VisitHeld(visitproc, void*) const` and `void LetGo()`, and stays usable after it.
template <typename T>
class Collected {
 public:
  static pybind11::custom_type_setup Setup() {
    return pybind11::custom_type_setup([](PyHeapTypeObject* heap_type) {
      PyTypeObject* const type = &heap_type->ht_type;
      type->tp_flags |= Py_TPFLAGS_HAVE_GC;
      type->tp_traverse = Traverse;
      type->tp_clear = Clear;
    });
  }

 private:
  // Null as long as __init__ has not run, or when it failed.
  static T* Of(PyObject* self) {
    auto* const instance = reinterpret_cast<pybind11::detail::instance*>(self);
    if (!instance->get_value_and_holder().holder_constructed()) return nullptr;
    return pybind11::handle(self).cast<T*>();
  }

  static int Traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    const T* const object = Of(self);
    return object == nullptr ? 0 : object->VisitHeld(visit, arg);
  }

  static int Clear(PyObject* self) {
    if (T* const object = Of(self)) object->LetGo();
    return 0;
  }
};

}  // namespace nwor
