// Which version of XLA's FFI the library is built for: an older one at run time refuses its handlers.
#include "xla/ffi/api/c_api.h"

extern "C" __attribute__((visibility("default"))) int JaxparFfiMajor() { return XLA_FFI_API_MAJOR; }
extern "C" __attribute__((visibility("default"))) int JaxparFfiMinor() { return XLA_FFI_API_MINOR; }
