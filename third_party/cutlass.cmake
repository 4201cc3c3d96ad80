# Defines the interface target cutlass (headers only) and QCUTLASS_CUTLASS_VERSION.
if(QCUTLASS_CUTLASS_DIR)
  set(candidates ${QCUTLASS_CUTLASS_DIR}/include ${QCUTLASS_CUTLASS_DIR})
else()
  qcutlass_run_python(candidates
    "import importlib.util as u; print(u.find_spec('cutlass_library').submodule_search_locations[0] + '/source/include')")
endif()
find_path(QCUTLASS_CUTLASS_INCLUDE_DIR cutlass/version.h PATHS ${candidates} NO_DEFAULT_PATH NO_CACHE)
if(NOT QCUTLASS_CUTLASS_INCLUDE_DIR)
  message(FATAL_ERROR "CUTLASS not found (looked in '${candidates}'): pip install nvidia-cutlass==4.2.0.0, "
                      "or set QCUTLASS_CUTLASS_DIR to a checkout")
endif()

set(QCUTLASS_CUTLASS_VERSION "")
foreach(part MAJOR MINOR PATCH)
  file(STRINGS ${QCUTLASS_CUTLASS_INCLUDE_DIR}/cutlass/version.h line REGEX "#define CUTLASS_${part} ")
  string(REGEX MATCH "[0-9]+" number "${line}")
  list(APPEND QCUTLASS_CUTLASS_VERSION ${number})
endforeach()
list(JOIN QCUTLASS_CUTLASS_VERSION "." QCUTLASS_CUTLASS_VERSION)
message(STATUS "qcutlass: CUTLASS ${QCUTLASS_CUTLASS_VERSION} in ${QCUTLASS_CUTLASS_INCLUDE_DIR}")

add_library(cutlass INTERFACE)
target_include_directories(cutlass SYSTEM INTERFACE ${QCUTLASS_CUTLASS_INCLUDE_DIR})
