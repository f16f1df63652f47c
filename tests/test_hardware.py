from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lohan_fx.errors import HardwareError, format_bytes, format_need
from lohan_fx.hardware import HardwareProfile, MemoryBudget, SsdDevice, parse_bytes

GIB = 2**30


def make_profile(**changes: Any) -> HardwareProfile:
    values: dict[str, Any] = {
        "name": "test",
        "device_kind": "cuda",
        "device_name": "some GPU",
        "matmul_flops_per_s": {"float32": 10e12, "bfloat16": 100e12},
        "block_flops_per_s": 80e12,
        "block_flops_dtype": "bfloat16",
        "device_bytes_per_s": 900e9,
        "h2d_bytes_per_s": 20e9,
        "d2h_bytes_per_s": 21e9,
        "duplex_bytes_per_s": 35e9,
        "cpu_optimizer_params_per_s": 2e9,
        "device_bytes": 24 * GIB,
        "host_bytes": 100 * GIB,
        "ssds": (
            SsdDevice(path="a", read_bytes_per_s=3e9, write_bytes_per_s=2e9, capacity_bytes=10**12),
            SsdDevice(
                path="b", read_bytes_per_s=4e9, write_bytes_per_s=1e9, capacity_bytes=2 * 10**12
            ),
        ),
        "ssd_read_bytes_per_s": 6e9,
        "ssd_write_bytes_per_s": 2.5e9,
    }
    return HardwareProfile(**(values | changes))


RATES = [
    field.name
    for field in dataclasses.fields(HardwareProfile)
    if field.name.endswith("_per_s") and field.name != "matmul_flops_per_s"
]


# Sizes as text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0),
        (17, 17),
        ("17", 17),
        ("17 B", 17),
        ("1KiB", 1024),
        ("1KB", 1000),
        ("300MiB", 300 * 2**20),
        ("2 GB", 2 * 10**9),
        (" 1.5GiB ", 3 * 2**29),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        ("0.1gib", 107374182),
    ],
)
def test_parse_bytes(text: int | str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "1 XB", "-1", "-1GiB", "1e9", "1,5GB", "1 G", "nan", -1, True, 1.5, None]
)
def test_parse_bytes_refuses(text: Any) -> None:
    with pytest.raises(ValueError, match=r"is no size(: w|; did .* W)rite"):
        parse_bytes(text)


@given(st.integers(0, 10**6), st.sampled_from(["", "K", "M", "G", "T"]), st.booleans())
def test_parse_bytes_is_exact(number: int, letter: str, binary: bool) -> None:
    power = " KMGT".index(letter or " ")
    unit = f"{letter}iB" if binary and letter else f"{letter}B"
    assert parse_bytes(f"{number}{unit}") == number * (1024 if binary else 1000) ** power


@given(st.integers(0, 2**50))
def test_parse_bytes_reads_what_format_bytes_prints(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    rounding = 0.005 * parse_bytes("1 " + text.split()[1])
    assert abs(parse_bytes(text) - num_bytes) <= rounding + 1


@given(st.integers(0, 2**60))
@example(2**24)
def test_a_need_is_rounded_up(num_bytes: int) -> None:
    """Who gives as much as a message names has given enough, and no more than a hundredth."""
    text = format_need(num_bytes)
    more = parse_bytes(text) - num_bytes
    assert 0 <= more <= 0.01 * parse_bytes("1 " + text.split()[1])


# Profiles


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf, None, "5", True])
@pytest.mark.parametrize("name", [*RATES, "device_bytes", "host_bytes"])
def test_a_useless_number_is_named(name: str, value: Any) -> None:
    with pytest.raises(HardwareError) as caught:
        make_profile(**{name: value})
    assert f"{name} is {value!r}" in str(caught.value)
    assert "profile_hardware()" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matmul_flops_per_s": {}}, r"matmul_flops_per_s is \{\}"),
        ({"matmul_flops_per_s": {"float32": 0.0}}, r"matmul_flops_per_s\['float32'\] is 0.0"),
        ({"device_kind": "tpu"}, "device_kind is 'tpu': use 'cpu' or 'cuda'"),
        ({"name": ""}, "name is ''"),
        ({"block_flops_dtype": None}, "block_flops_dtype is None"),
        ({"device_bytes": 1.5}, "device_bytes is 1.5, but must be a whole number"),
        ({"ssds": ()}, "ssd_read_bytes_per_s is 6000000000.0, but ssds is empty"),
        (
            {
                "ssds": [
                    SsdDevice(
                        path="a", read_bytes_per_s=1.0, write_bytes_per_s=0.0, capacity_bytes=1
                    )
                ]
            },
            r"ssds\[0\].write_bytes_per_s is 0.0",
        ),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        make_profile(**changes)


def test_replace_validates_again() -> None:
    hw = make_profile()
    assert hw.replace(h2d_bytes_per_s=5e9).h2d_bytes_per_s == 5e9
    with pytest.raises(HardwareError, match="h2d_bytes_per_s is 0"):
        hw.replace(h2d_bytes_per_s=0)


def test_without_ssds() -> None:
    hw = make_profile(ssds=(), ssd_read_bytes_per_s=0.0, ssd_write_bytes_per_s=0.0)
    assert hw.ssd_bytes == 0
    assert hw.describe()[-1] == ("SSDs together, read / write", "none")


def test_flops_per_s() -> None:
    hw = make_profile()
    assert hw.flops_per_s("float32") == 10e12
    assert hw.flops_per_s("torch.bfloat16") == 100e12
    assert hw.flops_per_s("float16") == 100e12, "stands in for bfloat16"
    assert hw.flops_per_s("float64") == hw.block_flops_per_s


def test_compute_is_no_gpu_on_a_cpu() -> None:
    lanes = ("gpu", "h2d", "ssd", "cpu")
    assert [make_profile(device_kind="cpu").lane_name(x) for x in lanes] == ["compute", *lanes[1:]]
    assert [make_profile(device_kind="cuda").lane_name(x) for x in lanes] == [*lanes]


def test_ssd_bytes_is_the_sum() -> None:
    assert make_profile().ssd_bytes == 3 * 10**12


def test_describe_has_units() -> None:
    rows = dict(make_profile().describe())
    assert rows["device"] == "some GPU (cuda)"
    assert rows["device memory"] == "24.00 GiB"
    assert rows["matmul"] == "float32 10.00, bfloat16 100.00 TFLOP/s"
    assert rows["H2D / D2H / both at once"] == "20.00 GB/s / 21.00 GB/s / 35.00 GB/s"
    assert rows["CPU optimizer"] == "2.000 Gparam/s"
    assert rows["SSD b"] == "4.00 GB/s / 1.00 GB/s, 1862.65 GiB"
    assert rows["SSDs together, read / write"] == "6.00 GB/s / 2.50 GB/s"


def test_fingerprint_ignores_the_name_only() -> None:
    hw = make_profile()
    assert hw.replace(name="other").fingerprint == hw.fingerprint
    changed = {
        "device_kind": "cpu",
        "device_name": "other",
        "matmul_flops_per_s": {"float32": 1.0},
        "block_flops_dtype": "float32",
        "ssds": hw.ssds[:1],
    } | {name: getattr(hw, name) * 2 for name in [*RATES, "device_bytes", "host_bytes"]}
    names = {field.name for field in dataclasses.fields(hw)} - {"name"}
    assert changed.keys() == names
    fingerprints = {hw.replace(**{name: value}).fingerprint for name, value in changed.items()}
    assert len(fingerprints | {hw.fingerprint}) == len(names) + 1


def test_equal_profiles_have_equal_fingerprints_and_hashes() -> None:
    a, b = make_profile(h2d_bytes_per_s=20_000_000_000), make_profile(h2d_bytes_per_s=20e9)
    assert a == b
    assert a.fingerprint == b.fingerprint
    assert len({a, b}) == 1


def test_the_profile_keeps_its_own_copy_of_the_rates() -> None:
    rates = {"float32": 1e12}
    hw = make_profile(matmul_flops_per_s=rates)
    rates["float32"] = 0.0
    assert hw.flops_per_s("float32") == 1e12


# Files


rate = st.floats(min_value=1e-3, max_value=1e18)
size = st.integers(1, 2**60)
ssd_devices = st.builds(
    SsdDevice,
    path=st.text(min_size=1).map(lambda text: text.replace("\0", "0")),
    read_bytes_per_s=rate,
    write_bytes_per_s=rate,
    capacity_bytes=size,
)


@given(st.data())
def test_a_file_restores_the_profile(tmp_path_factory: Any, data: st.DataObject) -> None:
    ssds = tuple(data.draw(st.lists(ssd_devices, max_size=3)))
    changes = {name: data.draw(rate) for name in RATES if ssds or not name.startswith("ssd_")}
    if not ssds:
        changes |= {"ssd_read_bytes_per_s": 0.0, "ssd_write_bytes_per_s": 0.0}
    hw = make_profile(ssds=ssds, device_bytes=data.draw(size), **changes)
    path = tmp_path_factory.getbasetemp() / "hw.json"
    hw.save(path)
    loaded = HardwareProfile.load(path)
    assert loaded == hw
    assert loaded.fingerprint == hw.fingerprint
    assert isinstance(loaded.ssds, tuple)


def edited_file(tmp_path: Path, edit: Any) -> Path:
    data = json.loads(json.dumps(make_profile().to_dict()))
    edit(data)
    path = tmp_path / "hw.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("h2d_bytes_per_s"), "missing fields: h2d_bytes_per_s"),
        (lambda d: d.update(h2d_gb_per_s=1), "unknown fields: h2d_gb_per_s"),
        (lambda d: d["ssds"][1].pop("path"), r"ssds\[1\] has missing fields: path"),
        (lambda d: d.update(ssds=None), "ssds is None"),
        (lambda d: d.update(ssds=["/mnt"]), r"ssds\[0\] is '/mnt', but must be a JSON object"),
        (lambda d: d.update(format=99), "format 99 is not 1"),
        (lambda d: d.update(d2h_bytes_per_s=math.nan), "d2h_bytes_per_s is nan"),
    ],
)
def test_a_bad_file_names_itself_and_the_field(tmp_path: Path, edit: Any, message: str) -> None:
    path = edited_file(tmp_path, edit)
    with pytest.raises(HardwareError, match=message) as caught:
        HardwareProfile.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hw.json"
    path.write_text(text)
    with pytest.raises(HardwareError, match=r"hw\.json"):
        HardwareProfile.load(path)


# Budgets


def test_budget_defaults_are_shares_of_the_hardware() -> None:
    hw = make_profile(device_bytes=1000, host_bytes=2000)
    assert MemoryBudget.from_request(hw) == MemoryBudget(
        device_bytes=920, host_bytes=1600, ssd_bytes=2_850_000_000_000
    )


def test_budget_request() -> None:
    budget = MemoryBudget.from_request(make_profile(), {"device": "300MiB", "ssd": 4096})
    assert budget == MemoryBudget(device_bytes=300 * 2**20, host_bytes=80 * GIB, ssd_bytes=4096)
    assert MemoryBudget.from_request(make_profile(), {"host": 0}).host_bytes == 0


def test_the_whole_hardware_may_be_asked_for() -> None:
    hw = make_profile()
    budget = MemoryBudget.from_request(hw, {"device": hw.device_bytes, "host": hw.host_bytes})
    assert (budget.device_bytes, budget.host_bytes) == (hw.device_bytes, hw.host_bytes)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"gpu": "1GiB"}, "unknown memory tier 'gpu': use device, host, ssd"),
        ({"device": "lots"}, r"memory\['device'\]: 'lots' is no size"),
        ({"device": 0}, r"memory\['device'\] is 0"),
        ({"device": " 3 "}, r"memory\['device'\]: ' 3 ' has no unit; did you mean '3GiB'"),
        ({"host": "1048575"}, r"memory\['host'\]: '1048575' has no unit"),
        ({"host": "13.1"}, r"memory\['host'\]: '13.1' has no unit; did you mean '13.1GiB'"),
        ({"device": "20G"}, r"memory\['device'\]: '20G' is no size; did you mean '20GiB'\? Write"),
        ({"host": "13.1 gi"}, r"memory\['host'\]: '13.1 gi' is no size; did you mean '13.1GiB'"),
        ({"ssd": "1t"}, r"memory\['ssd'\]: '1t' is no size; did you mean '1TiB'"),
        ({"device": 20}, r"memory\['device'\]: 20 is bytes, as every int, .* mean '20GiB'\?"),
        ({"ssd": 4095}, r"memory\['ssd'\]: 4095 is bytes"),
        ({"device": "25GiB"}, r"memory\['device'\]: need 25.00 GiB, have 24.00 GiB: ask for less"),
        ({"host": "101GiB"}, r"memory\['host'\]: need 101.00 GiB, have 100.00 GiB"),
        ({"ssd": "4TB"}, r"memory\['ssd'\]: need .* have 2793.97 GiB"),
    ],
)
def test_a_bad_request_is_explained(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        MemoryBudget.from_request(make_profile(), request_)


def test_a_budget_on_ssds_that_nobody_profiled_says_how_to() -> None:
    hw = make_profile(ssds=(), ssd_read_bytes_per_s=0.0, ssd_write_bytes_per_s=0.0)
    with pytest.raises(HardwareError, match=r"the profile has no SSD: .*profile_hardware\(ssd="):
        MemoryBudget.from_request(hw, {"ssd": "1MiB"})


def test_on_a_cpu_device_and_host_share_one_memory() -> None:
    kib = 2**10
    hw = make_profile(device_kind="cpu", device_bytes=1000 * kib, host_bytes=1000 * kib)

    def budget(**request_: int | str) -> MemoryBudget:
        return MemoryBudget.from_request(hw, request_)

    assert budget(device=1500 * kib).host_bytes == 400 * kib  # 0.8 of the rest
    assert budget(device=100 * kib).host_bytes == 800 * kib  # never more
    assert budget(host=1500 * kib).device_bytes == 460 * kib
    with pytest.raises(
        HardwareError, match=r"device.*have 499\.00 KiB .*share one memory on a CPU"
    ):
        budget(device=500 * kib, host=1501 * kib)
    with pytest.raises(HardwareError, match=r"memory\['host'\]: need 3072.00 GiB, have 1.46 MiB"):
        budget(device=500 * kib, host="3TiB")
    with pytest.raises(HardwareError, match=r"have 1000\.00 KiB: ask"):
        MemoryBudget.from_request(hw.replace(device_kind="cuda"), {"device": 1500 * kib})


@given(st.integers(4096, 8_192_000), st.integers(0, 8_192_000))
def test_cpu_budgets_never_exceed_the_memory(device: int, host: int) -> None:
    hw = make_profile(device_kind="cpu", device_bytes=2_867_200, host_bytes=5_324_800)
    for request in ({"device": device}, {"host": host}, {"device": device, "host": host}):
        try:
            budget = MemoryBudget.from_request(hw, request)
        except HardwareError:
            continue
        assert budget.device_bytes + budget.host_bytes <= 8_192_000


# Presets


@pytest.mark.parametrize("name", HardwareProfile.preset_names())
def test_presets_load_under_their_own_name(name: str, tmp_path: Path) -> None:
    hw = HardwareProfile.preset(name)
    assert hw.name == name
    assert hw.block_flops_per_s <= hw.flops_per_s(hw.block_flops_dtype)
    assert max(hw.h2d_bytes_per_s, hw.d2h_bytes_per_s) < hw.duplex_bytes_per_s
    assert hw.ssd_read_bytes_per_s <= sum(ssd.read_bytes_per_s for ssd in hw.ssds)
    assert hw.ssd_write_bytes_per_s <= sum(ssd.write_bytes_per_s for ssd in hw.ssds)
    hw.save(tmp_path / "hw.json")
    assert HardwareProfile.load(tmp_path / "hw.json") == hw


@pytest.mark.parametrize("count", range(1, 13))
def test_any_number_of_ssds_from_1_to_12(count: int) -> None:
    hw = HardwareProfile.preset(f"rtx4090-{count}xp5510")
    assert len(hw.ssds) == count
    assert hw.ssd_bytes == count * 3_840_000_000_000
    assert hw.device_bytes == 24 * GIB
    fewer = HardwareProfile.preset(f"rtx4090-{max(1, count - 1)}xp5510")
    assert hw.ssd_write_bytes_per_s >= fewer.ssd_write_bytes_per_s


@pytest.mark.parametrize("name", ["", "rtx4090", "rtx4090-0xp5510", "rtx4090-13xp5510", "b200"])
def test_an_unknown_preset_lists_the_known(name: str) -> None:
    with pytest.raises(HardwareError, match=r"rtx4090-12xp5510, .*h100-1ssd"):
        HardwareProfile.preset(name)


def lohan_model_tflops(hw: HardwareProfile, params: float, batch: int) -> float:
    """LoHan's Eq. 1-5 with nothing swapped and nothing recomputed: an upper bound."""
    forward_flops = 2 * params * batch * 1024
    forward_s = max(
        forward_flops / hw.block_flops_per_s,
        2 * params / hw.h2d_bytes_per_s,
        2 * params / hw.ssd_read_bytes_per_s,
    )
    backward_s = max(
        2 * forward_flops / hw.block_flops_per_s,
        2 * params / hw.h2d_bytes_per_s,
        14 * params / hw.ssd_read_bytes_per_s + 14 * params / hw.ssd_write_bytes_per_s,
    )
    return 3 * forward_flops / (forward_s + backward_s) / 1e12


@pytest.mark.parametrize(
    ("num_ssds", "params", "batch", "published_tflops"),
    [
        (12, 12.84e9, 8, 42.8),
        (12, 12.84e9, 16, 84.3),
        (12, 12.84e9, 32, 143.1),
        (12, 174.6e9, 8, 52.6),
        (12, 174.6e9, 16, 86.9),
        (1, 12.84e9, 64, 70.3),
        (2, 12.84e9, 64, 111.7),
        (3, 12.84e9, 64, 136.3),
        (6, 12.84e9, 64, 151.5),
        (12, 12.84e9, 64, 148.2),
    ],
)
def test_the_4090_preset_fits_the_published_throughput(
    num_ssds: int, params: float, batch: int, published_tflops: float
) -> None:
    hw = HardwareProfile.preset(f"rtx4090-{num_ssds}xp5510")
    assert lohan_model_tflops(hw, params, batch) == pytest.approx(published_tflops, rel=0.15)


def test_hardware_leaves_torch_out() -> None:
    code = "import sys, lohan_fx.hardware; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
