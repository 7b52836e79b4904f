#!/usr/bin/env python3
"""Writes dequant_golden.bin: random blocks of every weight type beside what the `gguf` package (PyPI) dequantises them to.

Layout, little-endian, one record a type: name (8 bytes, zero padded), u32 elements, u32 bytes, the bytes, `elements` f32.
"""
import pathlib
import struct

import gguf
import numpy as np

# Offsets of the half-precision scales inside a block, which must be finite numbers.
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def main():
    rng = np.random.default_rng(20261129)
    out = bytearray()
    for name in ["F32", "F16", "BF16", *HALVES]:
        qtype = gguf.GGMLQuantizationType[name]
        block, size = gguf.GGML_QUANT_SIZES[qtype]
        count = 512 // block
        if name == "F32":
            data = rng.standard_normal(512).astype("<f4").view(np.uint8)
        elif name == "F16":
            data = rng.standard_normal(512).astype("<f2").view(np.uint8)
        elif name == "BF16":
            data = (rng.standard_normal(512).astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
        else:
            data = rng.integers(0, 256, (count, size), dtype=np.uint8)
            for offset in HALVES[name]:
                scale = rng.uniform(-0.1, 0.1, count).astype("<f2")
                data[:, offset:offset + 2] = scale.view(np.uint8).reshape(count, 2)
            data = data.reshape(-1)
        values = gguf.quants.dequantize(data.reshape(1, -1), qtype).astype("<f4").reshape(-1)
        assert values.size == 512 and np.isfinite(values).all(), name
        out += struct.pack("<8sII", name.encode(), 512, data.size) + data.tobytes() + values.tobytes()
    pathlib.Path(__file__).with_name("dequant_golden.bin").write_bytes(out)


main()
