"""The runtime: what executes a rewritten program on devices, host memory and SSDs. Its modules, in
an order in which one can read them:

waiting               waits that an interrupt cannot break
tracebacks            what the error of a failed step holds
_memory, malloc       raw memory as tensors; allocators that a budget can be held with
arena                 host memory: the slab, its layout, rings of buffers
ssd                   a package: files striped over directories, threads that move their bytes
recording             a real step as a timeline
lane                  a thread that runs jobs in order
lanes                 transfers between device, host and SSD, beside compute
native                a package: kernels in C++ and Triton for Adam and for sums
sums                  gradients added to sums
supported_optimizers  which of the user's optimizers work elementwise
param_groups, shadow  their hyperparameters; their class without their parameters
initial_state         state that they hold before units take it over
update_values         what an update of a unit's parameters is given, and what comes of it
native_update         the update by our kernels
chunked_update        the update by the user's own `step`, chunk by chunk
optimizer, scratch    the optimizer of a unit; what an update takes besides
flats                 a unit's flat buffers, and views of them
guards                what stands in ``.grad`` where no gradient is
unit_states           one unit's states at rest, and what users see of them
clipping              norms, clipping, skipped steps
unit_gradients        one unit's gradients in one step, and how they add up
gradients             ``.grad`` of all parameters
states                the states of all units, in their tiers
accumulation          which backwards make a step
gradient_offload      gradients leave the device
state_pipeline        SSD units on their way through host memory
unit_updates          the update of a unit whose states and gradients are in memory
unit_jobs             additions and updates on the optimizer's thread, where units are
trials                updates into second copies
updates               the schedule: when which unit is updated
engine, ops           one program: its slots and stays; the ops that call it
memory                what all programs of a model share
op_timing             seconds of every op
written               what user code wrote between forward and backward
executor, step        the halves of a program; one step as autograd sees it
eager                 a module's own forward, without a program

Each imports those above it only (`tests/test_layers.py`).
"""
