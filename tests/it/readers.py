"""Reads a version of an embedding table as its users do: pyarrow and pandas.

  readers.py FOLDER ROWS WIDTH
"""
import sys
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

folder, rows, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

table = ds.dataset(folder, format="parquet").to_table()
assert table.num_rows == rows, table.num_rows
kind = table.schema.field("embedding").type
assert pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind), kind
assert pa.types.is_float32(kind.value_type), kind
assert table["embedding"].null_count == 0

frame = pd.read_parquet(folder)
assert len(frame) == rows
assert frame["id"].is_unique
assert all(len(vector) == width for vector in frame["embedding"])
