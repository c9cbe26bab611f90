"""LoRA runs of a base whose weights are quantized.

The tests show what commits hold of the base, and what a resume makes of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from lora_runs import ADAPTER_AND_OPTIMIZER_BYTES, LAYERS, WIDTH, adapted, committed_bytes, train, whole
from spottrain.checkpoint.errors import UnsupportedState
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.loading.export import export
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.engines.auto import facts_of
from spottrain.engines.deepspeed_limits import unfit_for_zero
from spottrain.engines.model_state import frozen_names, load_model_state, model_state

pytestmark = pytest.mark.usefixtures("world_of_its_own")


def bitsandbytes() -> Any:
    """Imported late, as collecting the tests would import torch's compiler."""
    return importlib.import_module("bitsandbytes")


class Int8(torch.Tensor):
    """Wraps int8 numbers and a scale for each row, as torchao's tensors do.

    It computes with their product.
    """

    packed: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, packed: torch.Tensor, scale: torch.Tensor) -> Int8:
        made: Int8 = torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=scale.dtype, device=packed.device)
        made.packed, made.scale = packed, scale
        return made

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Int8:
        return Int8(inner["packed"], inner["scale"])

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed.detach(), args[0].scale.detach())
        plain = tree_map(lambda each: each.packed * each.scale if isinstance(each, cls) else each, args)
        return func(*plain, **(kwargs or {}))


class Packed(nn.Linear):
    """Has its weight in buffers, as the layers of GPTQ and AWQ do."""

    packed: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        int8 = Int8.of(self.weight.detach())
        self.register_buffer("packed", int8.packed)
        self.register_buffer("scale", int8.scale)
        self.weight = nn.Parameter(torch.empty(0, WIDTH), requires_grad=False)
        self.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.packed * self.scale, self.bias)


def wrapping() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight = nn.Parameter(Int8.of(layer.weight.detach()))
    return layer.requires_grad_(False)


def four_bits(*, nested: bool = False, storage: torch.dtype = torch.uint8) -> nn.Module:
    plain = nn.Linear(WIDTH, WIDTH)
    made: nn.Module = bitsandbytes().nn.LinearNF4(
        WIDTH, WIDTH, compute_dtype=torch.float32, compress_statistics=nested, quant_storage=storage
    )
    made.load_state_dict(plain.state_dict())
    return made.to("cpu").requires_grad_(False)


def eight_bits() -> nn.Module:
    plain = nn.Linear(WIDTH, WIDTH)
    made: nn.Module = bitsandbytes().nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
    made.load_state_dict(plain.state_dict())
    return made.to("cpu").requires_grad_(False)


def base_of(layer: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*(layer() for _ in range(LAYERS)))


def nested() -> nn.Module:
    return four_bits(nested=True)


def in_bf16() -> nn.Module:
    return four_bits(storage=torch.bfloat16)


@pytest.mark.parametrize(
    ("layer", "strategy"),
    [
        (four_bits, "ddp"),
        (nested, "ddp"),
        (eight_bits, "ddp"),
        (wrapping, "ddp"),
        (Packed, "ddp"),
        (nested, "fsdp"),
        (in_bf16, "fsdp"),
    ],
)
def test_a_quantized_base_is_committed_once_and_resumed_from_the_store(
    layer: Callable[[], nn.Module], strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"file://{tmp_path}/checkpoints"
    train(uri, adapted(base_of(layer)), 2, strategy)
    sizes = committed_bytes(uri)
    assert sizes[1] > ADAPTER_AND_OPTIMIZER_BYTES + LAYERS * WIDTH * WIDTH / 2
    assert sizes[2] <= 1.05 * ADAPTER_AND_OPTIMIZER_BYTES
    assert "differ" not in caplog.text

    # The script brings another base: every part of it is replaced by what was committed.
    other = adapted(base_of(layer, seed=2))
    resumed = train(uri, other, 3, strategy)
    assert "Values that aren't trained differ from those in the checkpoint at step 2" in caplog.text
    assert committed_bytes(uri)[3] <= 1.05 * ADAPTER_AND_OPTIMIZER_BYTES

    own = adapted(base_of(layer))
    steady = train(f"file://{tmp_path}/steady", own, 3, strategy)
    assert resumed.keys() == steady.keys()
    now, wanted = model_state(other), model_state(own)
    assert now.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(bits(now[name]), bits(value)), name


def bits(value: torch.Tensor) -> torch.Tensor:
    """Packed weights in a type of numbers may be NaN."""
    return whole(value).reshape(-1).view(torch.uint8)


def test_the_parts_of_weights_have_names_and_go_back_to_their_places() -> None:
    model, other = (
        nn.Sequential(wrapping(), four_bits(nested=True), eight_bits(), nn.Linear(WIDTH, 1)) for _ in "ab"
    )
    state = {name: value.clone() for name, value in model_state(model).items()}
    assert {"0.weight.packed", "0.weight.scale", "1.weight.absmax", "2.SCB", "3.bias"} <= state.keys()
    assert frozen_names(model) == state.keys() - {"3.weight", "3.bias"}

    load_model_state(other, state)
    sample = torch.linspace(-1, 1, WIDTH).expand(2, -1)
    assert torch.equal(model(sample), other(sample))

    states = [name for name in model_state(adapted(base_of(four_bits))) if "quant_state" in name]
    packed = "base_layer.weight.quant_state.bitsandbytes__nf4"
    assert states == [f"base_model.model.{number}.{packed}" for number in range(LAYERS)]


def test_buffers_count_as_frozen_beside_frozen_weights_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2), nn.Linear(2, 2))
    assert frozen_names(model) == set()
    model.get_submodule("2").requires_grad_(False)
    statistics = {f"0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert frozen_names(model) == {"2.weight", "2.bias"} | statistics


def test_a_quantized_base_is_exported_as_bitsandbytes_reads_it(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/checkpoints"
    model = adapted(base_of(nested))
    train(uri, model, 1, "ddp")
    storage = open_storage(uri)
    head = read_head(storage)
    assert head is not None
    assert head.newest is not None
    (written,) = export(storage, head.newest, tmp_path / "model.safetensors")
    name = "base_model.model.0.base_layer.weight"
    exported = load_file(written)
    parts = {key.removeprefix(f"{name}."): value for key, value in exported.items() if key.startswith(f"{name}.")}
    weight = bitsandbytes().nn.Params4bit.from_prequantized(exported[name], parts, device="cpu")
    own: Any = model.get_parameter(name)
    values = [bitsandbytes().functional.dequantize_4bit(each.data, each.quant_state) for each in (weight, own)]
    assert torch.equal(*values)


@pytest.mark.parametrize("layer", [wrapping, eight_bits])
def test_weights_that_cannot_be_sharded_are_refused(
    layer: Callable[[], nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train(f"file://{tmp_path}", adapted(base_of(layer)), 1, "fsdp")
    said = capsys.readouterr().err
    assert "The parameter base_model.model.0.base_layer.weight is a quantized weight (Int8" in said
    assert "that can't be sharded. Use the strategy ddp." in said


def test_zero_3_refuses_weights_that_it_cannot_shard() -> None:
    model = nn.Sequential(eight_bits())
    refusal = unfit_for_zero(model, 3, torch.float32)
    assert (
        refusal
        == "The parameter 0.weight is a quantized weight (Int8Params) that can't be sharded. Use the strategy ddp."
    )
    assert unfit_for_zero(model, 2, torch.float32) is None


@pytest.mark.parametrize(("layer", "wanted"), [(wrapping, WIDTH * (WIDTH + 4)), (four_bits, WIDTH * WIDTH // 2)])
def test_the_estimate_of_memory_counts_packed_bytes(layer: Callable[[], nn.Module], wanted: int) -> None:
    assert facts_of(nn.Sequential(layer())).frozen_bytes == wanted + 4 * WIDTH  # with the bias


def test_what_deepspeed_cannot_move_is_refused() -> None:
    refusal = unfit_for_zero(nn.Sequential(wrapping()), 0, torch.float32)
    assert refusal == "The parameter 0.weight is of the type Int8, which DeepSpeed can't move. Use the strategy ddp."


def test_a_module_that_cannot_be_saved_is_named_in_a_sentence() -> None:
    model = nn.Sequential(bitsandbytes().nn.EmbeddingNF4(8, 64))
    with pytest.raises(UnsupportedState, match="Saving Embedding4bit module is not implemented"):
        model_state(model)
