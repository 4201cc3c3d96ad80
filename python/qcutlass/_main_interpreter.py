"""Refuses sub-interpreters of Python: torch, once imported in one of them, waits forever for itself."""

import ctypes


def _is_main() -> bool:
    state, main = ctypes.pythonapi.PyInterpreterState_Get, ctypes.pythonapi.PyInterpreterState_Main
    state.restype = main.restype = ctypes.c_void_p
    return bool(state() == main())


if not _is_main():
    raise ImportError(
        "qcutlass: expected Python's main interpreter, got a sub-interpreter, in which torch cannot be used; "
        "import it in the main one, or in processes (multiprocessing)"
    )
