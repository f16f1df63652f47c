"""Architectures, tiny, and what training them through lohan_fx gives: the table of docs/models.md.

    python -m tests.architectures        # train all of them, write the table anew

`tests.test_architectures` trains each, too, and holds its row of the table equal to what it saw.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.errors import LohanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.models.dit import DiT
from lohan_fx.plan import Action, Tier
from lohan_fx.planners import Choices, PlannerOptions
from lohan_fx.workload import Workload
from tests.training import cpu_hardware, identical, one_thread

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- made by: python -m tests.architectures -->\n", "<!-- end -->\n"
NUM_STEPS = 3
VOCAB = 64
LENGTH = 8
BATCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A way to make a tiny model, and the keyword arguments of its forward.

    Forward returns the loss, or an object with it. `note` goes into the table.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What training showed: `result` is "exact", "to rounding" or "refused" (`reason`)."""

    result: str
    reason: str = ""
    num_params: int = 0


# -- transformers --------------------------------------------------------------------------------


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCAB, (BATCH, length))


def _language() -> dict[str, Any]:
    """Two sentences; the second is shorter and padded."""
    ids, mask = _tokens(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def _classes() -> dict[str, Any]:
    text = _language()
    return {**text, "labels": torch.randint(0, 2, (BATCH,))}


def _translation() -> dict[str, Any]:
    return {**_language(), "labels": _tokens(6)}


def _pictures(size: int) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "labels": torch.randint(0, 4, (BATCH,)),
    }


def _decoder(kind: str, **more: Any) -> Callable[[], nn.Module]:
    """A decoder like Llama of transformers, with grouped queries."""

    def build() -> nn.Module:
        config = getattr(hf, f"{kind}Config")(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=VOCAB,
            max_position_embeddings=32,
            attention_dropout=0.1,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
            use_cache=False,
            **more,
        )
        model: nn.Module = getattr(hf, f"{kind}ForCausalLM")(config)
        return model

    return build


def _encoder(kind: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = getattr(hf, f"{kind}Config")(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            vocab_size=VOCAB,
            max_position_embeddings=32,
            pad_token_id=0,
        )
        model: nn.Module = getattr(hf, f"{kind}ForSequenceClassification")(config)
        return model

    return build


def _gpt2() -> nn.Module:
    config = hf.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=VOCAB,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return hf.GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    config = hf.T5Config(
        num_layers=2,
        d_model=32,
        d_ff=48,
        d_kv=8,
        num_heads=4,
        vocab_size=VOCAB,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return hf.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = hf.ViTConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.1,
        num_labels=4,
    )
    return hf.ViTForImageClassification(config)


def _resnet50() -> nn.Module:
    """ResNet-50's stages and bottlenecks at 1/32 of its width."""
    config = hf.ResNetConfig(
        embedding_size=4,
        hidden_sizes=[8, 16, 32, 64],
        depths=[3, 4, 6, 3],
        layer_type="bottleneck",
        num_labels=4,
    )
    return hf.ResNetForImageClassification(config)


# -- others --------------------------------------------------------------------------------------


class _Convolutions(nn.Module):
    """Two convolutions with group norm, the second behind dropout; a shortcut."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, channels_in), nn.GroupNorm(2, channels)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.shortcut = nn.Conv2d(channels_in, channels, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return self.shortcut(x) + h


class UNet(nn.Module):
    """Down, middle and up, with connections across; predicts noise."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        c = channels
        self.start = nn.Conv2d(3, c, 3, padding=1)
        self.down = nn.ModuleList([_Convolutions(c, c), _Convolutions(c, 2 * c)])
        self.middle = _Convolutions(2 * c, 2 * c)
        self.up = nn.ModuleList([_Convolutions(4 * c, c), _Convolutions(2 * c, c)])
        self.end = nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.start(x)
        across = []
        for block in self.down:
            x = block(x)
            across.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, across.pop()], 1))
        return F.mse_loss(self.end(x), target)


class LSTM(nn.Module):
    """Two layers over bytes, dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.rnn = nn.LSTM(16, 24, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        states, _ = self.rnn(self.embedding(input_ids))
        return F.cross_entropy(self.head(states[:, :-1]).flatten(0, 1), input_ids[:, 1:].flatten())


def _dit() -> nn.Module:
    model = DiT(2, 4, 32, latent=8)
    model.label = nn.Embedding(8, 32)
    return model


def _noise() -> dict[str, Any]:
    return {
        "x": torch.randn(BATCH, 4, 8, 8),
        "t": torch.randint(0, 1000, (BATCH,)),
        "y": torch.randint(0, 8, (BATCH,)),
        "target": torch.randn(BATCH, 4, 8, 8),
    }


def _images() -> dict[str, Any]:
    return {"x": torch.randn(BATCH, 3, 8, 8), "target": torch.randn(BATCH, 3, 8, 8)}


_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0}

ARCHITECTURES: Mapping[str, Architecture] = {
    "GPT-2": Architecture(build=_gpt2, inputs=_language, source="transformers"),
    "Llama": Architecture(build=_decoder("Llama"), inputs=_language, source="transformers"),
    "Qwen3": Architecture(build=_decoder("Qwen3"), inputs=_language, source="transformers"),
    "Mistral": Architecture(
        build=_decoder("Mistral", sliding_window=4), inputs=_language, source="transformers"
    ),
    "Gemma 2": Architecture(
        build=_decoder("Gemma2", sliding_window=4), inputs=_language, source="transformers"
    ),
    "Mixtral": Architecture(
        build=_decoder("Mixtral", **_EXPERTS),
        inputs=_language,
        source="transformers",
        note="experts as one grouped product, transformers' default",
    ),
    "Mixtral, a loop over experts": Architecture(
        build=_decoder("Mixtral", experts_implementation="eager", **_EXPERTS),
        inputs=_language,
        source="transformers",
        note='`experts_implementation="eager"`',
    ),
    "BERT": Architecture(build=_encoder("Bert"), inputs=_classes, source="transformers"),
    "RoBERTa": Architecture(build=_encoder("Roberta"), inputs=_classes, source="transformers"),
    "T5": Architecture(
        build=_t5, inputs=_translation, source="transformers", note="`use_cache=False`"
    ),
    "ViT": Architecture(build=_vit, inputs=_pictures(16), source="transformers"),
    "DiT": Architecture(build=_dit, inputs=_noise, source="lohan_fx.models"),
    "ResNet-50": Architecture(build=_resnet50, inputs=_pictures(32), source="transformers"),
    "U-Net": Architecture(build=UNet, inputs=_images, source="tests"),
    "LSTM": Architecture(
        build=LSTM,
        inputs=lambda: {"input_ids": _tokens()},
        source="torch.nn",
        note="its cells, where eager mode runs a fused kernel",
    ),
}


# -- training ------------------------------------------------------------------------------------


def everywhere(
    workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
) -> Choices:
    """A strategy that puts states into all tiers, and does everything with activations."""
    tiers: tuple[Tier, ...] = ("ssd", "host", "device")
    actions: tuple[Action, ...] = ("swap", "keep", "recompute", "swap")
    return Choices(
        actions={v: actions[i % 4] for i, v in enumerate(workload.residuals)},
        unit_tiers={u.name: tiers[i % 3] for i, u in enumerate(workload.units)},
        swap_tiers={v: tiers[i // 3 % 2] for i, v in enumerate(workload.residuals)},
    )


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model in training mode and its batch; the same ones at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        architecture = ARCHITECTURES[name]
        return architecture.build().train(), architecture.inputs()


def _train(model: nn.Module, inputs: dict[str, Any], hw: HardwareProfile | None) -> list[Tensor]:
    """Losses of the steps, then the weights and buffers; with lohan_fx if there is a machine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if hw is not None:
        model = lohan_fx.compile(model, hw=hw, optimizer=optimizer, strategy=everywhere)
    losses = []
    for seed in range(NUM_STEPS):
        torch.manual_seed(seed)
        output = model(**inputs)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if isinstance(model, LohanModule):
        plan = model.plan
        assert plan.count("swap", "host")
        assert plan.count("swap", "ssd")
        assert plan.count("recompute")
        assert {u.tier for u in plan.units.values()} >= {"host", "ssd"}
    found = [*losses, *(t.detach().clone() for t in (*model.parameters(), *model.buffers()))]
    if isinstance(model, LohanModule):
        model.lohan.close()
    return found


def outcome(name: str, directory: Path) -> Outcome:
    """Train `name` with lohan_fx, its SSD tier in `directory`, and in plain PyTorch.

    Raises:
        AssertionError: it trains to other numbers.
    """
    reference, inputs = make(name)
    num_params = sum(p.numel() for p in reference.parameters())
    try:
        found = _train(*make(name), cpu_hardware(directory))
    except LohanError as error:
        return Outcome(result="refused", reason=str(error), num_params=num_params)
    wanted = _train(reference, inputs, None)
    assert len(found) == len(wanted)
    if all(map(identical, found, wanted)):
        return Outcome(result="exact", num_params=num_params)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    return Outcome(result="to rounding", num_params=num_params)


# -- the table -----------------------------------------------------------------------------------


def row(name: str, found: Outcome) -> str:
    """The table's row of an architecture."""
    architecture = ARCHITECTURES[name]
    note = architecture.note
    if found.reason:
        lines = [
            re.sub(r"^at \S*/(\S+):\d+", r"at \1", x.strip()) for x in found.reason.splitlines()
        ]
        note = f"{note}: {'; '.join(lines)}" if note else "; ".join(lines)
    cells = (name, architecture.source, f"{found.num_params:,}", found.result, note)
    return f"| {' | '.join(re.sub(r'[|]', '/', cell) for cell in cells)} |\n"


def table(rows: list[str]) -> str:
    head = "| architecture | from | parameters | three steps | |\n|---|---|---:|---|---|\n"
    return f"{BEGIN}{head}{''.join(rows)}{END}"


def documented() -> str:
    """The table in the document, from `BEGIN` to `END`."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return text[text.index(BEGIN) : text.index(END) + len(END)]


@contextmanager
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def main() -> int:
    """Train all, write the table."""
    rows = []
    with one_thread(), directory() as path:
        for name in ARCHITECTURES:
            rows.append(row(name, outcome(name, path)))
            sys.stdout.write(rows[-1])
            sys.stdout.flush()
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(text.replace(documented(), table(rows)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
