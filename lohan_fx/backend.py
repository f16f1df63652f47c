"""``torch.compile(model, backend="lohan_fx")``: saved activations within a memory budget.

Inside a module that torch.compile compiles, lohan_fx decides what becomes of the activations that
forward saves for backward: kept, swapped to host memory or SSD, or computed again. Parameters,
gradients and the optimizer stay the user's, so wrappers such as DDP and FSDP2 work as ever; every
graph that Dynamo makes is planned on its own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from lohan_fx import _compat, footprint
from lohan_fx.annotate import StateLayout, annotate, module_name
from lohan_fx.errors import InsufficientMemoryError, LohanError, StepError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.joint_copy import constants_of, copy_joint
from lohan_fx.joint_graph import Captured, InputRole, OutputRole
from lohan_fx.passes import PassManager, Rewrite, pipeline
from lohan_fx.passes.base import Mark
from lohan_fx.passes.split import Halves, split
from lohan_fx.passes.verify import check_invariants, check_program
from lohan_fx.plan import Plan
from lohan_fx.planned import hardware
from lohan_fx.planners import Planner, PlannerOptions, make_plan
from lohan_fx.profiling import profile_hardware
from lohan_fx.runtime.arena import PageLocker
from lohan_fx.runtime.engine import Engine, SlotStore, slots_of
from lohan_fx.runtime.lane import close_elsewhere, wait_closed
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.runtime.memory import Memory, ssd_paths
from lohan_fx.runtime.ops import engines
from lohan_fx.runtime.states import ModelStates
from lohan_fx.workload import Workload

_NO_STATES = StateLayout(compute_dtype=None, num_states=0)
_OPTIONS = ("hw", "memory", "strategy", "swap_to")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """What ``options=`` of torch.compile asked for; the keys as in `lohan_fx.compile`."""

    hw: HardwareProfile
    budget: MemoryBudget
    strategy: str | Planner
    planner: PlannerOptions

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> BackendOptions:
        """Read the options, all of which may be absent.

        Raises:
            LohanError: an unknown key.
            HardwareError: a profile or a budget that cannot be.
        """
        given = dict(options or {})
        unknown = sorted(set(given) - set(_OPTIONS))
        if unknown:
            raise LohanError(
                f"options of backend 'lohan_fx': {', '.join(unknown)} is unknown; there are "
                f"{', '.join(_OPTIONS)}"
            )
        hw = given.get("hw")
        hw = _measured() if hw is None else hw if isinstance(hw, HardwareProfile) else str(hw)
        hw = hardware(hw)
        return cls(
            hw=hw,
            budget=MemoryBudget.from_request(hw, given.get("memory")),
            strategy=given.get("strategy", "pareto"),
            planner=PlannerOptions(swap_to=given.get("swap_to", "auto")),
        )


@functools.cache
def _measured() -> HardwareProfile:
    return profile_hardware()


def backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Compile a Dynamo graph: what `torch.compile(…, backend="lohan_fx", options={…})` calls.

    Options: ``memory`` (a budget by tier; "device" counts one graph's parameters and inputs, too),
    ``strategy``, ``swap_to`` and ``hw``, as for `lohan_fx.compile`. Ops run as eager PyTorch runs
    them. Each shape is a program of its own.

    Raises:
        LohanError: an unknown option.
        InsufficientMemoryError: no plan of the strategy fits.
    """
    parsed = BackendOptions.parse(options)
    _compat.specialize(inputs)
    name = type(module).__name__
    return _compat.aot_backend(module, inputs, functools.partial(_partition, name, parsed))


# -- one graph -----------------------------------------------------------------------------------


def _partition(
    name: str,
    options: BackendOptions,
    joint: fx.GraphModule,
    inputs: Any,
    *,
    num_fwd_outputs: int,
    **_: Any,
) -> _compat.Partition:
    """Forward and backward of a joint graph, as AOTAutograd calls them.

    Forward takes all primals and returns its outputs, then what is saved; backward takes that and
    then the tangents, and returns a gradient or None for each primal.
    """
    num_primals = len(inputs[0])
    captured = _captured(joint, num_primals, num_fwd_outputs)
    workload = annotate(captured, _skeleton(joint.graph), (), _NO_STATES, options.hw, name=name)
    plan = make_plan(options.strategy, workload, options.hw, options.budget, options.planner)
    rewrite = Rewrite(captured=captured, workload=workload, plan=plan, layouts=())
    calls = Calls(workload, plan, tuple(rewrite.slots), options, captured.device)
    rewrite.run = engines.add(calls)
    PassManager(passes=pipeline(), verify=check_invariants)(rewrite)
    check_program(rewrite, options.budget.device_bytes)
    halves = split(rewrite)
    assert halves.backward is not None
    placeholders = joint.graph.find_nodes(op="placeholder")
    flat: Any = joint.graph.output_node().args[0]
    forward = _forward(rewrite, halves, placeholders[:num_primals])
    backward = _backward(rewrite, halves, placeholders[num_primals:], flat[num_fwd_outputs:])
    if not calls.slots:
        return _compat.Partition(forward, backward, _plainly, _plainly)
    flat = forward.graph.output_node().args[0]
    handles = [isinstance(v, fx.Node) and _is_handle(v) for v in flat[num_fwd_outputs:]]
    calls.handle, calls.num_outputs = handles.index(True), num_fwd_outputs
    return _compat.Partition(forward, backward, calls.forward, calls.backward)


def _plainly(run: Callable[[list[Any]], Any], arguments: list[Any]) -> Any:
    return run(arguments)


def _is_handle(node: fx.Node) -> bool:
    mark: Mark | None = node.meta.get("lohan")
    return mark is not None and mark.kind == "release"


def _captured(joint: fx.GraphModule, num_primals: int, num_outputs: int) -> Captured:
    """The joint graph with roles: parameters are inputs like any other here.

    What AOTAutograd writes into inputs after forward (statistics of BatchNorm) are mutations.
    """
    roles = {
        node: InputRole(kind="input", index=i)
        if i < num_primals
        else InputRole(kind="tangent", index=i - num_primals)
        for i, node in enumerate(joint.graph.find_nodes(op="placeholder"))
        if isinstance(node.meta.get("val"), Tensor)
    }
    flat: Any = joint.graph.output_node().args[0]
    index = {node.meta["desc"]: role.index for node, role in roles.items()}
    returned: list[tuple[Any, OutputRole]] = []
    for i, (value, desc) in enumerate(
        zip(flat, joint.graph.output_node().meta["desc"], strict=True)
    ):
        if i >= num_outputs:
            if value is not None:
                returned.append((value, OutputRole(kind="gradient", index=i - num_outputs)))
        elif isinstance(desc, _compat.InputMutationAOTOutput):
            role = OutputRole(kind="mutation", index=index[desc.mutated_input])
            returned.append((value, role))
        else:
            returned.append((value, OutputRole(kind="output", index=i)))
    graph = copy_joint(joint.graph, roles, returned)
    inputs = tuple(n.meta["role"] for n in graph.find_nodes(op="placeholder"))
    device = next(
        (n.meta["val"].device for n in roles if n.meta["val"].device.type != "cpu"),
        torch.device("cpu"),
    )
    return Captured(
        graph=_compat.LazyGraphModule(constants_of(joint, graph), graph),
        inputs=inputs,
        outputs=tuple(role for _, role in returned),
        num_outputs=num_outputs,
        differentiable=tuple(r.index for r in inputs if r.kind == "tangent"),
        unflatten=lambda module, flat, args, kwargs: flat,
        compute_dtype=None,
        device=device,
        first_names={},
    )


def _skeleton(graph: fx.Graph) -> nn.Module:
    """Empty modules named and nested as those whose forward made the graph: they name blocks."""
    classes: dict[str, type[nn.Module]] = {}
    root = nn.Module()
    found: dict[str, type[nn.Module]] = {}
    for node in graph.nodes:
        for source, cls in (node.meta.get("nn_module_stack") or {}).values():
            made = classes.setdefault(str(cls), type("Module", (nn.Module,), {}))
            found[module_name(str(source)).removeprefix("L.self").strip(".")] = made
    for path in sorted(found):
        at = root
        for part in path.split(".") if path else ():
            if part not in at._modules:
                at.add_module(part, nn.ModuleList())
            at = at.get_submodule(part)
    for path in sorted(found, key=len, reverse=True):
        children = root.get_submodule(path)._modules if path else {}
        if path and not all(name.isdigit() for name in children):
            parent, _, name = path.rpartition(".")
            module = found[path]()
            for child, value in children.items():
                module.add_module(child, value)
            root.get_submodule(parent).add_module(name, module)
    return root


def _forward(rewrite: Rewrite, halves: Halves, primals: Sequence[fx.Node]) -> fx.GraphModule:
    taken = dict(
        zip((r.index for r in halves.forward_inputs), _inputs(halves.forward), strict=True)
    )
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for i, primal in enumerate(primals):
        made = graph.placeholder(primal.name)
        made.meta = dict(primal.meta)
        if i in taken:
            env[taken[i]] = made
    output = _body(halves.forward, graph, env)
    graph.output(tuple(output))
    return _compat.boxed(rewrite.module, graph)


def _backward(
    rewrite: Rewrite, halves: Halves, tangents: Sequence[fx.Node], gradients: Sequence[Any]
) -> fx.GraphModule:
    assert halves.backward is not None
    inputs = _inputs(halves.backward)
    direct, saved = inputs[: -halves.num_saved or None], inputs[-halves.num_saved :]
    if not halves.num_saved:
        direct, saved = inputs, []
    taken = dict(zip((r.index for r in halves.backward_inputs), direct, strict=True))
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in saved:
        env[node] = graph.node_copy(node)
    for i, tangent in enumerate(tangents):
        made = graph.placeholder(tangent.name)
        made.meta = dict(tangent.meta)
        if i in taken:
            env[taken[i]] = made
    output = _body(halves.backward, graph, env)
    found = dict(zip((r.index for r in halves.backward_outputs), output, strict=True))
    graph.output(tuple(found.get(i) for i in range(len(gradients))))
    return _compat.boxed(rewrite.module, graph)


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _body(module: fx.GraphModule, graph: fx.Graph, env: dict[fx.Node, fx.Node]) -> list[Any]:
    """Copy all but the placeholders behind `graph`; what the module returns."""
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            env[node] = graph.node_copy(node, env.__getitem__)
    flat: Any = module.graph.output_node().args[0]
    return [env[v] if isinstance(v, fx.Node) else v for v in flat]


# -- running -------------------------------------------------------------------------------------


class Calls:
    """The calls of one graph that wait for their backward, each with slots of its own.

    Blocks of one class share a graph, and all their forwards run before the first backward. A call
    is known by the storage of one of the handles that autograd saves for it: the one at `handle`
    behind the `num_outputs` outputs of forward.
    """

    handle: int
    num_outputs: int

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        slots: Sequence[str],
        options: BackendOptions,
        device: torch.device,
    ) -> None:
        self._workload, self._plan, self._options, self._device = workload, plan, options, device
        self.slots = slots_of(slots, workload, plan)
        pin = device.type == "cuda"
        locker = PageLocker()
        store = SlotStore(pin=pin, locker=locker)
        self._memory = Memory(pin=pin, lanes=Lanes(device), store=store, locker=locker)
        self._stores: list[SlotStore] = []
        self._waiting: list[tuple[_compat.StorageWeakRef, Engine]] = []
        self._free: list[Engine] = []
        self._current: Engine | None = None
        close = functools.partial(_close, self._memory, self._stores)
        weakref.finalize(self, close_elsewhere, close)

    # what the program's ops call

    def offload(self, x: Tensor, slot: int) -> None:
        self._running().offload(x, slot)

    def release(self, slot: int) -> None:
        self._running().release(slot)

    def prefetch(self, slot: int) -> Tensor:
        return self._running().prefetch(slot)

    def wait(self, slot: int) -> None:
        self._running().wait(slot)

    def _running(self) -> Engine:
        assert self._current is not None
        return self._current

    # what autograd calls

    def forward(self, run: Callable[[list[Any]], Any], arguments: list[Any]) -> Any:
        """Run forward with slots that nobody waits for."""
        for entry in [e for e in self._waiting if e[0].expired()]:  # its backward will not come
            self._waiting.remove(entry)
            self._reset(entry[1])
        engine = self._current = self._free.pop() if self._free else self._engine()
        try:
            results = run(arguments)
        except BaseException:
            self._reset(engine)
            raise
        handle = results[self.num_outputs + self.handle]
        self._waiting.append((_compat.StorageWeakRef(handle.untyped_storage()), engine))
        return results

    def backward(self, run: Callable[[list[Any]], Any], arguments: list[Any]) -> Any:
        """Run backward of the forward that gave these handles.

        Raises:
            StepError: it ran already.
        """
        key = _compat.StorageWeakRef(arguments[self.handle].untyped_storage())
        entry = next((e for e in self._waiting if e[0] == key), None)
        if entry is None:
            raise StepError(
                "backward ran twice through what one forward saved: swapped activations are read "
                "back once. Run forward again, or leave retain_graph=True out"
            )
        self._waiting.remove(entry)
        engine = self._current = entry[1]
        try:
            with engine.lanes.computing():
                results = run(arguments)
        except BaseException:
            self._reset(engine)
            raise
        engine.forget()  # all that it moved has been waited for; others' transfers go on
        self._free.append(engine)
        return results

    def _reset(self, engine: Engine) -> None:
        """Take an engine back in the middle. All share lanes and staging buffers, so transfers of
        the others end first."""
        for store in self._stores:
            if store.file is not None:
                store.file.drain()
        engine.reset()
        self._free.append(engine)

    def _engine(self) -> Engine:
        """One more engine, with slots of its own."""
        need = footprint.host_bytes_needed(self._workload, self._plan)
        count = len(self._waiting) + 1
        total, have = count * need["residuals"], self._options.budget.host_bytes
        if total > have:
            raise InsufficientMemoryError(
                "host",
                total,
                have,
                where=f"the {count}th forward before the first backward",
                advice="raise memory['host'], or swap_to='ssd'",
            )
        wait_closed()  # memory of graphs and models that are gone
        memory = self._memory
        store = SlotStore(pin=memory.pin, locker=memory.locker, name=f"slots-{len(self._stores)}")
        self._stores.append(store)
        store.grow_host(need["residuals"])
        ssd_bytes = footprint.ssd_bytes_needed(self._workload, self._plan)["residuals"]
        if ssd_bytes:
            paths = ssd_paths(self._options.hw, ssd_bytes)
            store.grow_ssd(ssd_bytes, *memory.open_ssd(paths))
            staging = footprint.staging_of(self._workload, self._plan)
            memory.grow_buffers({"staging": (staging.count, staging.total_bytes)})
        states = ModelStates(
            nn.Module(), (), (), {}, _NO_STATES, None, memory.lanes, None, None, None
        )
        return Engine(self.slots, (), states, None, memory.lanes, store)


def _close(memory: Memory, stores: list[SlotStore]) -> None:
    memory.lanes.drain()
    for store in stores:
        store.close()
    memory.close(joins=False)
