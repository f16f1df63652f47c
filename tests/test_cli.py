"""The command line: what it prints and saves, and that errors are messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import lohan_fx
from lohan_fx import errors
from lohan_fx.cli import app
from lohan_fx.errors import HardwareError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.planners import PlannerOptions, make_plan
from tests.workloads import budget, gpt_workload, small_hardware


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan = make_plan("lohan", gpt_workload(), small_hardware(), budget(), PlannerOptions())
    plan.save(path)
    return path


def failed(result: Result) -> str:
    """The message of a command that failed cleanly."""
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    return result.stderr


def test_profile_measures_prints_and_saves(tmp_path: Path) -> None:
    out = tmp_path / "hw.json"
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
    ssds = [argument for disk in disks for argument in ("--ssd", disk)]
    result = run("profile", *ssds, "--out", out, "--device", "cpu", "--quick", "--name", "here")
    assert result.exit_code == 0
    hw = HardwareProfile.load(out)
    assert hw.name == "here"
    assert [ssd.path for ssd in hw.ssds] == [str(disk) for disk in disks]
    assert "hardware profile here" in result.stdout
    assert str(out) in result.stderr
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["hw.json"]

    again = run("report", out)
    assert again.exit_code == 0
    assert again.stdout == result.stdout


def test_profile_warns_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    def measured(*_: object, **__: object) -> HardwareProfile:
        warnings.warn("/tmp is in memory", stacklevel=2)
        return small_hardware()

    monkeypatch.setattr("lohan_fx.profiling.profile_hardware", measured)
    result = run("profile")
    assert result.exit_code == 0
    assert result.stderr == "warning: /tmp is in memory\n"


def test_a_missing_ssd_directory_is_one_message(tmp_path: Path) -> None:
    message = failed(run("profile", "--ssd", tmp_path / "none", "--device", "cpu", "--quick"))
    assert f"{tmp_path / 'none'} does not exist" in message


def test_an_unknown_device_is_one_message() -> None:
    assert "'abacus'" in failed(run("profile", "--device", "abacus"))


def test_nothing_is_measured_that_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan_fx.profiling.profile_hardware", pytest.fail)
    assert "cannot save" in failed(run("profile", "--out", tmp_path / "none" / "hw.json"))


def test_presets_are_listed_by_name() -> None:
    result = run("presets")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in HardwareProfile.preset_names())
    assert "any number from 1 to 12: rtx4090-3xp5510" in result.stdout


def test_python_m_is_the_command_line() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "lohan_fx", "--version"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("lohan_fx ")


def test_the_package_lists_what_it_imports_on_first_use() -> None:
    assert set(lohan_fx.__all__) <= set(dir(lohan_fx))
    assert "    compile" in str(lohan_fx.__doc__)


def test_errors_have_the_names_that_users_catch() -> None:
    """Of the package itself, as what raises them; one of a bug is caught as the others are."""
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.LohanError):
            assert issubclass(kind, lohan_fx.LohanError)
            if kind is not errors.VerificationError:
                assert getattr(lohan_fx, name) is kind
                assert name in lohan_fx.__all__


def test_a_shortage_says_what_it_does_not_list() -> None:
    def lines(count: int) -> list[str]:
        parts = [(f"part{k}", 1024) for k in range(count)]
        error = errors.InsufficientMemoryError("device", 2**20, 1, where="here", at_peak=parts)
        return str(error).splitlines()

    assert lines(8)[-1] == "      1.00 KiB  part7"
    assert lines(11)[-2:] == [lines(8)[-1], "      3.00 KiB  and 3 more, together"]


def test_report_of_a_plan(plan_file: Path) -> None:
    result = run("report", plan_file)
    assert result.exit_code == 0
    for text in ("lohan plan for", "fingerprint", "predicted memory", "one step", "note: "):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON file"),
        ("\x00\xff", "is no JSON file"),
        ("[]", "is neither a plan nor a hardware profile"),
        ('{"matmul_flops_per_s": {}, "format": 0}', "hardware profile format 0 is not 1"),
        ('{"residuals": {}, "format": 0}', "plan format 0 is not 1"),
        ('{"residuals": {}, "format": 1}', "the plan lacks 'strategy'"),
    ],
)
def test_report_of_a_bad_file_is_one_message(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text, encoding="latin-1")
    assert message in failed(run("report", path))


def test_report_of_a_missing_file_is_one_message(tmp_path: Path) -> None:
    assert "none.json does not exist" in failed(run("report", tmp_path / "none.json"))


def test_a_bad_field_is_named_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "hw.json"
    data = small_hardware().to_dict()
    path.write_text(json.dumps({**data, "h2d_bytes_per_s": 0}), encoding="utf-8")
    message = failed(run("report", path))
    assert "hw.json: h2d_bytes_per_s is 0" in message
    with pytest.raises(HardwareError):
        HardwareProfile.load(path)


def test_version_and_help() -> None:
    assert run("--version").stdout == f"lohan_fx {lohan_fx.__version__}\n"
    assert all(name in run("--help").stdout for name in ("profile", "presets", "report"))


def test_light_commands_leave_torch_out(plan_file: Path) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from lohan_fx.cli import app\n"
        f"for args in (['presets'], ['report', {str(plan_file)!r}]):\n"
        "    assert CliRunner().invoke(app, args).exit_code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
