// The function that torch._C makes of an operator converts any argument to any schema, for 0.7 us
// more per call than a generated binding of native's. Here a comparison of classes passes the usual
// arguments on.
#include "python/direct_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>
#include <vector>

namespace py = pybind11;

namespace warpwright {
namespace {

using Stack = std::vector<c10::IValue>;

enum class Kind { kTensor, kInt, kBool, kFloat, kString, kDtype, kInts, kBools, kOther };

struct Argument {
  Kind kind;
  bool is_optional;
  std::optional<c10::IValue> otherwise;  // its default
};

struct Operator {
  c10::OperatorHandle handle;
  std::vector<Argument> arguments;
  py::object otherwise;
};

Kind kind_of(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return Kind::kTensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return Kind::kInt;
    case c10::TypeKind::BoolType:
      return Kind::kBool;
    case c10::TypeKind::FloatType:
      return Kind::kFloat;
    case c10::TypeKind::StringType:
      return Kind::kString;
    case c10::TypeKind::ScalarTypeType:
      return Kind::kDtype;
    case c10::TypeKind::ListType: {
      const Kind element = kind_of(*type.containedType(0));
      if (element == Kind::kInt) return Kind::kInts;
      return element == Kind::kBool ? Kind::kBools : Kind::kOther;
    }
    default:
      return Kind::kOther;
  }
}

// ---- Python objects of exactly one class (a list may be a tuple or torch.Size); false: another
// class, or beyond int64 ----

bool read(PyObject* value, int64_t& result) {
  if (!PyLong_CheckExact(value)) return false;
  int overflow = 0;
  result = PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0;
}

bool read(PyObject* value, bool& result) {
  result = value == Py_True;
  return PyBool_Check(value);
}

template <class T>
bool push_list(PyObject* value, Stack& stack) {
  if (!PyTuple_CheckExact(value) && !PyList_CheckExact(value) && !THPSize_Check(value))
    return false;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
  c10::List<T> list;
  list.reserve(static_cast<size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    T element;
    if (!read(PySequence_Fast_GET_ITEM(value, i), element)) return false;
    list.push_back(element);
  }
  stack.emplace_back(std::move(list));
  return true;
}

template <class T>
bool push_number(PyObject* value, Stack& stack) {
  T number;
  if (!read(value, number)) return false;
  stack.emplace_back(number);
  return true;
}

bool push_tensor(PyObject* value, Stack& stack) {
  if (!THPVariable_CheckExact(value)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(value);
  if (tensor.has_names()) return false;  // which torch refuses
  stack.emplace_back(tensor);
  return true;
}

bool push_string(PyObject* value, Stack& stack) {
  if (!PyUnicode_CheckExact(value)) return false;
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(value, &size);
  if (text == nullptr) throw python_error();
  stack.emplace_back(std::string(text, static_cast<size_t>(size)));
  return true;
}

bool push(const Argument& argument, PyObject* value, Stack& stack) {
  if (value == Py_None) {
    stack.emplace_back();
    return argument.is_optional;
  }
  switch (argument.kind) {
    case Kind::kTensor:
      return push_tensor(value, stack);
    case Kind::kInt:
      return push_number<int64_t>(value, stack);
    case Kind::kBool:
      return push_number<bool>(value, stack);
    case Kind::kFloat:
      if (!PyFloat_CheckExact(value)) return false;
      stack.emplace_back(PyFloat_AS_DOUBLE(value));
      return true;
    case Kind::kString:
      return push_string(value, stack);
    case Kind::kDtype:
      if (!THPDtype_Check(value)) return false;
      stack.emplace_back(reinterpret_cast<THPDtype*>(value)->scalar_type);
      return true;
    case Kind::kInts:
      return push_list<int64_t>(value, stack);
    case Kind::kBools:
      return push_list<bool>(value, stack);
    case Kind::kOther:
      return false;
  }
  return false;
}

bool push_all(const Operator& op, PyObject* const* values, size_t count, Stack& stack) {
  if (count > op.arguments.size()) return false;
  stack.reserve(op.arguments.size());
  for (size_t i = 0; i < count; ++i) {
    if (!push(op.arguments[i], values[i], stack)) return false;
  }
  for (size_t i = count; i < op.arguments.size(); ++i) {
    if (!op.arguments[i].otherwise.has_value()) return false;
    stack.push_back(*op.arguments[i].otherwise);
  }
  return true;
}

// ---- the call ----

PyObject* results_of(Stack&& stack) {
  if (stack.size() == 1) return THPVariable_Wrap(std::move(stack[0]).toTensor());
  py::tuple results(stack.size());
  for (size_t i = 0; i < stack.size(); ++i) {
    PyTuple_SET_ITEM(results.ptr(), static_cast<Py_ssize_t>(i),
                     THPVariable_Wrap(std::move(stack[i]).toTensor()));
  }
  return results.release().ptr();
}

PyObject* call(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* keywords) {
  HANDLE_TH_ERRORS
  const auto& op = *static_cast<const Operator*>(PyCapsule_GetPointer(self, nullptr));
  Stack stack;
  if (keywords != nullptr || at::impl::torch_function_mode_enabled() ||
      !push_all(op, values, static_cast<size_t>(count), stack)) {
    return PyObject_Vectorcall(op.otherwise.ptr(), values, static_cast<size_t>(count), keywords);
  }
  {
    const py::gil_scoped_release no_gil;
    op.handle.callBoxed(stack);
  }
  return results_of(std::move(stack));
  END_HANDLE_TH_ERRORS
}

PyMethodDef definition{"direct_call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)),
                       METH_FASTCALL | METH_KEYWORDS, nullptr};

}  // namespace

py::object direct_call(const std::string& name, py::object otherwise) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
  for (const auto& result : handle.schema().returns()) {
    if (result.type()->kind() != c10::TypeKind::TensorType) return otherwise;
  }
  if (handle.schema().returns().empty()) return otherwise;
  auto* op = new Operator{handle, {}, std::move(otherwise)};
  const py::capsule self(op, [](void* pointer) { delete static_cast<Operator*>(pointer); });
  for (const auto& argument : handle.schema().arguments()) {
    const auto& type = argument.real_type();
    const bool is_optional = type->kind() == c10::TypeKind::OptionalType;
    op->arguments.push_back({kind_of(is_optional ? *type->containedType(0) : *type), is_optional,
                             argument.default_value()});
  }
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&definition, self.ptr(), nullptr));
}

}  // namespace warpwright
