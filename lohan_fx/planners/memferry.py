"""memferry: parameters read in host memory where that is faster, fetched where it is not.

Source: papers/memferry.txt §IV. A unit in host memory has one of three modes (§IV-B):

  GFGB  copied to the device before forward uses it, there until backward has ("hold");
  DHA   read in host memory by forward and backward, never copied ("direct");
  DFGB  read in host memory by forward, copied for backward while PCIe is idle
        ("direct-forward").

Algorithm 1 goes forward through the layers: DHA if that takes no longer than the transfer and
the computation on the device; else GFGB, whose transfer hides behind the reserved overlap time
T_res; if T_res is too short, earlier GFGB layers are turned to DHA (backtracking) where that
shortens the whole. Then a greedy choice turns DHA layers to DFGB in the window between the last
transfer of forward and the first gradient. All activations stay on the device.

Not as in the paper:
  - A layer is a unit, a whole transformer block; inside one nothing is chosen. What is chosen in
    practice is the embedding, of which forward reads a few rows.
  - Profiled times are modelled: `program.direct_read_bytes` over the link, on top of the
    roofline; ops between two layers (T(A)) are those that read no parameters.
  - Algorithm 1 as printed adds `base` to T_all (line 30), takes no account in line 22 of layers
    that this backtrack has turned already, and starts at tag −1. Here `base` replaces T_all, the
    turned layers' times count, and backtracking starts at the first layer while there is no tag.
  - The paper says "a greedy algorithm" for DFGB, no more. Here: most seconds of backward saved per
    second of transfer first, while the transfer ends before the layer's backward begins.
  - Gradients are freed when their copy has ended; MemFerry keeps them (§V-A).
  - Units on SSD are copied and held (GFGB); the paper has none. If the device is too small,
    DFGB layers become DHA again, the last chosen first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lohan_fx.plan import Action
from lohan_fx.planners.registry import register
from lohan_fx.planners.schedule import UnitMode
from lohan_fx.planners.strategy import Activations, Parameters, Setting, Strategy
from lohan_fx.planners.windows import unit_uses
from lohan_fx.program import direct_read_bytes
from lohan_fx.workload import Op, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """The profile of one layer, §IV-B. Seconds.

    `after_s` is the computation up to the next layer, T_FP(A_{l,l+1}).
    """

    name: str
    transfer_s: float
    forward_s: float
    forward_direct_s: float
    backward_s: float
    backward_direct_s: float
    after_s: float = 0.0


@dataclass(kw_only=True)
class ForwardPlan:
    """Algorithm 1 in progress: modes, T_all, T_res, tag."""

    layers: Sequence[LayerTimes]
    direct: list[bool] = field(default_factory=list)
    total_s: float = 0.0
    reserved_s: float = 0.0
    tag: int = -1

    def run(self) -> ForwardPlan:
        for k, layer in enumerate(self.layers):
            self.direct.append(layer.forward_direct_s <= layer.forward_s + layer.transfer_s)
            if self.direct[k]:
                self._advance(layer.forward_direct_s, layer.forward_direct_s)
            elif layer.transfer_s < self.reserved_s:
                self.tag = k if self.tag == -1 else self.tag
                self._advance(layer.forward_s, layer.forward_s - layer.transfer_s)
            else:
                self._backtrack(k)
            self._advance(layer.after_s, layer.after_s)
        return self

    def _advance(self, total_s: float, reserved_s: float) -> None:
        self.total_s += total_s
        self.reserved_s += reserved_s

    def _backtrack(self, at: int) -> None:
        """Turn earlier layers to DHA while that shortens the whole; `at` is exposed GFGB."""
        new = self.layers[at]
        best = self.total_s + max(0.0, new.transfer_s - self.reserved_s) + new.forward_s
        for i in range(max(0, self.tag), at):
            if self.direct[i] or self.reserved_s >= new.transfer_s:
                continue
            old = self.layers[i]
            slower = old.forward_direct_s - old.forward_s
            gain = old.transfer_s + slower
            total = (
                max(new.transfer_s - self.reserved_s - gain, 0.0)
                + self.total_s
                + slower
                + new.forward_s
            )
            if total < best:
                self.direct[i] = True
                self.tag = i + 1
                self.total_s += slower
                self.reserved_s += gain
                best = total
        self.total_s = best
        self.reserved_s = max(self.reserved_s - new.transfer_s, 0.0) + new.forward_s


def greedy_reload(
    layers: Sequence[LayerTimes], direct: Sequence[bool], forward_s: float, first_gradient_s: float
) -> list[int]:
    """DHA layers that become DFGB, best first, in the idle window of the H2D link.

    The window is from the end of the GFGB transfers to the first gradient; a layer's copy must
    also end before its own backward begins. Both are seconds from the begin of forward.
    """
    loaded = sum(x.transfer_s for x, d in zip(layers, direct, strict=True) if not d)
    begins: dict[int, float] = {}
    now = forward_s
    for k in reversed(range(len(layers))):
        begins[k] = now
        now += layers[k].backward_direct_s if direct[k] else layers[k].backward_s

    def worth(k: int) -> float:
        saved = layers[k].backward_direct_s - layers[k].backward_s
        return saved / layers[k].transfer_s if layers[k].transfer_s else 0.0

    chosen = []
    for k in sorted((k for k, d in enumerate(direct) if d), key=lambda k: (-worth(k), -k)):
        end = loaded + layers[k].transfer_s
        if worth(k) > 0 and end <= min(first_gradient_s, begins[k]):
            loaded = end
            chosen.append(k)
    return chosen


def profile(setting: Setting) -> list[LayerTimes]:
    """Every unit that lives in host memory as a layer, in the order of its first use."""
    w, hw = setting.workload, setting.hw
    n = w.num_forward_ops
    uses = unit_uses(w)
    names = [u for u in uses if setting.tiers[u] == "host" and uses[u] and uses[u][0] < n]
    names.sort(key=lambda u: uses[u][0])
    own = {i for name in names for i in uses[name]}
    layers = []
    for k, name in enumerate(names):
        stop = uses[names[k + 1]][0] if k + 1 < len(names) else n
        seconds = dict.fromkeys(("forward", "backward"), 0.0)
        direct = dict(seconds)
        for i in uses[name]:
            op = w.ops[i]
            seconds[op.phase] += op.seconds
            direct[op.phase] += op.seconds + _direct_bytes(w, op, name) / hw.h2d_bytes_per_s
        layers.append(
            LayerTimes(
                name=name,
                transfer_s=w.unit_by_name[name].compute_bytes / hw.h2d_bytes_per_s,
                forward_s=seconds["forward"],
                forward_direct_s=direct["forward"],
                backward_s=seconds["backward"],
                backward_direct_s=direct["backward"],
                after_s=_seconds(w, set(range(uses[name][0], stop)) - own),
            )
        )
    return layers


def _seconds(workload: Workload, ops: Collection[int]) -> float:
    return sum(workload.ops[i].seconds for i in sorted(ops))


def _direct_bytes(workload: Workload, op: Op, unit: str) -> int:
    values = (workload.values[v] for v in op.reads)
    return sum(
        direct_read_bytes(op, v.num_bytes)
        for v in values
        if v.kind == "parameter" and v.unit == unit
    )


def hybrid_training(setting: Setting, found: Activations) -> Parameters:
    """The policy for access to parameters: modes for all units off the device."""
    layers = profile(setting)
    plan = ForwardPlan(layers=layers).run()
    reloaded = greedy_reload(layers, plan.direct, plan.total_s, _first_gradient_s(setting, plan))
    modes: dict[str, UnitMode] = {u.name: "hold" for u in setting.workload.units}
    for layer, direct in zip(layers, plan.direct, strict=True):
        modes[layer.name] = "direct" if direct else "hold"
    for k in reloaded:
        modes[layers[k].name] = "direct-forward"
    while reloaded and not setting.fits(setting.draft(found, Parameters(modes=modes))):
        modes[layers[reloaded.pop()].name] = "direct"
    counts = {
        text: sum(modes[u.name] == name for u in setting.workload.units if _moves(setting, u.name))
        for name, text in _TOLD.items()
    }
    note = ", ".join(f"{count} {text}" for text, count in counts.items())
    return Parameters(modes=modes, notes=(f"units: {note}",))


def _moves(setting: Setting, unit: str) -> bool:
    return setting.tiers[unit] != "device"


def _first_gradient_s(setting: Setting, plan: ForwardPlan) -> float:
    """When the first gradients leave the device, from the begin of forward."""
    w = setting.workload
    n = w.num_forward_ops
    made = [
        max(w.producer.get(g, n) for g in u.gradients)
        for u in w.units
        if u.trainable and _moves(setting, u.name)
    ]
    first = min(made, default=n)
    return plan.total_s + _seconds(w, range(n, min(first + 1, len(w.ops))))


def keep_everything(setting: Setting) -> Activations:
    """The activation policy: none."""
    actions: dict[str, Action] = dict.fromkeys(setting.workload.residuals, "keep")
    return Activations(actions=actions)


_TOLD: dict[UnitMode, str] = {
    "hold": "copied to the device once for the step (GFGB)",
    "direct": "read in host memory (DHA)",
    "direct-forward": "read there in forward, copied for backward (DFGB)",
}
"""What a user reads of a mode, with the paper's name for it."""

MEMFERRY = register("memferry")(
    Strategy(
        name="memferry",
        activations=keep_everything,
        parameters=hybrid_training,
        states="host",
        swap_to="host",
        schedule="naive",
    )
)
