"""Triton's launchers, made by threads beside each other: each thread gets its own."""

import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")
if shutil.which("gcc") is None and shutil.which("clang") is None:
    pytest.skip("needs a C compiler", allow_module_level=True)

from triton.backends.nvidia import driver

from indexer_service.kernels.launchers import make_one_at_a_time

TURNS = 100

SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *arguments) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""
"""As Triton's: a module of this name, with one function, that is made once."""

METADATA = SimpleNamespace(
    global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
    profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False,
)  # fmt: skip


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers that return their kernel's number; loading one gives other threads their turn."""
    load = driver.compile_module_from_src

    def load_slowly(**options: Any) -> Any:
        module = load(**options)
        time.sleep(0.0005)
        return module

    for name, value in {
        "make_launcher": lambda constants, signature, meta: SOURCE % signature[0],
        "compile_module_from_src": load_slowly,
        "library_dirs": list, "libraries": [], "include_dirs": [],
        "wrap_handle_tensordesc": lambda launch, *rest: launch,
    }.items():  # fmt: skip
        monkeypatch.setattr(driver, name, value)


def wrong(make: Any) -> int:
    """Launchers of two threads that were another kernel's. make: `CudaLauncher.__init__`."""
    found = []

    def work(number: int) -> None:
        source = SimpleNamespace(signature={0: number}, fn=None)
        for _ in range(TURNS):
            launcher = object.__new__(driver.CudaLauncher)
            make(launcher, source, METADATA)
            found.append(launcher.launch() != number)

    for number in (1, 2):
        work(number)  # compiled, and loaded before
    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 * TURNS
    return sum(found)


def test_each_thread_gets_its_own_launcher(without_a_gpu: None) -> None:
    make_one_at_a_time()
    make_one_at_a_time()
    assert wrong(driver.CudaLauncher.__init__) == 0


def test_triton_alone_gives_a_thread_anothers(without_a_gpu: None) -> None:
    """Once it does no more, `launchers` can go."""
    make_one_at_a_time()
    assert wrong(driver.CudaLauncher.__init__.__wrapped__) > 0


def test_compilers_run_beside_each_other(
    without_a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A warm-up makes dozens of launchers: one after the other they would take most of its time."""
    make_one_at_a_time()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    together = threading.Barrier(2, timeout=30)
    compile_c = subprocess.check_call

    def check_call(*arguments: Any, **options: Any) -> int:
        together.wait()
        return compile_c(*arguments, **options)

    monkeypatch.setattr(subprocess, "check_call", check_call)

    def work(number: int) -> int:
        source = SimpleNamespace(signature={0: number}, fn=None)
        launched: int = driver.CudaLauncher(source, METADATA).launch()
        return launched

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, (11, 12))) == [11, 12]
