"""The one place where a kernel is launched, compiled and loaded without a launch, or bound for launches to come.

Triton finds out at each launch what its arguments are specialised on, which takes longer than all else that the host
does for a layer. So a call's launches are written down once (`Recording`), each with the binary that Triton chose and
with the places of its tensors in a table; a later call of the same kind fills in addresses alone (`Bound`).
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import inspect
import operator
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from dsmoe_op.streams import current_stream

INTERPRET: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter (which cannot multiply bf16), as decided when they are imported."""

TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any], *, warmup: bool = False
) -> None:
    """Launches on the current stream of the current device; with `warmup` it compiles and loads, and launches nothing.

    Inside a `Recording` it launches nothing either, and is written down.

    Args:
        args: the kernel's runtime arguments, in order.
        meta: its constexpr arguments and the compiler's options.
    """
    meta = {"enable_fp_fusion": True, **meta}  # said aloud, since Triton's default changes between versions
    early, followed = _overlap.get()
    if (early or followed) and "EARLY" in kernel.arg_names:
        meta |= {"EARLY": early, "FOLLOWED": followed, "launch_pdl": early}
    if not warmup:
        recording = _recording.get()
        if recording is None:
            kernel[grid](*args, **meta)
        else:
            recording.add(kernel, grid, args, meta)
        return
    compiled = kernel.warmup(*args, grid=grid, **meta)
    if compiled is None:  # in the interpreter
        return
    together = _together.get()
    if together is None:
        _load(compiled)
    else:
        together.append(compiled)


@contextlib.contextmanager
def overlapping(early: bool, followed: bool) -> Iterator[None]:
    """Launches inside are such as `overlap.begin` describes."""
    token = _overlap.set((early, followed))
    try:
        yield
    finally:
        _overlap.reset(token)


_overlap: contextvars.ContextVar[tuple[bool, bool]] = contextvars.ContextVar("overlap", default=(False, False))


def compile_together(warm_up: Callable[[], None]) -> None:
    """What `warm_up` warms up is compiled side by side, on all of the process's cores, and loaded at the end."""
    compiling: list[Any] = []

    def compile_all() -> None:
        _together.set(compiling)
        cores = len(os.sched_getaffinity(0))
        with _no_collection(), ThreadPoolExecutor(cores) as executor, triton.AsyncCompileMode(executor):
            warm_up()

    # In a context of its own: a kernel that fails to compile leaves the mode set, and the next call could not enter it.
    contextvars.Context().run(compile_all)
    for compiled in compiling:
        _load(compiled)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No automatic garbage collection inside.

    In CPython 3.11 a collection may let another thread go on while `ast.parse` builds its tree, which then fails with
    "AST constructor recursion depth mismatch"; Triton parses each function that it compiles.
    """
    with _collection:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


_collection = threading.Lock()


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """What is warmed up inside is compiled, for Triton's cache on disk, and not loaded: this process needs no GPU."""
    token = _together.set([])
    try:
        yield
    finally:
        _together.reset(token)


_together: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("together", default=None)


def _load(compiled: Any) -> None:
    """Loads the binary, which the first launch would otherwise do, perhaps in a capture."""
    if hasattr(compiled, "result"):  # of an asynchronous compile
        compiled = compiled.result()
    compiled._init_handles()


def row_stride(rows: Tensor) -> int:
    """Elements between rows of a [T, H] tensor; one row may report any number, which would compile one more kernel."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


# --- launches written down ------------------------------------------------------------------------------------------

Table = Sequence[Any]
"""What launches draw their arguments from: the call's tensors, or their addresses, then a recording's constants."""


class Recording:
    """Launches made inside `with recording:`, not issued but bound to the places of their tensors in a table.

    A table for the launches has the tensors, or their addresses, at the places given here, and `constants` after them.
    All that a launch's other arguments, its grid and its constexprs come from is thereby fixed, as is all that Triton
    specialises on: dtypes, which addresses are multiples of 16 bytes, and integers. So whoever keeps a recording keeps
    it by shapes, strides, dtypes, device and alignment of every tensor. It holds no tensor and no stream itself.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Args: tensors: one object for each place, even where two share memory. Buffers may be on "meta"."""
        self._tensors = list(tensors)
        self._places = {id(t): place for place, t in enumerate(tensors)}
        assert len(self._places) == len(self._tensors)
        self.constants: list[Any] = []
        self.launches: list[Bound | Direct] = []

    def __enter__(self) -> list[Bound | Direct]:
        self.launches = []
        self._token = _recording.set(self)
        return self.launches

    def __exit__(self, *exc: object) -> None:
        _recording.reset(self._token)

    def add(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        """Binds one launch; arguments as of `launch`."""
        descriptors = tuple(_Descriptor(i, arg) for i, arg in enumerate(args) if isinstance(arg, _DESCRIPTORS))
        places = [self._place(arg.base if isinstance(arg, _DESCRIPTORS) else arg) for arg in args]
        compiled = None if INTERPRET else kernel.warmup(*args, grid=grid, **meta)
        if compiled is not None and hasattr(compiled, "result"):
            compiled = compiled.result()
        if compiled is None or not _takes_what_is_known(kernel, compiled, len(args)):
            self.launches.append(Direct(kernel, grid, _picker(places), meta, descriptors))
            return
        # The launcher wants a value for each constexpr, and looks at none.
        places += [self._place(None)] * (len(kernel.arg_names) - len(args))
        self.launches.append(Bound(compiled, grid, _picker(places), descriptors))

    def _place(self, value: Any) -> int:
        if isinstance(value, Tensor):
            if id(value) not in self._places:
                raise ValueError(f"a launch was given a tensor that is not the call's own: {tuple(value.shape)}")
            return self._places[id(value)]
        for i, constant in enumerate(self.constants):
            if constant is value or (type(constant) is type(value) and constant == value):
                return len(self._tensors) + i
        self.constants.append(value)
        return len(self._tensors) + len(self.constants) - 1


_recording: contextvars.ContextVar[Recording | None] = contextvars.ContextVar("recording", default=None)


def _picker(places: list[int]) -> Callable[[Table], Sequence[Any]]:
    """What takes these places of a table. An itemgetter of one place would give what is there, not a tuple of it."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda table: tuple(table[place] for place in places)


class Bound:
    """One launch of a binary that is chosen and loaded. A call takes a microsecond or two above the driver's own."""

    __slots__ = ("_compiled", "_descriptors", "_fixed", "_grid", "_pick", "_run")

    def __init__(
        self, compiled: Any, grid: tuple[int, ...], pick: Callable[[Table], Any], descriptors: tuple[_Descriptor, ...]
    ) -> None:
        self._run = compiled.run  # loads the binary, if that is still to be done
        self._compiled, self._pick, self._descriptors = compiled, pick, descriptors
        self._grid = (*grid, 1, 1)[:3]
        self._fixed = (compiled.function, compiled.packed_metadata)

    def __call__(self, table: Table, stream: int | None) -> None:
        args = self._pick(table)
        if self._descriptors:
            args = _with_descriptors(args, self._descriptors)
        runtime = triton.knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if _is_empty(enter) and _is_empty(leave):
            self._run(*self._grid, stream, *self._fixed, None, None, None, *args)
        else:  # a profiler of Triton's is on
            metadata = self._compiled.launch_metadata(self._grid, stream, *args)
            self._run(*self._grid, stream, *self._fixed, metadata, enter, leave, *args)


class Direct:
    """One launch through Triton's own path: in the interpreter, or where its launcher has a form unknown here.

    Its table holds tensors.
    """

    __slots__ = ("_descriptors", "_grid", "_kernel", "_meta", "_pick")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        pick: Callable[[Table], Any],
        meta: dict[str, Any],
        descriptors: tuple[_Descriptor, ...],
    ) -> None:
        self._kernel, self._grid, self._pick, self._meta = kernel, grid, pick, meta
        self._descriptors = descriptors

    def __call__(self, table: Table, stream: int | None) -> None:
        args = _with_descriptors(self._pick(table), self._descriptors)
        with current_stream(stream):
            self._kernel[self._grid](*args, **self._meta)


def _is_empty(hook: Any) -> bool:
    """Whether nothing is called: None, or a chain without links."""
    return not getattr(hook, "calls", hook)


_FIRST = ["gridX", "gridY", "gridZ", "stream", "function"]
_THEN = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"]


def _takes_what_is_known(kernel: Any, compiled: Any, num_args: int) -> bool:
    """Whether `compiled.run` takes what `Bound` gives: true for Triton 3.6 to 3.9, whose launchers agree in this."""
    try:
        *names, rest = inspect.signature(compiled.run).parameters.values()
        given = [p.name for p in names]
        known = rest.kind is inspect.Parameter.VAR_POSITIONAL and given in (_FIRST, _FIRST + _THEN)
        constexprs = [p.is_constexpr for p in kernel.params]
        known = known and not any(constexprs[:num_args]) and all(constexprs[num_args:])
        return known and compiled.function is not None and compiled.packed_metadata is not None
    except (AttributeError, TypeError, ValueError):
        return False


# --- tensor descriptors ---------------------------------------------------------------------------------------------


_DESCRIPTORS = (TensorDescriptor, GluonDescriptor)


class _Descriptor:
    """A descriptor argument without its tensor, whose place the table has."""

    __slots__ = ("_template", "position")

    def __init__(self, position: int, descriptor: Any) -> None:
        self.position = position
        self._template = copy.copy(descriptor)
        self._template.base = _Address(0, descriptor.base.dtype)

    def of(self, base: Any) -> Any:
        """The descriptor of that tensor, or of what lies at that address: the plan's key has its alignment."""
        descriptor = copy.copy(self._template)
        descriptor.base = _Address(base, self._template.base.dtype) if isinstance(base, int) else base
        return descriptor


class _Address:
    """What a descriptor asks of its tensor."""

    __slots__ = ("_address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address


def _with_descriptors(args: Sequence[Any], descriptors: tuple[_Descriptor, ...]) -> Sequence[Any]:
    if not descriptors:
        return args
    args = list(args)
    for descriptor in descriptors:
        args[descriptor.position] = descriptor.of(args[descriptor.position])
    return args
