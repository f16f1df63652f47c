"""The command line: ``lohan-fx profile | presets | report | models | plan | simulate | ablate``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lohan_fx import __version__, cli_plan
from lohan_fx.errors import HardwareError, LohanError, PlanError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan
from lohan_fx.reading import json_of, kind_of
from lohan_fx.report import hardware_table, plan_file_parts, presets_table

app = typer.Typer(
    help="Train models far larger than GPU memory. See `lohan-fx COMMAND --help`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

BAD_INPUT = 2
"""Exit status, the same as for options that typer refuses."""


def main() -> None:
    """Run the command line and leave the process."""
    app(prog_name="lohan-fx")


def _print(*parts: Any) -> None:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, 100)  # files and pipes have no width of their own
    for part in parts:
        console.print(part)


@contextmanager
def _plain_messages() -> Iterator[None]:
    """Errors that are raised on purpose, and warnings, as one message each, without traceback."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = lambda message, *_, **__: typer.echo(
                f"warning: {message}", err=True
            )
            yield
    except (LohanError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            missing = isinstance(error, FileNotFoundError)
            text = f"{error.filename}{' does not exist' if missing else f': {error.strerror}'}"
        typer.secho(f"error: {text}", err=True, fg="red")
        raise typer.Exit(BAD_INPUT) from None


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"lohan_fx {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print it and exit."
        ),
    ] = False,
) -> None:
    pass


cli_plan.add_to(app, _plain_messages, _print)


@app.command()
def profile(
    ssd: Annotated[
        list[Path] | None,
        typer.Option(help="A directory on an SSD; repeat it for several.", metavar="DIR"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to save the profile.", metavar="HW.json")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1 or cpu; CUDA where available if absent.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The profile's label.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Less exact, a quarter of the time.")
    ] = False,
) -> None:
    """Measure this machine: device, links, host memory, CPU optimizer, SSDs."""
    with _plain_messages():
        if out is not None and not out.absolute().parent.is_dir():
            raise HardwareError(f"cannot save {out}: its directory does not exist")
        from lohan_fx.profiling import profile_hardware

        hw = profile_hardware(ssd or [], device=device, name=name, quick=quick)
        _print(hardware_table(hw))
        if out is not None:
            hw.save(out)
            typer.echo(f"saved {out}", err=True)


@app.command()
def presets() -> None:
    """List the built-in hardware profiles."""
    _print(presets_table(), "12 SSDs stand for any number from 1 to 12: rtx4090-3xp5510.")


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="What Plan.save or HardwareProfile.save wrote.")],
) -> None:
    """Print a plan file or a hardware profile as tables."""
    with _plain_messages():
        _print(*_parts_of(file))


def _parts_of(file: Path) -> list[Any]:
    try:
        data = json_of(file)
    except ValueError as error:
        raise LohanError(f"{file} is no JSON file: {error}") from error
    kinds: dict[str, Callable[[], list[Any]]] = {
        "matmul_flops_per_s": lambda: [hardware_table(HardwareProfile.from_dict(data))],
        "residuals": lambda: plan_file_parts(Plan.from_dict(data)),
    }
    keys = data.keys() if isinstance(data, Mapping) else ()
    show = next((show for key, show in kinds.items() if key in keys), None)
    if show is None:
        what = f", but {kind_of(data)}" if kind_of(data) else ""
        raise LohanError(f"{file} is neither a plan nor a hardware profile of lohan_fx{what}")
    try:
        return show()
    except (HardwareError, PlanError) as error:
        raise type(error)(f"{file}: {error}") from error
