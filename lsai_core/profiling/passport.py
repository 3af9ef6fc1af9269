"""The passport of a machine: what `lsai probe` measured on it, as one small JSON file.

It holds what `lsai_core/prediction/measured.json` holds of the GPUs that were studied (`rates`,
host `costs`) and `lsai_core/attention/measured.json` of theirs (`attention`), so that a prediction
takes it in their place (`Gpu.passport`). Beside them stand messages between GPUs by size, and
power. A passport may come from anywhere: it is read as data, and whatever it says is checked here.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from lsai_core.base.errors import UserError
from lsai_core.config.strict import Strict

MOST_BYTES = 20_000  # of a passport's file

# Words for a terminal and a table: no control character, no markup.
Text = Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9 .,:;/()+@*#_-]*$")]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
Number = Annotated[float, Field(gt=0, le=1e12)]
Count = Annotated[int, Field(gt=0, le=2**40)]


def _ascending(curve: list[list[float]]) -> list[list[float]]:
    sizes = [size for size, _ in curve]
    if sizes != sorted(set(sizes)):
        raise ValueError("the sizes of products must ascend")
    return curve


# [GFLOP of a product, TFLOP/s], small to large
Pair = Annotated[list[Number], Field(min_length=2, max_length=2)]
Curve = Annotated[list[Pair], Field(min_length=1, max_length=100), AfterValidator(_ascending)]


class Device(Strict):
    """Which device was measured, `count` of them together, on which host, with which software."""

    kind: Literal["gpu", "cpu"]
    name: Text = Field(min_length=1, description="the driver's name, or the processor's")
    count: Count = 1
    memory_gib: Number
    capability: Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")] | None = None
    uuids: list[Text] = Field([], max_length=64)
    driver: Text | None = None
    torch: Text
    cuda: Text | None = None
    packages: dict[Text, Text] = Field({}, max_length=20)
    host_cpu: Text
    host_cores: Count
    host_threads: Count
    host_memory_gib: Number


class Rates(Strict):
    """Speeds of calls timed alone: 10^9 bytes per second, and matrix products by dtype.

    `copy_gb_per_s` counts bytes read and written. `h2d`, `d2h`: pinned host memory to GPU and back.
    """

    copy_gb_per_s: Number
    h2d_gb_per_s: Number | None = None
    d2h_gb_per_s: Number | None = None
    bf16: Curve | None = None
    fp8: Curve | None = None
    tf32: Curve | None = None
    fp32: Curve | None = None


class AttentionRate(Strict):
    """TFLOP/s of the correct kernels at one shape, fastest first: forward and backward
    (`training`), forward alone (`inference`)."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    head_dim: Count
    grouped: bool = False
    causal: bool = True
    window: Count | None = None
    length: Count
    training: dict[Name, Number] = Field(max_length=20)
    inference: dict[Name, Number] = Field(max_length=20)


class Message(Strict):
    """One exchange of `bytes` among `processes`. `bus_gb_per_s`: what each must send, per second;
    `beside_gb_per_s`: the same beside matrix products, which took `product_slowdown` times as
    long."""

    operation: Name
    processes: Count
    bytes: Count
    bus_gb_per_s: Number
    beside_gb_per_s: Number | None = None
    product_slowdown: Number | None = None


class Costs(Strict):
    """Seconds of the host, by the names of `measured.json`: for an operator (`call`), a compiled
    block's kernel (`kernel`). `eager`, on a CPU: time of a byte of other operators, over a
    copy's."""

    call: Number | None = None
    kernel: Number | None = None
    eager: Number | None = None


class Power(Strict):
    """Of one GPU: the limit, what it draws in large bf16 products, and its clock there."""

    limit_w: Number | None = None
    products_w: Number | None = None
    products_mhz: Number | None = None


class Passport(Strict):
    """Everything that `lsai probe` found, or as much as there was time for; `seconds` it took.

    `disturbed`: what else used the machine meanwhile, if that was much.
    """

    passport: Literal[1] = 1  # of this schema
    measured: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    seconds: Number
    disturbed: Text | None = None
    device: Device
    rates: Rates
    costs: Costs = Costs()
    power: Power = Power()
    messages: list[Message] = Field([], max_length=200)
    attention: list[AttentionRate] = Field([], max_length=200)


def read_passport(path: Path) -> Passport:
    """The passport in the file `path`. UserError in one line for a file that is none."""
    if not path.is_file():
        what = "it is no plain file" if path.exists() else "there is no such file"
        raise UserError(f"{path}: {what}; `lsai probe` writes a passport of this machine")
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise _no_passport(path, f"more than {MOST_BYTES:,} bytes")
        return Passport.model_validate_json(text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first: Any = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:100]
        raise _no_passport(path, f"{where + ': ' if where else ''}{first['msg'][:200]}") from None


def _no_passport(path: Path, why: str) -> UserError:
    return UserError(f"{path} is no passport of a machine ({why}); `lsai probe` writes one")
