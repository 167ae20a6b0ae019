"""A kernel's functions as Python: their source, in a namespace that is bound to the semantic."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction, JITCallable

from tests.gates.gluon.semantic import Semantic

_ASSIGNED = "_assigned_in_a_kernel"


class _Assignments(ast.NodeTransformer):
    """What is assigned becomes a tensor, as in a compiled function (annotated: a constant)."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        called = ast.Name(id=_ASSIGNED, ctx=ast.Load())
        node.value = ast.Call(func=called, args=[node.value], keywords=[])
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.decorator_list = []
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
        return node


class _Bound:
    """A module whose functions run here."""

    def __init__(self, names: "Names", module: ModuleType) -> None:
        self._names, self._module = names, module

    def __getattr__(self, name: str) -> Any:
        value = self._names.bind(getattr(self._module, name))
        setattr(self, name, value)
        return value


class Names:
    """Functions of kernels, bound to a semantic."""

    def __init__(self, semantic: Semantic) -> None:
        self.semantic = semantic
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self._ours = {
            id(tl.reduce): semantic.reduce,
            id(gl.reduce): semantic.reduce,
            id(tl.associative_scan): semantic.scan,
            id(gl.associative_scan): semantic.scan,
            id(tl.inline_asm_elementwise): semantic.inline_asm,
            id(gl.inline_asm_elementwise): semantic.inline_asm,
            id(tl.multiple_of): semantic.multiple_of,
            id(gl.multiple_of): semantic.multiple_of,
            id(tl.static_range): range,
            id(tl.range): range,
        }

    def bind(self, value: Any) -> Any:
        if id(value) in self._ours:
            return self._ours[id(value)]
        if isinstance(value, ConstexprFunction):
            return value
        if isinstance(value, (JITCallable, InterpretedFunction)):
            return self._callee(value.fn)
        if isinstance(value, tl.constexpr):
            return value.value
        if isinstance(value, ModuleType):
            return _Bound(self, value)
        if tl.core.is_builtin(value):
            return partial(value, _semantic=self.semantic)
        return value

    def _callee(self, source: Callable[..., Any]) -> Callable[..., Any]:
        """What calls a jitted function, which is read when it is first called."""

        def call(*arguments: Any, **named: Any) -> Any:
            return self.function(source)(*arguments, **named)

        call.__name__ = source.__name__
        return call

    def function(self, source: Callable[..., Any]) -> Callable[..., Any]:
        """A jitted function's Python function, as it runs here."""
        if source not in self._functions:
            self._functions[source] = self._compiled(source)
        return self._functions[source]

    def _compiled(self, source: Callable[..., Any]) -> Callable[..., Any]:
        lines, begin = inspect.getsourcelines(source)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        ast.increment_lineno(tree, begin - 1)
        tree = ast.fix_missing_locations(_Assignments().visit(tree))
        code = compile(tree, inspect.getsourcefile(source) or "?", "exec")
        held: dict[str, Any] = {}
        exec(code, self._namespace(source.__globals__), held)
        function: Callable[..., Any] = held[source.__name__]
        return function

    def _namespace(self, names: dict[str, Any]) -> dict[str, Any]:
        if id(names) not in self._globals:
            bound = {name: self.bind(value) for name, value in names.items()}
            bound[_ASSIGNED] = lambda value: self.semantic.to_tensor(value, False)
            self._globals[id(names)] = bound
        return self._globals[id(names)]
