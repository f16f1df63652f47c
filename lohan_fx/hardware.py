"""What the machine can do: rates, capacities, presets. Nothing here knows torch.

`profile_hardware` measures a `HardwareProfile`; `HardwareProfile.preset` has the servers of
the papers. Rates are per second, in bytes, FLOPs or parameters; sizes are whole bytes.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from lohan_fx.arguments import path_of
from lohan_fx.errors import HardwareError, format_bytes, format_need
from lohan_fx.reading import json_of

DeviceKind = Literal["cpu", "cuda"]

FORMAT_VERSION = 1

_PAGE_BYTES = 4096
"""No tier is laid out in less."""

_LIMIT = 1e30
"""No machine has so many bytes or does so much in a second."""

_UNIT_BYTES: dict[str, int] = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def parse_bytes(size: int | str) -> int:
    """Return whole bytes: ``"1.5GiB"`` → 1610612736, ``"2 GB"`` → 2000000000, ``17`` → 17.

    KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB are powers of 1000. Case and
    spaces do not matter; a fraction of a byte is dropped.

    Raises:
        ValueError: the text has no such form, or the number is negative.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size if isinstance(size, str) else "", re.IGNORECASE
    )
    if match is None or match[2].lower() not in _UNIT_BYTES:
        short = match and re.fullmatch("([kmgt])i?", match[2], re.IGNORECASE)  # as of 20G, 20Gi
        meant = f"; did you mean '{match[1]}{short[1].upper()}iB'? W" if match and short else ": w"
        raise ValueError(
            f"{size!r} is no size{meant}rite whole bytes as an int, or a number with a unit such "
            "as '300MiB', '16 GiB' or '1TB' (KiB to TiB count in 1024s, KB to TB in 1000s)"
        )
    return int(Fraction(match[1]) * _UNIT_BYTES[match[2].lower()])


def lane_name(lane: str, kind: DeviceKind) -> str:
    """What people are told of a lane: on a CPU, "gpu", on which ops run, is "compute"."""
    return "compute" if lane == "gpu" and kind == "cpu" else lane


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdDevice:
    """One directory on an SSD: its rates when it works alone, and its free bytes.

    `endurance_bytes` are the bytes that its maker lets be written in its life (TBW); None if nobody
    has said. Only the wear in `model.lohan.metrics()` depends on it.
    """

    path: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    capacity_bytes: int
    endurance_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """One device, its links, its host and its SSDs.

    Attributes:
        name: a label; no part of the fingerprint.
        matmul_flops_per_s: dtype name (``"bfloat16"``) → FLOP/s of a large matmul.
        block_flops_per_s: FLOP/s of a transformer block, forward and backward, in
            `block_flops_dtype`: the papers' measured peak THP_G.
        device_bytes_per_s: device memory bandwidth, bytes read plus bytes written.
        h2d_bytes_per_s, d2h_bytes_per_s: each direction of the link alone, pinned memory.
            On a CPU device these are memcpy rates.
        duplex_bytes_per_s: both directions at once, their sum.
        ssds: one entry a directory; empty without an SSD tier.
        ssd_read_bytes_per_s, ssd_write_bytes_per_s: all directories at once; the host caps
            them below the sum of the devices. 0.0 without SSDs. LoHan Eq. 2: the SSD lane is
            simplex, a read and a write do not run at full rate at the same time.
        cpu_optimizer_params_per_s: fused fp32 AdamW on the host, in parameters; half of the time
            beside copies over the link, which take the host memory's bandwidth, too.
        device_bytes, host_bytes: capacities. On a CPU device the two are shares of one
            memory; their sum is the whole.

    Raises:
        HardwareError: a rate or size is missing, zero, negative or not a number.
    """

    name: str
    device_kind: DeviceKind
    device_name: str
    matmul_flops_per_s: Mapping[str, float]
    block_flops_per_s: float
    block_flops_dtype: str
    device_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    duplex_bytes_per_s: float
    cpu_optimizer_params_per_s: float
    device_bytes: int
    host_bytes: int
    ssds: tuple[SsdDevice, ...] = ()
    ssd_read_bytes_per_s: float = 0.0
    ssd_write_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        self.validate()
        # One number type a field, so that equal profiles have equal fingerprints.
        for name in _RATES:
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in _SIZES:
            object.__setattr__(self, name, int(getattr(self, name)))
        rates = {dtype: float(rate) for dtype, rate in self.matmul_flops_per_s.items()}
        object.__setattr__(self, "matmul_flops_per_s", rates)
        ssds = tuple(
            SsdDevice(
                path=ssd.path,
                read_bytes_per_s=float(ssd.read_bytes_per_s),
                write_bytes_per_s=float(ssd.write_bytes_per_s),
                capacity_bytes=int(ssd.capacity_bytes),
                endurance_bytes=None if ssd.endurance_bytes is None else int(ssd.endurance_bytes),
            )
            for ssd in self.ssds
        )
        object.__setattr__(self, "ssds", ssds)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def validate(self) -> None:
        """Raise `HardwareError` for the first field that no planner could divide by."""
        for name in ("name", "device_name", "block_flops_dtype"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise HardwareError(f"{name} is {value!r}, but must be a non-empty text")
        if self.device_kind not in get_args(DeviceKind):
            raise HardwareError(f"device_kind is {self.device_kind!r}: use 'cpu' or 'cuda'")
        if not isinstance(self.matmul_flops_per_s, Mapping) or not self.matmul_flops_per_s:
            raise HardwareError(
                f"matmul_flops_per_s is {self.matmul_flops_per_s!r}: give at least one dtype "
                "name with its FLOP/s, such as {'float32': 1e11}"
            )
        for dtype, rate in self.matmul_flops_per_s.items():
            _check_positive(f"matmul_flops_per_s[{dtype!r}]", rate)
        for name in (*_RATES, *_SIZES):
            if not name.startswith("ssd_"):
                _check_positive(name, getattr(self, name))
        for name in _SIZES:
            _check_whole(name, getattr(self, name))
        for i, ssd in enumerate(self.ssds):
            if not isinstance(ssd.path, str) or not ssd.path or "\0" in ssd.path:
                raise HardwareError(f"ssds[{i}].path is {ssd.path!r}, but must name a directory")
            for name in ("read_bytes_per_s", "write_bytes_per_s", "capacity_bytes"):
                _check_positive(f"ssds[{i}].{name}", getattr(ssd, name))
            _check_whole(f"ssds[{i}].capacity_bytes", ssd.capacity_bytes)
            if ssd.endurance_bytes is not None:
                _check_positive(f"ssds[{i}].endurance_bytes", ssd.endurance_bytes)
        for name in ("ssd_read_bytes_per_s", "ssd_write_bytes_per_s"):
            rate = getattr(self, name)
            if self.ssds:
                _check_positive(name, rate)
            elif rate != 0:
                raise HardwareError(
                    f"{name} is {rate!r}, but ssds is empty: list the SSDs, or set it to 0.0"
                )

    def flops_per_s(self, dtype: str) -> float:
        """Matmul FLOP/s of a dtype name (``"bfloat16"`` or ``"torch.bfloat16"``).

        float16 and bfloat16 stand for each other: tensor cores run both at one rate. Any
        other unknown dtype gets the block's rate.
        """
        dtype = dtype.removeprefix("torch.")
        sibling = {"float16": "bfloat16", "bfloat16": "float16"}.get(dtype, dtype)
        rates = self.matmul_flops_per_s
        return rates.get(dtype, rates.get(sibling, self.block_flops_per_s))

    def lane_name(self, lane: str) -> str:
        """What reports call a lane; see `lane_name`."""
        return lane_name(lane, self.device_kind)

    @property
    def ssd_bytes(self) -> int:
        """Sum of the SSD capacities, in bytes."""
        return sum(ssd.capacity_bytes for ssd in self.ssds)

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when anything but the name changes."""
        data = self.to_dict()
        data.pop("name")
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def replace(self, **changes: Any) -> HardwareProfile:
        """A copy with some fields changed, validated again."""
        _check_keys("the changed profile", {**dict.fromkeys(_FIELDS), **changes}, type(self))
        return dataclasses.replace(self, **changes)

    def describe(self) -> list[tuple[str, str]]:
        """(what, value) rows for a table: GiB, GB/s, TFLOP/s."""
        matmul = ", ".join(
            f"{dtype} {rate / 1e12:,.2f}" for dtype, rate in self.matmul_flops_per_s.items()
        )
        link = (self.h2d_bytes_per_s, self.d2h_bytes_per_s, self.duplex_bytes_per_s)
        rows = [
            ("device", f"{self.device_name} ({self.device_kind})"),
            ("device memory", format_bytes(self.device_bytes)),
            ("device memory bandwidth", _gb_per_s(self.device_bytes_per_s)),
            ("matmul", f"{matmul} TFLOP/s"),
            (
                "transformer block",
                f"{self.block_flops_dtype} {self.block_flops_per_s / 1e12:,.2f} TFLOP/s",
            ),
            ("H2D / D2H / both at once", " / ".join(_gb_per_s(rate) for rate in link)),
            ("host memory", format_bytes(self.host_bytes)),
            ("CPU optimizer", f"{self.cpu_optimizer_params_per_s / 1e9:,.3f} Gparam/s"),
        ]
        for ssd in self.ssds:
            rates = f"{_gb_per_s(ssd.read_bytes_per_s)} / {_gb_per_s(ssd.write_bytes_per_s)}"
            rows.append((f"SSD {ssd.path}", f"{rates}, {format_bytes(ssd.capacity_bytes)}"))
        rates = f"{_gb_per_s(self.ssd_read_bytes_per_s)} / {_gb_per_s(self.ssd_write_bytes_per_s)}"
        rows.append(("SSDs together, read / write", rates if self.ssds else "none"))
        return rows

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        for ssd in data["ssds"]:
            if ssd["endurance_bytes"] is None:
                del ssd["endurance_bytes"]
        return {"format": FORMAT_VERSION, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HardwareProfile:
        """The inverse of `to_dict`.

        Raises:
            HardwareError: another format, or unknown, missing or bad fields, by their names.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT_VERSION:
            found = data.get("format") if isinstance(data, Mapping) else data
            raise HardwareError(
                f"hardware profile format {found!r} is not {FORMAT_VERSION}: "
                "profile again with this version of lohan_fx"
            )
        values = {key: value for key, value in data.items() if key != "format"}
        _check_keys("the hardware profile", values, cls)
        if not isinstance(values["ssds"], list | tuple):
            raise HardwareError(f"ssds is {values['ssds']!r}, but must be a list of SSDs")
        for i, ssd in enumerate(values["ssds"]):
            given = {"endurance_bytes": None, **ssd} if isinstance(ssd, Mapping) else ssd
            _check_keys(f"ssds[{i}]", given, SsdDevice)
        values["ssds"] = tuple(SsdDevice(**ssd) for ssd in values["ssds"])
        return cls(**values)

    def save(self, path: str | Path) -> None:
        file = path_of("path", path)
        try:
            file.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise HardwareError(f"cannot write {path}: {error.strerror}; name a file") from error

    @classmethod
    def load(cls, path: str | Path) -> HardwareProfile:
        """Read a file that `save` wrote; `HardwareError` names the file and the field."""
        file = path_of("path", path)
        try:
            return cls.from_dict(json_of(file))
        except OSError as error:
            raise HardwareError(
                f"cannot read the hardware profile {path}: {error.strerror}; name a file that "
                "HardwareProfile.save or lohan-fx profile --out wrote"
            ) from error
        except HardwareError as error:
            raise HardwareError(f"{path}: {error}") from error
        except ValueError as error:
            raise HardwareError(f"{path} is no JSON file: {error}") from error

    @classmethod
    def preset(cls, name: str) -> HardwareProfile:
        """A server of the papers; `preset_names` lists them.

        ``rtx4090-12xp5510`` stands for any count from 1 to 12: ``rtx4090-3xp5510``.
        """
        if not isinstance(name, str):
            raise HardwareError(f"{name!r} is no name of a preset: use {cls.preset_names()[0]!r}")
        if name in _OTHER_PRESETS:
            return _OTHER_PRESETS[name]()
        match = re.fullmatch(r"(.+)-(\d+)xp5510", name)
        if match and match[1] in _LOHAN_GPUS and 1 <= int(match[2]) <= 12:
            return _lohan_server(match[1], int(match[2]))
        near = difflib.get_close_matches(name.lower(), cls.preset_names(), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? Known are" if near else "use one of"
        raise HardwareError(
            f"no hardware preset {name!r}: {hint} {', '.join(cls.preset_names())} "
            "(with 1 to 12 in place of 12), or measure with profile_hardware()"
        )

    @classmethod
    def preset_names(cls) -> tuple[str, ...]:
        return (*(f"{gpu}-12xp5510" for gpu in _LOHAN_GPUS), *_OTHER_PRESETS)


_RATES = tuple(
    field.name
    for field in dataclasses.fields(HardwareProfile)
    if field.name.endswith("_per_s") and field.name != "matmul_flops_per_s"
)
_SIZES = ("device_bytes", "host_bytes")
_FIELDS = tuple(field.name for field in dataclasses.fields(HardwareProfile))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """How many bytes of each tier a plan may use."""

    device_bytes: int
    host_bytes: int
    ssd_bytes: int

    def within(self, other: MemoryBudget) -> bool:
        """Whether it has no more of any tier than another one."""
        return (
            self.device_bytes <= other.device_bytes
            and self.host_bytes <= other.host_bytes
            and self.ssd_bytes <= other.ssd_bytes
        )

    @classmethod
    def from_request(
        cls, hw: HardwareProfile, request: Mapping[str, int | str] | None = None
    ) -> MemoryBudget:
        """Parse ``{"device": "24GiB", "host": "100GiB", "ssd": "1TB"}``; all keys optional.

        Without a request a tier gets a share of what the profile has: device 0.92 (the rest
        is for library workspaces and fragmentation), host 0.8 (the process itself, data
        loading, the operating system), ssd 0.95 (the file system's own needs).

        On a CPU device, device and host share one memory: what one of them asks beyond its
        share, the other loses.

        Raises:
            HardwareError: an unknown tier, a malformed size, an int below a page, or more than the
                hardware has.
        """
        if not isinstance(request, (Mapping, type(None))):
            raise HardwareError(
                f"memory={request!r}: write it as {{'device': '24GiB', 'host': '64GiB'}}"
            )
        have = {"device": hw.device_bytes, "host": hw.host_bytes, "ssd": hw.ssd_bytes}
        asked: dict[str, int] = {}
        for tier, size in (request or {}).items():
            if tier not in have:
                raise HardwareError(f"unknown memory tier {tier!r}: use {', '.join(have)}")
            try:
                asked[tier] = parse_bytes(size)
            except ValueError as error:
                raise HardwareError(f"memory[{tier!r}]: {error}") from error
            bare = isinstance(size, str) and size.strip().replace(".", "", 1).isdigit()
            if isinstance(size, str) and bare and 0 < asked[tier] < 2**20:
                raise HardwareError(
                    f"memory[{tier!r}]: {size!r} has no unit; did you mean '{size.strip()}GiB'? "
                    "(bytes are given as an int)"
                )
            if isinstance(size, int) and 0 < size < _PAGE_BYTES:
                raise HardwareError(
                    f"memory[{tier!r}]: {size} is bytes, as every int, and less than a page; did "
                    f"you mean '{size}GiB'?"
                )

        limit = dict(have)
        if hw.device_kind == "cpu":
            pool = hw.device_bytes + hw.host_bytes
            for tier, other in (("device", "host"), ("host", "device")):
                # What the other tier cannot have is that tier's fault.
                taken = asked.get(other, 0)
                limit[tier] = pool - taken if taken <= pool else pool
        for tier, size in asked.items():
            if size > limit[tier]:
                if tier == "ssd" and not hw.ssds:
                    raise HardwareError(
                        f"memory['ssd']: need {format_need(size)}, but the profile has no SSD: "
                        "give hw=lohan_fx.profile_hardware(ssd=['/a/folder/on/it'])"
                    )
                note = " (device and host share one memory on a CPU)" if limit != have else ""
                raise HardwareError(
                    f"memory[{tier!r}]: need {format_need(size)}, have "
                    f"{format_bytes(limit[tier])}{note}: ask for less, or profile again "
                    "if the hardware has more"
                )
        shares = {"device": Fraction("0.92"), "host": Fraction("0.8"), "ssd": Fraction("0.95")}
        budget = {
            tier: asked.get(tier, int(share * min(have[tier], limit[tier])))
            for tier, share in shares.items()
        }
        if budget["device"] == 0:
            raise HardwareError("memory['device'] is 0: compute needs device memory; ask for more")
        return cls(
            device_bytes=budget["device"], host_bytes=budget["host"], ssd_bytes=budget["ssd"]
        )


def _check_positive(name: str, value: object) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and 0 < value < _LIMIT):  # type: ignore[operator]
        raise HardwareError(
            f"{name} is {reprlib.repr(value)}, but must be a positive finite number (below 1e30): "
            "measure it with profile_hardware(), or correct the profile"
        )


def _check_whole(name: str, value: float) -> None:
    if value != int(value):
        raise HardwareError(f"{name} is {value!r}, but must be a whole number of bytes")


def _check_keys(where: str, data: Mapping[str, Any], kind: Any) -> None:
    if not isinstance(data, Mapping):
        raise HardwareError(f"{where} is {data!r}, but must be a JSON object")
    fields = {field.name for field in dataclasses.fields(kind)}
    for problem, names in (("unknown", data.keys() - fields), ("missing", fields - data.keys())):
        if names:
            raise HardwareError(
                f"{where} has {problem} fields: {_join(names)}; correct the file, or profile again"
            )


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _gb_per_s(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.2f} GB/s"


# Presets. "Spec" is the vendor's data sheet. What neither a paper nor a measurement states is
# marked "inferred", with the reasoning.

_GIB = 2**30


class _Gpu(NamedTuple):
    device_name: str
    half_flops_per_s: float  # matmul, float16 and bfloat16 with fp32 accumulation
    float_flops_per_s: float  # matmul, float32 without tensor cores
    block_flops_per_s: float
    device_bytes_per_s: float
    device_bytes: int


# The one server of LoHan (Table III) and Fuyou (Table 3), with each of its GPUs.
# Device memory bandwidth is inferred: 0.92 of the spec, what large copies usually reach.
_LOHAN_GPUS: dict[str, _Gpu] = {
    "rtx4090": _Gpu(
        device_name="NVIDIA GeForce RTX 4090",
        # Inferred: at this rate a block of 13B, elementwise ops included, runs at the rate below
        # or a little less. The spec, 165.2, is for 2.52 GHz, and cards boost beyond that.
        half_flops_per_s=173e12,
        float_flops_per_s=82.6e12,  # spec
        # Inferred from two statements. LoHan reaches "53 % of peak" on 175B, and that is
        # 86.9 TFLOPS: 164. It reaches 155.8 on 13B, "90 to 95 % of peak": 164 to 173.
        block_flops_per_s=164e12,
        device_bytes_per_s=0.92 * 1008e9,
        device_bytes=24 * _GIB,
    ),
    "rtx3090": _Gpu(
        device_name="NVIDIA GeForce RTX 3090",
        half_flops_per_s=74.4e12,  # inferred: the 4090's ratio to the spec (71, dense), 1.047
        float_flops_per_s=35.6e12,  # spec
        block_flops_per_s=70.5e12,  # inferred: the 4090's ratio of block to spec, 0.993
        device_bytes_per_s=0.92 * 936e9,
        device_bytes=24 * _GIB,
    ),
    "rtx4080": _Gpu(
        device_name="NVIDIA GeForce RTX 4080",
        half_flops_per_s=102e12,  # inferred: the 4090's ratio to the spec (97.5, dense), 1.047
        float_flops_per_s=48.7e12,  # spec
        block_flops_per_s=96.8e12,  # inferred: the 4090's ratio of block to spec, 0.993
        device_bytes_per_s=0.92 * 716.8e9,
        device_bytes=16 * _GIB,
    ),
    "a100-80gb": _Gpu(
        device_name="NVIDIA A100 80GB PCIe",
        # Inferred, as for the 4090, from the rate of a block; 0.68 of the spec's 312 (300 W).
        half_flops_per_s=213e12,
        float_flops_per_s=19.5e12,  # spec
        # Fuyou §1 and Fig. 5: 172 TFLOPS are "86 % of peak", so 200; it reaches 202 on 13B.
        block_flops_per_s=202e12,
        device_bytes_per_s=0.92 * 1935e9,
        device_bytes=80 * _GIB,
    ),
}


def _lohan_server(gpu_name: str, num_ssds: int) -> HardwareProfile:
    gpu = _LOHAN_GPUS[gpu_name]
    # LoHan §III-C: 213 GB of activations leave the GPU in 10 s, over PCIe 4 x16. These GB are
    # GiB: the "12.5 GB" of block inputs beside them are 40 x 32 x 1024 x 5120 x 2 bytes.
    link_bytes_per_s = 22.8e9
    # The P5510's data sheet has up to 7.0 GB/s read and 4.2 write (3.84 TB: 6.5 and 3.4). Inferred
    # as what bends least from LoHan's 13B, batch 64 with 1/2/3 SSDs (70.3 / 111.7 / 136.3
    # TFLOPS), which asks for more with one SSD and for less with three: docs/papers.md.
    ssd: dict[str, Any] = {"read_bytes_per_s": 7.0e9, "write_bytes_per_s": 4.1e9}
    # 12 SSDs share the host's PCIe. Inferred from LoHan §III-C: reading 182 GB of model states
    # and writing as many takes 13 s, and the SSD lane is simplex: 182/32 + 182/26.5 = 12.6 s.
    # 13B at batch 8 asks for less (26 GB/s on average), 175B at batch 8 for more (33 GB/s).
    # Their split is a guess.
    read_cap_bytes_per_s, write_cap_bytes_per_s = 32e9, 26.5e9
    return HardwareProfile(
        name=f"{gpu_name}-{num_ssds}xp5510",
        device_kind="cuda",
        device_name=gpu.device_name,
        matmul_flops_per_s={
            "float16": gpu.half_flops_per_s,
            "bfloat16": gpu.half_flops_per_s,
            "float32": gpu.float_flops_per_s,
        },
        block_flops_per_s=gpu.block_flops_per_s,
        block_flops_dtype="float16",  # the papers' mixed precision: P16, G16, A16
        device_bytes_per_s=gpu.device_bytes_per_s,
        h2d_bytes_per_s=link_bytes_per_s,  # inferred: BW_G is one number for both directions
        d2h_bytes_per_s=link_bytes_per_s,
        duplex_bytes_per_s=2 * link_bytes_per_s,  # LoHan Eq. 2: "the link is duplex"
        # Inferred: 28 bytes a parameter at 112 GB/s, 0.6 of one Xeon Gold 5320's eight
        # channels of DDR4-2933. LoHan says only that Adam is faster than its SSD traffic.
        cpu_optimizer_params_per_s=4.0e9,
        device_bytes=gpu.device_bytes,
        host_bytes=768 * _GIB,  # Table III
        ssds=tuple(
            SsdDevice(path=f"p5510-{i}", capacity_bytes=3_840_000_000_000, **ssd)  # Table III
            for i in range(num_ssds)
        ),
        ssd_read_bytes_per_s=min(num_ssds * ssd["read_bytes_per_s"], read_cap_bytes_per_s),
        ssd_write_bytes_per_s=min(num_ssds * ssd["write_bytes_per_s"], write_cap_bytes_per_s),
    )


def _ssdtrain_server() -> HardwareProfile:
    # SSDTrain, Table II, and §IV-A: "the memory use of the A100 with 4 SSDs". One GPU of the two.
    ssd: dict[str, Any] = {
        "read_bytes_per_s": 7.2e9,
        "write_bytes_per_s": 6.2e9,
    }  # spec, P5800X 1.6 TB
    link_bytes_per_s = 24e9  # inferred: PCIe 4 x16 moves 24 to 26 of its 31.5 GB/s
    return HardwareProfile(
        name="ssdtrain-a100-4xp5800x",
        device_kind="cuda",
        device_name="NVIDIA A100 40GB PCIe, base clock",
        matmul_flops_per_s={
            "float16": 169e12,  # spec 312 * 765/1410 MHz: §IV-A locks the base frequency
            "bfloat16": 169e12,
            "float32": 10.6e12,  # spec 19.5, likewise
        },
        # Inferred from Table III: step = 2 * offloaded / write bandwidth, so 1.15, 1.86 and
        # 2.45 s; BERT's 6 * parameters * tokens over two GPUs then is 151, 155 and 140 TFLOPS.
        block_flops_per_s=155e12,
        block_flops_dtype="float16",
        device_bytes_per_s=0.92 * 1555e9,  # inferred: 0.92 of the spec
        h2d_bytes_per_s=link_bytes_per_s,
        d2h_bytes_per_s=link_bytes_per_s,
        duplex_bytes_per_s=2 * link_bytes_per_s,  # inferred, as for LoHan
        # Inferred: 28 bytes a parameter at 0.6 of one EPYC 7702's 205 GB/s (the paper's
        # optimizer is SGD on the GPU).
        cpu_optimizer_params_per_s=4.4e9,
        device_bytes=40 * _GIB,
        host_bytes=1024 * _GIB,
        ssds=tuple(
            SsdDevice(path=f"p5800x-{i}", capacity_bytes=1_600_000_000_000, **ssd) for i in range(4)
        ),
        # Inferred: four SSDs exceed the GPU's own link (GPUDirect Storage).
        # Table III needs 18.0 GB/s of it without any slowdown.
        ssd_read_bytes_per_s=link_bytes_per_s,
        ssd_write_bytes_per_s=link_bytes_per_s,
    )


def _memferry_server() -> HardwareProfile:
    # MemFerry §V-A: a cloud instance with 128 CPU cores and 8 A100 of 80 GB, PCIe 3.0; one GPU of
    # the eight, all of the cores.
    link_bytes_per_s = 12.5e9  # §III-B: "interconnected via 100Gbps PCIe switch"
    half_flops_per_s = 55e12
    return HardwareProfile(
        name="memferry-a100",
        device_kind="cuda",
        device_name="NVIDIA A100 80GB",
        # Fitted, with the CPU's rate below, to two speedups: 1.32, the mean of Fig. 9, and 1.26, of
        # 6.7B in Fig. 13. A quarter of Fuyou's rate for the same chip; the paper runs PyTorch 1.9,
        # which has no fused attention.
        matmul_flops_per_s={
            "float16": half_flops_per_s,
            "bfloat16": half_flops_per_s,
            "float32": 19.5e12,  # spec
        },
        block_flops_per_s=half_flops_per_s,
        block_flops_dtype="float16",
        device_bytes_per_s=_LOHAN_GPUS["a100-80gb"].device_bytes_per_s,
        h2d_bytes_per_s=link_bytes_per_s,
        d2h_bytes_per_s=link_bytes_per_s,
        duplex_bytes_per_s=2 * link_bytes_per_s,  # inferred: PCIe is full duplex
        # Fitted, see above; 280 GB/s at 28 bytes a parameter, which two sockets' memory gives to
        # 128 cores.
        cpu_optimizer_params_per_s=10e9,
        device_bytes=80 * _GIB,
        host_bytes=128 * _GIB,  # a guess: an eighth of 1 TiB
    )


def _h100_server() -> HardwareProfile:
    # This project's own measurements: one H100 80GB HBM3, PCIe 5 x16, 16 vCPU.
    ssd: dict[str, Any] = {
        "read_bytes_per_s": 2.4e9,
        "write_bytes_per_s": 3.4e9,
    }  # O_DIRECT; read 2.2 to 2.6
    return HardwareProfile(
        name="h100-1ssd",
        device_kind="cuda",
        device_name="NVIDIA H100 80GB HBM3",
        matmul_flops_per_s={
            "bfloat16": 749e12,  # 8192³
            "float16": 749e12,  # inferred: as bfloat16
            "float32": 51e12,  # profile_hardware on such a machine: 50.8 to 51.4
        },
        block_flops_per_s=653e12,  # GPT block, eager, h=4096, batch 8
        block_flops_dtype="bfloat16",
        device_bytes_per_s=2.9e12,  # profile_hardware: 2.86 to 2.93
        h2d_bytes_per_s=55.3e9,
        d2h_bytes_per_s=55.1e9,
        duplex_bytes_per_s=90e9,
        # fused AdamW, 16 threads: 4.9e9 alone, 3.2e9 beside copies both ways, half of the time each
        cpu_optimizer_params_per_s=3.9e9,
        device_bytes=78 * _GIB,  # profile_hardware: 78.4 GiB are free beside the CUDA context
        host_bytes=125 * _GIB,
        ssds=(SsdDevice(path="nvme0", capacity_bytes=1_000_000_000_000, **ssd),),  # size: a guess
        ssd_read_bytes_per_s=ssd["read_bytes_per_s"],
        ssd_write_bytes_per_s=ssd["write_bytes_per_s"],
    )


_OTHER_PRESETS: dict[str, Callable[[], HardwareProfile]] = {
    "ssdtrain-a100-4xp5800x": _ssdtrain_server,
    "memferry-a100": _memferry_server,
    "h100-1ssd": _h100_server,
}
