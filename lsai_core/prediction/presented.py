"""What PyTorch answers while CPU tensors stand for a GPU's: `cuda` is where all tensors are.

Device arguments are turned by a mode of torch's own (`TorchFunctionMode`). For the rest there is no
such way: the functions of `torch.cuda` and `torch.accelerator` below, the device of
`torch.autocast`, and how a module converts its parameters are attributes of torch that are others
while `presented` is open.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from lsai_core.base.attributes import attributes_as
from lsai_core.base.errors import UserError
from lsai_core.prediction.cuda_calls import (
    SILENT,
    Stream,
    call_answers,
    quiet_calls,
    statistics_of,
)
from lsai_core.prediction.no_values import READS, NoValues
from lsai_core.profiling.gpus import Gpu

CPU = torch.device("cpu")
GIB = 2**30
CUDA = torch.device("cuda", 0)
_DEVICE: Any = FakeTensor.device  # a property of torch's own
_MOVES = (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu)


class OnGpu(TorchFunctionMode):
    """Turns `cuda` into where tensors are, and tells `tracker` what a program has on the host: what
    it sends there, makes of numbers, or makes with the device "cpu", in words; and `values` that it
    reads one."""

    def __init__(self, tracker: Places, values: NoValues) -> None:
        super().__init__()
        self._tracker, self._values = tracker, values
        self._named: set[int] = set()  # GPUs, by number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        given = kwargs or {}
        kwargs = {name: _here(value) for name, value in given.items()}
        kwargs.pop("pin_memory", None)
        self._name(given.get("device"))
        if func is torch.Tensor.pin_memory:
            return args[0]
        if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return _device_for(frame, args[0], self._tracker).type == "cuda"
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and isinstance(args[0], FakeTensor):
            raise UserError(
                "simulated_gpu has no values for NumPy; .item() and .tolist() give zeros"
            )
        if func in READS and isinstance(args[0], FakeTensor):
            self._values.read()
            if func is torch.Tensor.__format__ and not args[0].dim():
                return format(args[0].item(), *args[1:])
        if func in _MOVES:
            return self._moved(func, args, given, kwargs, frame)
        of_numbers = func is torch.tensor and given.get("device") is None
        if of_numbers or _is_cpu(given.get("device"), frame):
            with self._tracker.at("host"):
                return func(*args, **kwargs)
        if _is_cuda(given.get("device")):
            with self._tracker.at("sent"):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _name(self, device: Any) -> None:
        """A program names a device. UserError for a second GPU: there is one, by any number, as one
        of several processes may have it."""
        if isinstance(device, int) or _is_cuda(device):
            number = torch.device("cuda", device) if isinstance(device, int) else device
            index = torch.device(number).index
            self._named |= set() if index is None else {index}
            if len(self._named) > 1:
                names = " and ".join(f"cuda:{each}" for each in sorted(self._named))
                raise UserError(f"simulated_gpu has one GPU, and this program names {names}")

    def _moved(
        self,
        func: Any,
        args: Any,
        given: dict[str, Any],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> Any:
        """The result of `Tensor.to` and its kind, called in `frame`; a copy where it goes to the
        other memory."""
        devices = [value for value in (*args[1:2], given.get("device")) if _is_device(value)]
        for device in (*devices, *(args[1:2] if func is torch.Tensor.cuda else ())):
            self._name(device)
        to_host = func is torch.Tensor.cpu or any(_is_cpu(device, frame) for device in devices)
        to_gpu = func is torch.Tensor.cuda or (devices and not to_host)
        source = args[0]
        if func is torch.Tensor.to:
            source = func(*(_here(value) for value in args), **kwargs)
        if not isinstance(source, Tensor) or source.is_meta:
            return source
        if to_host and not self._tracker.lies_on_host(source):
            with self._tracker.at("host"):
                return source.clone()
        said = func is torch.Tensor.cuda or any(map(_is_cuda, devices))
        if to_gpu and self._tracker.lies_on_host(source):
            with self._tracker.at("sent" if said else "GPU"):
                return source.clone()
        if said:
            self._tracker.send(source)
        return source


class Places(Protocol):
    """Knows where tensors are."""

    def at(
        self, place: Literal["host", "GPU", "sent"]
    ) -> contextlib.AbstractContextManager[None]: ...

    def lies_on_host(self, tensor: Tensor) -> bool: ...

    def send(self, tensor: Tensor) -> None: ...


def _here(value: Any) -> Any:
    return CPU if _is_cuda(value) else value


def _is_cuda(value: Any) -> bool:
    kind = value if isinstance(value, str) else getattr(value, "type", None)
    return isinstance(value, str | torch.device) and str(kind).partition(":")[0] == "cuda"


def _zeros(tensor: Tensor) -> Any:
    """What `tolist` gives, without asking for each value."""
    zero: Any = tensor.new_zeros(()).item()
    for size in reversed(tensor.shape):
        zero = [copy.copy(zero) for _ in range(size)] if isinstance(zero, list) else [zero] * size
    return zero


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value != "")


def _is_cpu(value: Any, frame: FrameType) -> bool:
    """Whether a program, in its `frame`, names the host. PyTorch means the GPU by a device that it
    reads off a tensor."""
    if isinstance(value, torch.device):
        return value.type == "cpu" and not _works_with_torch(frame)
    return isinstance(value, str) and value == "cpu"


@contextlib.contextmanager
def presented(
    gpu: Gpu, memory: SimpleNamespace, values: NoValues, places: Places, main: Stream
) -> Iterator[None]:
    """While open, torch speaks of `gpu`, whose stream is `main`. `memory`: functions `live`,
    `peak`, `reserved`, `reset` in bytes, for what programs ask of `torch.cuda`. `values` is told
    what they want to read or save, `places` knows what is not on the GPU."""
    from torch.nn.attention import flex_attention

    answers = _answers(gpu, memory) | call_answers(main)
    changed = [
        *((torch.cuda, name, value) for name, value in answers.items()),
        *quiet_calls(),
        *_accelerator(_answers(gpu, memory)),  # others, for Dynamo knows a function by one name
        (torch.amp.autocast_mode.autocast, "__init__", _autocast()),
        (torch, "Generator", _Generator),
        (flex_attention, "_validate_device", _no_flex),
        (nn.Module, "_apply", _apply({})),
        # programs that ask whether a tensor is fake, and would then trace, get no for an answer
        (torch._subclasses, "FakeTensor", _Nothing),
        (FakeTensor, "tolist", _zeros),
        (FakeTensor, "device", _device(places)),
        (torch._subclasses.fake_tensor.log, "disabled", True),  # it repeats what is raised
        (torch, "save", values.save),
        (torch, "load", values.load(torch.load)),
        (torch.cuda.memory, "memory_stats_as_nested_dict", lambda *_, **__: statistics_of(memory)),
        (DataLoader, "_get_iterator", _in_this_process),
        (torch, "is_autocast_enabled", _of_cpu(torch.is_autocast_enabled)),
        (torch, "get_autocast_dtype", _of_cpu(torch.get_autocast_dtype)),
    ]
    with attributes_as(changed), warnings.catch_warnings():
        # deepcopy asks a tensor for its address
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        # float() of a loss, at a line of this file
        warnings.filterwarnings("ignore", message="Converting a tensor with requires_grad=True")
        # a data loader, which finds no accelerator to pin memory for
        warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
        # a compiled module, which is told of the simulation's hooks as well
        warnings.filterwarnings("ignore", message=".*global hooks on modules")
        yield


def capability_of(gpu: Gpu) -> tuple[int, int]:
    """CUDA's; a GPU of which only the memory is known is taken for a Hopper."""
    major, _, minor = (gpu.capability or "9.0").partition(".")
    return int(major), int(minor)


class _Nothing:
    """A class of which nothing is."""


class _Generator(torch.Generator):
    """A random generator, which a GPU's fake values do not need."""

    def __new__(cls, device: Any = "cpu") -> Self:
        return super().__new__(cls, _here(device))  # type: ignore[call-arg]


def _answers(gpu: Gpu, memory: SimpleNamespace) -> dict[str, Callable[..., Any]]:
    def nothing() -> Callable[..., None]:  # one for each, for Dynamo tells them apart
        return lambda *_arguments, **_options: None

    capability = capability_of(gpu)
    about = SimpleNamespace(
        name=gpu.driver_name,
        total_memory=int(gpu.memory_gib * GIB),
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
    )
    return {
        **{name: nothing() for name in SILENT},
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "reset_peak_memory_stats": lambda *_: memory.reset(),
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: gpu.driver_name,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: about,
        "memory_allocated": lambda *_: memory.live(),
        "max_memory_allocated": lambda *_: memory.peak(),
        "memory_reserved": lambda *_: memory.reserved(),
        "max_memory_reserved": lambda *_: memory.reserved(),
        "mem_get_info": lambda *_: (about.total_memory - memory.reserved(), about.total_memory),
    }


def _in_this_process(loader: DataLoader[Any]) -> _SingleProcessDataLoaderIter:
    """A data loader's iterator. Workers could not send fake tensors, and take no GPU memory."""
    alone = copy.copy(loader)
    alone.num_workers, alone.timeout, alone.prefetch_factor = 0, 0, None
    return _SingleProcessDataLoaderIter(alone)


def _accelerator(answers: dict[str, Callable[..., Any]]) -> list[tuple[Any, str, Any]]:
    """What `torch.accelerator` answers (owner, name, value): what `torch.cuda` does, by `answers`.

    PyTorch's own code asks it whether there are streams to wait for and whether to pin memory. That
    gets the answer of a machine without a GPU, whatever PyTorch was built for: there is no stream,
    and no driver either."""
    device = torch.device("cuda")
    changed: dict[str, Callable[..., Any]] = {
        **{name: value for name, value in answers.items() if hasattr(torch.accelerator, name)},
        "is_available": lambda: not _asked_by_torch(),
        "current_accelerator": lambda check_available=False: None if _asked_by_torch() else device,
        "current_device_index": lambda: 0,
        "set_device_index": lambda *_: None,
    }
    return [(torch.accelerator, name, value) for name, value in changed.items()]


def _asked_by_torch() -> bool:
    """Whether the caller's caller is PyTorch's own code."""
    return _package_of(sys._getframe(2)) == "torch"


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _device(places: Places) -> property:
    """`FakeTensor.device`, which knows the GPU; but not in a program that is being compiled, where
    no mode turns devices."""

    def device(tensor: FakeTensor) -> torch.device:
        if not torch._C._len_torch_function_stack():
            return _DEVICE.fget(tensor)  # type: ignore[no-any-return]
        return _device_for(sys._getframe(1), tensor, places)

    return property(device)


def _device_for(frame: FrameType, tensor: Tensor, places: Places) -> torch.device:
    """The device of a tensor for who asks in `frame`. A program gets to know the GPU; PyTorch and
    this package work with where the tensor is."""
    found: torch.device = _DEVICE.fget(tensor) if isinstance(tensor, FakeTensor) else CPU
    if found.type != "cpu" or _works_with_torch(frame):
        return found
    return CPU if places.lies_on_host(tensor) else CUDA


def _works_with_torch(frame: FrameType) -> bool:
    """Whether a frame is PyTorch's or this package's, and of no program. What a module is moved to,
    and `with torch.device`, a program says."""
    if frame.f_globals.get("__name__") in ("torch.nn.modules.module", "torch.utils._device"):
        return False
    return _package_of(frame) in ("torch", "lsai_core")


def _autocast() -> Callable[..., None]:
    original = torch.amp.autocast_mode.autocast.__init__

    @functools.wraps(original)
    def begin(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *more: Any, **options: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        original(self, device_type, dtype, *more, **options)

    return begin


def _of_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def ask(device_type: str = "cpu") -> Any:
        return function("cpu" if device_type == "cuda" else device_type)

    return ask


def require_inside(module: nn.Module, parameter: nn.Parameter) -> None:
    """UserError for a parameter of `module` that was made before the simulation."""
    if not (isinstance(parameter, FakeTensor) or is_traceable_wrapper_subclass(parameter)):
        raise UserError(
            f"simulated_gpu: the weights of a {type(module).__name__} were made outside of the "
            "context and would not count; build the model and its optimizer inside"
        )


def _apply(moved: dict[int, tuple[nn.Parameter, nn.Parameter]]) -> Callable[..., nn.Module]:
    """`nn.Module._apply`, behind `to` and its kind; torch's own cannot swap fake parameters. One
    that leaves the meta device becomes another, which `moved` keeps for those that share it."""

    def converted(parameter: nn.Parameter, function: Callable[[Tensor], Tensor]) -> nn.Parameter:
        if id(parameter) in moved:
            return moved[id(parameter)][1]
        data = function(parameter.data)
        if data.device != parameter.device:
            new = nn.Parameter(data, parameter.requires_grad)
            moved[id(parameter)] = (parameter, new)
            return new
        parameter.data = data
        if parameter.grad is not None:
            parameter.grad = function(parameter.grad)
        return parameter

    def apply(
        module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if not parameter.is_meta:
                    require_inside(module, parameter)
                module._parameters[name] = converted(parameter, function)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    return apply


def _no_flex(*_arguments: Any, **_options: Any) -> Any:
    raise UserError("simulated_gpu cannot follow flex_attention; predict with another attention")
