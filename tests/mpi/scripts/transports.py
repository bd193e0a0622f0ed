"""python transports.py: prints the setting `btl` of Open MPI that is in force after mpicoll has started it."""

import ctypes

from mpicoll._base import probe
from mpicoll._mpi import open_mpi, runtime

runtime.start()
library = ctypes.CDLL(probe.loaded_library())
with open_mpi._tool_interface(library) as usable:
    assert usable
    index, count, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    assert library.MPI_T_cvar_get_index(b"btl", ctypes.byref(index)) == 0
    assert library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)) == 0
    text = ctypes.create_string_buffer(count.value + 1)
    assert library.MPI_T_cvar_read(handle, text) == 0
    library.MPI_T_cvar_handle_free(ctypes.byref(handle))
    print(f"btl: {text.value.decode()}")
