#!/usr/bin/env python3
"""Converts the 16-bit matrices of a GGUF file to Q8_0 and copies everything else.

    make_reckoner_q8.py reckoner-f16.gguf tests/data/models/reckoner-q8_0.gguf

Needs the PyPI package `gguf`. The result is the same byte for byte on every run.
"""
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

Q8_0 = GGMLQuantizationType.Q8_0
MOSTLY_Q8_0 = 7  # general.file_type


def copy_keys(reader, writer):
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue  # the writer's own
        value = MOSTLY_Q8_0 if field.name == "general.file_type" else field.contents()
        element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=element)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    reader = GGUFReader(sys.argv[1])
    writer = GGUFWriter(sys.argv[2], reader.fields["general.architecture"].contents())
    copy_keys(reader, writer)
    for tensor in reader.tensors:
        if tensor.tensor_type == GGMLQuantizationType.F16 and len(tensor.shape) == 2 and tensor.shape[0] % 32 == 0:
            data = gguf.quants.quantize(tensor.data.astype(np.float32), Q8_0)
            writer.add_tensor(tensor.name, data, raw_dtype=Q8_0)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
