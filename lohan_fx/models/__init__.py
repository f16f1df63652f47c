"""Models by name: the papers' GPT and DiT sizes. The catalog needs no torch; building does.

named("gpt-175b").build()                  # on the current default device: use meta
named("gpt-175b").inputs(batch=16)         # meta tensors, keyword arguments of forward
"""

from __future__ import annotations

from lohan_fx.models.catalog import FAMILIES, NamedModel, family_of, is_known, named, names

__all__ = ["FAMILIES", "NamedModel", "family_of", "is_known", "named", "names"]
