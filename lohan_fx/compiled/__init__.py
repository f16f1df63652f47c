"""A compiled model. Its modules, in an order in which one can read them:

options           what was asked for
structure         what a forward asks of all modules and parameters
user_module       the user's module under the class that replaced its own
grad_mode         autograd's mode, which an interrupt must not change
hooks, notices    hooks, ours and theirs; what is said once in the log
training          what is trained, from which gradients, in which layout
arriving          values that wait for memory
ending            the memory of a model that ends, and its optimizer
programs          the programs by signature, and the memory that they share
allocation        the memory that a plan needs
leaving_room      plans for parts of the budget, where forwards wait
fitting           a plan within budget
building          from inputs to a program
lookup            which program runs for the inputs of a call
replanning        another plan, once, by what the first steps measured
integrity         whether weights and states are all of one step; loads that would be lost
optimizer_states  states between the user's optimizer and their tiers
optimizer_step    what optimizer.step() does
running           one forward
model             `CompiledModel`: what users have, as ``model.lohan``

Each imports those above it only (`tests/test_layers.py`).
"""
