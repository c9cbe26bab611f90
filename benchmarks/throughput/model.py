"""The model to train, its amount of arithmetic, and the peak of the device."""

from __future__ import annotations

import re
import time

import torch

from benchmarks.memory.cases import Case, Gpt, Shape
from benchmarks.memory.rank import estimated

# About a billion parameters; fewer if the device lacks the memory.
ON_A_GPU = (
    Shape(layers=16, width=2048, context=2048, micro_batch=8, vocabulary=50_304),
    Shape(layers=16, width=2048, context=2048, micro_batch=1, vocabulary=50_304),
    Shape(layers=12, width=1024, context=1024, micro_batch=4, vocabulary=50_304),
    Shape(layers=12, width=512, context=512, micro_batch=2, vocabulary=8_192),
)
ON_THE_CPU = Shape(layers=2, width=128, context=64, micro_batch=2, vocabulary=256)
# TFLOP/s of dense bf16 in the makers' data sheets, by words of the device's name, more words first.
_PEAKS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "A10G": 70.0,
    "L40S": 362.0,
    "L4": 121.0,
}
# A MIG slice is a part of the device, and an NVL board is slower than the SXM board of the same name.
_OF_NO_KNOWN_PEAK = {"MIG", "NVL"}
_MATRIX = 8192, 256  # on a GPU, and on the CPU: one without bf16 instructions is very slow
_REPEATS = 20
# Share of the device's memory. The rest is for the runtime and the allocator.
_SHARE = 0.8


def shape_for(device: torch.device) -> Shape:
    """The largest model that fits."""
    if device.type == "cpu":
        return ON_THE_CPU
    memory = torch.cuda.get_device_properties(device).total_memory
    cases = [Case(shape=shape, strategy="ddp", precision="bf16") for shape in ON_A_GPU]
    fitting = [case.shape for case in cases if estimated(case, 1, "cuda").total < _SHARE * memory]
    return fitting[0] if fitting else ON_A_GPU[-1]


def flops_per_token(shape: Shape) -> float:
    """Return the FLOP of forward and backward for one token.

    They are 6 for each weight in a multiplication, which excludes the embedding, and 12 for each pair of tokens,
    hidden unit and layer. Source: Chowdhery et al., "PaLM", 2022, appendix B.
    """
    with torch.device("meta"):
        model = Gpt(shape)
    multiplied = sum(parameter.numel() for parameter in model.parameters()) - model.tokens.weight.numel()
    return 6.0 * multiplied + 12.0 * shape.layers * shape.width * shape.context


def num_parameters(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Gpt(shape).parameters())


def measured_tflops(device: torch.device) -> float:
    """TFLOP/s of a large matrix product in bf16, measured here."""
    size = _MATRIX[0] if device.type == "cuda" else _MATRIX[1]
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    wait_for(device)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        left @ right
    wait_for(device)
    return 2.0 * size**3 * _REPEATS / (time.perf_counter() - started) / 1e12


def peak_tflops(device_name: str) -> float | None:
    """TFLOP/s in the data sheet, if it is known here."""
    words = set(re.findall(r"\w+", device_name))
    if words & _OF_NO_KNOWN_PEAK:
        return None
    return next((peak for name, peak in _PEAKS.items() if words >= set(name.split())), None)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
