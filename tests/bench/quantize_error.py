# What quantization costs a trained drafter's weights, scheme by scheme, with and without the search for scales:
#
#     python -m tests.bench.quantize_error outputs/markov-smollm2/drafter
#
# Prints |W - Q| / |W| over all quantized weights and of the worst matrix, bytes against bf16, and the seconds it took.
# A scheme whose group does not divide a width is printed with what refuses it.

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafters.errors import ConfigError
from export.compressed import tensors_of
from export.quantize import GROUP_SIZES, Scheme, dequantize, is_quantized, quantize


def schemes() -> dict[str, Scheme]:
    """Every kind that there is, by a name to print."""
    found = {}
    for bits in (8, 4):
        for group in (None, *reversed(GROUP_SIZES)):
            for symmetric in (True, False):
                name = f"int{bits} {'a row' if group is None else f'in {group}'}{'' if symmetric else ' asymmetric'}"
                found[name] = Scheme(bits=bits, group_size=group, symmetric=symmetric)
    return {**found, "fp8 a row": Scheme(kind="fp8", dynamic_activations=True)}


def measure(weights: Mapping[str, Tensor], scheme: Scheme) -> dict[str, float]:
    """Relative error of all and of the worst matrix, bytes against bf16, seconds."""
    errors, norms, size, seconds = [], [], 0, 0.0
    for name, weight in weights.items():
        started = time.perf_counter()
        q = quantize(weight, scheme, name=name)
        seconds += time.perf_counter() - started
        errors.append(float((weight - dequantize(q)).square().sum()))
        norms.append(float(weight.square().sum()))
        size += sum(t.nbytes for t in tensors_of(name, q, torch.bfloat16).values())
    worst = max(error / norm for error, norm in zip(errors, norms, strict=True)) ** 0.5
    whole = sum(weight.numel() for weight in weights.values()) * 2
    return dict(error=(sum(errors) / sum(norms)) ** 0.5, worst=worst, size=size / whole, seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("drafter", type=Path)
    args = parser.parse_args()
    tensors = load_file(args.drafter / "model.safetensors")
    weights = {name: tensor for name, tensor in tensors.items() if is_quantized(name)}
    print(f"{len(weights)} of {len(tensors)} tensors, {sum(w.numel() for w in weights.values()):,} weights")
    print("scheme                     plain (worst)        searched (worst)     gain    size   seconds")
    for name, scheme in schemes().items():
        try:
            plain, searched = (measure(weights, replace(scheme, search=search)) for search in (False, True))
        except ConfigError as error:
            print(f"{name:24}   {error}")
            continue
        both = "   ".join(f"{one['error']:.5f} ({one['worst']:.5f})" for one in (plain, searched))
        gain = 1 - searched["error"] / plain["error"]
        seconds = f"{plain['seconds']:.2f} -> {searched['seconds']:.2f}"
        print(f"{name:24}   {both}   {gain:6.1%}   {searched['size']:.1%}   {seconds}")


if __name__ == "__main__":
    main()
