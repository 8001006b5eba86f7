# Reads back what an offline wandb run holds: its file is a LevelDB log of protobuf records behind a header of 7 bytes.
# wandb has no public reader.

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEAD = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path):
    """All records of a `.wandb` file."""
    data, at, parts = path.read_bytes(), HEAD, []
    assert data[:4] == b":W&B"
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEAD:  # the rest of a block is padding
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        body, at = data[at + HEAD : at + HEAD + size], at + HEAD + size
        if kind == 0:
            continue
        parts = [body] if kind in (FULL, FIRST) else [*parts, body]
        if kind in (FULL, LAST):
            yield Record.FromString(b"".join(parts))


def of_run(folder):
    """All records of the offline runs in `folder`/wandb."""
    return [one for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")) for one in records(path)]


def history_names(found):
    """Names of what was logged step by step."""
    items = [item for one in found if one.WhichOneof("record_type") == "history" for item in one.history.item]
    return {item.key or "/".join(item.nested_key) for item in items}
