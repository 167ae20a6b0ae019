"""Modules with a text of their source changed, for as long as a measurement or a check takes."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory


@dataclass(frozen=True)
class Source:
    """A text that stands once in a module's source, and what is put in its place."""

    module: str
    there: str
    instead: str
    users: tuple[str, ...] = ()
    """Modules that have functions of it."""


@contextmanager
def changed(source: Source) -> Iterator[None]:
    """Modules have another source meanwhile.

    Raises:
        LookupError: the text does not stand there once.
    """
    origin = Path(str(import_module(source.module).__file__))
    text = origin.read_text()
    if text.count(source.there) != 1:
        raise LookupError(f"{source.there!r} stands {text.count(source.there)} times in {origin}")
    with TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / origin.name
        path.write_text(text.replace(source.there, source.instead))
        stack.enter_context(_loaded(source.module, path))
        for user in source.users:
            stack.enter_context(_loaded(user, Path(str(import_module(user).__file__))))
        yield


@contextmanager
def _loaded(module: str, path: Path) -> Iterator[None]:
    """Another file's module in the place of one."""
    package, _, name = module.rpartition(".")
    spec = spec_from_file_location(module, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as {module}")
    before, loaded = sys.modules[module], module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
        setattr(sys.modules[package], name, loaded)
        yield
    finally:
        sys.modules[module] = before
        setattr(sys.modules[package], name, before)
