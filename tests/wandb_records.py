# Reads back what an offline wandb run holds: its file is a LevelDB log of protobuf records behind a header of 7 bytes.
# wandb has no public reader.

import time

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEAD = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path):
    """All records of a `.wandb` file."""
    data, at, parts = path.read_bytes(), HEAD, []
    assert data[:4] in (b"", b":W&B")
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEAD:  # the rest of a block is padding
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        body, at = data[at + HEAD : at + HEAD + size], at + HEAD + size
        if len(body) < size:  # it is being written
            return
        if kind == 0:
            continue
        parts = [body] if kind in (FULL, FIRST) else [*parts, body]
        if kind in (FULL, LAST):
            yield Record.FromString(b"".join(parts))


def of_run(folder, *, seconds=60):
    """All records of the offline runs in `folder`/wandb. A finished run is written by another process, which may be
    behind: its last record is awaited."""
    paths = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert paths
    end = time.monotonic() + seconds
    while True:
        found = [list(records(path)) for path in paths]
        if all(any(one.WhichOneof("record_type") == "exit" for one in of_one) for of_one in found):
            return [one for of_one in found for one in of_one]
        assert time.monotonic() < end, "a run was not finished"
        time.sleep(0.05)


def history_names(found):
    """Names of what was logged step by step."""
    items = [item for one in found if one.WhichOneof("record_type") == "history" for item in one.history.item]
    return {item.key or "/".join(item.nested_key) for item in items}
