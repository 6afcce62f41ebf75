"""A device of its own on top of the CPU, which counts what the host waits for.

Tensors on it compute on the CPU, but are as strange to the CPU's as those of a GPU: nothing mixes without a copy, and only a
copy or a question brings a value back. What is counted is what `torch.cuda.set_sync_debug_mode` warns of on CUDA:

* reads: `.item()`, `.tolist()`, `int()`, `bool()`, `float()`, `.cpu()`, copies to the CPU of any kind, `torch.equal`, and what
  asks for the number of elements that are set: `nonzero`, boolean masks as indices, `masked_select`, `unique`,
  `repeat_interleave`;
* blocking uploads: copies from the CPU without `non_blocking=True`, `torch.tensor(..., device=...)` and index tensors on the
  CPU among them.

Not counted: what the allocator or a library waits for, and launches.

torch knows one such device for the rest of a process, and trains on it from then on: tests that use it are marked
`own_process`.

It has a clock of its own, on which the host takes `launch` seconds to ask for an operation and the device `work` seconds for
it, one after another; whatever is counted lets the host wait until the device is done. Events are those of a GPU.
"""

from __future__ import annotations

import traceback
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


__all__ = ["DEVICE", "FakeDevice", "FakeTensor", "moved"]

_NAME = "fakegpu"


class _Backend:
    """What torch asks of a backend's module: there is no device that others should find."""

    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 0

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def synchronize(device: Any = None) -> None:
        FakeDevice.active().wait()

    @staticmethod
    def current_stream(device: Any = None) -> None:
        """There is one."""

    class Event:
        """When the device is done with all that it was asked for before."""

        def __init__(self, enable_timing: bool = False) -> None:
            self.timed = enable_timing

        def record(self, stream: Any = None) -> None:
            self.at = FakeDevice.active().done

        def query(self) -> bool:
            return self.at <= FakeDevice.active().now

        def synchronize(self) -> None:
            FakeDevice.active().now = max(FakeDevice.active().now, self.at)
            FakeDevice.active().waited_for_events += 1

        def elapsed_time(self, other: Any) -> float:
            assert self.timed
            assert other.timed
            assert self.query(), "the event has not happened yet"
            assert other.query(), "the event has not happened yet"
            return 1000 * (other.at - self.at)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """It has no dice of its own."""


DEVICE = torch.device("privateuseone", 0)


@cache
def _register() -> None:
    """Makes the device known to torch, which then takes it for the accelerator of this process, for good."""
    _setup_privateuseone_for_python_backend(_NAME, _Backend())


_ATEN = torch.ops.aten
_WAITS = {
    _ATEN._local_scalar_dense.default,
    _ATEN.equal.default,
    _ATEN.is_nonzero.default,
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
    _ATEN._unique2.default,
    _ATEN.unique_dim.default,
    _ATEN.unique_consecutive.default,
    _ATEN.repeat_interleave.Tensor,
}
_INDEXING = {
    _ATEN.index.Tensor,
    _ATEN.index_put.default,
    _ATEN.index_put_.default,
    _ATEN._index_put_impl_.default,
    _ATEN._unsafe_index.Tensor,
}


class FakeTensor(Tensor):
    """A tensor on the device; `inner` holds its values on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> FakeTensor:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FakeTensor({self.inner!r})"

    def tolist(self) -> Any:
        FakeDevice._count("reads")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FakeDevice._call(func, args, kwargs or {})


class FakeDevice(TorchDispatchMode):
    """Within it the device exists.

    Attributes:
        reads (`int`): Times that the host waited for a value.
        blocking_uploads (`int`): Times that it waited for a copy to the device.
        places (`list[str]`): Where, innermost line of the package or of transformers first.
        waited_for_events (`int`): Times that the host waited for an event.
        launch, work (`float`): Seconds of an operation, for the host and for the device.
        now, done (`float`): The host's clock, and when the device is done with what it was asked for.
    """

    _active: FakeDevice | None = None

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.blocking_uploads = 0
        self.places: list[str] = []
        self.launch = self.work = self.now = self.done = 0.0
        self.waited_for_events = 0

    @classmethod
    def active(cls) -> FakeDevice:
        assert cls._active is not None
        return cls._active

    def perf_counter(self) -> float:
        """For a patch of `time`."""
        return self.now

    def wait(self) -> None:
        """Lets the host wait until the device is done."""
        self.now = max(self.now, self.done)

    @property
    def syncs(self) -> int:
        """All that the host waited for."""
        return self.reads + self.blocking_uploads

    def __enter__(self) -> FakeDevice:
        _register()
        FakeDevice._active = self
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(
            True
        )  # `torch.tensor(..., device=...)` is then a tensor on the CPU, and a copy
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._lifted)
        FakeDevice._active = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(func, args, kwargs or {})

    @classmethod
    def _call(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors: list[Tensor] = []
        on_cpu = _mapped(args, tensors), {name: _mapped(each, tensors) for name, each in kwargs.items()}
        ours = [each for each in tensors if isinstance(each, FakeTensor)]
        wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if not ours and (wanted is None or wanted.type != _NAME):
            return func(*args, **kwargs)
        if cls._check(func, args, kwargs, wanted, tensors):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func} got some on {DEVICE} and some on the CPU"
            )
        if cls._active is not None:
            cls._active.now += cls._active.launch
            cls._active.done = max(cls._active.done, cls._active.now) + cls._active.work
        if wanted is not None:
            on_cpu[1]["device"] = torch.device("cpu")
        result = func(*on_cpu[0], **on_cpu[1])
        if wanted is not None and wanted.type == "cpu":
            return result
        if func is _ATEN.copy_.default:
            return args[0]
        given = {id(each.inner): each for each in ours}
        return _wrapped(result, given)

    @classmethod
    def _check(cls, func: Any, args: Any, kwargs: Any, wanted: torch.device | None, tensors: list[Tensor]) -> bool:
        """Counts what is waited for; returns whether tensors of both places meet that must not."""
        is_ours = isinstance(args[0], FakeTensor) if args else False
        strangers = [each for each in tensors if not isinstance(each, FakeTensor) and each.ndim > 0]
        if func is _ATEN._to_copy.default:
            if is_ours and wanted is not None and wanted.type == "cpu":
                if kwargs.get("non_blocking"):
                    raise RuntimeError("a copy to the CPU that is not waited for may be read before it is there")
                cls._count("reads")
            elif not is_ours and not kwargs.get("non_blocking"):
                cls._count("blocking_uploads")
            return False
        if func is _ATEN.copy_.default:
            if not is_ours:
                cls._count("reads")
            elif strangers and not (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
                cls._count("blocking_uploads")
            return False
        if func in _WAITS:
            cls._count("reads")
        elif func in _INDEXING:
            for index in args[1]:
                if index is None:
                    continue
                if index.dtype in (torch.bool, torch.uint8):
                    if not (len(args) > 2 and len(args[1]) == 1 and args[2].numel() == 1):  # torch fills a mask instead
                        cls._count("reads")
                elif not isinstance(index, FakeTensor) and index.ndim > 0:
                    cls._count("blocking_uploads")
            return any(each is args[0] for each in strangers)
        return bool(strangers)

    @classmethod
    def _count(cls, what: str) -> None:
        active = cls._active
        if active is None:
            return
        setattr(active, what, getattr(active, what) + 1)
        active.wait()
        own = [
            f"{frame.filename.rpartition('/hf_specdec/')[2] or frame.filename}:{frame.lineno} {frame.line}"
            for frame in reversed(traceback.extract_stack())
            if "/tests/fake_device" not in frame.filename and "/torch/" not in frame.filename
        ]
        active.places.append(f"{what}: {own[0]}" if own else what)


def _mapped(value: Any, tensors: list[Tensor]) -> Any:
    """The value with every tensor of the device as the one on the CPU behind it; all tensors are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.inner if isinstance(value, FakeTensor) else value
    if isinstance(value, list | tuple):
        return type(value)([_mapped(each, tensors) for each in value])
    return value


def _wrapped(value: Any, given: dict[int, FakeTensor]) -> Any:
    """A result with its tensors on the device; what was changed in place is what was given."""
    if isinstance(value, Tensor):
        return given[id(value)] if id(value) in given else FakeTensor(value)
    return type(value)([_wrapped(each, given) for each in value]) if isinstance(value, list | tuple) else value


def moved(model: nn.Module) -> nn.Module:
    """The model itself, its weights and buffers put on the device."""
    _register()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(FakeTensor(parameter.data), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = FakeTensor(buffer)
    return model
