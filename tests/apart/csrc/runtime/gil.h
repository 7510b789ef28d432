// A wait must not hold Python's lock: the work that is waited for may need it, and other threads want to go on.
#pragma once

// Declared by hand: they are part of Python's stable ABI, and machines with Python often lack its headers.
extern "C" {
struct _ts;
int Py_IsInitialized();
int PyGILState_Check();
_ts* PyEval_SaveThread();
void PyEval_RestoreThread(_ts*);
}

namespace apart {

class GilRelease {
 public:
  GilRelease() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~GilRelease() {
    if (state_) PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  _ts* state_;
};

}  // namespace apart
