"""Mixed-integer programs through PuLP: which solver there is, and what it proved. No torch.

HiGHS if `highspy` is installed, else CBC: the one that PuLP brings along, or `cbc` on the path.
After a time-out PuLP's `status` says "Optimal", so `sol_status` and the solver's own lower bound
count. PuLP is imported when it is needed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lohan_fx.errors import PlanError

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
"""optimal: within the gap that was asked for. feasible: stopped early, with a solution. unknown:
stopped early, without one."""


class SolverError(PlanError):
    """A MILP solver is not there, failed, or ended without a solution."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a solver stops.

    Attributes:
        solver: "auto" is HiGHS if `highspy` is installed, else CBC.
        time_s: wall-clock seconds.
        gap: relative gap at which a solution counts as optimal.
    """

    solver: str = "auto"
    time_s: float = 60.0
    gap: float = 1e-4


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a solver proved: no solution is below `bound`, and the one that it found is `value`."""

    status: Status
    value: float
    bound: float

    @property
    def solved(self) -> bool:
        return self.status in ("optimal", "feasible")


def available_solvers() -> tuple[str, ...]:
    """Those that `Limits.solver` may name here, best first."""
    if importlib.util.find_spec("pulp") is None:
        return ()
    found = ["highs"] if importlib.util.find_spec("highspy") is not None else []
    return (*found, "cbc") if _cbc_path() is not None else tuple(found)


def _cbc_path() -> str | None:
    """The CBC to run. PuLP brings one up to version 3; its own class for it warns."""
    import pulp

    bundled = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)
    for path in (bundled, None):
        if pulp.COIN_CMD(path=path, msg=False).available():
            return path or "cbc"
    return None


def pick_solver(name: str) -> str:
    """The solver that a name stands for.

    Raises:
        SolverError: it is not there; the message says what to install.
    """
    there = available_solvers()
    wanted = there[0] if name == "auto" and there else name
    if wanted in there:
        return wanted
    have = f"available: {', '.join(there)}" if there else "no solver is available"
    if name not in ("auto", "highs", "cbc"):
        raise SolverError(f"no MILP solver is named {name!r}: use auto, highs or cbc ({have})")
    raise SolverError(
        f"the MILP solver {name!r} is not installed ({have}): pip install pulp for CBC, "
        "pip install pulp highspy for HiGHS, or use a strategy that needs no solver, such as "
        "'pareto'"
    )


class Milp:
    """A program to minimise. Expressions are PuLP's: sums of variables times numbers."""

    def __init__(self, name: str, *, relaxed: bool = False) -> None:
        import pulp

        self._pulp: Any = pulp
        self.relaxed = relaxed
        self.problem: Any = pulp.LpProblem(name, pulp.LpMinimize)

    def number(self, name: str, high: float | None = None) -> Any:
        """A variable in [0, high]."""
        return self._variable(name, high, self._pulp.LpContinuous)

    def binary(self, name: str) -> Any:
        """A variable in {0, 1}; in [0, 1] if the program is relaxed."""
        kind = self._pulp.LpContinuous if self.relaxed else self._pulp.LpBinary
        return self._variable(name, 1, kind)

    def _variable(self, name: str, high: float | None, kind: str) -> Any:
        if hasattr(self.problem, "add_variable"):
            return self.problem.add_variable(name, 0, high, cat=kind)
        return self._pulp.LpVariable(name, 0, high, cat=kind)  # PuLP before 3.3

    def sum(self, terms: Iterable[Any]) -> Any:
        return self._pulp.lpSum(terms)

    def add(self, constraint: Any) -> None:
        """Constraints without variables are left out, or make the program infeasible."""
        if not isinstance(constraint, bool) and len(constraint):
            self.problem += constraint
        elif not (constraint if isinstance(constraint, bool) else constraint.valid()):
            self.problem += self.number("never", 1) >= 2

    def minimise(self, terms: Iterable[Any]) -> None:
        """The objective. It must have no constant: solvers report their bound without it."""
        self.problem += self._pulp.lpSum(terms)

    def solve(self, solver: str, limits: Limits) -> Answer:
        """Run a solver that `pick_solver` gave.

        Raises:
            SolverError: the solver itself failed.
        """
        lp = self._pulp
        with tempfile.TemporaryDirectory() as folder:
            try:
                bound = self._run(solver, limits, Path(folder) / "log")
            except (lp.PulpError, KeyError) as error:  # KeyError: a status that PuLP does not know
                raise SolverError(
                    f"{solver} failed ({error}): name another one, or use strategy 'pareto'"
                ) from error
        status = self.problem.sol_status
        proved = self.problem.status == lp.LpStatusInfeasible
        if proved or status in (lp.LpSolutionInfeasible, lp.LpSolutionUnbounded):
            return Answer(status="infeasible", value=math.inf, bound=math.inf)
        if status == lp.LpSolutionOptimal:
            value = float(lp.value(self.problem.objective) or 0.0)
            known = bound if math.isfinite(bound) else value - limits.gap * abs(value)
            return Answer(status="optimal", value=value, bound=min(known, value))
        # of a linear program that is not finished, the point may break constraints
        if status == lp.LpSolutionIntegerFeasible and not self.relaxed:
            value = float(lp.value(self.problem.objective) or 0.0)
            return Answer(status="feasible", value=value, bound=min(bound, value))
        return Answer(status="unknown", value=math.inf, bound=bound)

    def _run(self, solver: str, limits: Limits, log: Path) -> float:
        """Returns the solver's own lower bound, −∞ if it has none."""
        lp = self._pulp
        common = {"msg": False, "gapRel": limits.gap, "threads": 1}
        if solver == "highs":
            with _silent():
                self.problem.solve(lp.HiGHS(timeLimit=limits.time_s, random_seed=0, **common))
            info = self.problem.solverModel.getInfo()
            bound = info.objective_function_value if self.relaxed else info.mip_dual_bound
            return float(bound) if math.isfinite(bound) and abs(bound) < 1e29 else -math.inf
        seconds = max(1.0, limits.time_s)  # CBC finds nothing in less
        command = lp.COIN_CMD(path=_cbc_path(), timeLimit=seconds, logPath=str(log), **common)
        self.problem.solve(command)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        found = re.findall(r"Lower bound:\s+([-+.\deE]+)", text)
        return float(found[-1]) if found else -math.inf


def value_of(x: Any) -> float:
    """A variable's value in the solution; a number's own."""
    if isinstance(x, int | float):
        return float(x)
    return float(x.varValue or 0.0)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """HiGHS prints a banner of its own to the process's standard output; keep it out of there."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # no standard output at all
        yield
        return
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
        os.close(sink)
